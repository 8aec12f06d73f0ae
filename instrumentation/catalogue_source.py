"""The programs of the catalogue: their text, and what they give when they run."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from instrumentation.errors import Error

if TYPE_CHECKING:
    from instrumentation.findings import Finding, FindingLog, Stack

Kind = Literal["bad", "fixed"]
FOLDER = Path(__file__).resolve().parent / "catalogue_programs"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program gave: its findings, and the error that ended it."""

    findings: tuple[Finding, ...]
    error: Error | None

    @property
    def code(self) -> str | None:
        """Code of the first finding; where there is none, that of the error: a failed reservation is no finding."""
        return self.findings[0].code if self.findings else getattr(self.error, "code", None)


def path(code: str, kind: Kind) -> Path:
    """File of a program, whether or not it is there."""
    return FOLDER / f"{code.lower()}_{kind}.py"


@cache
def source(code: str, kind: Kind) -> str:
    """Text of a program; empty where there is none."""
    file = path(code, kind)
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def repair(code: str) -> str:
    """What turns a program into its repaired twin: lines that begin with ``-`` and ``+``, and one line around them."""
    bad, fixed = (source(code, kind).splitlines() for kind in ("bad", "fixed"))
    # The first two lines name files; those that begin with @@ say where a piece stands.
    lines = list(difflib.unified_diff(bad, fixed, n=1, lineterm=""))[2:]
    return "\n".join(line for line in lines if not line.startswith("@@"))


def run(code: str, kind: Kind) -> Outcome:
    """Run a program in this process; stacks of its findings have its own frames alone.

    Errors that are not this project's own are the caller's.
    """
    file = path(code, kind)
    names: dict[str, object] = {"__name__": "__main__", "__file__": str(file)}
    error = None
    try:
        exec(compile(source(code, kind), str(file), "exec"), names)  # noqa: S102 - a file of this package
    except Error as caught:
        error = caught
    # Every program keeps its findings under this name, bound before it can go wrong.
    log: FindingLog = names["findings"]  # type: ignore[assignment]
    return Outcome(tuple(_own_frames(finding, str(file)) for finding in log), error)


def _own_frames(finding: Finding, file: str) -> Finding:
    def own(stack: Stack) -> Stack:
        return tuple(frame for frame in stack if frame.file == file)

    return replace(
        finding,
        access=own(finding.access),
        previous=own(finding.previous),
        allocation=own(finding.allocation),
        free=own(finding.free),
    )
