"""All that a captured graph touches, as one sorted list: made once, then checked at each replay as a whole."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from instrumentation.happens_before.accesses import Kind
from instrumentation.happens_before.intervals import IntervalMap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.happens_before.accesses import Touch


class Overlap(NamedTuple):
    """Bytes [start, stop) that two lists share, with who touches them in each."""

    start: int
    stop: int
    mine: Touch
    other: Touch


class Footprint:
    """Disjoint ranges of one space in order. A byte that is read and written counts as written, by its first writer."""

    def __init__(self, space: str, touches: Iterable[Touch]) -> None:
        self.space = space
        first: dict[int, Touch] = {}
        ranges = IntervalMap()
        for touch in touches:
            if touch.start == touch.stop:
                continue
            for segment in ranges.cover(touch.start, touch.stop):
                known = segment.write
                if known is None or (known.kind == Kind.READ and touch.kind != Kind.READ):
                    segment.write = touch
        ranges.prune(lambda _touch: False)  # joins neighbours
        for segment in ranges:
            assert segment.write is not None, "a range that was covered has a touch"
            first[segment.start] = segment.write
        self._starts = list(first)
        self._stops = [segment.stop for segment in ranges]
        self._touches = list(first.values())
        self._known: WeakKeyDictionary[Footprint, Overlap | None] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._starts)

    def overlap(self, start: int, stop: int, kind: Kind) -> tuple[int, int, Touch] | None:
        """First bytes that would conflict with an access of that kind, and who touches them here."""
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < stop:
            touch = self._touches[at]
            if self._stops[at] > start and (kind != Kind.READ or touch.kind != Kind.READ):
                return max(start, self._starts[at]), min(stop, self._stops[at]), touch
            at += 1
        return None

    def conflict(self, other: Footprint) -> Overlap | None:
        """First bytes that one of the two lists writes and the other touches. Looked for once for each pair."""
        if other in self._known:
            return self._known[other]
        found = self._search(other) if other.space == self.space else None
        self._known[other] = found
        return found

    def _search(self, other: Footprint) -> Overlap | None:
        for start, stop, touch in zip(self._starts, self._stops, self._touches, strict=True):
            hit = other.overlap(start, stop, touch.kind)
            if hit is not None:
                return Overlap(hit[0], hit[1], touch, hit[2])
        return None
