"""Ranges against sets of numbers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from instrumentation.ranges import Ranges

changes = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=30)


@given(changes, st.integers(0, 30), st.integers(1, 10))
def test_they_hold_what_was_put_in_and_not_taken_out(made, start, count):
    ranges, wanted = Ranges(), set()
    for put, first, last in made:
        (ranges.add if put else ranges.remove)(first, last)
        numbers = set(range(first, last))
        wanted = wanted | numbers if put else wanted - numbers
    found = list(ranges)
    assert {n for low, high in found for n in range(low, high)} == wanted
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(found))
    assert ranges.covers(start, start + count) == (set(range(start, start + count)) <= wanted)
