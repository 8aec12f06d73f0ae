"""Page-locked memory between a stream's copies and the caller's arrays.

Copies are asynchronous only from and to page-locked memory. A stream owns a ring of segments; a segment is used again
when the event behind its last copy has passed. A stream that is synchronised often never waits for one.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from instrumentation.devices.host_memory import bytes_at

if TYPE_CHECKING:
    from instrumentation.account import Held
    from instrumentation.devices.cuda_driver import Driver

SEGMENT_NBYTES = 1 << 20
MAX_SEGMENTS = 4
#: copies start at multiples of this many bytes
_ALIGNMENT = 64
Bytes = npt.NDArray[np.uint8]


class Segment:
    """A piece of page-locked memory and the event behind the copies that use it."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.event = driver.create_event()
        try:
            self.address, _ = driver.allocate_pinned(nbytes)
        except BaseException:
            driver.destroy_event(self.event)
            raise
        self.bytes: Bytes = bytes_at(self.address, nbytes)
        self.used = 0
        #: ``event`` was recorded and not waited for since
        self.in_flight = False


class _Landing(NamedTuple):
    """Bytes that a copy brings, to go where the caller wants them."""

    segment: Segment
    source: Bytes
    target: Bytes


class Staging:
    """The ring of one stream. Its calls are made inside the stream's ``DriverCalls``."""

    def __init__(
        self,
        driver: Driver,
        stream: Any,
        segment_nbytes: int = SEGMENT_NBYTES,
        *,
        held: Held | None = None,
    ) -> None:
        self._driver = driver
        self._stream = stream
        self._nbytes = segment_nbytes
        self._segments: list[Segment] = []
        self._current = -1
        #: where its memory is accounted for
        self.held = held
        self._landings: deque[_Landing] = deque()
        #: pieces of copies out that were queued, ever
        self.n_queued = 0

    def copy_in(self, target: int, source: Bytes) -> None:
        """Queue a copy to device memory; ``source`` may change when this returns."""
        done = 0
        while done < len(source):
            segment, piece = self._take(len(source) - done)
            count = len(piece)
            piece[:] = source[done : done + count]
            at = segment.address + segment.used
            segment.used += count
            self._driver.copy_in(target + done, at, count, self._stream)
            done += count

    def copy_out(self, target: Bytes, source: int) -> None:
        """Queue a copy from device memory, which is in ``target`` after ``land``."""
        done = 0
        while done < len(target):
            segment, piece = self._take(len(target) - done)
            count = len(piece)
            at = segment.address + segment.used
            segment.used += count
            self._driver.copy_out(at, source + done, count, self._stream)
            self._landings.append(_Landing(segment, piece, target[done : done + count]))
            self.n_queued += 1
            done += count

    def land(self) -> None:
        """Put what came where it belongs: the stream was synchronised."""
        self.land_first(self.n_queued)
        for segment in self._segments:
            segment.used = 0
            segment.in_flight = False

    def land_first(self, count: int) -> None:
        """As ``land`` for the first ``count`` pieces ever queued: an event behind them was waited for."""
        waiting = count - (self.n_queued - len(self._landings))
        for _ in range(waiting):
            landing = self._landings.popleft()
            landing.target[:] = landing.source

    def drop(self) -> None:
        """Forget what is under way: it will never come."""
        self._landings.clear()

    def release(self) -> None:
        """Give the memory back, when nothing is under way."""
        segments, self._segments, self._current = self._segments, [], -1
        self._landings.clear()
        for segment in segments:
            self._driver.destroy_event(segment.event)
            self._driver.free_pinned(segment.address)
        if self.held is not None:
            self.held.drop()

    def _take(self, nbytes: int) -> tuple[Segment, Bytes]:
        """A segment with the bytes behind what is used of it: ``nbytes``, or a whole segment of a larger copy."""
        wanted = min(nbytes, self._nbytes)
        if self._segments:
            segment = self._segments[self._current]
            segment.used = -(-segment.used // _ALIGNMENT) * _ALIGNMENT
            if self._nbytes - segment.used >= wanted:
                return segment, segment.bytes[segment.used : segment.used + wanted]
        segment = self._advance()
        return segment, segment.bytes[:wanted]

    def _advance(self) -> Segment:
        """Close the current segment and make the next one usable."""
        if self._segments:
            closed = self._segments[self._current]
            self._driver.record(closed.event, self._stream)
            closed.in_flight = True
        following = self._current + 1
        if following == len(self._segments) and following < MAX_SEGMENTS:
            self._segments.append(Segment(self._driver, self._nbytes))
            if self.held is not None:
                self.held.grow(host=self._nbytes)
        self._current = following % len(self._segments)
        segment = self._segments[self._current]
        if segment.in_flight:
            self._driver.synchronize_event(segment.event)
            segment.in_flight = False
            while self._landings and self._landings[0].segment is segment:
                landing = self._landings.popleft()
                landing.target[:] = landing.source
        segment.used = 0
        return segment
