import sys

import numpy as np
import pytest
from kernel_runner import run_all
from numba import cuda, int32
from sample_kernels import calls, clamp, collectives_inside, mirror

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import i32_1d, i32_2d


def test_nested_calls_with_read_and_written_arrays():
    rng = np.random.default_rng(0)
    matrix = rng.integers(-9, 9, (7, 5)).astype(np.float32)
    vector = rng.integers(-9, 9, 5).astype(np.float32)
    _, _, out = run_all(calls, 2, matrix, vector, np.zeros(50, np.float32))
    product = (matrix @ vector)[np.arange(50) % 7]
    np.testing.assert_array_equal(out, np.clip(product, -50, 50) * 3 - product)


def test_a_store_in_a_device_function_counts_as_a_write():
    assert calls.writes == {"out"}
    assert calls.reads == {"matrix", "vector", "out"}


def test_python_runs_a_device_function_as_it_is():
    assert clamp(5, 0, 3) == 3
    assert sys.modules[clamp.__module__].clamp is clamp


@pytest.mark.parametrize("rounds", [0, 3])
def test_collectives_in_device_functions_are_inlined(rounds):
    x = np.arange(96, dtype=np.int32) ** 2 % 37
    _, y, z = run_all(collectives_inside, 1, x, np.zeros(96, np.int32), np.zeros(96, np.int32), rounds)
    np.testing.assert_array_equal(y, x[::-1] * 2 + x + np.repeat(x.reshape(3, 32).sum(axis=1), 32))
    want = sum(int((x + k).sum()) - k * int(np.arange(96).sum()) for k in range(rounds))
    assert (z == want).all()


@device_function
def scratch_sum(x, row, n):
    held = cuda.local.array(4, int32)
    for k in range(4):
        held[k] = 0
    for k in range(n):
        held[k % 4] += x[row, k]
    return held[0] * 1000 + held[1] * 100 + held[2] * 10 + held[3]


@kernel(block=32)
def local_array_inside(x: i32_2d, y: i32_1d) -> None:
    t = cuda.threadIdx.x
    y[t] = scratch_sum(x, t, x.shape[1])


def test_a_local_array_in_a_device_function():
    x = np.random.default_rng(0).integers(0, 3, (32, 9)).astype(np.int32)
    _, y = run_all(local_array_inside, 1, x, np.zeros(32, np.int32))
    np.testing.assert_array_equal(y, sum(x[:, k::4].sum(axis=1) * 10 ** (3 - k) for k in range(4)))


def test_an_inlined_function_beside_a_load_that_it_could_change_is_refused():
    with pytest.raises(KernelDialectError, match=r"test_device_functions.py:\d+: .* a load beside mirror"):

        @kernel(block=96)
        def moved(y: i32_1d) -> None:
            tile = cuda.shared.array((96, 2), int32)
            t = cuda.threadIdx.x
            y[t] = tile[t, 0] + mirror(tile, t)


def test_recursion_is_refused():
    with pytest.raises(KernelDialectError, match="'forever' is not defined"):

        @device_function
        def forever(n):
            return forever(n - 1)
