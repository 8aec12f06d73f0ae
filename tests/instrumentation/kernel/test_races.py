"""What is kept of an element's accesses finds a race exactly where there is one: against all pairs of accesses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from instrumentation.kernel.checked import races
from instrumentation.kernel.checked.races import ATOMIC, FOUND, LOAD, RECORD_WORDS, SHARED_BYTES, STORE
from instrumentation.kernel.checked.report import SITE_BITS, THREAD_BITS

BARRIER, WARP, NEXT = "barrier", "syncwarp", "next block"
THREADS = (0, 1, 2, 31, 32, 33, 64, 1023)


@dataclass(frozen=True)
class Access:
    thread: int
    how: int
    block: int
    now: int
    since: int

    def races_with(self, other):
        """By the rule itself, for an earlier access of the same element."""
        if LOAD == self.how == other.how or ATOMIC == self.how == other.how:
            return False
        if self.block != other.block:
            return True
        if self.thread == other.thread or other.now < self.since:
            return False
        return self.thread // 32 != other.thread // 32 or other.now == self.now


class Table:
    """A table of the process, as a checked kernel takes and uses it."""

    def __init__(self):
        races.link()
        self._begin, self._touch, self._end = (
            races.compiled(name).ctypes for name in ("refengine_begin", "refengine_touch", "refengine_end")
        )
        self.table = self._begin(races.tables())
        self.now = self.since = self.word(races.CLOCK)
        self.block = -1
        self.next_block()

    def word(self, index):
        return int(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 8).from_address(self.table))[index])

    def next_block(self):
        self.block += 1
        self.barrier()

    def barrier(self):
        self.now += 1
        self.since = self.now

    def touch(self, element, access, *, shared, site=0, chain=0):
        record = self.table + SHARED_BYTES + 8 * RECORD_WORDS * element if shared else 0
        address = 0 if shared else 4096 + 4 * element
        return self._touch(
            self.table,
            record,
            address,
            access.how,
            site,
            chain,
            access.block,
            access.thread,
            access.now,
            access.since,
        )

    def end(self):
        self._end(self.table, self.now)


@pytest.fixture
def table():
    table = Table()
    yield table
    table.end()


def accesses(*kinds):
    return st.tuples(st.sampled_from(THREADS), st.sampled_from(kinds))


cuts = st.sampled_from((BARRIER, WARP, WARP, NEXT))
anything = st.lists(st.one_of(accesses(LOAD, STORE, ATOMIC), cuts), max_size=30)
#: many that do not race, before one that may
quiet = st.sampled_from((LOAD, ATOMIC)).flatmap(
    lambda how: st.tuples(
        st.lists(st.one_of(accesses(how), accesses(how), cuts), min_size=3, max_size=12),
        st.lists(accesses(LOAD, STORE, ATOMIC), min_size=1, max_size=3),
    ).map(lambda parts: parts[0] + parts[1])
)


@settings(max_examples=500, deadline=None)
@given(st.one_of(quiet, quiet, anything), st.booleans())
@example([(0, LOAD), (1, LOAD), WARP, (2, LOAD), (31, LOAD), (2, STORE)], True)
@example([(0, ATOMIC), (1, ATOMIC), WARP, (1, ATOMIC), (2, ATOMIC), (1, STORE)], True)
@example([(0, LOAD), NEXT, (0, LOAD), (0, STORE)], False)
def test_the_first_race_is_found_where_it_is(sequence, shared):
    """Blocks have shared arrays of their own: what is another block's is for other memory alone."""
    table, earlier = Table(), []
    try:
        for event in sequence:
            if event == NEXT and not shared:
                table.next_block()
            elif event in (BARRIER, NEXT):
                table.barrier()
            elif event == WARP:
                table.now += 1
            else:
                access = Access(*event, table.block, table.now, table.since)
                wanted = any(access.races_with(other) for other in earlier)
                assert bool(table.touch(0, access, shared=shared)) == wanted
                if wanted:
                    return
                earlier.append(access)
    finally:
        table.end()


def test_what_is_found_names_both_accesses(table):
    first = Access(40, STORE, table.block, table.now, table.since)
    second = Access(3, LOAD, table.block, table.now, table.since)
    assert table.touch(5, first, shared=False, site=7, chain=(1 << 40) - 1) == 0
    assert table.touch(5, second, shared=False, site=(1 << SITE_BITS) - 1, chain=9) > 0
    assert table.word(FOUND) == 9 << SITE_BITS | (1 << SITE_BITS) - 1
    assert table.word(FOUND + 1) == (1 << 40) - 1 << SITE_BITS | 7
    assert table.word(FOUND + 2) == table.block << THREAD_BITS | 40


def test_elements_are_kept_apart(table):
    for element in range(5000):
        access = Access(element % 1024, STORE, table.block, table.now, table.since)
        assert table.touch(element, access, shared=False) == 0
    for element in range(5000):
        access = Access((element + 1) % 1024, LOAD, table.block, table.now, table.since)
        assert table.touch(element, access, shared=False) > 0


def test_what_has_no_room_is_not_taken_for_a_race(table):
    for element in range(100_000):
        access = Access(element % 1024, STORE, table.block, table.now, table.since)
        assert table.touch(element, access, shared=False) == 0


def test_a_call_knows_nothing_of_the_one_before():
    for thread in (1, 2):
        table = Table()
        assert table.touch(0, Access(thread, STORE, 0, table.now, table.since), shared=True) == 0
        assert table.touch(9, Access(thread, STORE, 0, table.now, table.since), shared=False) == 0
        table.end()


def test_a_clock_that_is_late_is_set_back():
    table = Table()
    table.touch(0, Access(1, STORE, 0, table.now, table.since), shared=True)
    table.now = (1 << 34) + 5
    table.touch(1, Access(1, STORE, 0, table.now, table.now), shared=True)
    table.end()
    table = Table()
    assert table.now == 1
    assert table.touch(1, Access(2, STORE, 0, table.now, table.since), shared=True) == 0
    table.end()
