import numpy as np
import pytest
from kernel_runner import run, run_all
from numba import cuda, float32, float64, uint64

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, f32_2d, f64_1d, i32_1d, i64_1d, u8_1d, u32_1d, u64_1d


@kernel(block=32)
def on_int32(x: i32_1d, y: i32_1d, old: i32_1d) -> None:
    i = cuda.grid(1)
    v = x[i]
    cuda.atomic.add(y, 0, v)
    cuda.atomic.sub(y, 1, v)
    cuda.atomic.min(y, 2, v)
    cuda.atomic.max(y, 3, v)
    cuda.atomic.and_(y, 4, v)
    cuda.atomic.or_(y, 5, v)
    cuda.atomic.xor(y, 6, v)
    cuda.atomic.exch(y, 7 + i % 2, i % 2)
    cuda.atomic.cas(y, 9, 0, 5)
    old[cuda.atomic.add(y, 10, 1)] = 1


@kernel(block=32)
def on_int64(x: i64_1d, y: i64_1d, old: i64_1d) -> None:
    i = cuda.grid(1)
    v = x[i]
    cuda.atomic.add(y, 0, v)
    cuda.atomic.sub(y, 1, v)
    cuda.atomic.min(y, 2, v)
    cuda.atomic.max(y, 3, v)
    cuda.atomic.and_(y, 4, v)
    cuda.atomic.or_(y, 5, v)
    cuda.atomic.xor(y, 6, v)
    cuda.atomic.exch(y, 7 + i % 2, i % 2)
    cuda.atomic.cas(y, 9, 0, 5)
    old[cuda.atomic.add(y, 10, 1)] = 1


@kernel(block=32)
def on_uint32(x: u32_1d, y: u32_1d, old: u32_1d) -> None:
    i = cuda.grid(1)
    v = x[i]
    cuda.atomic.add(y, 0, v)
    cuda.atomic.sub(y, 1, v)
    cuda.atomic.min(y, 2, v)
    cuda.atomic.max(y, 3, v)
    cuda.atomic.and_(y, 4, v)
    cuda.atomic.or_(y, 5, v)
    cuda.atomic.xor(y, 6, v)
    cuda.atomic.exch(y, 7 + i % 2, i % 2)
    cuda.atomic.cas(y, 9, 0, 5)
    old[cuda.atomic.add(y, 10, 1)] = 1


@kernel(block=32)
def on_uint64(x: u64_1d, y: u64_1d, old: u64_1d) -> None:
    tile = cuda.shared.array((2, 6), uint64)
    i = cuda.grid(1)
    t = cuda.threadIdx.x
    if t < 6:
        tile[0, t] = y[t + 1]
        tile[1, t] = 0
    cuda.syncthreads()
    v = x[i]
    cuda.atomic.add(tile, (1, 5), v)
    cuda.atomic.sub(tile, (0, 0), v)
    cuda.atomic.min(tile, (0, 1), v)
    cuda.atomic.max(tile, (0, 2), v)
    cuda.atomic.and_(tile, (0, 3), v)
    cuda.atomic.or_(tile, (0, 4), v)
    cuda.atomic.xor(tile, (0, 5), v)
    cuda.syncthreads()
    if t < 6:
        y[t + 1] = tile[0, t]
    if t == 0:
        y[0] += tile[1, 5]
        y[8] = 1
        y[9] = 5
        y[10] = 32
    old[t] = 1


CASES = [
    (on_int32, np.int32, 3),
    (on_int64, np.int64, 3),
    (on_uint32, np.uint32, 3),
    (on_uint64, np.uint64, 1),
]


@pytest.mark.parametrize(
    ("kernel_under_test", "kind", "blocks"), CASES, ids=lambda c: getattr(c, "__name__", str(c))
)
def test_integers(kernel_under_test, kind, blocks):
    info = np.iinfo(kind)
    x = np.random.default_rng(0).integers(info.min, info.max, 32 * blocks, dtype=kind)
    y = np.zeros(11, kind)
    y[2], y[3], y[4] = info.max, info.min, kind(0) if info.min == 0 else -1
    y[4] = ~kind(0)
    _, got, old = run_all(kernel_under_test, blocks, x, y, np.zeros(32 * blocks, kind))
    with np.errstate(over="ignore"):
        want = [x.sum(dtype=kind), kind(0) - x.sum(dtype=kind), x.min(), x.max(), np.bitwise_and.reduce(x)]
    want += [np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x), kind(0), kind(1), kind(5), kind(32 * blocks)]
    assert [int(v) for v in got] == [int(v) for v in want]
    assert (old == 1).all(), "each thread was given another number"


@kernel(block=64)
def on_floats(x: f32_1d, y: f32_1d, d: f64_1d, bins: f32_2d) -> None:
    tile = cuda.shared.array(4, float32)
    i = cuda.grid(1)
    t = cuda.threadIdx.x
    if t < 4:
        tile[t] = float32(0)
    cuda.syncthreads()
    v = x[i]
    cuda.atomic.add(tile, 0, v)
    cuda.atomic.sub(tile, 1, v)
    cuda.atomic.min(tile, 2, v)
    cuda.atomic.max(tile, 3, v)
    cuda.atomic.add(d, 0, float64(v))
    cuda.atomic.max(d, 1, float64(v))
    cuda.atomic.add(bins, (i % 2, i % 3), 1)
    cuda.syncthreads()
    if t < 4:
        y[t] = tile[t]


def test_floats_in_shared_and_global_memory():
    x = np.random.default_rng(0).integers(-99, 99, 64).astype(np.float32)  # sums are exact in any order
    _, y, d, bins = run_all(
        on_floats, 1, x, np.zeros(4, np.float32), np.zeros(2), np.zeros((2, 3), np.float32)
    )
    assert list(y) == [x.sum(), -x.sum(), x.min(), x.max()]
    assert list(d) == [x.sum(), x.max()]
    i = np.arange(64)
    want = [[((i % 2 == a) & (i % 3 == b)).sum() for b in range(3)] for a in range(2)]
    np.testing.assert_array_equal(bins, want)


def test_atomics_hold_between_host_threads():
    x = np.ones(32 * 64, np.int32)
    y, old = np.zeros(11, np.int32), np.zeros(32 * 64, np.int32)
    run(on_int32, 64, x, y, old, threads=2)
    assert y[0] == 32 * 64
    assert (old == 1).all()


def test_an_atomic_reads_and_writes():
    assert on_int32.reads == {"x", "y"}
    assert on_int32.writes == {"y", "old"}


@kernel(block=32)
def on_bytes(y: u8_1d) -> None:
    cuda.atomic.add(y, 0, 1)


@kernel(block=32)
def exchange_floats(y: f32_1d) -> None:
    cuda.atomic.exch(y, 0, float32(1))


@pytest.mark.parametrize("wrong", [on_bytes, exchange_floats], ids=lambda k: k.name)
def test_types_that_cuda_has_no_atomic_for_are_refused(wrong):
    with pytest.raises(KernelDialectError, match=rf"test_atomics.py:\d+: {wrong.name}: .*atomic"):
        wrong.host()
