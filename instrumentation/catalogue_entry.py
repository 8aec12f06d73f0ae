"""The shape of one entry of the catalogue of finding codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrumentation.levels import Level


@dataclass(frozen=True, slots=True)
class Entry:
    """What one code means. ``level`` None: found only by a check of its own, which ``switch`` names."""

    code: str
    #: a few words, for the headline of a report
    title: str
    level: Level | None
    meaning: str
    cure: str
    switch: str = ""

    def __post_init__(self) -> None:
        assert len(self.code) == 6, self.code
        assert self.code[:3].isupper(), self.code
        assert self.code[3:].isdigit(), self.code
        assert all((self.title, self.meaning, self.cure)), self.code
        assert (self.level is None) == bool(self.switch), self.code
        # Entries are written as indented blocks; here the indentation and the line breaks go.
        object.__setattr__(self, "meaning", " ".join(self.meaning.split()))
        object.__setattr__(self, "cure", " ".join(self.cure.split()))

    @property
    def found_by(self) -> str:
        """``level guard``, or the switch."""
        return self.switch if self.level is None else f"level {self.level}"
