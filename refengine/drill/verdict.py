"""What came of a fault: whether it was found, by whom, where, how far from its cause, and what else was said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["found", "missed", "not on this device", "not at this level"]
#: names of the columns, in order, with those of ``Row.cells``
COLUMNS = ("fault", "code", "planted at", "found at", "check", "level", "distance", "false")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    code: str
    status: Status
    incident: str = ""
    #: where in the run it was planted
    planted: str = ""
    #: where the report says that it happened
    found: str = ""
    #: which check found it: the headline of its report
    check: str = ""
    #: lowest level at which it was found, of those that were tried
    level: str = ""
    #: levels that were tried
    tried: tuple[str, ...] = ()
    #: launches, replays and copies between cause and report
    distance: int | None = None
    #: reports that are not the fault's, and differences between its clean twins
    false_reports: tuple[str, ...] = ()
    #: why it is missed, or was not tried
    why: str = ""

    @property
    def ok(self) -> bool:
        """Nothing is wrong with it."""
        return self.status != "missed" and not self.false_reports

    @property
    def cells(self) -> tuple[str, ...]:
        """What the columns show."""
        found = self.found if self.status == "found" else f"{self.status}: {self.why}"
        distance = "" if self.distance is None else str(self.distance)
        ran = self.status in ("found", "missed")
        name = f"{self.fault} ({self.incident})" if self.incident else self.fault
        return (
            name, self.code, self.planted, found, self.check, self.level, distance,
            str(len(self.false_reports)) if ran else "",
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fault": self.fault,
            "code": self.code,
            "incident": self.incident or None,
            "status": self.status,
            "planted_at": self.planted or None,
            "found_at": self.found or None,
            "check": self.check or None,
            "level": self.level or None,
            "tried": list(self.tried),
            "distance": self.distance,
            "false_reports": list(self.false_reports),
            "why": self.why or None,
        }
