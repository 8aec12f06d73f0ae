"""Which accesses to the same bytes nothing orders: every one is checked before it is queued, and kept when it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.happens_before.accesses import HOST, Conflict, HostTouch, Kind, Operation, Touch
from instrumentation.happens_before.intervals import IntervalMap
from instrumentation.happens_before.order import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instrumentation.happens_before.clocks import Clock, StreamClock, Timeline
    from instrumentation.happens_before.footprint import Footprint

#: segments of a space before those that are over are looked for
_SWEEP_FROM = 1024
#: touches that wait to be put into the maps
_NOTED = 512


class RaceDetector:
    """Accesses in flight, and the order among them.

    Check an operation, queue it, then commit it; one that conflicts is refused and leaves nothing here. What the host
    knows to be done cannot conflict with anything to come and is forgotten, so that memory is bounded by what is in
    flight. Not safe to use from several threads at a time.

    While one stream has all that is in flight, as in an engine that waits after each step, nothing can conflict with
    it but what lands in host arrays: touches are only noted then, and looked at when somebody else comes.
    """

    def __init__(self) -> None:
        self.order = Order()
        self._spaces: dict[str, IntervalMap] = {}
        self._limits: dict[str, int] = {}
        #: replays in flight: the last one of each graph on each timeline
        self._replays: dict[tuple[Footprint, Timeline], Operation] = {}
        #: the one stream that has all that is in flight; None when several have, or nothing is
        self._alone: StreamClock | None = None
        #: touches of that stream which are in no map yet
        self._noted: list[Touch] = []
        #: whether something of it lands in a host array
        self._lands = False

    def __len__(self) -> int:
        return sum(len(space) for space in self._spaces.values()) + len(self._replays) + len(self._noted)

    # --- operations on streams

    def enter(self, stream: StreamClock) -> None:
        """Before the checks of an operation on a stream."""
        self.order.enter(stream)
        if stream is not self._alone:
            idle = not (self._noted or self._replays or self._spaces)
            self._file()
            self._alone, self._lands = (stream, False) if idle else (None, True)

    def check(self, touches: Iterable[Touch]) -> Conflict | None:
        """First conflict that queueing these touches would make."""
        for touch in touches:
            if self._alone is not None and not (self._lands and touch.space == HOST):
                continue
            if self._noted:
                self._file()
            timeline = touch.op.timeline
            found = self._conflict(touch, timeline.clock, timeline)
            if found is not None:
                return found
        return None

    def check_footprint(self, op: Operation, footprint: Footprint) -> Conflict | None:
        """As ``check``, for the replay of a graph."""
        if self._alone is not None:
            return None
        timeline = op.timeline
        clock = timeline.clock
        for (other, replayed_on), earlier in self._replays.items():
            if replayed_on is timeline or earlier.before(clock):
                continue
            hit = footprint.conflict(other)
            if hit is not None:
                return Conflict(_of(earlier, hit.other), _of(op, hit.mine), hit.start, hit.stop)
        for segment in self._spaces.get(footprint.space, ()):
            for touch in _unordered(segment.write, segment.reads, clock, timeline):
                found = footprint.overlap(segment.start, segment.stop, touch.kind)
                if found is not None:
                    return Conflict(touch, _of(op, found[2]), found[0], found[1])
        return None

    def commit(self, operations: Sequence[Operation], touches: Iterable[Touch]) -> None:
        """Keep operations that were queued, in that order, with what they touch: reads of a byte before its write.

        The first of them is of a stream, others are what of it lands.
        """
        for op in operations:
            op.seq = op.timeline.advance()
        self._noted.extend(touches)
        self._lands = self._lands or len(operations) > 1
        if operations[0].timeline is not self._alone:
            # Another thread has entered with another stream since this one did.
            self._alone, self._lands = None, True
        if self._alone is None or len(self._noted) > _NOTED:
            self._file()

    def _file(self) -> None:
        """Put what was noted into the maps."""
        touches, self._noted = self._noted, []
        for touch in touches:
            if touch.start == touch.stop:
                continue
            space = self._spaces.get(touch.space)
            if space is None:
                space = self._spaces[touch.space] = IntervalMap()
            for segment in space.cover(touch.start, touch.stop):
                if touch.kind == Kind.READ:
                    segment.reads.pop(touch.op.timeline, None)  # the last read stands last
                    segment.reads[touch.op.timeline] = touch
                else:
                    segment.write = touch
                    if segment.reads:
                        segment.reads = {}
            if len(space) > self._limits.get(touch.space, _SWEEP_FROM):
                self._sweep(touch.space)

    def commit_footprint(self, op: Operation, footprint: Footprint) -> None:
        """Keep a replay that was queued; it stands for those before it of the same graph on its stream."""
        op.seq = op.timeline.advance()
        if op.timeline is not self._alone:
            self._file()
            self._alone, self._lands = None, True
        self._replays[footprint, op.timeline] = op

    # --- the host

    def check_host(self, touch: Touch | HostTouch) -> Conflict | None:
        """The conflict of what the host is about to do itself, and what may still run. There is nothing to commit.

        A ``Touch`` is something that an operation does when it is queued.
        """
        if touch.space == HOST and touch.kind == Kind.READ and not self._lands:
            return None
        self._file()
        return self._conflict(touch, self.order.host, None)

    def host_waited(self) -> None:
        """The host waited for something: forget what cannot conflict any more."""
        if not self.order.in_flight():
            self._spaces.clear()
            self._replays.clear()
            self._noted.clear()
            self._alone, self._lands = None, False
            return
        self._file()
        # What a host array's touch names keeps the array's memory from being used again.
        if HOST in self._spaces:
            self._sweep(HOST)
        over = [key for key, op in self._replays.items() if self._over(op)]
        for key in over:
            del self._replays[key]

    def forget(self, space: str, start: int, stop: int) -> None:
        """Bytes went back to the device, which waited for whatever names them."""
        self._file()
        if space in self._spaces:
            self._spaces[space].remove(start, stop)

    # --- parts

    def _conflict(self, touch: Touch | HostTouch, clock: Clock, timeline: Timeline | None) -> Conflict | None:
        start, stop = touch.start, touch.stop
        space = self._spaces.get(touch.space)
        if start == stop or (space is None and not self._replays):
            return None
        if space is not None:
            reads = touch.kind == Kind.READ
            for segment in space.overlapping(start, stop):
                since = {} if reads else segment.reads
                for earlier in _unordered(segment.write, since, clock, timeline):
                    return Conflict(earlier, touch, max(start, segment.start), min(stop, segment.stop))
        for (footprint, replayed_on), op in self._replays.items():
            if footprint.space == touch.space and replayed_on is not timeline and not op.before(clock):
                found = footprint.overlap(start, stop, touch.kind)
                if found is not None:
                    return Conflict(_of(op, found[2]), touch, found[0], found[1])
        return None

    def _over(self, op: Operation) -> bool:
        return op.before(self.order.host)

    def _sweep(self, name: str) -> None:
        space = self._spaces[name]
        space.prune(lambda touch: self._over(touch.op))
        self._limits[name] = max(_SWEEP_FROM, 2 * len(space))


def _of(op: Operation, touch: Touch) -> Touch:
    """What a graph's list says, of one replay."""
    return Touch(op, touch.space, touch.start, touch.stop, touch.kind, touch.detail)


def _unordered(
    write: Touch | None, reads: dict[Timeline, Touch], clock: Clock, timeline: Timeline | None
) -> list[Touch]:
    """Which of these touches are neither of ``timeline`` nor done at ``clock``.

    The last ones first: whoever waits for those has waited for what came before them on their streams.
    """
    found = []
    for reader, touch in reads.items():
        if reader is not timeline and not touch.op.before(clock):
            found.append(touch)
    if found:
        found.reverse()
    if write is not None:
        op = write.op
        if op.timeline is not timeline and not op.before(clock):
            found.append(write)
    return found
