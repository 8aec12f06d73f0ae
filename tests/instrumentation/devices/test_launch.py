"""What a launch refuses before anything is queued, by kernel and argument."""

import numpy as np
import pytest
from engines import Bench, increment, scale_by
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.devices.launch import MAX_GRID_X, MAX_GRID_YZ, bind
from instrumentation.errors import BadInputError

BENCH = Bench()
ARENA = BENCH.arena()
X, Y = (ARENA.reserve(64, owner=BENCH.stream.owner, name=name).unwrap() for name in ("x", "y"))
GOOD = {"x": X.view(np.float32, 16), "y": Y.view(np.float32, 16), "factor": 2.0, "offset": 3}


def test_a_launch_has_its_grid_and_arguments_in_order():
    shuffled = {name: GOOD[name] for name in ("offset", "y", "factor", "x")}
    launch = bind(scale_by, (2, 3), shuffled)
    assert launch.grid == (2, 3, 1)
    assert launch.blocks == 6
    assert list(launch.arguments) == ["x", "y", "factor", "offset"]
    assert bind(scale_by, 1, GOOD).number > launch.number


@pytest.mark.parametrize(
    "grid", [np.int64(2), (np.int32(2), 1), [2, 1, 1], (MAX_GRID_X, MAX_GRID_YZ, MAX_GRID_YZ)]
)
def test_grids_of_whole_numbers_within_the_limits_are_taken(grid):
    assert bind(scale_by, grid, GOOD).grid[0] in (2, MAX_GRID_X)


@pytest.mark.parametrize(
    "grid",
    [
        0, -1, (), (1, 0), (1, 1, 1, 1), 1.0, 2.5, "1", None, (1, None), MAX_GRID_X + 1, (1, MAX_GRID_YZ + 1),
        (1, 1, MAX_GRID_YZ + 1), 10**30,
    ],
)  # fmt: skip
def test_other_grids_are_refused(grid):
    with pytest.raises(BadInputError, match=r"scale_by: grid .*; give 1 to 3 whole numbers"):
        bind(scale_by, grid, GOOD)


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_argument_is_named(name):
    with pytest.raises(BadInputError, match=f"scale_by: missing arguments: {name}; unknown arguments: none"):
        bind(scale_by, 1, {k: v for k, v in GOOD.items() if k != name})


def test_an_unknown_argument_is_named():
    with pytest.raises(
        BadInputError, match="missing arguments: none; unknown arguments: z; it takes x, y, factor"
    ):
        bind(scale_by, 1, GOOD | {"z": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X.view(np.int32, 16)}, "argument x is view x of int32 .*; give a view of float32 with 1 axes"),
        ({"x": X.view(np.float64, 8)}, "argument x is view x of float64"),
        ({"x": X.view(">f4", 16)}, "argument x is view x of >f4"),
        ({"y": Y.view(np.float32, (4, 4))}, r"argument y is view y of float32 \(4, 4\); give .* with 1 axes"),
        ({"y": Y.view(np.float32, ())}, "argument y is view y"),
        ({"x": np.zeros(16, np.float32)}, "argument x is ndarray; give a view"),
        ({"x": X}, "argument x is Buffer; give a view"),
        ({"x": 1}, "argument x is int; give a view"),
        ({"factor": X.view(np.float32, 1)}, "argument factor is View; give a number for float32"),
        ({"factor": "2"}, "argument factor is str; give a number"),
        ({"factor": None}, "argument factor is NoneType"),
        ({"factor": 2j}, "argument factor is complex"),
        ({"factor": 1e39}, "argument factor is 1e.39; give a number that fits float32"),
        ({"factor": -(10**400)}, "give a number that fits float32"),
        ({"offset": 2**31}, "argument offset is 2147483648; give a whole number that fits int32"),
        ({"offset": -(2**31) - 1}, "argument offset is -2147483649; give a whole number"),
        ({"offset": 1.5}, "argument offset is 1.5; give a whole number"),
        ({"offset": float("nan")}, "argument offset is nan; give a whole number"),
        ({"offset": float("inf")}, "argument offset is inf; give a whole number"),
        ({"offset": 10**400}, "give a whole number that fits int32"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    with pytest.raises(BadInputError, match=f"^scale_by: .*{message}|^scale_by: {message}"):
        bind(scale_by, 1, GOOD | change)


@pytest.mark.parametrize(
    "factor", [0, -1, np.float64(0.1), np.float32(3), np.int64(7), float("inf"), float("nan")]
)
@pytest.mark.parametrize("offset", [2**31 - 1, -(2**31), np.int8(-3), 2.0, True])
def test_numbers_reach_the_kernel(factor, offset):
    x = np.arange(40, dtype=np.float32)
    found = Bench().run(scale_by, 2, x=x, y=np.zeros_like(x), factor=factor, offset=offset)["y"]
    with np.errstate(invalid="ignore"):
        wanted = x * np.float32(factor) + np.float32(offset)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)


@given(
    first=st.integers(0, 15),
    first_length=st.integers(0, 16),
    second=st.integers(0, 15),
    second_length=st.integers(0, 16),
)
def test_a_written_argument_overlaps_no_other(first: int, first_length: int, second: int, second_length: int):
    lengths = (min(first_length, 16 - first), min(second_length, 16 - second))
    views = [X.view(np.float32, n, offset=4 * at) for at, n in zip((first, second), lengths, strict=True)]
    arguments = GOOD | {"x": views[0], "y": views[1]}
    shared = set(range(first, first + lengths[0])) & set(range(second, second + lengths[1]))
    if not shared:
        bind(scale_by, 1, arguments)
        return
    with pytest.raises(BadInputError, match=r"scale_by: arguments (x|y) \(x\) and (x|y) \(x\) overlap"):
        bind(scale_by, 1, arguments)


def test_nothing_is_queued_by_a_refused_launch():
    bench = Bench()
    y = bench.put(bench.arena(), np.zeros(4, np.float32), "y")
    with pytest.raises(BadInputError):
        bench.stream.launch(increment, 0, {"y": y})
    assert bench.stream.pending == 0
    np.testing.assert_array_equal(bench.get(y), np.zeros(4))
