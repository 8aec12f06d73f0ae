import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run, run_all
from numba import cuda, float32, int32, int64

from instrumentation.kernel import HostOptions, kernel
from instrumentation.kernel.types import f32_1d, f32_2d, f64_1d, i32, i32_1d, i32_2d, i64_1d

FULL = 0xFFFFFFFF
THREE = 3


@kernel(block=64)
def shift_through_shared(x: f32_1d, y: f32_1d, rounds: i32) -> None:
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    for _ in range(rounds):
        kept = tile[(t + 1) % 64]
        cuda.syncthreads()
        tile[t] = kept
        cuda.syncthreads()
    y[cuda.grid(1)] = tile[t]


@given(rounds=st.integers(0, 130), blocks=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_barriers_in_a_uniform_loop(rounds, blocks):
    x = np.arange(64 * blocks, dtype=np.float32)
    _, y = run_all(shift_through_shared, blocks, x, np.zeros_like(x), rounds)
    np.testing.assert_array_equal(y.reshape(-1, 64), np.roll(x.reshape(-1, 64), -rounds, axis=1))


@kernel(block=32)
def shift_without_barrier(x: f32_1d, y: f32_1d) -> None:
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[(t + 1) % 32]


def test_a_missing_barrier_shows_in_reversed_and_poisoned_runs():
    x = np.arange(32, dtype=np.float32)
    results = []
    for options in (HostOptions(), HostOptions(reverse_lanes=True, poison=True)):
        y = np.zeros_like(x)
        run(shift_without_barrier, 1, x, y, options=options)
        results.append(y.tobytes())
    assert results[0] != results[1]


@kernel(block=32)
def branch_around_barriers(x: f32_1d, y: f32_1d, mode: i32) -> None:
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    value = float32(-1)
    if mode == 0:
        cuda.syncthreads()
        value = tile[31 - t]
    elif mode == 1 and cuda.blockIdx.x == 0:
        cuda.syncwarp()
        value = tile[t ^ 1]
        if x.shape[0] > 32:
            cuda.syncthreads()
            tile[t] = value
            cuda.syncthreads()
            value = tile[0]
    else:
        value = value * cuda.shfl_sync(FULL, value, 0)
    y[t] = value


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("length", [32, 33])
def test_barriers_under_uniform_branches(mode, length):
    x = np.arange(length, dtype=np.float32)
    _, y = run_all(branch_around_barriers, 1, x, np.zeros(32, np.float32), mode)
    swapped = x[np.arange(32) ^ 1]
    want = [x[31::-1], np.full(32, swapped[0]) if length > 32 else swapped, np.ones(32)][mode]
    np.testing.assert_array_equal(y, want)


@kernel(block=96)
def literal_shuffles(x: f32_1d, y: f32_2d) -> None:
    t = cuda.threadIdx.x
    v = x[t]
    y[0, t] = cuda.shfl_xor_sync(FULL, v, 5)
    y[1, t] = cuda.shfl_up_sync(FULL, v, THREE)
    y[2, t] = cuda.shfl_down_sync(-1, v, 7)
    y[3, t] = cuda.shfl_sync(FULL, v, 9)
    y[4, t] = cuda.shfl_xor_sync(FULL, v + float32(1), 32)
    y[5, t] = cuda.shfl_up_sync(FULL, cuda.shfl_down_sync(FULL, v, 1), 1)


@kernel(block=(32, 3))
def run_time_shuffles(x: f32_1d, y: f32_2d, offset: i32) -> None:
    t = cuda.threadIdx.y * 32 + cuda.threadIdx.x
    v = x[t]
    y[0, t] = cuda.shfl_xor_sync(FULL, v, offset)
    y[1, t] = cuda.shfl_up_sync(FULL, v, offset)
    y[2, t] = cuda.shfl_down_sync(FULL, v, offset)
    y[3, t] = cuda.shfl_sync(FULL, v, offset)
    y[4, t] = cuda.shfl_sync(FULL, v, (t * 7 + offset) % 32)
    y[5, t] = cuda.shfl_xor_sync(FULL, t, offset)


def shuffled(kind: str, x: np.ndarray, offset: int) -> np.ndarray:
    """The PTX rule: the offset has five bits, a lane outside the warp gives the own value."""
    lane, offset = np.arange(32), offset & 31
    source = {"xor": lane ^ offset, "up": lane - offset, "down": lane + offset, "index": np.full(32, offset)}[
        kind
    ]
    source = np.where((source >= 0) & (source < 32), source, lane)
    return x.reshape(-1, 32)[:, source].reshape(-1)


def test_literal_shuffles():
    x = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    _, y = run_all(literal_shuffles, 1, x, np.zeros((6, 96), np.float32))
    rows = [("xor", 5), ("up", 3), ("down", 7), ("index", 9)]
    for row, (kind, offset) in zip(y, rows, strict=False):
        np.testing.assert_array_equal(row, shuffled(kind, x, offset))
    np.testing.assert_array_equal(y[4], x + np.float32(1))
    np.testing.assert_array_equal(y[5], shuffled("up", shuffled("down", x, 1), 1))


@given(offset=st.integers(-40, 70))
@settings(max_examples=25, deadline=None)
def test_run_time_shuffles(offset):
    x = np.random.default_rng(1).standard_normal(96).astype(np.float32)
    _, y = run_all(run_time_shuffles, 1, x, np.zeros((6, 96), np.float32), offset)
    for row, kind in zip(y, ("xor", "up", "down", "index"), strict=False):
        np.testing.assert_array_equal(row, shuffled(kind, x, offset))
    t = np.arange(96)
    np.testing.assert_array_equal(y[4], x[(t & ~31) + (t * 7 + offset) % 32])
    np.testing.assert_array_equal(y[5], shuffled("xor", t.astype(np.float32), offset))


@kernel(block=32)
def shuffle_each_type(a: i32_1d, b: i64_1d, c: f64_1d, ints: i32_2d) -> None:
    t = cuda.threadIdx.x
    a[t] = cuda.shfl_xor_sync(FULL, a[t], 1)
    b[t] = cuda.shfl_up_sync(FULL, b[t], 2)
    c[t] = cuda.shfl_down_sync(FULL, c[t], 4)
    row = cuda.blockIdx.x
    ints[row, t] = cuda.shfl_sync(FULL, row, t)
    ints[1, t] = cuda.shfl_sync(FULL, int32(7), t)
    ints[2, t] = int64(cuda.shfl_sync(FULL, t, 31 - t))


def test_shuffles_of_each_type_and_of_uniform_values():
    a, b, c = (
        np.arange(32, dtype=np.int32),
        np.arange(32, dtype=np.int64) << 40,
        np.arange(32, dtype=np.float64) / 3,
    )
    got = run_all(shuffle_each_type, 1, a, b, c, np.zeros((3, 32), np.int32))
    for result, (kind, source, offset) in zip(
        got, [("xor", a, 1), ("up", b, 2), ("down", c, 4)], strict=False
    ):
        np.testing.assert_array_equal(result, shuffled(kind, source, offset))
    np.testing.assert_array_equal(got[3], [np.zeros(32), np.full(32, 7), np.arange(31, -1, -1)])


@kernel(block=32)
def shuffles_in_loops(x: f32_1d, y: f32_1d, n: i32) -> None:
    t = cuda.threadIdx.x
    total = float32(0)
    k = 0
    while k < n:
        v = x[k * 32 + t]
        for o in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(FULL, v, o)
        if v < float32(0):  # uniform in fact, not to the compiler: no collective may follow inside
            total -= v
        else:
            total += v
        k += 1
    y[t] = total


@pytest.mark.parametrize("n", [0, 1, 5])
def test_shuffles_in_a_while_loop(n):
    x = np.random.default_rng(n).integers(-9, 9, 32 * 5).astype(np.float32)
    _, y = run_all(shuffles_in_loops, 1, x, np.zeros(32, np.float32), n)
    np.testing.assert_array_equal(y, np.full(32, np.abs(x.reshape(5, 32)[:n].sum(axis=1)).sum()))
