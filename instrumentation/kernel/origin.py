"""Where a node of a kernel's normal form stood in its source, whatever the normal form made of it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from instrumentation.findings import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Origin:
    """One place in a source. ``column`` counts from 1; ``callers`` are calls that were inlined, innermost first."""

    file: str
    function: str
    line: int
    column: int
    #: the function's text without its indentation, its first line's number, and where the node lies in it (bytes)
    source: str
    first_line: int
    span: tuple[int, int, int]
    #: the line says that what is read may be unwritten, since nothing comes of it
    unwritten: bool = False
    #: the line says that what is stored may be infinite, and that it is meant to
    infinite: bool = False
    callers: tuple[Origin, ...] = ()

    @property
    def may_be_unwritten(self) -> bool:
        """Whether this line, or one of those that call it, says so."""
        return any(each.unwritten for each in (self, *self.callers))

    @property
    def may_be_infinite(self) -> bool:
        """As ``may_be_unwritten``, of infinities that are stored."""
        return any(each.infinite for each in (self, *self.callers))

    @property
    def text(self) -> str:
        """The expression as it is written, on one line."""
        start, stop_line, stop = self.span
        lines = [text.encode() for text in self.source.splitlines()]
        rows = lines[self.line - self.first_line : stop_line - self.first_line + 1]
        rows[-1] = rows[-1][:stop]
        rows[0] = rows[0][start:]
        return b" ".join(row.strip() for row in rows).decode(errors="replace")

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The place, then the calls around it."""
        return tuple(Frame(each.file, each.line, each.function) for each in (self, *self.callers))

    def called_from(self, call: Origin) -> Origin:
        """The same place, inlined at a call."""
        return replace(self, callers=(*self.callers, call, *call.callers))


def hinted_lines(source: str, first_line: int, hint: str) -> set[int]:
    """Lines of a function whose comment holds a hint."""
    return {first_line + i for i, text in enumerate(source.splitlines()) if hint in text.partition("#")[2]}


def mark_origins(
    nodes: Iterable[ast.AST], *, file: str, function: str, source: str, first_line: int, indentation: int
) -> None:
    """Give each element access and call among ``nodes`` its origin, and a statement that of its value or condition.

    Copies of a node keep it.
    """
    hints = hinted_lines(source, first_line, "unwritten: allowed")
    infinite = hinted_lines(source, first_line, "infinity: intended")
    for node in nodes:
        place = _said_of(node)
        if place is not None:
            assert place.end_lineno is not None
            assert place.end_col_offset is not None
            span = (place.col_offset, place.end_lineno, place.end_col_offset)
            column = place.col_offset + indentation + 1
            line = place.lineno
            origin = Origin(
                file, function, line, column, source, first_line, span,
                unwritten=line in hints, infinite=line in infinite,
            )  # fmt: skip
            node.origin = origin  # type: ignore[attr-defined]


def _said_of(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Subscript | ast.Call):
        return node
    if isinstance(node, ast.Assign):
        return node.value
    if isinstance(node, ast.If):
        return node.test
    return node.iter if isinstance(node, ast.For) else None


def origin_of(node: ast.AST) -> Origin | None:
    """Origin of an access, a call or a statement; None for what the normal form added."""
    return getattr(node, "origin", None)


def mark_inlined(nodes: Iterable[ast.AST], call: ast.AST) -> None:
    """Nodes of an inlined function now stand at ``call``, too."""
    at = origin_of(call)
    for node in nodes:
        origin = origin_of(node)
        if origin is not None and at is not None:
            node.origin = origin.called_from(at)  # type: ignore[attr-defined]
