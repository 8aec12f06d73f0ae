"""What ``refengine golden`` prints: progress, comparisons, and findings of the engines that ran."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import click

from cli.failures import end_command, end_engine, one_line
from instrumentation.errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cli.command import Settings
    from cli.display import Display
    from refengine.engine import Engine
    from refengine.golden.compare import Comparison
    from refengine.golden.session import Session


class Shown:
    """Progress and results of one command, with the session whose engines it runs."""

    def __init__(self, display: Display, verbosity: int) -> None:
        self._display = display
        self._verbosity = verbosity
        self._session: Session | None = None
        self.n_findings = 0

    def session(self, **given: Any) -> Session:
        """Engines with these options."""
        from refengine.golden.session import Session  # noqa: PLC0415 - --help does without what it takes to run

        self._session = Session(self._ended, progress=self._display.weights, **given)
        return self._session

    def end(self) -> None:
        """Close the session."""
        self._display.clear()
        if self._session is not None:
            self._session.close()

    def _ended(self, engine: Engine) -> None:
        self._display.clear()
        self.n_findings += end_engine(engine)

    def line(self, text: str) -> None:
        """A line about what was done, unless the command is to be quiet."""
        self._display.clear()
        if self._verbosity >= 0:
            click.echo(one_line(text))

    def result(self, text: str) -> None:
        """What was asked for."""
        self._display.clear()
        click.echo(text)

    def progress(self, done: int, total: int) -> None:
        """Chunks that are done."""
        import structlog  # noqa: PLC0415

        structlog.get_logger("cli").info("chunk", done=done, of=total)

    def comparisons(self, results: Iterable[Comparison], *, as_json: bool) -> bool:
        """Print results as they come; whether nothing differs."""
        seen = []
        for result in results:
            seen.append(result)
            if not as_json and (self._verbosity >= 0 or not result.same):
                self.result("\n".join(result.lines()))
        same = all(each.same for each in seen)
        if as_json:
            self.result(json.dumps({"same": same, "cases": [each.as_json() for each in seen]}, indent=2))
        return same


@contextlib.contextmanager
def showing(settings: Settings) -> Iterator[Shown]:
    """Show what a command does; at its end the engine is closed, and findings end it with 1."""
    from cli.display import display  # noqa: PLC0415

    failed: Error | None = None
    with display(quiet=settings.verbosity < 0) as drawn:
        shown = Shown(drawn, settings.verbosity)
        try:
            yield shown
        except Error as error:
            failed = error
        finally:
            shown.end()
    end_command(failed, shown.n_findings, verbose=settings.verbosity > 0)
