"""What the lint says: one line of text, or one JSON object, for each place."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: a reservation that is discarded, or used without a check
UNCHECKED = "LNT001"
#: input that cannot be read or parsed
UNREADABLE = "LNT000"


@dataclass(frozen=True, order=True, slots=True)
class Report:
    """One place. ``line`` and ``column`` (in characters) count from 1."""

    path: str
    line: int
    column: int
    code: str
    message: str

    def __post_init__(self) -> None:
        assert self.line >= 1, self
        assert self.column >= 1, self

    def __str__(self) -> str:
        return _one_line(f"{self.path}:{self.line}:{self.column}: {self.code} {self.message}")


def _one_line(text: str) -> str:
    """``text`` with what would break a line, or cannot be encoded, written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def render_text(reports: Iterable[Report]) -> str:
    """``file:line:column: CODE message``, a line each."""
    return "".join(f"{report}\n" for report in reports)


def render_json(reports: Iterable[Report]) -> str:
    """A JSON array of objects with the fields of ``Report``."""
    return json.dumps([asdict(report) for report in reports], indent=2) + "\n"
