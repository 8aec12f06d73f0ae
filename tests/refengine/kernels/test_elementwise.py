"""SwiGLU, sum and choice of rows against their twins."""

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given
from hypothesis import strategies as st

from refengine.kernels.elementwise import SPAN, add, add_f64, select_rows, swiglu, swiglu_f64


def random(n: int, seed: int, scale: float = 1.0) -> tuple[Array, Array]:
    a, b = (scale * np.random.default_rng(seed).standard_normal((2, n))).astype(np.float32)
    return a, b


def blocks(n: int) -> int:
    return -(-n // SPAN)


LENGTHS = st.one_of(st.integers(1, 100), st.integers(SPAN - 2, SPAN + 2), st.integers(1, 3 * SPAN))


@given(n=LENGTHS, scale=st.sampled_from([1e-3, 1.0, 20.0]), seed=st.integers(0, 2**32 - 1))
def test_swiglu_is_its_twin(n: int, scale: float, seed: int):
    gate, up = random(n, seed, scale)
    y = Bench().run(swiglu, blocks(n), gate=gate, up=up, y=poisoned((n,)))["y"]
    assert nmse(y, swiglu_f64(gate, up)) < 1e-11


@given(n=LENGTHS, seed=st.integers(0, 2**32 - 1))
def test_add_is_the_rounded_sum(n: int, seed: int):
    a, b = random(n, seed)
    y = Bench().run(add, blocks(n), a=a, b=b, y=poisoned((n,)))["y"]
    assert same_bits(y, add_f64(a, b).astype(np.float32))


@given(n=st.integers(1, 100), wanted=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_select_rows_copies_bits(n: int, wanted: int, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, (5, n), np.uint32).view(np.float32)
    rows = rng.integers(0, 5, wanted).astype(np.int32)
    y = Bench().run(select_rows, wanted, x=x, rows=rows, y=poisoned((wanted, n)))["y"]
    assert same_bits(y, x[rows])


@pytest.mark.parametrize("where", ["gate", "up"])
def test_swiglu_shows_nan_where_it_is(where: str):
    gate, up = random(40, seed=0)
    {"gate": gate, "up": up}[where][33] = np.nan
    y = Bench().run(swiglu, 1, gate=gate, up=up, y=poisoned((40,)))["y"]
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y)), [33])


def test_swiglu_of_a_large_negative_gate_is_zero():
    gate = np.array([-1e4, -200, 1e4], np.float32)
    y = Bench().run(swiglu, 1, gate=gate, up=np.ones(3, np.float32), y=poisoned((3,)))["y"]
    np.testing.assert_array_equal(y, [0, 0, 1e4])
