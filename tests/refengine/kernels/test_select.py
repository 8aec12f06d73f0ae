"""The k best of rows: order, ties, infinities, NaN, rows of one and of many chunks."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refengine.kernels.select import (
    CANDIDATES,
    CHUNK,
    best_f64,
    best_of_chunks,
    best_of_chunks_f64,
    best_of_rows,
    n_chunks,
    packed_f64,
)

BENCH = Bench()


def packed(x: Array, k: int) -> Array:
    shape = (len(x), n_chunks(x.shape[1]))
    keys, bad = poisoned((*shape, k), np.int64), poisoned(shape, np.int32)
    lists = BENCH.run(best_of_chunks(k), shape[::-1], x=x, keys=keys, bad=bad)
    best = poisoned((len(x), 2 * k + 1), np.int32)
    return BENCH.run(best_of_rows(k), len(x), x=x, keys=lists["keys"], bad=lists["bad"], best=best)["best"]


def best(x: Array, k: int) -> tuple[Array, Array, Array]:
    found = packed(x, k)
    return found[:, :k], found[:, k : 2 * k].copy().view(np.float32), found[:, 2 * k]


def assert_is_twin(x: Array, k: int) -> None:
    for found, wanted in zip(best(x, k), best_f64(x, k), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert packed(x, k).tobytes() == packed_f64(x, k).tobytes(), "zeros keep their signs"


#: few values make many ties
ODD = st.one_of(
    st.sampled_from([-1.0, -0.0, 0.0, 1.0, -np.inf, np.inf, np.nan]), st.floats(-(2.0**99), 2.0**99, width=32)
)


@given(
    x=hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 100)), elements=ODD),
    k=st.sampled_from(CANDIDATES),
)
def test_the_best_are_those_of_the_twin(x: Array, k: int):
    assert_is_twin(x, k)


@settings(max_examples=40)
@given(
    n=st.one_of(st.integers(1, 3 * CHUNK), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])),
    k=st.sampled_from(CANDIDATES),
    n_values=st.sampled_from([1, 2, 30, 1 << 20]),
    n_bad=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_several_chunks(n: int, k: int, n_values: int, n_bad: int, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, n_values, (2, n)).astype(np.float32) - np.float32(n_values // 2)
    x[rng.integers(0, 2, n_bad), rng.integers(0, n, n_bad)] = rng.choice([np.nan, np.inf, -np.inf], n_bad)
    assert_is_twin(x, k)


@pytest.mark.parametrize("k", CANDIDATES)
def test_a_row_of_more_lists_than_one_round_merges(k: int):
    x = np.random.default_rng(k).integers(0, 5000, (1, 150_000)).astype(np.float32)
    x[0, -1] = 4999
    assert_is_twin(x, k)


@pytest.mark.parametrize("k", CANDIDATES)
def test_equal_logits_come_in_the_order_of_their_index(k: int):
    x = np.full((1, 2 * CHUNK), 3, np.float32)
    x[0, CHUNK + 50] = 4
    index, _, _ = best(x, k)
    np.testing.assert_array_equal(index[0], [CHUNK + 50, *range(k - 1)])


@pytest.mark.parametrize("n", [1, 31, 32, 33, 49152])
@pytest.mark.parametrize("k", CANDIDATES)
def test_the_best_is_found_wherever_it_is(n: int, k: int):
    for place in {0, n // 2, n - 1}:
        x = np.zeros((1, n), np.float32)
        x[0, place] = 1
        index, value, _ = best(x, k)
        assert (int(index[0, 0]), float(value[0, 0])) == (place, 1.0)


@pytest.mark.parametrize("k", [16, 64])
def test_more_than_there_are_ends_in_minus_one(k: int):
    index, value, bad = best(np.array([[2, np.nan, 1]], np.float32), k)
    assert index[0, :3].tolist() == [0, 2, -1]
    assert value[0, :3].tolist() == [2, 1, -np.inf]
    assert set(index[0, 2:].tolist()) == {-1}
    assert bad.tolist() == [1]


def test_a_row_of_nothing_but_nan_has_no_best():
    index, value, bad = best(np.full((1, CHUNK + 1), np.nan, np.float32), 16)
    assert set(index[0].tolist()) == {-1}
    assert set(value[0].tolist()) == {-np.inf}
    assert bad.tolist() == [CHUNK + 1]


def test_what_is_not_finite_is_counted_in_every_row():
    x = np.zeros((3, CHUNK + 300), np.float32)
    x[0, [1, CHUNK, CHUNK + 299]] = np.nan, np.inf, -np.inf
    x[2, ::2] = -np.inf
    for k in CANDIDATES:
        assert best(x, k)[2].tolist() == [3, 0, CHUNK // 2 + 150]


def test_the_twin_of_chunks_agrees_with_the_twin_of_rows():
    x = np.random.default_rng(1).integers(0, 9, (2, CHUNK + 7)).astype(np.float32)
    keys, bad = best_of_chunks_f64(x, 16)
    assert (np.diff(keys, axis=2) < 0)[:, 0].all()
    assert bad.tolist() == [[0, 0], [0, 0]]
    of_all = np.sort(keys.reshape(2, -1), axis=1)[:, ::-1][:, :16]
    np.testing.assert_array_equal((1 << 31) - 1 - (of_all & 0xFFFFFFFF), best_f64(x, 16)[0])
