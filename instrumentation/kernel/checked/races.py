"""Races inside a block: what was done to each element, and whether that was ordered before the next access.

Threads of a block are ordered by ``syncthreads``; threads of one warp by ``syncwarp``, too; a shuffle orders nothing,
as on a GPU. The host runs a block's threads one after the other, so an access that is not ordered behind an earlier
one of another thread is a race whether or not it did harm. Of each element five accesses are kept, which is enough to
find one where there is one: the last store; two loads and two atomics since the last barrier, of different warps where
there were such, else of different threads behind the last ``syncwarp``. Blocks of a launch are not ordered at all: of
memory that they share, a load and an atomic of an earlier block are kept as well.

They lie in a *table*, which one call of a checked kernel has for itself: a record for each element of its shared
arrays, and for those of parameters that it writes as many as there is room for. Time is counted in barriers, and goes
on from call to call, so that nothing is cleared between two blocks.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from numba import cfunc, njit, types

from instrumentation.kernel.checked.report import (
    CHAIN_BITS,
    KIND_BITS,
    RACE,
    SITE_BITS,
    THREAD_BITS,
)
from instrumentation.kernel.native import get_word, put_word, store_word, swap_word
from instrumentation.kernel.plan import MAX_SHARED_BYTES

#: how an element is accessed
LOAD, STORE, ATOMIC = range(3)
#: words of a table: taken or not; time of the last barrier; time when the call began; of the race found last its two
#: accesses and the other one's place; then elements of parameters; then records of shared arrays
_TAKEN, CLOCK, _BEGAN, FOUND = range(4)
_HEADER = 8
#: an element of a parameter: address, time of its last access, record
_SLOT_WORDS = 16
_SLOTS = 1 << 14
_PROBED = 8
#: a record: the last store, two loads, two atomics, of two words each: site, thread and time; block and chain of calls.
#: That of a parameter's element goes on with a load and an atomic of an earlier block.
RECORD_WORDS = 10
_STORED, _LOADED, _CHANGED, _LOADED_BEFORE, _CHANGED_BEFORE = 0, 2, 6, 10, 12
_TIME_BITS = 35
_BLOCK_BITS = 24
assert SITE_BITS + THREAD_BITS + _TIME_BITS == CHAIN_BITS + _BLOCK_BITS == 64
_TIME = (1 << _TIME_BITS) - 1
_THREAD = (1 << THREAD_BITS) - 1
_BLOCK = (1 << _BLOCK_BITS) - 1
_CHAIN = (1 << CHAIN_BITS) - 1
_SITE = (1 << SITE_BITS) - 1
_SHARED = _HEADER + _SLOTS * _SLOT_WORDS
#: bytes from a table's begin to its first record of a shared array
SHARED_BYTES = 8 * _SHARED
_MAX_SHARED_ELEMENTS = 48 * 1024
_TABLE_WORDS = _SHARED + _MAX_SHARED_ELEMENTS * RECORD_WORDS
#: a clock is set back when it comes here, before it runs over within a call
_LATE = 1 << _TIME_BITS - 1
_KEY = (1 << CHAIN_BITS + SITE_BITS) - 1
_MIX = -7046029254386353131
# Numba keeps what it compiled of this file until this file changes: what stands elsewhere, stands here as well.
_KIND_BITS, _RACE, _SITE_BITS, _THREAD_BITS, _CHAIN_BITS = 3, 3, 19, 10, 40
assert (_KIND_BITS, _RACE, _SITE_BITS) == (KIND_BITS, RACE, SITE_BITS)
assert (_THREAD_BITS, _CHAIN_BITS, _MAX_SHARED_ELEMENTS) == (THREAD_BITS, CHAIN_BITS, MAX_SHARED_BYTES)


@njit(nogil=True, error_model="numpy")
def _conflicts(
    record: int, word: int, began: int, thread: int, block: int, now: int, since: int, shared: bool
) -> bool:
    """Whether an access that was kept is not ordered before one by a thread at a time."""
    kept = get_word(record, word)
    time = kept & _TIME
    if time < began:
        return False
    if time < since:
        return not shared and bool(get_word(record, word + 1) >> _CHAIN_BITS & _BLOCK != block)
    other = kept >> _TIME_BITS & _THREAD
    if other == thread:
        return False
    return bool(other >> 5 != thread >> 5 or time == now)


@njit(nogil=True, error_model="numpy")
def _keep_one_of_two(record: int, word: int, before: int, first: int, second: int, since: int) -> None:
    """Keep an access beside another one, so that any that conflicts with one of all conflicts with one of the two."""
    now, thread = first & _TIME, first >> _TIME_BITS & _THREAD
    one, two = get_word(record, word), get_word(record, word + 2)
    one_thread, two_thread = one >> _TIME_BITS & _THREAD, two >> _TIME_BITS & _THREAD
    at = -1
    if one & _TIME < since:
        at = word
        if before != 0 and (get_word(record, word + 1) ^ second) >> _CHAIN_BITS & _BLOCK != 0:
            put_word(record, before, one)
            put_word(record, before + 1, get_word(record, word + 1))
    elif one_thread == thread:
        at = word
    elif two & _TIME < since or two_thread == thread:
        at = word + 2
    elif one_thread >> 5 == two_thread >> 5:
        if thread >> 5 != one_thread >> 5 or two & _TIME < now:
            at = word + 2
        elif one & _TIME < now:
            at = word
    if at >= 0:
        put_word(record, at, first)
        put_word(record, at + 1, second)


@njit(nogil=True, error_model="numpy")
def _record_of(table: int, address: int, now: int, since: int) -> int:
    """The record of an element of a parameter; 0 where there is no room for one."""
    number = address >> 2
    start = number + (number >> 14) * 40503
    free = 0
    for tried in range(_PROBED):
        slot = table + 8 * (_HEADER + (start + tried & _SLOTS - 1) * _SLOT_WORDS)
        if get_word(slot, 0) == address:
            put_word(slot, 1, now)
            return slot + 16
        # What is behind a barrier says only of other blocks what conflicts.
        if free == 0 and get_word(slot, 1) < since:
            free = slot
    if free != 0:
        put_word(free, 0, address)
        put_word(free, 1, now)
        for word in range(_SLOT_WORDS - 2):
            put_word(free, 2 + word, 0)
        return free + 16
    return 0


_WORDS = (types.int64,) * 10


@functools.cache
def _touch() -> Any:
    @cfunc(types.int64(*_WORDS), cache=True, nopython=True, error_model="numpy")
    def touch(
        table: int,
        record: int,
        address: int,
        how: int,
        site: int,
        chain: int,
        block: int,
        thread: int,
        now: int,
        since: int,
    ) -> int:
        """Keep an access; the key of its race, whose accesses are in the table then, or 0."""
        shared = record != 0
        if not shared:
            record = _record_of(table, address, now, since)
            if record == 0:
                return 0
        block &= _BLOCK
        chain &= _CHAIN
        began = get_word(table, _BEGAN)
        end = RECORD_WORDS if shared else _SLOT_WORDS - 2
        found = -1
        if _conflicts(record, _STORED, began, thread, block, now, since, shared):
            found = _STORED
        if found < 0 and how != LOAD:
            for word in (_LOADED, _LOADED + 2, _LOADED_BEFORE):
                if word < end and _conflicts(record, word, began, thread, block, now, since, shared):
                    found = word
        if found < 0 and how != ATOMIC:
            for word in (_CHANGED, _CHANGED + 2, _CHANGED_BEFORE):
                if word < end and _conflicts(record, word, began, thread, block, now, since, shared):
                    found = word
        key = 0
        if found >= 0:
            first, second = get_word(record, found), get_word(record, found + 1)
            own = chain << _SITE_BITS | site
            other = (second & _CHAIN) << _SITE_BITS | (first >> _TIME_BITS + _THREAD_BITS & _SITE)
            place = (second >> _CHAIN_BITS & _BLOCK) << _THREAD_BITS | (first >> _TIME_BITS & _THREAD)
            put_word(table, FOUND, own)
            put_word(table, FOUND + 1, other)
            put_word(table, FOUND + 2, place)
            mixed = (own * _MIX ^ other) * _MIX
            key = ((mixed >> 3 & _KEY) << _KIND_BITS | _RACE) + 1
        first = site << _TIME_BITS + _THREAD_BITS | thread << _TIME_BITS | now
        second = block << _CHAIN_BITS | chain
        if how == STORE:
            put_word(record, _STORED, first)
            put_word(record, _STORED + 1, second)
        elif how == LOAD:
            _keep_one_of_two(record, _LOADED, 0 if shared else _LOADED_BEFORE, first, second, since)
        else:
            _keep_one_of_two(record, _CHANGED, 0 if shared else _CHANGED_BEFORE, first, second, since)
        return key

    return touch


@functools.cache
def _begin() -> Any:
    @cfunc(types.int64(types.int64), cache=True, nopython=True, error_model="numpy")
    def begin(tables: int) -> int:
        """Take a table; 0 where there are none."""
        if tables == 0:
            return 0
        count = get_word(tables, 0)
        while True:
            for number in range(count):
                table = tables + 64 + number * 8 * _TABLE_WORDS
                if swap_word(table, _TAKEN, 0, 1) == 0:
                    clock = get_word(table, CLOCK)
                    if clock >= _LATE:
                        clock = 0
                        for word in range(CLOCK, _TABLE_WORDS):
                            put_word(table, word, 0)
                    put_word(table, CLOCK, clock)
                    put_word(table, _BEGAN, clock + 1)
                    return table

    return begin


@functools.cache
def _end() -> Any:
    @cfunc(types.int64(types.int64, types.int64), cache=True, nopython=True, error_model="numpy")
    def end(table: int, clock: int) -> int:
        """Give a table back."""
        if table != 0:
            put_word(table, CLOCK, clock)
            store_word(table, _TAKEN, 0)
        return 0

    return end


#: what checked kernels call, by the names that they call it
_SYMBOLS = {"refengine_touch": _touch, "refengine_begin": _begin, "refengine_end": _end}


def compiled(name: str) -> Any:
    """What is called by a name."""
    return _SYMBOLS[name]()


@functools.cache
def link() -> None:
    """Let compiled kernels find what they call here."""
    for name in _SYMBOLS:
        llvm.add_symbol(name, compiled(name).address)


_lock = threading.Lock()
_tables: list[npt.NDArray[np.int64]] = []


def tables() -> int:
    """Address of the tables of this process, one for each thread that could need one. Untouched ones cost nothing."""
    with _lock:
        if not _tables:
            count = min(os.cpu_count() or 1, 64)
            words = np.zeros(8 + count * _TABLE_WORDS, np.int64)
            words[0] = count
            _tables.append(words)
        return int(_tables[0].ctypes.data)
