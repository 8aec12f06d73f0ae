import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run, run_all
from numba import cuda, int32
from sample_kernels import TILE, arg_max, tiled_product

from instrumentation.kernel import HostOptions, device_function, kernel
from instrumentation.kernel.types import i32_1d

FULL = 0xFFFFFFFF


@given(m=st.integers(1, 20), k=st.integers(1, 20), n=st.integers(1, 20))
@settings(max_examples=15, deadline=None)
def test_tiled_product(m, k, n):
    rng = np.random.default_rng(m * 400 + k * 20 + n)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    *_, c = run_all(tiled_product, (-(-n // TILE), -(-m // TILE)), a, b, np.full((m, n), np.nan, np.float32))
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


@given(rows=st.integers(1, 4), columns=st.integers(1, 500), spread=st.integers(1, 1000))
@settings(max_examples=20, deadline=None)
def test_arg_max_over_several_warps(rows, columns, spread):
    x = np.random.default_rng(columns).integers(0, spread, (rows, columns)).astype(np.float32)
    _, best, where = run_all(arg_max, rows, x, np.zeros(rows, np.float32), np.zeros(rows, np.int32))
    np.testing.assert_array_equal(best, x.max(axis=1))
    np.testing.assert_array_equal(where, x.argmax(axis=1))


@kernel(block=64)
def histogram(x: i32_1d, counts: i32_1d) -> None:
    bins = cuda.shared.array(256, int32)
    t = cuda.threadIdx.x
    for b in range(t, counts.shape[0], 64):
        bins[b] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        cuda.atomic.add(bins, x[i], 1)
    cuda.syncthreads()
    for b in range(t, counts.shape[0], 64):
        cuda.atomic.add(counts, b, bins[b])


@given(length=st.integers(0, 600), bins=st.integers(1, 256), blocks=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_histogram(length, bins, blocks):
    x = np.random.default_rng(length).integers(0, bins, max(length, 1)).astype(np.int32)[:length]
    _, counts = run_all(histogram, blocks, x, np.zeros(bins, np.int32))
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=bins))


@device_function
def warp_scan(v, lane):
    for o in (1, 2, 4, 8, 16):
        before = cuda.shfl_up_sync(FULL, v, o)
        if lane >= o:
            v += before
    return v


@kernel(block=96)
def prefix_sum(x: i32_1d, y: i32_1d) -> None:
    sums = cuda.shared.array(3, int32)
    t = cuda.threadIdx.x
    lane = t % 32
    warp = t // 32
    carried = 0
    for start in range(0, x.shape[0], 96):
        i = start + t
        own = x[i] if i < x.shape[0] else int32(0)
        total = warp_scan(own, lane)
        if lane == 31:
            sums[warp] = total
        cuda.syncthreads()
        for w in range(3):
            if w < warp:
                total += sums[w]
        if i < x.shape[0]:
            y[i] = carried + total
        for w in range(3):
            carried += sums[w]
        cuda.syncthreads()


@given(length=st.integers(0, 500))
@settings(max_examples=20, deadline=None)
def test_prefix_sum(length):
    x = np.random.default_rng(length).integers(-99, 99, length).astype(np.int32)
    _, y = run_all(prefix_sum, 1, x, np.zeros(length, np.int32))
    np.testing.assert_array_equal(y, np.cumsum(x))


def test_blocks_over_two_host_threads_give_the_same_bits():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((50, 33)).astype(np.float32), rng.standard_normal((33, 41)).astype(np.float32)
    results = []
    for threads in (1, 2):
        c = np.zeros((50, 41), np.float32)
        run(tiled_product, (6, 7), a, b, c, options=HostOptions(), threads=threads)
        results.append(c.tobytes())
    assert results[0] == results[1]
