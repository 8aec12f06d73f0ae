"""Schedule fuzzing of the host device: queued work of all streams in a random order that is legal.

A program whose order is right gives the same bits in each of them. Legal is what a GPU might do: operations of a
stream one after the other, none before the event that its stream waits for, all that the host waits for when it waits.
Work may run as soon as it is queued, or not before somebody needs it.
"""

from __future__ import annotations

import operator
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from instrumentation.devices.host_stream import HostStream

MAX_SEED = 2**64 - 1
NOWHERE: Mapping[HostStream, int] = MappingProxyType({})
#: how often something runs when something is queued: one of these from one wait to the next
_EAGERNESS = (0.0, 0.0, 0.05, 0.5)
#: most runs of operations then
_MOST_EAGER = 8
#: most operations of one stream that run before others get a chance
_MOST_IN_A_ROW = 8
#: how often other streams come first from here on
_CHANGE = 0.2


def check_seed(seed: object) -> int:
    """A schedule's seed. Raises ``BadInputError``."""
    try:
        checked = -1 if isinstance(seed, bool) else operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        checked = -1
    if not 0 <= checked <= MAX_SEED:
        raise BadInputError(f"schedule_seed is {seed!r}; give a whole number from 0 to {MAX_SEED}")
    return checked


class Schedule:
    """Chooses what runs next. The same seed and the same calls of one thread give the same order.

    Some streams come first for a while, as in a test that gives threads priorities, and the device is lazy for a while,
    or eager: one stream is far ahead of the others, or far behind, more often than by drawing lots for each operation.
    """

    def __init__(self, seed: int, streams: Collection[HostStream]) -> None:
        self._streams = streams
        self._random = np.random.default_rng(seed)
        self._first: dict[HostStream, float] = {}
        self._eagerness = 0.0
        self._lock = threading.RLock()
        self._running = False

    def queued(self) -> None:
        """Something was queued: a device may do any part of what it has before the host goes on."""
        with self._lock:
            if self._running or self._random.random() >= self._eagerness:
                return
            self._first.clear()
            for _ in range(self._random.integers(1, _MOST_EAGER, endpoint=True)):
                if not self._run_some():
                    return

    def run_until(self, stream: HostStream, mark: int) -> None:
        """The host waits until ``mark`` operations of a stream, counted since it began, are done."""
        with self._lock:
            self._first.clear()
            self._eagerness = float(self._random.choice(_EAGERNESS))
            exact = bool(self._random.integers(2))
            try:
                while stream.done < mark:
                    ran = self._run_some({stream: mark} if exact else {})
                    assert ran, f"stream {stream.name} waits for an event that nothing will reach"
            except BaseException:
                # What stands behind relies on what should have been done.
                stream.drop()
                raise

    def _run_some(self, marks: Mapping[HostStream, int] = NOWHERE) -> bool:
        """Run a few operations of one stream, none behind its mark if it has one; False when nothing can run."""
        if self._random.random() < _CHANGE:
            self._first.clear()
        # Sets have no order that is the same in the next process, and another thread may add to this one.
        ready = sorted((s for s in list(self._streams) if s.ready), key=lambda s: s.number)
        if not ready:
            return False
        for stream in ready:
            if stream not in self._first:
                self._first[stream] = self._random.random()
        chosen = min(ready, key=self._first.__getitem__)
        count = int(self._random.integers(1, _MOST_IN_A_ROW, endpoint=True))
        if chosen in marks:
            count = min(count, marks[chosen] - chosen.done)
        outer, self._running = self._running, True
        try:
            chosen.run_ready(count)
        finally:
            self._running = outer
        return True
