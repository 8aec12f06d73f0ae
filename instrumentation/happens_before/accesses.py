"""One operation and the bytes that it touches."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from instrumentation.findings import CallSite
    from instrumentation.happens_before.clocks import Clock, Timeline

#: the space of host arrays; every other name is a device's memory
HOST = "host arrays"


class Kind(enum.IntEnum):
    """What is done to bytes. All but reading needs them for itself."""

    READ = 0
    WRITE = 1
    FREE = 2


class Operation:
    """A launch, copy, fill, replay or free. Gets its number when it is queued."""

    __slots__ = ("graph", "seq", "site", "timeline")

    def __init__(self, timeline: Timeline, site: CallSite | None = None, graph: str = "") -> None:
        self.timeline = timeline
        self.site = site
        #: of a replay
        self.graph = graph
        self.seq = 0

    def before(self, clock: Clock) -> bool:
        """Whether it is done at a point with that clock."""
        timeline = self.timeline
        return timeline.retired or clock.get(timeline, 0) >= self.seq


class Touch:
    """What an operation does to the bytes [start, stop) of a space. ``detail`` is for whoever reports it."""

    __slots__ = ("detail", "kind", "op", "space", "start", "stop")

    def __init__(
        self, op: Operation, space: str, start: int, stop: int, kind: Kind, detail: Any = None
    ) -> None:
        self.op = op
        self.space = space
        self.start = start
        self.stop = stop
        self.kind = kind
        self.detail = detail


class HostTouch(NamedTuple):
    """What the host does to bytes [start, stop) now."""

    space: str
    start: int
    stop: int
    kind: Kind
    site: CallSite | None = None
    detail: Any = None


class Conflict(NamedTuple):
    """Two accesses to the bytes [start, stop), one at least no reading, and nothing orders them."""

    earlier: Touch
    later: Touch | HostTouch
    start: int
    stop: int

    @property
    def code(self) -> str:
        """Code of the finding."""
        kinds = {self.earlier.kind, self.later.kind}
        if self.later.space == HOST:
            return "STR013"
        if Kind.FREE in kinds:
            return "STR012"
        return "STR010" if kinds == {Kind.WRITE} else "STR011"
