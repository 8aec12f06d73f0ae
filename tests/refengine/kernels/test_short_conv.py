"""The short convolution against its twin: segments, history planes, splits."""

import numpy as np
import pytest
from engines import Array, nmse, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run_all

from refengine.kernels.short_conv import ROWS, short_conv, short_conv_f64

EMPTY = -1
#: source plane, and planes to write in an order; those beyond the planes that there are stand for none
SOURCE_AND_TARGETS = st.tuples(st.integers(-1, 4), st.permutations(range(6)))


def convolved(x: Array, weight: Array, segments: list[list[int]], history: Array) -> tuple[Array, Array]:
    """y and the history after it."""
    n_channels, n_taps = weight.shape
    table = np.array(segments, np.int32)
    grid = (-(-n_channels // 32), len(table), -(-len(x) // ROWS))
    out = run_all(short_conv(n_taps), grid, x, weight, table, history, poisoned(x.shape))
    return out[4], out[3]


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    n_taps=st.sampled_from([2, 3, 4]),
    n_channels=st.integers(1, 100),
    counts=st.lists(st.integers(0, 9) | st.integers(ROWS - 2, 2 * ROWS + 4), min_size=1, max_size=3),
    n_planes=st.integers(1, 6),
    planes=st.lists(SOURCE_AND_TARGETS, min_size=3, max_size=3),
    n_kept=st.integers(1, 5),
    fill=st.sampled_from([0x3E, 0xFF]),
    seed=st.integers(0, 2**32 - 1),
)
def test_segments_are_their_twins(
    n_taps: int,
    n_channels: int,
    counts: list[int],
    n_planes: int,
    planes: list[tuple[int, list[int]]],
    n_kept: int,
    fill: int,
    seed: int,
):
    rng = np.random.default_rng(seed)
    n_slots, n_rows = 4, max(1, sum(counts))
    x, weight = normal(rng, n_rows, n_channels), normal(rng, n_channels, n_taps)
    history = poisoned((n_slots, n_planes, n_taps - 1, n_channels))
    history.view(np.uint8)[...] = fill
    slots = rng.permutation(n_slots).tolist()
    segments, wanted_y, wanted = [], poisoned(x.shape).astype(np.float64), history.astype(np.float64)
    first = 0
    for count, slot, (plane, order) in zip(counts, slots, planes, strict=False):
        source = min(plane, n_planes - 1)
        targets = [plane if plane < n_planes else EMPTY for plane in order[:n_kept]]
        old = np.zeros((n_taps - 1, n_channels), np.float32)
        if source != EMPTY and count:
            old = history[slot, source] = normal(rng, *old.shape)
            wanted[slot, source] = old
        segments.append([first, count, slot, source, *targets])
        if count:
            y, states = short_conv_f64(x[first : first + count], weight, old)
            wanted_y[first : first + count] = y
            for back, target in enumerate(targets[:count]):
                if target != EMPTY:
                    wanted[slot, target] = states[count - 1 - back]
        first += count
    y, after = convolved(x, weight, segments, history)
    if sum(counts):
        assert nmse(y, wanted_y) < 1e-11
    else:
        assert np.isnan(y).all()
    # Copies of rows, so exact; planes that are no target, or that no row reaches, are left as they were.
    np.testing.assert_array_equal(after, wanted)
    for i, (start, count, slot, *rest) in enumerate(segments):
        if count:
            alone, alone_after = convolved(
                x[start : start + count].copy(), weight, [[0, count, slot, *rest]], history
            )
            assert same_bits(alone, y[start : start + count]), i
            assert same_bits(alone_after[slot], after[slot])


@pytest.mark.parametrize("n_taps", [2, 4])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_state_written_over_the_one_that_was_read(n_taps: int, n_rows: int, back: int):
    rng = np.random.default_rng(back)
    x, weight = normal(rng, n_rows, 40), normal(rng, 40, n_taps)
    history = poisoned((1, 4, n_taps - 1, 40))
    history[0, 3] = normal(rng, n_taps - 1, 40)
    wanted, apart = convolved(x, weight, [[0, n_rows, 0, 3, 0, 1, 2]], history)
    targets = [0, 1, 2]
    targets[back] = 3
    y, over = convolved(x, weight, [[0, n_rows, 0, 3, *targets]], history)
    assert same_bits(y, wanted)
    for s in range(min(n_rows, 3)):
        assert same_bits(over[0, targets[s]], apart[0, s])


@pytest.mark.parametrize("n_taps", [2, 4])
def test_a_split_anywhere_gives_the_same_bits(n_taps: int):
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 9, 40), normal(rng, 40, n_taps)
    empty = poisoned((1, 1, n_taps - 1, 40))
    whole, history = convolved(x, weight, [[0, 9, 0, EMPTY, 0]], empty)
    for cut in range(1, 9):
        first, middle = convolved(x[:cut], weight, [[0, cut, 0, EMPTY, 0]], empty)
        second, last = convolved(x[cut:].copy(), weight, [[0, 9 - cut, 0, 0, 0]], middle)
        assert same_bits(np.concatenate([first, second]), whole)
        assert same_bits(last, history)


def test_taps_run_from_the_oldest_to_the_row_itself():
    x = np.array([[1], [0], [0], [0]], np.float32)
    weight = np.array([[1, 2, 3, 4]], np.float32)
    y, _ = convolved(x, weight, [[0, 4, 0, EMPTY, 0]], poisoned((1, 1, 3, 1)))
    silu = np.array([4, 3, 2, 1]) / (1 + np.exp(-np.array([4, 3, 2, 1])))
    np.testing.assert_allclose(y[:, 0], silu, rtol=1e-6)


def test_a_convolution_of_one_tap_is_none():
    with pytest.raises(AssertionError):
        short_conv(1)
