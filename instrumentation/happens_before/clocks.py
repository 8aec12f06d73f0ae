"""Vector clocks: how far into each line of work somebody can be sure that it is done."""

from __future__ import annotations

from typing import TypeAlias


class Timeline:
    """Work that runs in order, numbered from 1."""

    __slots__ = ("clock", "name", "owner", "retired", "seq")

    def __init__(self, name: str, owner: str, clock: Clock) -> None:
        self.name = name
        self.owner = owner
        #: what is done before the next piece of work begins
        self.clock = clock
        #: number of the last piece
        self.seq = 0
        #: the host knows that all of it is done, and no more will come
        self.retired = False

    def advance(self) -> int:
        """Number of the next piece of work, which begins now."""
        self.seq += 1
        return self.seq

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self.owner} at {self.seq}>"


#: the last piece of each timeline that is done; 0 for one that is not there
Clock: TypeAlias = "dict[Timeline, int]"


class StreamClock(Timeline):
    """The work of one stream.

    What a copy out brings lands in its host array when the host waits, so that is a timeline of its own, ``landing``:
    behind the copies as the stream is, but nothing that is queued is behind it unless the host waited for it. Records
    of events are one as well, ``marks``: who has not waited for a record does not know it, though the work before it
    may be done.
    """

    __slots__ = ("blocking", "default", "device", "epoch", "landing", "marks")

    def __init__(
        self, device: str, name: str, owner: str, clock: Clock, *, blocking: bool, default: bool
    ) -> None:
        super().__init__(name, owner, clock)
        self.device = device
        #: as made without the flag non-blocking: ordered with the device's legacy default stream, both ways
        self.blocking = blocking or default
        self.default = default
        self.landing = Timeline(name, owner, clock)
        self.marks = Timeline(name, owner, clock)
        #: which of the host's clocks this one has taken in
        self.epoch = -1

    def advance(self) -> int:
        """As for any timeline; what is queued on the stream later comes behind it."""
        self.seq += 1
        self.clock[self] = self.seq
        return self.seq

    @property
    def timelines(self) -> tuple[Timeline, Timeline]:
        """Its work, and what lands."""
        return self, self.landing


def join(clock: Clock, other: Clock) -> None:
    """Let ``clock`` know what ``other`` knows."""
    for timeline, seq in other.items():
        if seq > clock.get(timeline, 0):
            clock[timeline] = seq
