"""The native loops that run a batch of launches: one call from Python for a whole decode step.

The calling thread leads: it goes through the launches in order and takes blocks of each. Followers are threads that
help with the launches that are large enough; both take blocks from a counter, in parts. The leader waits only for
parts that a follower has taken, never for a follower to turn up: on a busy machine, where a thread may not run for
milliseconds, a fork and join of all threads at each of some 400 launches of a token made decoding 50 times slower.
"""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from instrumentation.kernel.host_runtime import call_blocks
from instrumentation.kernel.native import add_word, load_word, store_word, swap_word

#: columns of a launch record: entry address, argument block address, number of blocks, first and last canary range,
#: whether followers help
ENTRY, ARGUMENTS, BLOCKS, FIRST_RANGE, LAST_RANGE, SHARED = range(6)
RECORD = 6
#: least part of a launch's blocks that a thread takes at a time
_LEAST = 16
#: the state word of a batch: 0 before its first shared launch, i + 1 while launch i is shared, then this
_OVER = -1
NO_RANGES = np.zeros((0, 3), np.int64)


def run_launches(records: Any, begin: int, end: int, threads: int, ranges: Any) -> int:
    """Run launches ``begin`` to ``end``; after each, compare its canary ranges (address, nbytes, byte).

    ``records``: int64 [n, RECORD]; ``ranges``: int64 [m, 3]. Returns the index of the first launch after which a canary
    was damaged, or ``end``.
    """
    state = np.zeros(1, np.int64)
    counters = np.zeros((len(records), 2), np.int64)
    if threads > 1 and records[begin:end, SHARED].any():
        _followers(threads - 1).help(records, state, counters, threads)
    return int(_lead(records, begin, end, ranges, state, counters, threads))


class _Followers:
    """Threads that sleep until there is a batch to help with."""

    def __init__(self, count: int) -> None:
        self._wake = threading.Condition()
        self._job: tuple[Any, ...] | None = None
        for number in range(count):
            threading.Thread(target=self._work, name=f"refengine-host-{number}", daemon=True).start()

    def help(self, *job: Any) -> None:
        """Help with a batch, if a thread wakes up before it is over."""
        with self._wake:
            self._job = job
            self._wake.notify_all()

    def _work(self) -> None:
        seen: tuple[Any, ...] | None = None
        while True:
            with self._wake:
                while self._job is seen or self._job is None:
                    self._wake.wait()
                seen = self._job
            _follow(*seen)


_pools: dict[int, _Followers] = {}
_pools_lock = threading.Lock()


def _followers(count: int) -> _Followers:
    with _pools_lock:
        if count not in _pools:
            _pools[count] = _Followers(count)
        return _pools[count]


@njit(nogil=True, cache=True, error_model="numpy")
def _lead(records: Any, begin: int, end: int, ranges: Any, state: Any, counters: Any, threads: int) -> int:
    word, count = state.ctypes.data, counters.ctypes.data
    for i in range(begin, end):
        blocks = records[i, 2]
        if records[i, 5] == 0 or blocks < 2:
            call_blocks(records[i, 0], records[i, 1], 0, blocks)
        else:
            store_word(word, 0, i + 1)
            _take_blocks(records, i, count, threads)
            while load_word(count, 2 * i + 1, 0) < blocks:
                pass
        for r in range(records[i, 3], records[i, 4]):
            if not holds(ranges[r, 0], ranges[r, 1], ranges[r, 2]):
                store_word(word, 0, _OVER)
                return i
    store_word(word, 0, _OVER)
    return end


@njit(nogil=True, cache=True, error_model="numpy")
def _follow(records: Any, state: Any, counters: Any, threads: int) -> None:
    word, count = state.ctypes.data, counters.ctypes.data
    seen = 0
    while True:
        current = load_word(word, 0, 0)
        if current < 0:
            return
        if current != seen:
            seen = current
            _take_blocks(records, current - 1, count, threads)


@njit(nogil=True, cache=True, error_model="numpy")
def _take_blocks(records: Any, i: int, count: int, threads: int) -> None:
    """Run parts of launch ``i`` until none is left; counters: blocks taken, blocks done.

    Each part is an equal share of what is left: long runs of memory first, which the hardware fetches ahead, short ones
    last, so that threads that started at different times end together.
    """
    blocks = records[i, 2]
    least = max(1, blocks // _LEAST)
    first = load_word(count, 2 * i, 0)
    while first < blocks:
        last = min(first + max((blocks - first) // threads, least), blocks)
        seen = swap_word(count, 2 * i, first, last)
        if seen == first:
            call_blocks(records[i, 0], records[i, 1], first, last)
            add_word(count, 2 * i + 1, last - first)
            seen = load_word(count, 2 * i, 0)
        first = seen


@njit(nogil=True, cache=True, error_model="numpy")
def holds(address: int, nbytes: int, byte: int) -> bool:
    """Whether every byte of a range has one value."""
    data = numba.carray(bytes_at(address), nbytes)
    for i in range(nbytes):  # noqa: SIM110 - Numba compiles no generator in all()
        if data[i] != byte:
            return False
    return True


@intrinsic
def bytes_at(_typing: Any, _address: Any) -> Any:
    """Pointer to bytes at an address."""
    result = types.CPointer(types.uint8)
    signature = result(types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return signature, generate
