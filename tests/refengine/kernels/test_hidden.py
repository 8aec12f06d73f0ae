"""Hidden rows gathered, scattered and joined: bits are copied, and only to where they belong."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned, same_bits
from hypothesis import given
from hypothesis import strategies as st

from refengine.kernels.hidden import (
    concat_rows,
    concat_rows_f64,
    gather_hidden,
    gather_hidden_f64,
    scatter_rows,
    scatter_rows_f64,
)

WIDTHS = st.one_of(st.integers(1, 5), st.integers(30, 34), st.integers(63, 130))
SEEDS = st.integers(0, 2**32 - 1)


def any_bits(rng: np.random.Generator, *shape: int) -> Array:
    """NaNs with payloads and denormal numbers too."""
    return rng.integers(0, 2**32, shape, np.uint32).view(np.float32)


@given(
    n=WIDTHS,
    n_hidden=st.integers(1, 4),
    n_chain=st.integers(1, 3),
    rows=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
    seed=SEEDS,
)
def test_gather_hidden_copies_bits(n: int, n_hidden: int, n_chain: int, rows: list[int], seed: int):
    rng = np.random.default_rng(seed)
    hidden, chain = any_bits(rng, n_hidden, n), any_bits(rng, n_chain, n)
    # From the last row of the chain to the last hidden one, as often as it comes.
    wanted = np.array([row % (n_hidden + n_chain + 1) - n_chain - 1 for row in rows], np.int32)
    y = Bench().run(
        gather_hidden, len(rows), hidden=hidden, chain=chain, rows=wanted, y=poisoned((len(rows), n))
    )["y"]
    expected = [
        hidden[row] if row >= 0 else np.zeros(n, np.float32) if row == -1 else chain[-2 - row]
        for row in wanted
    ]
    assert same_bits(y, np.array(expected))


@given(n=WIDTHS, n_rows=st.integers(1, 6), n_wide=st.integers(1, 8), data=st.data(), seed=SEEDS)
def test_scatter_rows_copies_bits_and_leaves_the_others(
    n: int, n_rows: int, n_wide: int, data: st.DataObject, seed: int
):
    rng = np.random.default_rng(seed)
    x, before = any_bits(rng, n_rows, n), any_bits(rng, n_wide, n)
    goals = data.draw(st.permutations([*range(n_wide), *[-1, -2, -(2**31)] * n_rows]))[:n_rows]
    y = Bench().run(scatter_rows, n_rows, x=x, rows=np.array(goals, np.int32), y=before)["y"]
    expected = before.copy()
    for row, goal in enumerate(goals):
        if goal >= 0:
            expected[goal] = x[row]
    assert same_bits(y, expected)


@given(n=WIDTHS, m=WIDTHS, n_rows=st.integers(1, 4), seed=SEEDS)
def test_concat_rows_copies_bits(n: int, m: int, n_rows: int, seed: int):
    rng = np.random.default_rng(seed)
    a, b = any_bits(rng, n_rows, n), any_bits(rng, n_rows, m)
    y = Bench().run(concat_rows, n_rows, a=a, b=b, y=poisoned((n_rows, n + m)))["y"]
    assert same_bits(y, np.concatenate([a, b], axis=1))


@pytest.mark.parametrize("row", [0, 1, -1, -2, -3])
def test_the_twin_of_gather_hidden_counts_as_written(row: int):
    hidden, chain = np.array([[1.0], [2.0]]), np.array([[10.0], [20.0]])
    wanted = {0: 1.0, 1: 2.0, -1: 0.0, -2: 10.0, -3: 20.0}[row]
    assert gather_hidden_f64(hidden, chain, np.array([row])).tolist() == [[wanted]]


def test_the_twins_of_scatter_and_concat():
    x = np.array([[1.0], [2.0], [3.0]])
    assert scatter_rows_f64(x, np.array([1, -1, 0]), np.full((3, 1), 9.0)).tolist() == [[3.0], [1.0], [9.0]]
    assert concat_rows_f64(x, 2 * x).tolist() == [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]


def test_a_scatter_back_from_a_gather_changes_nothing():
    rng = np.random.default_rng(4)
    hidden, rows = any_bits(rng, 5, 40), np.array([4, 0, 2], np.int32)
    bench = Bench()
    taken = bench.run(gather_hidden, 3, hidden=hidden, chain=hidden[:1], rows=rows, y=poisoned((3, 40)))["y"]
    assert same_bits(bench.run(scatter_rows, 3, x=taken, rows=rows, y=hidden)["y"], hidden)
