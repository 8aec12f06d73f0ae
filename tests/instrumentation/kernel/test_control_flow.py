import ast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run_all
from numba import cuda, float32, int32

from instrumentation.kernel import kernel
from instrumentation.kernel.regions import Control, Region
from instrumentation.kernel.types import f32_1d, i32, i32_1d, i32_2d


@kernel(block=32)
def early_exits(x: i32_1d, y: i32_1d, stop: i32, mode: i32) -> None:
    i = cuda.grid(1)
    if stop < 0:
        return
    if mode == 1:
        if i < y.shape[0]:
            y[i] = -7
        return
    if i >= y.shape[0]:
        return
    v = x[i]
    if v > stop:
        y[i] = -v
        return
    v += 1
    if v == 3:
        y[i] = 300
    elif v == 5:
        return
    else:
        v = v * 2
        y[i] = v


@given(length=st.integers(1, 100), stop=st.integers(-1, 9), mode=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_early_exits(length, stop, mode):
    x = np.random.default_rng(length).integers(0, 10, 128).astype(np.int32)
    _, y = run_all(early_exits, 4, x, np.full(length, 99, np.int32), stop, mode)

    def one(v):
        if v > stop:
            return -v
        return {3: 300, 5: 99}.get(v + 1, (v + 1) * 2)

    want = [99] * length if stop < 0 else [-7] * length if mode else [one(int(v)) for v in x[:length]]
    np.testing.assert_array_equal(y, want)


@kernel(block=32)
def uniform_exit_before_a_barrier(x: i32_1d, y: i32_1d, n: i32) -> None:
    tile = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    if cuda.blockIdx.x * 32 >= n:
        y[cuda.grid(1)] = -1
        return
    tile[t] = x[cuda.grid(1)]
    cuda.syncthreads()
    y[cuda.grid(1)] = tile[31 - t]


def test_uniform_exit_before_a_barrier():
    x = np.arange(96, dtype=np.int32)
    _, y = run_all(uniform_exit_before_a_barrier, 3, x, np.zeros(96, np.int32), 64)
    np.testing.assert_array_equal(y, [*x[31::-1], *x[63:31:-1], *[-1] * 32])


@kernel(block=32)
def loops_of_all_kinds(x: i32_1d, y: i32_2d, n: i32) -> None:  # noqa: C901, PLR0912
    t = cuda.threadIdx.x
    a = 0
    for k in range(n):  # uniform, with a break and a continue that are uniform too
        if k == 7:
            break
        if k % 2 == 1:
            continue
        a += x[t] + k
    y[0, t] = a
    b = 0
    for k in range(n):  # the same name in a loop that threads leave one by one
        if k > x[t]:
            break
        if (k + t) % 3 == 0:
            continue
        b += k
    y[1, t] = b
    c = 0
    for k in range(t, n, 5):  # bounds that differ between threads
        for j in range(k, 0, -2):
            if j == 4:
                break
            c += j
    y[2, t] = c
    d = x[t]
    steps = 0
    while d > 1:
        steps += 1
        if steps > 20:
            break
        if d % 2 == 0:
            d //= 2
            continue
        d = 3 * d + 1
    y[3, t] = steps
    e = 1
    u = 0
    while u < n:
        u += 3
        if u == 6:
            continue
        e = e * 2 + (u & t)
        if u > 9:
            break
    y[4, t] = e
    f = 0
    for k in range(n):  # lanes: outside
        f = f * 2 + ((x[t] >> (k & 3)) & 1)
        f &= 0xFFFF
    y[5, t] = f
    for k in (1, 2, 3):
        for m in (10, -20):
            y[6, t] += k * m + t


def loops_of_one_thread(t: int, x: int, n: int) -> list[int]:
    a = sum(x + k for k in range(min(n, 7)) if k % 2 == 0)
    b = sum(k for k in range(n) if k <= x and (k + t) % 3)
    c = 0
    for k in range(t, n, 5):
        for j in range(k, 0, -2):
            if j == 4:
                break
            c += j
    d, steps = x, 0
    while d > 1:
        steps += 1
        if steps > 20:
            break
        d = d // 2 if d % 2 == 0 else 3 * d + 1
    e, u = 1, 0
    while u < n:
        u += 3
        if u == 6:
            continue
        e = e * 2 + (u & t)
        if u > 9:
            break
    f = 0
    for k in range(n):
        f = (f * 2 + ((x >> (k & 3)) & 1)) & 0xFFFF
    return [a, b, c, steps, e, f, sum(k * m + t for k in (1, 2, 3) for m in (10, -20))]


@given(n=st.integers(0, 24), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_loops_of_all_kinds(n, seed):
    x = np.random.default_rng(seed).integers(0, 30, 32).astype(np.int32)
    _, y = run_all(loops_of_all_kinds, 1, x, np.zeros((7, 32), np.int32), n)
    np.testing.assert_array_equal(y.T, [loops_of_one_thread(t, int(x[t]), n) for t in range(32)])


def test_the_lane_hint_moves_a_uniform_loop_into_the_lane_loop():
    loops = [p for p in loops_of_all_kinds.plan.parts if isinstance(p, Control)]
    regions = [p for p in loops_of_all_kinds.plan.parts if isinstance(p, Region)]
    assert len(loops) == 2, "the uniform for and the uniform while"
    assert any("65535" in ast.dump(statement) for region in regions for statement in region.statements)


@kernel(block=32)
def grid_stride(x: f32_1d, y: f32_1d, scale: i32) -> None:
    step = cuda.gridsize(1)
    for i in range(cuda.grid(1), x.shape[0], step):
        y[i] = x[i] * float32(scale)


@given(length=st.integers(1, 300), blocks=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_grid_stride_loop(length, blocks):
    x = np.arange(length, dtype=np.float32)
    _, y = run_all(grid_stride, blocks, x, np.zeros_like(x), 3)
    np.testing.assert_array_equal(y, x * 3)


@kernel(block=32)
def values_of_an_earlier_round(x: i32_1d, y: i32_1d, n: i32) -> None:
    t = cuda.threadIdx.x
    tile = cuda.shared.array(32, int32)
    tile[t] = 0
    place = t
    for k in range(n):
        if k > 0:
            y[t] += place * k  # the place of the round before
        cuda.syncthreads()
        base = x[k]
        place = base + t
    n -= 1
    limit = n * t
    n = 100
    y[t] += limit


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_name_keeps_its_value_into_the_next_round(n):
    x = np.array([5, 7, 11, 13], np.int32)
    _, y = run_all(values_of_an_earlier_round, 1, x, np.zeros(32, np.int32), n)
    t = np.arange(32)
    np.testing.assert_array_equal(y, sum(((int(x[k - 1]) + t) * k for k in range(1, n)), start=(n - 1) * t))


@kernel(block=32)
def conditional_expressions(x: i32_1d, y: i32_1d, n: i32) -> None:
    t = cuda.threadIdx.x
    big = x[t] if x[t] > n else -n
    inside = 2 <= x[t] < 9 and not (t == 3 or t == 4)  # noqa: PLR1714
    cuda.syncthreads()
    y[t] = big + (1000 if inside else 0) + min(t, n) + max(x[t], 1, n) + abs(-t)


def test_conditional_expressions_and_a_bool_kept_over_a_barrier():
    x = np.arange(32, dtype=np.int32)
    _, y = run_all(conditional_expressions, 1, x, np.zeros(32, np.int32), 6)
    want = [
        (v if v > 6 else -6) + (1000 if 2 <= v < 9 and v not in (3, 4) else 0) + min(v, 6) + max(v, 1, 6) + v
        for v in range(32)
    ]
    np.testing.assert_array_equal(y, want)
