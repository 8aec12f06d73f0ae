"""Loops of checked CUDA kernels whose indices are looked at before them: what is found does not change."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_source import load_module
from numba import cuda, int64
from ptx_cuda import ptx_device
from trap_world import World

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.checked_bounds import MOST_FACTOR, Bounds, Root, Sum
from instrumentation.kernel.lower_checked_cuda import checked_source
from instrumentation.kernel.types import i32, i64_1d, i64_2d

N = 24


@device_function
def around(x, row, i):
    at = 2 * i + 1
    return x[row, at] - x[row, at - 1]


@kernel(block=4)
def walk(x: i64_1d, z: i64_2d, y: i64_1d, first: i32, end: i32, at: i32, row: i32, cap: i32) -> None:
    t = cuda.threadIdx.x
    own = cuda.local.array(8, int64)
    total = 0
    for k in range(first, end):
        total = total + x[3 * k + at + t]
        total = total - x[at - k]
        total = total + around(z, row, k + t)
        total = total + x[min(2 * k, cap)]
    for k in range(8):
        own[k] = x[at + 2 * k + t]
    for k in range(8):
        total = total * 3 + own[k]
    for k in range(first, end):
        y[k * 4 + t] = total + k


def launched(world, numbers):
    arguments = world.bind(
        {"x": np.arange(N) ** 2, "z": np.arange(3 * N).reshape(3, N), "y": np.full(N, -1)} | numbers
    )
    world.stream.launch(walk, 1, arguments)
    world.stream.synchronize()
    # Which of several threads is shown, and with which index, is a matter of the order on either device.
    found = [(f.code, f.argument, f.access[0].line, f.count) for f in world.findings]
    return sorted(found), world.read(arguments["y"]).tolist()


places = st.integers(-4, N + 4)


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({"first": st.integers(-2, 5), "end": st.integers(-2, 7), "at": places,
                              "row": st.integers(-1, 3), "cap": places}))  # fmt: skip
def test_findings_and_bits_are_those_of_the_host(numbers):
    assert launched(World(device=ptx_device()), numbers) == launched(World(), numbers)


@pytest.mark.parametrize("numbers", [
    {"first": 2**31 - 3, "end": 2**31 - 1, "at": 4, "row": 0, "cap": 3},
    {"first": -(2**31), "end": -(2**31) + 2, "at": 4, "row": 0, "cap": 3},
], ids=["largest", "smallest"])  # fmt: skip
def test_the_ends_of_integers(numbers):
    assert launched(World(device=ptx_device()), numbers) == launched(World(), numbers)


def test_the_loops_are_there_twice():
    source, _ = checked_source(walk.plan, walk.access_table)
    assert source.count("all_within(") == 3
    assert source.count("for v_k") == 4
    # All four of the first loop, two of them in the function, eight of the second, and the store.
    assert len(re.findall(r"\bsure_load_ro\(", source)) == 3 + 2 + 8
    assert source.count("sure_store_rw(") == 1


def source_of(tmp_path, body, known=frozenset()):
    text = f"""\
from numba import cuda, float32
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32, i32_1d


@kernel(block=32)
def made(x: f32_1d, places: i32_1d, y: f32_1d, n: i32) -> None:
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
{body}
    y[t] = total
"""
    made = load_module(tmp_path / "made.py", text).made
    return checked_source(made.plan, made.access_table, known)[0]


@pytest.mark.parametrize("body", [
    "    for k in range(n):\n        total = total + x[k * k]",
    "    for k in range(n):\n        total = total + x[k & 7]",
    "    for k in range(n):\n        total = total + x[max(k, 3)]",
    "    for k in range(n):\n        total = total + x[places[0] + k]",
    "    at = 0\n    for k in range(n):\n        total = total + x[at]\n        at = at + 2",
    "    for k in range(n, 0, -1):\n        total = total + x[k]",
    "    for k in range(places[0]):\n        total = total + x[k]",
    "    for k in range(n):\n        total = total + x[k * 2147483648]",
    "    for k in range(n):\n        tile[t] = x[k]\n        cuda.syncthreads()\n        total = total + tile[31 - t]",
], ids=[
    "square", "bits", "max", "loaded", "carried", "falling", "loaded end", "wraps", "barrier",
])  # fmt: skip
def test_what_stays_checked_where_it_stands(tmp_path, body):
    source = source_of(tmp_path, body)
    assert "sure_load_ro(v_x," not in source
    assert "try_load_ro(v_x," in source


@pytest.mark.parametrize("body", [
    "    for k in range(n):\n        if k > 2:\n            total = total + x[k]",
    "    for k in range(n):\n        total = total + (x[k] if k > 2 else float32(1))",
    "    for k in range(n):\n        if k > 2:\n            at = k + 1\n            total = total + x[at]",
], ids=["if", "choice", "name"])  # fmt: skip
def test_what_may_not_run_is_looked_at_as_if_it_did(tmp_path, body):
    assert "sure_load_ro(v_x," in source_of(tmp_path, body)


@pytest.mark.parametrize("body", [
    "        at = k\n        if k > 2:\n            at = k + 1\n        total = total + x[at]",
    "        at = k\n        if k > 2:\n            at = k + 1\n        else:\n            total = total + x[at]",
    "        at = k\n        for j in range(n):\n            total = total + x[at]\n            at = at + 1",
], ids=["behind", "other side", "carried"])  # fmt: skip
def test_a_name_that_one_of_several_ways_gives_is_not_known(tmp_path, body):
    source = source_of(tmp_path, f"    at = 0\n    for k in range(n):\n{body}")
    assert "sure_load_ro(v_x," not in source


def test_ends_may_be_extents(tmp_path):
    source = source_of(
        tmp_path, "    for k in range(min(n, x.shape[0] >> 1)):\n        total = total + x[2 * k]"
    )
    assert "sure_load_ro(v_x," in source


def test_constants_are_not_looked_up_where_the_host_knows_them(tmp_path):
    source = source_of(tmp_path, "    for k in range(n):\n        total = total + x[k]", frozenset({"x"}))
    assert "load_known(v_x, v_k" in source
    assert re.search(r"if all_within\(\(.*, s_x, .*,\), \(.*, 1, ", source)


sums = st.builds(
    lambda factors, constant: Sum(tuple(sorted(factors.items())), constant),
    st.dictionaries(st.sampled_from(["v_k", "v_a"]), st.integers(-9, 9).filter(bool), max_size=2),
    st.integers(-50, 50),
)


@given(st.lists(sums, min_size=1, max_size=4), st.integers(-5, 5), st.integers(0, 6), st.integers(-20, 20))
def test_tests_hold_where_every_turn_is_inside_and_nowhere_else(indices, first, more, a):
    bounds = Bounds("v_k")
    for each in indices:
        bounds.require(Root("x", ("60",), "ro"), [each])
    last = first + more
    turns = [
        sum(factor * {"v_k": k, "v_a": a}[term] for term, factor in each.factors) + each.constant
        for each in indices
        for k in range(first, last + 1)
    ]
    values = [(eval(text, {"first": first, "last": last, "v_a": a}), int(extent))  # noqa: S307 - text of our own
              for text, extent in bounds.tests("first", "last")]  # fmt: skip
    assert all(0 <= value < extent for value, extent in values) == all(0 <= value < 60 for value in turns)


def test_sums_that_could_wrap_are_none():
    assert Sum.of({"v_k": MOST_FACTOR}, 0) is None
    assert Sum((("v_k", MOST_FACTOR - 1),)).times(2) is None
