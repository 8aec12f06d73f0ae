"""Reductions, exp and sigmoid against NumPy in float64."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numba import cuda

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_1d
from refengine.kernels.numerics import exp_f32, sigmoid_f32, warp_max, warp_sum

#: where exp_f32 gives up: 0 below, infinity above
LOWEST, HIGHEST = -87.33, 88.37


@kernel(block=32, strict=True)
def exponentials(x: f32_1d, y: f32_1d) -> None:
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < x.shape[0]:
        y[i] = exp_f32(x[i])


@kernel(block=32, strict=True)
def sigmoids(x: f32_1d, y: f32_1d) -> None:
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < x.shape[0]:
        y[i] = sigmoid_f32(x[i])


@kernel(block=32, strict=True)
def reductions(x: f32_1d, sums: f32_1d, largest: f32_1d) -> None:
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    total = warp_sum(x[i])
    most = warp_max(x[i])
    sums[i] = total
    largest[i] = most


def apply(function: Kernel, x: Array) -> Array:
    return Bench().run(function, -(-len(x) // 32), x=x, y=poisoned(x.shape))["y"]


def worst_ulp(found: Array, wanted: Array) -> float:
    """Largest error in units of the last place of the right float32."""
    spacing = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    return float((np.abs(found.astype(np.float64) - wanted) / spacing).max())


def grid(low: float, high: float) -> Array:
    return np.linspace(low, high, 1_000_003).astype(np.float32)[1:-1]


def test_exp_is_within_2_ulp_over_its_range():
    x = grid(LOWEST, HIGHEST)
    assert worst_ulp(apply(exponentials, x), np.exp(x.astype(np.float64))) <= 2


def test_exp_of_tiny_arguments_is_within_2_ulp():
    x = np.concatenate([s * np.float32(2.0) ** np.arange(-149, 3, dtype=np.float32) for s in (-1, 1)])
    x = x.astype(np.float32)
    assert worst_ulp(apply(exponentials, x), np.exp(x.astype(np.float64))) <= 2


def test_exp_never_falls_where_its_argument_rises():
    x = grid(-20, 2)
    assert (np.diff(apply(exponentials, x)) >= -np.spacing(apply(exponentials, x)[1:])).all()


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (-np.inf, 0.0), (-1e30, 0.0), (-100, 0.0), (-87.34, 0.0), (0.0, 1.0), (-0.0, 1.0), (88.4, np.inf),
        (89, np.inf), (1e30, np.inf), (np.inf, np.inf), (np.nan, np.nan),
    ],
)  # fmt: skip
def test_exp_at_the_edges(x: float, wanted: float):
    np.testing.assert_array_equal(apply(exponentials, np.array([x], np.float32)), [np.float32(wanted)])


def test_exp_of_88_is_a_number():
    assert worst_ulp(apply(exponentials, np.array([88], np.float32)), np.exp(np.array([88.0]))) <= 2


def test_sigmoid_is_within_3_ulp_over_its_range():
    # Two from exp, one from the sum and the division together.
    x = grid(LOWEST, 40)
    assert worst_ulp(apply(sigmoids, x), 1 / (1 + np.exp(-x.astype(np.float64)))) <= 3


@pytest.mark.parametrize(
    ("x", "wanted"),
    [(-np.inf, 0.0), (-100, 0.0), (0, 0.5), (88, 1.0), (89, 1.0), (np.inf, 1.0), (np.nan, np.nan)],
)
def test_sigmoid_at_the_edges(x: float, wanted: float):
    np.testing.assert_array_equal(apply(sigmoids, np.array([x], np.float32)), [np.float32(wanted)])


@given(x=hnp.arrays(np.float32, st.sampled_from([32, 64, 96]), elements=st.floats(-1e6, 1e6, width=32)))
def test_reductions_give_every_lane_the_same(x: Array):
    found = Bench().run(reductions, len(x) // 32, x=x, sums=poisoned(x.shape), largest=poisoned(x.shape))
    warps = x.reshape(-1, 32)
    sums, largest = (found[name].reshape(-1, 32) for name in ("sums", "largest"))
    np.testing.assert_array_equal(sums, np.broadcast_to(sums[:, :1], sums.shape))
    np.testing.assert_array_equal(largest, np.broadcast_to(warps.max(axis=1)[:, None], largest.shape))
    bound = 5 * np.abs(warps.astype(np.float64)).sum(axis=1) * 2.0**-24
    assert (np.abs(sums[:, 0] - warps.astype(np.float64).sum(axis=1)) <= bound).all()
