"""Comparisons: the first difference in execution order, its row and its worst element."""

from __future__ import annotations

import numpy as np
import pytest
from golden_runs import of
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from instrumentation.errors import BadInputError
from refengine.golden.case import DeviceId, Step, layer_of, nmse
from refengine.golden.compare import compare
from refengine.golden.session import diff

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=5)
FLOATS = st.floats(-100, 100, width=32)
HOST, GPU = DeviceId("host", "x86_64"), DeviceId("cuda", "sm_90")


def f32(*values):
    return np.array(values, np.float32)


@given(st.data())
def test_one_changed_element_is_the_worst_of_its_row(data):
    wanted = data.draw(arrays.arrays(np.float32, SHAPES, elements=FLOATS))
    index = tuple(data.draw(st.integers(0, n - 1)) for n in wanted.shape)
    found = wanted.copy()
    found[index] = np.float32(data.draw(FLOATS.filter(lambda v: np.float32(v) != wanted[index])))
    result = compare(of({"a": wanted, "x-7": found}), of({"a": wanted, "x-7": wanted}), exact=True)
    (difference,) = result.differences
    assert (difference.tensor, difference.layer, difference.row) == ("x-7", 7, index[0])
    assert difference.n_rows == len(wanted)
    worst = difference.worst
    assert (worst.index, worst.seen, worst.wanted) == (index, float(found[index]), float(wanted[index]))
    assert difference.nmse == nmse(found, wanted)
    assert compare(of({"x": wanted}), of({"x": wanted}), exact=True).same


@given(arrays.arrays(np.float32, SHAPES, elements=st.floats(width=32)))
def test_a_tensor_is_like_itself_whatever_it_holds(array):
    for exact in (True, False):
        assert compare(of({"x": array}), of({"x": array.copy()}), exact=exact, tolerance=0.0).same


def test_bits_differ_where_numbers_do_not():
    result = compare(of({"x": f32(1, -0.0)}), of({"x": f32(1, 0.0)}), exact=True)
    assert result.differences[0].worst.index == (1,)
    assert compare(of({"x": f32(1, -0.0)}), of({"x": f32(1, 0.0)}), exact=False).same


def test_tolerance_is_per_tensor_and_whole_numbers_are_exact():
    a, b = {"x": f32(1, 2), "y": f32(1, 2)}, {"x": f32(1.01, 2), "y": f32(1.01, 2)}
    wanted = of(a, tolerance={"x": 1e-3, "y": 1e-9})
    result = compare(of(b), wanted, exact=False)
    assert [each.tensor for each in result.differences] == ["y"]
    assert result.differences[0].nmse == pytest.approx(0.01**2 / 5, rel=1e-4)
    assert compare(of(b), wanted, exact=False, tolerance=1e-3).same
    index = compare(of({"i": np.int32([5])}), of({"i": np.int32([6])}), exact=False, tolerance=1e9)
    assert not index.same


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1.0])
def test_a_tolerance_that_allows_anything_is_refused(tolerance):
    with pytest.raises(BadInputError, match=f"tolerance is {tolerance}; give a finite NMSE of 0 or more"):
        compare(of({"x": f32(1)}), of({"x": f32(2)}), exact=False, tolerance=tolerance)


def test_values_that_are_not_finite_must_agree():
    for seen, want in ((np.nan, 1), (1, np.nan), (np.inf, -np.inf), (np.inf, np.nan)):
        result = compare(of({"x": f32(1, seen)}), of({"x": f32(1, want)}), exact=False, tolerance=1e9)
        assert result.differences[0].worst.index == (1,)
        assert result.differences[0].nmse == np.inf
        result.as_json()
    assert compare(of({"x": f32(2, np.nan)}), of({"x": f32(2, np.nan)}), exact=False).same


def test_by_tolerance_the_first_row_beyond_it_is_named():
    wanted = np.ones((4, 3), np.float32)
    found = wanted.copy()
    found[1, 0] += 1e-6  # a difference of bits, within the tolerance
    found[2, 1] += 1
    found[3, 2] += 5
    difference = compare(of({"x": found}), of({"x": wanted}), exact=False).differences[0]
    assert (difference.row, difference.worst.index) == (2, (3, 2))


def test_of_unequal_numbers_of_rows_the_last_are_compared():
    whole, last = f32([1, 2], [3, 4], [5, 6]), f32([5, 7])
    difference = compare(of({"x": last}), of({"x": whole}), exact=True).differences[0]
    assert (difference.row, difference.n_rows, difference.worst.index) == (2, 3, (2, 1))
    assert compare(of({"x": whole}), of({"x": f32([5, 6])}), exact=True).same


def test_shapes_types_and_names():
    wanted = of({"a": f32(1), "b": f32([1, 2]), "c": f32(1)})
    result = compare(of({"a": np.int32([1]), "b": f32([1, 2, 3]), "d": f32(1)}), wanted, exact=True)
    lines = [str(each) for each in result.differences]
    assert lines == [
        "a is int32 (1,), want float32 (1,)",
        "b is float32 (1, 3), want float32 (1, 2)",
        "c is missing",
        "d is there, and not in the recording",
    ]
    assert len(compare(of({"d": f32(1)}), wanted, exact=True, shared_only=True).differences) == 0


def test_order_is_that_of_execution_and_what_lies_between_is_named():
    steps = tuple(Step(name, "op", (1,)) for name in ("a", "b-0", "c-0", "d-0", "e-0"))
    wanted = of({"e-0": f32(1), "a": f32(1), "d-0": f32(1)}, steps=steps)
    result = compare(of({"e-0": f32(2), "a": f32(1), "d-0": f32(2)}), wanted, exact=True)
    assert [each.tensor for each in result.differences] == ["d-0", "e-0"]
    assert result.agrees_before == "a"
    assert result.suspects == ("b-0 (op)", "c-0 (op)", "d-0 (op)")
    assert list(result.lines()) == [
        "one: 2 of 3 tensors differ (bits)",
        "  first: d-0 differs (layer 0, row 0 of 1): worst [0] is 2, want 1, NMSE 1.00e+00",
        "  agrees before it: a",
        "  computed in between: b-0 (op), c-0 (op), d-0 (op)",
        "  then: e-0",
    ]


def test_tokens_are_compared():
    wanted = of({"x": f32(1)}, tokens=(1, 2), greedy=(3, 4), generated=(3, 4))
    found = of({"x": f32(1)}, tokens=(1, 2), greedy=(3, 5), generated=(3,))
    result = compare(found, wanted, exact=True)
    assert result.others == ("greedy token 1 is 5, want 4", "1 generated tokens, want 2")
    assert not result.same


def test_recordings_are_paired_by_name():
    a, b = of({"x": f32(1)}, "a", device=HOST), of({"x": f32(1)}, "b", device=HOST)
    near = of({"x": f32(1 + 1e-6)}, "a", device=HOST)
    far = of({"x": f32(1 + 1e-6)}, "a", device=GPU)
    assert [each.name for each in diff([a, b], [b, a])] == ["a", "b"]
    assert [each.name for each in diff([a], [b])] == ["a"]
    with pytest.raises(BadInputError, match="has no case b; it has a"):
        list(diff([a, b], [a]))
    assert [each.same for each in diff([a], [near])] == [False]
    assert [each.same for each in diff([a], [far])] == [True]
    assert [each.same for each in diff([a], [far], exact=True)] == [False]
    assert [each.same for each in diff([a], [near], tolerance=1e-9)] == [True]


def test_layers_are_the_ends_of_names():
    assert [layer_of(name) for name in ("l_out-3", "mtp_concat-4", "h_nextn", "kv-12")] == [3, 4, None, 12]
