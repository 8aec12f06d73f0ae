"""Python files, read and parsed; nothing of them is ever imported or run."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from instrumentation.lint.report import UNREADABLE, Report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_BYTES = 16 << 20
_SUPPRESSION = re.compile(r"#\s*lint:\s*reserve-ok\b[\s:,-]*(?P<reason>.*)")


@dataclass(slots=True)
class Source:
    """One parsed file."""

    path: str
    tree: ast.Module
    lines: list[bytes]
    #: reason of ``# lint: reserve-ok REASON`` by line, blank when it gives none
    suppressions: dict[int, str] = field(default_factory=dict)
    #: every identifier, to see at once that a file has nothing to do with reservations
    mentions: frozenset[str] = frozenset()

    def column(self, node: ast.expr | ast.stmt | ast.arg | ast.pattern) -> int:
        """Column of a node in characters, from 1; ``ast`` counts bytes."""
        line = self.lines[node.lineno - 1] if node.lineno <= len(self.lines) else b""
        return len(line[: node.col_offset].decode("utf-8", "replace")) + 1

    def suppression(self, node: ast.expr | ast.stmt | ast.arg | ast.pattern) -> str | None:
        """Reason on one of the node's lines; blank when it lacks one, None without such a comment."""
        found = [
            self.suppressions[line]
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if line in self.suppressions
        ]
        return next((reason for reason in found if reason), "") if found else None


def discover(paths: Iterable[str | Path]) -> Iterator[Path]:
    """Files to lint, each once: the paths themselves, and what directories among them hold."""
    seen: set[str] = set()
    for path in map(Path, paths):
        for file in _walk(path) if path.is_dir() else (path,):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _walk(top: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(folder, name)))
        yield from (
            Path(folder, name)
            for name in sorted(files)
            if name.endswith((".py", ".pyi")) and not name.startswith(".")
        )


def _is_skipped(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name == "__pycache__" or (folder / "pyvenv.cfg").exists()


def read(path: Path) -> Source | Report:
    """The parsed file, or why there is none."""
    try:
        # Opening a pipe would wait for its writer.
        if not path.is_file():
            reason = "is not a regular file" if path.exists() else "does not exist"
            return Report(str(path), 1, 1, UNREADABLE, f"{reason}; give Python files or directories")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        return Report(str(path), 1, 1, UNREADABLE, f"cannot be read: {getattr(error, 'strerror', error)}")
    if len(data) > MAX_BYTES:
        return Report(str(path), 1, 1, UNREADABLE, f"has more than {MAX_BYTES} bytes; split the file")
    return parse(data, str(path))


def parse(data: bytes, path: str) -> Source | Report:
    """As ``read``, from bytes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data, path)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        mentions = frozenset(identifiers(tree))
    except SyntaxError as error:
        line, column = max(error.lineno or 1, 1), max(error.offset or 1, 1)
        return Report(path, line, column, UNREADABLE, f"cannot be parsed: {error.msg}")
    except (ValueError, LookupError) as error:
        return Report(path, 1, 1, UNREADABLE, f"cannot be parsed: {error}")
    except (RecursionError, MemoryError):
        return too_deep(path)
    source = Source(path, tree, text.encode().splitlines(), mentions=mentions)
    if "reserve-ok" in text:
        source.suppressions = _suppressions(text)
    return source


def too_deep(path: str) -> Report:
    """Report of a file whose nesting is beyond any use."""
    return Report(path, 1, 1, UNREADABLE, "cannot be parsed: nested too deeply; split its expressions")


def _suppressions(text: str) -> dict[int, str]:
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        match = _SUPPRESSION.search(token.string) if token.type == tokenize.COMMENT else None
        if match:
            found[token.start[0]] = match["reason"].strip()
    return found


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names and attributes in a tree, and the words of short texts, which may be annotations."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            yield from re.findall(r"\w+", node.value)
