"""A space's bytes in disjoint ranges, each with its last write and the reads since."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instrumentation.happens_before.accesses import Touch
    from instrumentation.happens_before.clocks import Timeline


class Segment:
    """Bytes [start, stop) with one history. Of a timeline's reads the last one stands for all."""

    __slots__ = ("reads", "start", "stop", "write")

    def __init__(
        self, start: int, stop: int, write: Touch | None = None, reads: dict[Timeline, Touch] | None = None
    ) -> None:
        self.start = start
        self.stop = stop
        self.write = write
        self.reads: dict[Timeline, Touch] = reads if reads is not None else {}


class IntervalMap:
    """Segments by address. Bytes that nothing touched are in none.

    The garbage collector may free a buffer, and so look here, in the middle of a change: every start has a segment.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._at: dict[int, Segment] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Segment]:
        return (self._at[start] for start in self._starts)

    def overlapping(self, start: int, stop: int) -> list[Segment]:
        """Segments that share a byte with [start, stop), in order."""
        known = self._at.get(start)
        if known is not None and known.stop >= stop:
            return [known]
        starts = self._starts
        first = bisect_right(starts, start)
        if first and self._at[starts[first - 1]].stop > start:
            first -= 1
        last = bisect_left(starts, stop, first)
        return [self._at[each] for each in starts[first:last]]

    def cover(self, start: int, stop: int) -> list[Segment]:
        """Segments that tile [start, stop): known ones are cut at its ends, gaps become new ones."""
        known = self._at.get(start)
        if known is not None and known.stop == stop:
            return [known]
        self._cut(start)
        self._cut(stop)
        tiles: list[Segment] = []
        at = start
        for segment in self.overlapping(start, stop):
            if segment.start > at:
                tiles.append(self._insert(Segment(at, segment.start)))
            tiles.append(segment)
            at = segment.stop
        if at < stop:
            tiles.append(self._insert(Segment(at, stop)))
        return tiles

    def remove(self, start: int, stop: int) -> None:
        """Forget what was done to [start, stop)."""
        if start < stop:
            self._cut(start)
            self._cut(stop)
            gone = {segment.start for segment in self.overlapping(start, stop)}
            self._starts = [each for each in self._starts if each not in gone]
            self._at = {each: self._at[each] for each in self._starts}

    def prune(self, over: Callable[[Touch], bool]) -> None:
        """Forget touches that are over, drop segments without any, and join neighbours with one history."""
        kept: list[Segment] = []
        for segment in self:
            if segment.write is not None and over(segment.write):
                segment.write = None
            segment.reads = {t: touch for t, touch in segment.reads.items() if not over(touch)}
            if segment.write is None and not segment.reads:
                continue
            last = kept[-1] if kept else None
            if last is not None and last.stop == segment.start and _same_history(last, segment):
                last.stop = segment.stop
            else:
                kept.append(segment)
        self._starts = [segment.start for segment in kept]
        self._at = {segment.start: segment for segment in kept}

    def _cut(self, at: int) -> None:
        """Make a segment that holds ``at`` in its middle end there."""
        index = bisect_left(self._starts, at)
        if index:
            segment = self._at[self._starts[index - 1]]
            if segment.stop > at:
                self._insert(Segment(at, segment.stop, segment.write, dict(segment.reads)))
                segment.stop = at

    def _insert(self, segment: Segment) -> Segment:
        self._at[segment.start] = segment
        self._starts.insert(bisect_left(self._starts, segment.start), segment.start)
        return segment


def _same_history(one: Segment, other: Segment) -> bool:
    return one.write is other.write and one.reads == other.reads
