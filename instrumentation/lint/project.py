"""All files together: facts first, then each file until nothing new is learned."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.lint import sources
from instrumentation.lint.facts import Facts
from instrumentation.lint.names import FileContext
from instrumentation.lint.report import UNREADABLE, Report
from instrumentation.lint.scopes import Scope
from instrumentation.lint.sources import Source
from instrumentation.lint.state import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: frames for one file; a chain of 500 ``elif`` needs about 3000
_FRAMES = 8000
#: a wrapper of a wrapper of a reserving function takes one more turn
_TURNS = 50


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a run: sorted reports, and how many files were read."""

    reports: tuple[Report, ...]
    n_files: int

    @property
    def exit_code(self) -> int:
        """0 clean, 1 when something is reported, 2 when a file could not be read: the rest says too little."""
        if any(report.code == UNREADABLE for report in self.reports):
            return 2
        return 1 if self.reports else 0


def lint_paths(paths: Iterable[str | Path], *, reserving: Iterable[str] = ()) -> Result:
    """Lint files, and the Python files in directories.

    ``reserving`` are names of functions and methods that return reservations, besides those of the package
    and those that an annotation in the files names.
    """
    read = [sources.read(path) for path in sources.discover(paths)]
    files = [source for source in read if isinstance(source, Source)]
    failed = [report for report in read if isinstance(report, Report)]
    return Result(tuple(sorted([*failed, *lint_sources(files, reserving)])), len(files))


def lint_source(text: str | bytes, *, path: str = "<text>", reserving: Iterable[str] = ()) -> Result:
    """Lint one text as if it were a file of its own."""
    source = sources.parse(text.encode() if isinstance(text, str) else text, path)
    if isinstance(source, Report):
        return Result((source,), 0)
    return Result(tuple(sorted(lint_sources([source], reserving))), 1)


def lint_sources(files: list[Source], reserving: Iterable[str] = ()) -> list[Report]:
    """Lint files that were parsed."""
    facts = Facts(files, reserving)
    reports: list[Report] = []
    contexts: list[FileContext] = []
    for _ in range(_TURNS):
        facts.changed = False
        interesting = facts.of_interest
        reports, contexts = [], []
        for source in files:
            if source.mentions & interesting:
                context = FileContext(source, facts, facts.modules[source.path], interesting)
                try:
                    _analyse(context)
                except RecursionError:
                    reports.append(sources.too_deep(source.path))
                    continue
                contexts.append(context)
        if not facts.changed:
            break
    for context in contexts:
        for token, attribute in context.stored.items():
            if attribute not in facts.checked_attributes:
                info = context.tokens[token]
                text = f"{info.what} is stored in `{attribute}`, which nothing checks; call `.unwrap()`"
                context.found.setdefault(info.node, text)
        reports += context.reports()
    return reports


def _analyse(context: FileContext) -> None:
    with _deep_recursion():
        Scope(context, context.source.tree, None, later=[]).run(State())


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Room for long chains of operators; what parses is nested less than that anyway."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _FRAMES))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
