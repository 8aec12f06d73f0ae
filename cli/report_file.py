"""Files that commands write: refused before hours went into what they are to hold. ``--report`` is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from cli.completion import FILE
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.findings import Finding

report_option = click.option(
    "--report", "report_file", type=FILE, metavar="FILE", help="Keep what is found here, as JSON lines."
)


def writable(name: str, flag: str, model: Path) -> Path:
    """The file of this name, which can be written and is not the model. Raises ``BadInputError`` naming the flag."""
    file = Path(name)
    try:
        if file.exists() and file.samefile(model):
            raise BadInputError(f"{flag} {name}: that is the model; give another file")
        with file.open("ab"):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(f"{flag} {name}: cannot be written: {reason}") from None
    return file


class ReportFile:
    """What ``--report`` names: findings of every engine of a command, as JSON lines. Empty from the beginning."""

    def __init__(self, name: str, model: Path) -> None:
        self.name = name
        self._file = writable(name, "--report", model)
        self._write((), "w")

    @classmethod
    def of(cls, name: str | None, model: Path) -> ReportFile | None:
        """The file, if one is given."""
        return None if name is None else cls(name, model)

    def add(self, findings: Iterable[Finding]) -> None:
        """Write more findings, behind those of engines before."""
        self._write(findings, "a")

    def _write(self, findings: Iterable[Finding], mode: Literal["a", "w"]) -> None:
        from instrumentation.reports.jsonlines import write  # noqa: PLC0415 - --help does without

        try:
            with self._file.open(mode, encoding="utf-8", newline="\n") as file:
                write(findings, file)
        except OSError as error:
            raise BadInputError(f"--report {self.name}: cannot be written: {error.strerror}") from None
