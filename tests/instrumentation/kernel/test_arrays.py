import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run_all
from numba import boolean, cuda, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64

from instrumentation.kernel import kernel
from instrumentation.kernel.types import (
    f32,
    f32_1d,
    f32_2d,
    f32_3d,
    f32_4d,
    f64,
    f64_1d,
    i8_1d,
    i16_1d,
    i32,
    i32_1d,
    i32_2d,
    i32_3d,
    i64,
    i64_1d,
    u8_1d,
    u16_1d,
    u32,
    u32_1d,
    u64,
    u64_1d,
)  # fmt: skip


@kernel(block=(8, 4))
def over_two_axes(x: f32_2d, y: f32_2d) -> None:
    i, j = cuda.grid(2)
    rows, columns = x.shape
    if j < rows and i < columns:
        y[i, j] = x[j, i] + float32(x.size)


@kernel(block=(4, 2, 8))
def over_three_axes(x: f32_3d, y: f32_3d, ids: i32_3d) -> None:
    i, j, k = cuda.grid(3)
    n, m, p = x.shape
    dx, dy, dz = cuda.gridsize(3)
    if k < n and j < m and i < p:
        y[k, j, i] = x[k, j, i] * float32(2)
        ids[k, j, i] = (cuda.blockIdx.z * 100 + cuda.blockIdx.y) * 100 + cuda.threadIdx.z + dx * dy * dz
        ids[k, j, i] += cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z + cuda.gridDim.z


@kernel(block=16)
def over_four_axes(x: f32_4d, y: f32_1d) -> None:
    i = cuda.grid(1)
    a, b, c, d = x.shape
    if i < y.shape[0]:
        y[i] = x[i // (b * c * d), i // (c * d) % b, i // d % c, i % d] - float32(a)


@given(rows=st.integers(1, 20), columns=st.integers(1, 20))
@settings(max_examples=10, deadline=None)
def test_two_axes(rows, columns):
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    _, y = run_all(over_two_axes, (-(-columns // 8), -(-rows // 4)), x, np.zeros((columns, rows), np.float32))
    np.testing.assert_array_equal(y, x.T + np.float32(x.size))


@given(n=st.integers(1, 20), m=st.integers(1, 5), p=st.integers(1, 9))
@settings(max_examples=10, deadline=None)
def test_three_axes(n, m, p):
    x = np.random.default_rng(0).standard_normal((n, m, p)).astype(np.float32)
    grid = (-(-p // 4), -(-m // 2), -(-n // 8))
    _, y, ids = run_all(over_three_axes, grid, x, np.zeros_like(x), np.zeros(x.shape, np.int32))
    np.testing.assert_array_equal(y, x * 2)
    k, j, _ = np.indices(x.shape)
    np.testing.assert_array_equal(
        ids, (k // 8 * 100 + j // 2) * 100 + k % 8 + np.prod(grid) * 64 + 64 + grid[2]
    )


def test_four_axes():
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    _, y = run_all(over_four_axes, 8, x, np.zeros(120, np.float32))
    np.testing.assert_array_equal(y, x.reshape(-1) - 2)


@kernel(block=32)
def shared_arrays(x: i32_1d, y: i32_1d) -> None:
    a = cuda.shared.array(32, int32)
    b = cuda.shared.array((4, 8), dtype=int32)
    c = cuda.shared.array(shape=(2, 4, 2 * 2), dtype=int64)
    t = cuda.threadIdx.x
    a[t] = x[t]
    b[t % 4, t // 4] = x[t] * 10
    c[t // 16, t // 4 % 4, t % 4] = x[t] * 100
    cuda.syncthreads()
    s = 31 - t
    y[t] = a[s] + b[s % 4, s // 4] + c[s // 16, s // 4 % 4, s % 4] + c.shape[2] + b.size


def test_shared_arrays_of_one_to_three_axes():
    x = np.arange(32, dtype=np.int32)
    _, y = run_all(shared_arrays, 1, x, np.zeros(32, np.int32))
    np.testing.assert_array_equal(y, x[::-1] * 111 + 4 + 32)


@kernel(block=32)
def local_arrays(x: i32_1d, y: i32_1d, n: i32) -> None:
    row = cuda.local.array(5, int32)
    table = cuda.local.array((2, 3), int32)
    t = cuda.threadIdx.x
    for k in range(5):
        row[k] = x[t] + k
    for a in range(2):
        for b in range(3):
            table[a, b] = row[a + b] * (t + 1)
    cuda.syncthreads()
    total = 0
    for k in range(n):
        total += row[(k + t) % 5] - table[k % 2, (k + t) % 3]
    y[t] = total


@pytest.mark.parametrize("n", [0, 4, 11])
def test_local_arrays_are_private_and_live_over_barriers(n):
    x = np.arange(32, dtype=np.int32) * 3
    _, y = run_all(local_arrays, 1, x, np.zeros(32, np.int32), n)
    want = [
        sum(int(x[t]) + (k + t) % 5 - (int(x[t]) + k % 2 + (k + t) % 3) * (t + 1) for k in range(n))
        for t in range(32)
    ]
    np.testing.assert_array_equal(y, want)


@kernel(block=32)
def widths_over_a_barrier(
    a: i8_1d, b: i16_1d, c: i32_1d, d: i64_1d, e: u8_1d, f: u16_1d, g: u32_1d, h: u64_1d, x: f32_1d, y: f64_1d
) -> None:
    t = cuda.threadIdx.x
    va = int8(a[t])
    vb = int16(b[t])
    vc = int32(c[t])
    vd = int64(d[t])
    ve = uint8(e[t])
    vf = uint16(f[t])
    vg = uint32(g[t])
    vh = uint64(h[t])
    vx = float32(x[t])
    vy = float64(y[t])
    negative = boolean(va < 0)
    big = vy > 0.5
    cuda.syncthreads()
    a[t] = va + 1
    b[t] = vb + 1
    c[t] = vc + 1 if negative else vc - 1
    d[t] = vd + 1
    e[t] = ve + 1
    f[t] = vf + 1
    g[t] = vg + 1
    h[t] = vh + uint64(1)
    x[t] = -vx if big else vx
    y[t] = vy * 2


def test_each_width_wraps_and_lives_over_a_barrier():
    rng = np.random.default_rng(0)
    kinds = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    integers = []
    for kind in kinds:
        values = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, 32, dtype=kind)
        values[3] = np.iinfo(kind).max
        integers.append(values)
    integers[2][3] = 5
    x, y = rng.random(32, np.float32), rng.random(32)
    got = run_all(widths_over_a_barrier, 1, *integers, x, y)
    for kind, before, after in zip(kinds, integers, got, strict=False):
        step = np.where(integers[0] < 0, 1, -1).astype(kind) if kind is np.int32 else np.ones(32, kind)
        np.testing.assert_array_equal(after, before + step)
    np.testing.assert_array_equal(got[8], np.where(y > 0.5, -x, x))
    np.testing.assert_array_equal(got[9], y * 2)


@kernel(block=1)
def scalars(a: i32, b: i64, c: u32, d: u64, e: f32, f: f64, ints: i64_1d, floats: f64_1d) -> None:
    ints[0] = a
    ints[1] = b
    ints[2] = c
    ints[3] = int64(d >> uint64(1))
    floats[0] = e
    floats[1] = f


def test_scalars_of_each_type():
    values = (-(2**31), -(2**63), 2**32 - 1, 2**64 - 1, float(np.float32(0.1)), 0.1)
    ints, floats = run_all(scalars, 1, *values, np.zeros(4, np.int64), np.zeros(2))
    assert [int(v) for v in ints] == [-(2**31), -(2**63), 2**32 - 1, 2**63 - 1]
    assert list(floats) == list(values[4:])


INFINITY = float("inf")
HALF = np.float32(0.5)
SEVEN = np.int32(7)


@kernel(block=32)
def constants(x: f32_1d, y: f32_2d) -> None:
    t = cuda.threadIdx.x
    y[0, t] = min(x[t], INFINITY)
    y[1, t] = x[t] * HALF
    y[2, t] = x[t] + float32(SEVEN * -2)
    y[3, t] = float32(np.pi)
    y[4, t] = float32(-INFINITY)
    y[5, t] = float32(np.nan)
    y[6, t] = np.float32(cuda.warpsize + cuda.laneid)


def test_captured_constants():
    x = np.arange(32, dtype=np.float32)
    _, y = run_all(constants, 1, x, np.zeros((7, 32), np.float32))
    rest = [np.full(32, v) for v in (np.float32(np.pi), -np.inf, np.nan)]
    np.testing.assert_array_equal(y, np.array([x, x / 2, x - 14, *rest, 32 + x], np.float32))


@kernel(block=32)
def index_once(counter: i32_1d, y: i32_2d) -> None:
    y[0, cuda.atomic.add(counter, 0, 1)] += 5


def test_an_augmented_assignment_evaluates_its_index_once():
    counter, y = run_all(index_once, 1, np.zeros(1, np.int32), np.zeros((1, 32), np.int32))
    assert counter[0] == 32
    assert (y == 5).all()
