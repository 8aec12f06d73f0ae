"""Sets of bytes by address, as few ranges."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ranges:
    """Disjoint ranges [start, stop) that do not touch. Safe to use from any thread."""

    __slots__ = ("_lock", "_starts", "_stops")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        with self._lock:
            return iter(list(zip(self._starts, self._stops, strict=True)))

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes of [start, stop) are there."""
        with self._lock:
            at = bisect_right(self._starts, start) - 1
            return at >= 0 and stop <= self._stops[at]

    def add(self, start: int, stop: int) -> None:
        """Put [start, stop) in."""
        if start >= stop:
            return
        with self._lock:
            # Ranges that touch it become one with it.
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Take [start, stop) out."""
        if start >= stop:
            return
        with self._lock:
            first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
            if first >= last:
                return
            starts, stops = [], []
            if self._starts[first] < start:
                starts.append(self._starts[first])
                stops.append(start)
            if stop < self._stops[last - 1]:
                starts.append(stop)
                stops.append(self._stops[last - 1])
            self._starts[first:last], self._stops[first:last] = starts, stops
