"""Micro-batches cover a batch in order, keep to their limits, and never part what must stay together."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refengine.batch import Batch, MicroBatchLimits, micro_batches


def batch_of(lengths: list[int], outputs: list[bool]) -> Batch:
    """Sequence s has lengths[s] rows, one run each."""
    n = sum(lengths)
    sequence = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    position = np.concatenate([np.arange(k) for k in lengths]).astype(np.int32)
    return Batch(np.arange(n, dtype=np.int32), position, sequence, np.array(outputs, np.bool_))


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    wanted = draw(st.sampled_from(["all", "none", "some"]))
    n = sum(lengths)
    outputs = {"all": [True] * n, "none": [False] * n}.get(wanted)
    return batch_of(lengths, outputs or draw(st.lists(st.booleans(), min_size=n, max_size=n)))


@st.composite
def limits(draw):
    n_rows, n_outputs = draw(st.integers(1, 50)), draw(st.integers(1, 32))
    return MicroBatchLimits(n_rows, n_outputs, draw(st.integers(1, min(n_rows, n_outputs))))


@given(batches(), limits())
@example(batch_of([3, 5], [True] * 8), MicroBatchLimits(4, 4, 4))
@example(batch_of([9], [True] * 9), MicroBatchLimits(8, 8, 4))
def test_they_cover_the_batch_within_limits(batch: Batch, limit: MicroBatchLimits):
    parts = micro_batches(batch, limit)
    assert [parts[0][0], *(stop for _, stop in parts)] == [*(start for start, _ in parts), len(batch)]
    for start, stop in parts:
        assert 1 <= stop - start <= limit.n_rows
        assert batch.outputs[start:stop].sum() <= limit.n_outputs


@given(batches(), limits())
def test_the_tail_of_a_sequence_is_in_one_of_them(batch: Batch, limit: MicroBatchLimits):
    parts = micro_batches(batch, limit)
    for s in np.unique(batch.sequence):
        rows = np.flatnonzero(batch.sequence == s)[-limit.keep_tail :]
        assert sum(start <= rows[0] and rows[-1] < stop for start, stop in parts) == 1


@given(batches(), limits())
def test_no_two_of_them_could_be_one(batch: Batch, limit: MicroBatchLimits):
    parts = micro_batches(batch, limit)
    for (start, _), (_, stop) in itertools.pairwise(parts):
        fits = stop - start <= limit.n_rows and batch.outputs[start:stop].sum() <= limit.n_outputs
        assert not fits


def test_rows_that_fill_a_pass_are_taken_to_the_last():
    parts = micro_batches(batch_of([10], [False] * 10), MicroBatchLimits(4, 4, 1))
    assert parts == [(0, 4), (4, 8), (8, 10)]


def test_a_draft_block_waits_for_a_pass_of_its_own():
    parts = micro_batches(batch_of([4, 4, 4], [True] * 12), MicroBatchLimits(10, 10, 4))
    assert parts == [(0, 8), (8, 12)]


@given(batches(), st.data())
def test_joined_parts_are_the_batch(batch: Batch, data):
    cut = data.draw(st.integers(1, len(batch)))
    parts = [batch.part(0, cut), batch.part(cut, len(batch))] if cut < len(batch) else [batch]
    whole = Batch.joined(parts)
    for name in ("tokens", "position", "sequence", "outputs"):
        assert np.array_equal(getattr(whole, name), getattr(batch, name))
    assert whole.chain_rows is None


def test_optional_rows_go_along():
    rows = np.arange(3, dtype=np.int32)
    batch = Batch(rows, rows, rows * 0, rows == 2, hidden_rows=rows - 1, chain_rows=-rows)
    part = Batch.joined([batch, batch]).part(2, 5)
    assert part.hidden_rows.tolist() == [1, -1, 0]
    assert part.chain_rows.tolist() == [-2, 0, -1]


@pytest.mark.parametrize("name", ["position", "sequence", "hidden_rows", "chain_rows"])
def test_arrays_of_other_lengths_are_refused(name):
    rows = np.arange(3, dtype=np.int32)
    arrays = {"tokens": rows, "position": rows, "sequence": rows, "outputs": rows > 0, name: rows[:2]}
    with pytest.raises(AssertionError):
        Batch(**arrays)
