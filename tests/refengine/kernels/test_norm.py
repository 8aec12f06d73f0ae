"""RMS normalisation against its twin."""

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given
from hypothesis import strategies as st

from refengine.kernels.norm import rms_norm, rms_norm_f64


def normalised(x: Array, weight: Array, eps: float, warps: int = 1) -> Array:
    return Bench().run(rms_norm(warps), len(x), x=x, weight=weight, y=poisoned(x.shape), eps=eps)["y"]


def random(rows: int, n: int, seed: int, scale: float = 1.0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((rows, n))).astype(np.float32), rng.standard_normal(n).astype(
        np.float32
    )


@given(
    rows=st.integers(1, 9),
    n=st.integers(1, 700),
    scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6]),
    eps=st.sampled_from([1e-6, 1e-5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rms_norm_is_its_twin(rows: int, n: int, scale: float, eps: float, seed: int):
    x, weight = random(rows, n, seed, scale)
    # The kernel's epsilon is a float32.
    wanted = rms_norm_f64(x, weight, float(np.float32(eps)))
    assert nmse(normalised(x, weight, eps), wanted) < 1e-11


@given(rows=st.integers(2, 9), n=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_a_row_has_the_same_bits_alone(rows: int, n: int, seed: int):
    x, weight = random(rows, n, seed)
    together = normalised(x, weight, 1e-5)
    assert same_bits(normalised(x[-1:], weight, 1e-5), together[-1:])


@given(rows=st.integers(1, 3), n=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_warps_change_no_bit(rows: int, n: int, seed: int):
    x, weight = random(rows, n, seed)
    assert same_bits(normalised(x, weight, 1e-5, warps=8), normalised(x, weight, 1e-5))


def test_a_row_of_zeros_stays_zero():
    assert not normalised(np.zeros((1, 40), np.float32), np.ones(40, np.float32), 1e-5).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_own_row_only(bad: float):
    x, weight = random(3, 48, seed=1)
    x[1, 7] = bad
    y = normalised(x, weight, 1e-5)
    assert np.isnan(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()
