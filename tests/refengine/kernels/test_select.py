"""Top-k and arg-max: order, ties, infinities, NaN."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refengine.kernels.select import top_k, top_k_f64


def largest(x: Array, k: int) -> tuple[Array, Array]:
    shape = (len(x), k)
    found = Bench().run(top_k, len(x), x=x, index=poisoned(shape, np.int32), value=poisoned(shape))
    return found["index"], found["value"]


@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 100)),
        # Few values make many ties.
        elements=st.one_of(
            st.sampled_from([-1.0, -0.0, 0.0, 1.0, -np.inf, np.inf]), st.floats(-(2.0**99), 2.0**99, width=32)
        ),
    ),
    data=st.data(),
)
def test_top_k_is_its_twin(x: Array, data: st.DataObject):
    k = data.draw(st.integers(1, x.shape[1]))
    index, value = largest(x, k)
    wanted_index, wanted_value = top_k_f64(x, k)
    np.testing.assert_array_equal(index, wanted_index)
    np.testing.assert_array_equal(value, wanted_value)


def test_equal_values_come_in_the_order_of_their_index():
    x = np.full((1, 70), 3, np.float32)
    x[0, 50] = 4
    index, _ = largest(x, 70)
    np.testing.assert_array_equal(index[0], [50, *(i for i in range(70) if i != 50)])


@given(n=st.integers(1, 80), n_nan=st.integers(0, 80), seed=st.integers(0, 2**32 - 1))
def test_nan_is_never_chosen(n: int, n_nan: int, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, n)).astype(np.float32)
    x[0, rng.permutation(n)[: min(n, n_nan)]] = np.nan
    numbers = np.flatnonzero(~np.isnan(x[0]))
    index, value = largest(x, n)
    wanted = numbers[np.argsort(-x[0, numbers], kind="stable")]
    np.testing.assert_array_equal(index[0, : len(numbers)], wanted)
    np.testing.assert_array_equal(value[0, : len(numbers)], x[0, wanted])
    assert (index[0, len(numbers) :] == -1).all()
    assert (value[0, len(numbers) :] == -np.inf).all()


@pytest.mark.parametrize("n", [1, 31, 32, 33, 49152])
def test_the_largest_is_found_wherever_it_is(n: int):
    for place in {0, n // 2, n - 1}:
        x = np.zeros((1, n), np.float32)
        x[0, place] = 1
        index, value = largest(x, 1)
        assert (int(index[0, 0]), float(value[0, 0])) == (place, 1.0)


def test_more_than_there_are_ends_in_minus_one():
    index, value = largest(np.array([[2, 1]], np.float32), 4)
    np.testing.assert_array_equal(index, [[0, 1, -1, -1]])
    np.testing.assert_array_equal(value, [[2, 1, -np.inf, -np.inf]])
