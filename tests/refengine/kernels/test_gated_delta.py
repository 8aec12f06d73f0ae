"""The gated delta rule against its twin: head maps, segments, planes, splits."""

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run, run_all

from refengine.kernels.gated_delta import columns_per_block, gated_delta, gated_delta_f64, packed_state

EMPTY = -1
EPS = float(np.float32(1e-6))
SIZES = (16, 64, 128)
#: source plane, and planes to write in an order; those beyond the planes that there are stand for none
SOURCE_AND_TARGETS = st.tuples(st.integers(-1, 4), st.permutations(range(5)))


def decoded(
    qkv: Array,
    gates: Array,
    segments: list[list[int]],
    states: Array,
    every_order: bool = True,
    warps: int = 1,
) -> tuple[Array, Array]:
    """y and the states after it."""
    n_rows, _, n_head = gates.shape
    size = int(np.sqrt(states.shape[-1]))
    table = np.array(segments, np.int32)
    kernel, grid = gated_delta(size, warps), (size // columns_per_block(size), n_head, len(table))
    arguments = [qkv, gates, table, states.copy(), poisoned((n_rows, n_head * size)), EPS]
    if every_order:
        arguments = run_all(kernel, grid, *arguments)
    else:
        run(kernel, grid, *arguments)
    return arguments[4], arguments[3]


def rows(rng: np.random.Generator, n_rows: int, n_key: int, n_head: int, size: int) -> tuple[Array, Array]:
    """qkv and gates [n_rows, ...] of ordinary size: decays from slow to fast."""
    gates = np.stack(
        [rng.uniform(0, 1, (n_rows, n_head)) ** 0.1, rng.uniform(0, 1, (n_rows, n_head))], axis=1
    )
    qkv = rng.standard_normal((n_rows, (2 * n_key + n_head) * size)).astype(np.float32)
    return qkv, gates.astype(np.float32)


def matrices(rng: np.random.Generator, n_head: int, size: int) -> Array:
    return rng.standard_normal((n_head, size, size)).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=20, deadline=None)
@given(
    n_key=st.integers(1, 3),
    n_head=st.integers(1, 6),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
    n_planes=st.integers(1, 5),
    planes=st.lists(SOURCE_AND_TARGETS, min_size=3, max_size=3),
    n_kept=st.integers(1, 4),
    fill=st.sampled_from([0x3E, 0xFF]),
    seed=st.integers(0, 2**32 - 1),
)
def test_segments_are_their_twins(
    size: int,
    n_key: int,
    n_head: int,
    counts: list[int],
    n_planes: int,
    planes: list[tuple[int, list[int]]],
    n_kept: int,
    fill: int,
    seed: int,
):
    rng = np.random.default_rng(seed)
    n_slots = 4
    qkv, gates = rows(rng, sum(counts), n_key, n_head, size)
    states = poisoned((n_slots, n_planes, n_head, size * size))
    states.view(np.uint8)[...] = fill
    segments, wanted_y, wanted = [], [], []
    first = 0
    for count, slot, (plane, order) in zip(counts, rng.permutation(n_slots).tolist(), planes, strict=False):
        source = min(plane, n_planes - 1)
        targets = [plane if plane < n_planes else EMPTY for plane in order[:n_kept]]
        old = np.zeros((n_head, size, size), np.float32)
        if source != EMPTY:
            old = matrices(rng, n_head, size)
            states[slot, source] = packed_state(old)
        segments.append([first, count, slot, source, *targets])
        y, after = gated_delta_f64(qkv[first : first + count], gates[first : first + count], old, EPS)
        wanted_y.append(y)
        wanted.append(after)
        first += count
    y, after = decoded(qkv, gates, segments, states)
    assert nmse(y, np.concatenate(wanted_y)) < 1e-11
    untouched = np.ones(states.shape[:2], bool)
    for (start, count, slot, *rest), right in zip(segments, wanted, strict=True):
        for back, plane in enumerate(rest[1:][:count]):
            if plane != EMPTY:
                untouched[slot, plane] = False
                assert nmse(after[slot, plane], packed_state(right[count - 1 - back])) < 1e-11
        if count:
            part = slice(start, start + count)
            alone, alone_after = decoded(
                qkv[part].copy(), gates[part].copy(), [[0, count, slot, *rest]], states, every_order=False
            )
            assert same_bits(alone, y[part])
            assert same_bits(alone_after[slot], after[slot])
    # Planes that are no target, or that no row reaches, and other slots, are left as they were.
    assert same_bits(after[untouched], states[untouched])


@pytest.mark.parametrize(("size", "n_key", "n_head"), [(16, 2, 4), (64, 1, 3), (128, 2, 2)])
def test_a_split_anywhere_gives_the_same_bits(size: int, n_key: int, n_head: int):
    rng = np.random.default_rng(0)
    qkv, gates = rows(rng, 9, n_key, n_head, size)
    empty = poisoned((1, 2, n_head, size * size))
    whole, states = decoded(qkv, gates, [[0, 9, 0, EMPTY, 0, 1]], empty)
    for cut in range(1, 9):
        first, middle = decoded(qkv[:cut], gates[:cut], [[0, cut, 0, EMPTY, 0]], empty, every_order=False)
        second, last = decoded(
            qkv[cut:].copy(), gates[cut:].copy(), [[0, 9 - cut, 0, 0, 1]], middle, every_order=False
        )
        assert same_bits(np.concatenate([first, second]), whole)
        assert same_bits(last[0, 1], states[0, 0])


@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 5])
@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_state_written_over_the_one_that_was_read(size: int, n_rows: int, back: int):
    rng = np.random.default_rng(back)
    qkv, gates = rows(rng, n_rows, 1, 2, size)
    states = poisoned((1, 4, 2, size * size))
    states[0, 3] = packed_state(matrices(rng, 2, size))
    wanted, apart = decoded(qkv, gates, [[0, n_rows, 0, 3, 0, 1, 2]], states)
    targets = [0, 1, 2]
    targets[back] = 3
    y, over = decoded(qkv, gates, [[0, n_rows, 0, 3, *targets]], states)
    assert same_bits(y, wanted)
    for s in range(min(n_rows, 3)):
        assert same_bits(over[0, targets[s]], apart[0, s])


@pytest.mark.parametrize("n_rows", [1, 63, 64, 65, 129])
def test_long_sequences_stay_close(n_rows: int):
    rng = np.random.default_rng(n_rows)
    qkv, gates = rows(rng, n_rows, 1, 2, 16)
    y, _ = decoded(qkv, gates, [[0, n_rows, 0, EMPTY, 0]], poisoned((1, 1, 2, 256)))
    wanted, _ = gated_delta_f64(qkv, gates, np.zeros((2, 16, 16)), EPS)
    assert nmse(y, wanted) < 1e-11


def test_value_heads_take_key_heads_in_turn():
    # Two key heads, four value heads: 0 and 2 share the first, 1 and 3 the second.
    rng = np.random.default_rng(0)
    size, n_key, n_head = 16, 2, 4
    qkv, gates = rows(rng, 3, n_key, n_head, size)
    gates[...] = gates[:, :, :1]
    heads = qkv.reshape(3, 2 * n_key + n_head, size)
    heads[:, 2 * n_key :] = heads[:, 2 * n_key : 2 * n_key + 1]
    y, _ = decoded(qkv, gates, [[0, 3, 0, EMPTY, 0]], poisoned((1, 1, n_head, size * size)))
    y = y.reshape(3, n_head, size)
    assert same_bits(y[:, 0].copy(), y[:, 2].copy())
    assert same_bits(y[:, 1].copy(), y[:, 3].copy())
    assert nmse(y[:, 0], y[:, 1]) > 1e-3


def test_a_full_step_without_decay_recalls_the_value_of_its_key():
    size = 16
    qkv = np.zeros((2, 3 * size), np.float32)
    qkv[0, :size] = qkv[0, size : 2 * size] = 3 * np.eye(size, dtype=np.float32)[5]
    qkv[0, 2 * size :] = np.arange(size)
    # The second row asks for the same key, and replaces what is there.
    qkv[1] = qkv[0]
    qkv[1, 2 * size :] = -np.arange(size)
    y, states = decoded(qkv, np.ones((2, 2, 1), np.float32), [[0, 2, 0, EMPTY, 0]], poisoned((1, 2, 1, 256)))
    np.testing.assert_allclose(y * np.sqrt(size), [np.arange(size), -np.arange(size)], rtol=1e-5)
    held = np.zeros((size, size))
    held[5] = -np.arange(size)
    np.testing.assert_allclose(states[0, 0, 0], packed_state(held), rtol=1e-5, atol=1e-6)


def test_keys_and_queries_of_zeros_are_no_numbers_to_fear():
    size = 16
    qkv = np.zeros((2, 3 * size), np.float32)
    qkv[:, 2 * size :] = 1
    y, states = decoded(qkv, np.ones((2, 2, 1), np.float32), [[0, 2, 0, EMPTY, 0]], poisoned((1, 1, 1, 256)))
    assert not y.any()
    assert not states.any()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_bit(threads: int):
    rng = np.random.default_rng(0)
    qkv, gates = rows(rng, 5, 2, 4, 64)
    states = packed_state(rng.standard_normal((2, 1, 4, 64, 64)))
    segments = [[0, 2, 1, 0, 0], [2, 3, 0, 0, 0]]
    wanted = decoded(qkv, gates, segments, states)
    found = Bench(threads=threads).run(
        gated_delta(64), (2, 4, 2), qkv=qkv, gates=gates, segments=np.array(segments, np.int32),
        states=states, y=poisoned((5, 256)), eps=EPS,
    )  # fmt: skip
    assert same_bits(found["y"], wanted[0])
    assert same_bits(found["states"], wanted[1])


@pytest.mark.parametrize("size", [4, 12, 48, 80, 256])
def test_other_state_sizes(size: int):
    rng = np.random.default_rng(size)
    qkv, gates = rows(rng, 2, 1, 2, size)
    y, states = decoded(
        qkv, gates, [[0, 2, 0, EMPTY, 0]], poisoned((1, 1, 2, size * size)), every_order=False
    )
    wanted, after = gated_delta_f64(qkv, gates, np.zeros((2, size, size)), EPS)
    assert nmse(y, wanted) < 1e-11
    assert nmse(states[0, 0], packed_state(after[-1])) < 1e-11


@pytest.mark.parametrize("size", [*SIZES, 48])
@settings(max_examples=10)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
    planes=st.permutations(range(-1, 4)),
    seed=st.integers(0, 2**32 - 1),
)
def test_four_warps_give_the_bits_of_one(size: int, counts: list[int], planes: list[int], seed: int):
    rng = np.random.default_rng(seed)
    qkv, gates = rows(rng, sum(counts), 2, 4, size)
    states = rng.standard_normal((3, 4, 4, size * size)).astype(np.float32)
    firsts = np.cumsum([0, *counts[:-1]]).tolist()
    source, *targets = planes
    segments = [
        [first, n, slot, source, *targets[:3]]
        for first, n, slot in zip(firsts, counts, rng.permutation(3).tolist(), strict=False)
    ]
    # Warps wait for one another alike whatever the size: one size is run in every order of threads.
    one, four = (
        decoded(qkv, gates, segments, states, every_order=size == 64, warps=warps) for warps in (1, 4)
    )
    assert same_bits(four[0], one[0])
    assert same_bits(four[1], one[1])


@pytest.mark.parametrize("size", [0, 6, 260])
def test_state_sizes_that_are_not_built_are_refused(size: int):
    with pytest.raises(AssertionError):
        gated_delta(size)


def test_a_packed_state_keeps_every_element():
    m = np.arange(2 * 64 * 64, dtype=np.float32).reshape(2, 64, 64)
    packed = packed_state(m).reshape(2, 2, 64, 32)  # (head, slice, key, column)
    for j in (0, 31, 32, 63):
        np.testing.assert_array_equal(packed[:, j // 32, :, j % 32], m[:, :, j])


@pytest.mark.parametrize("size", [64, 128])
def test_four_warps_keep_the_matrix_in_registers(size: int):
    text = gated_delta(size, 4).ptx((9, 0))
    assert ".local" not in text
    # One load of each of a thread's elements, which no loop holds back.
    assert text.count("ld.global") >= size // 4
