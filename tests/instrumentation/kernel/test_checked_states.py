"""States that a checked CUDA kernel looks at before a loop, or not at all: what is found does not change."""

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
from instrumentation.kernel.checked.lower_cuda import checked_source
from instrumentation.kernel.checked.states import SharedReads
from instrumentation.kernel.checked.sums import Capped, Sum
from instrumentation.kernel.types import i32, i64_1d
from refengine.kernels import all_kernels

N = 40


@device_function
def entry(tile, i):
    return tile[i]


@kernel(block=32)
def staged(
    x: i64_1d, y: i64_1d, low: i32, high: i32, hole: i32, first: i32, end: i32, at: i32, mask: i32
) -> None:
    t = cuda.threadIdx.x
    tile = cuda.shared.array(N, int64)
    rows = cuda.shared.array((4, 32), int64)
    own = cuda.local.array(8, int64)
    mine = cuda.local.array(8, int64)
    if t >= low and t < high and t != hole:
        tile[t] = x[t]
    for r in range(4):
        if t != hole:
            rows[r, t] = x[t] + r
    for k in range(8):
        if (mask >> k) & 1:
            own[k] = x[k]
    cuda.syncthreads()
    total = 0
    for k in range(first, end):
        total = total * 3 + tile[k] + tile[k + 1]
    for k in range(8):
        mine[k] = entry(tile, at + k) + rows[at & 3, k + (at & 7)]
    for k in range(8):
        total = total * 5 + own[k] + x[at + k] + mine[k]
    y[t] = total


def launched(world, numbers):
    arguments = world.bind({"x": np.arange(N) ** 2 + 1, "y": np.full(32, -1)} | numbers)
    world.stream.launch(staged, 1, arguments)
    world.stream.synchronize()
    found = [(f.code, f.argument, f.access[0].line, f.count) for f in world.findings]
    found = sorted(each for each in found if each[0].startswith("MEM"))
    # Values of elements that nothing wrote may differ.
    return found, None if found else world.read(arguments["y"]).tolist()


WHOLE = {"low": 0, "high": 32, "hole": -1, "first": 0, "end": 31, "at": 0, "mask": 255}
numbers = st.fixed_dictionaries({
    "low": st.integers(0, 12), "high": st.integers(20, 32), "hole": st.integers(-1, 31), "first": st.integers(-2, 20),
    "end": st.integers(0, 34), "at": st.integers(-2, 34), "mask": st.sampled_from([255, 255, 127, 254, 239, 0]),
})  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(numbers)
def test_findings_and_bits_are_those_of_the_host(numbers):
    assert launched(World(device=ptx_device()), numbers) == launched(World(), numbers)


@pytest.mark.parametrize("changed", [
    {"low": 1}, {"high": 31}, {"hole": 15}, {"hole": 0}, {"hole": 8}, {"mask": 127}, {"mask": 254}, {"mask": 247},
    {"first": 8, "end": 16, "hole": 16}, {"first": 8, "end": 16, "hole": 8},
], ids=str)  # fmt: skip
def test_one_element_that_nothing_wrote_is_found(changed):
    found, y = launched(World(device=ptx_device()), WHOLE | changed)
    assert {code for code, *_ in found} == {"MEM012"}
    assert (found, y) == launched(World(), WHOLE | changed)


@pytest.mark.parametrize("changed", [
    {}, {"first": 8, "end": 16, "low": 0, "hole": 17, "at": 0}, {"first": 5, "end": 5}, {"first": 9, "end": 2},
], ids=str)  # fmt: skip
def test_what_is_written_is_not(changed):
    """Nothing is reported of elements beside those that a loop reads, whatever they hold."""
    assert launched(World(device=ptx_device()), WHOLE | changed)[0] == []


def test_ranges_are_looked_at_before_the_loops():
    source, _ = checked_source(staged.plan, staged.access_table)
    tile, entries, rows = re.findall(r"all_written\(s_(\w+), (.+?), (.+?), (\d+)\)", source)
    assert tile[0] == entries[0] == "tile"
    assert rows[0] == "rows"
    assert tile[3] == "0"
    assert entries[3] == rows[3] == "2"
    assert "(s_own & uint64(255)) == uint64(255)" in source
    assert "load_own(v_tile, " in source


def test_what_is_dear_to_look_at_is_looked_at_where_it_is_read():
    reads = SharedReads("v_k", {"tile": (64, 64), "near": (64,)})
    k, lane = (Sum(((name, 1),)) for name in ("v_k", "v_lane"))
    assert not reads.add("tile", [k, lane])
    assert not reads.add("near", [k])
    assert reads.worth() == {"near"}
    assert not reads.add("elsewhere", [k])
    assert not reads.add("near", [Capped(k, lane)])


@kernel(block=8)
def short(x: i64_1d, y: i64_1d, n: i32, hole: i32, of: i32) -> None:
    t = cuda.threadIdx.x
    five = cuda.shared.array(5, int64)
    nine = cuda.shared.array((3, 3), int64)
    if t < 5 and (t != hole or of != 5):
        five[t] = x[t]
    for k in range(2):
        if t + 8 * k < 9 and (t + 8 * k != hole or of != 9):
            nine[(t + 8 * k) // 3, (t + 8 * k) % 3] = x[t + k]
    cuda.syncthreads()
    total = t
    for k in range(n):
        total = total * 3 + five[k]
    for k in range(n):
        total = total * 3 + nine[k // 2, k & 1] + nine[2, 2]
    for k in range(3):
        total = total * 3 + nine[1, k]
    y[t] = total


@pytest.mark.parametrize("of", [5, 9])
def test_arrays_that_are_no_whole_words(of):
    """Their states are looked at in words all the same, which lie inside of what holds them."""
    source, _ = checked_source(short.plan, short.access_table)
    assert "all_written(s_five, " in source
    assert "s_five = shared_array(uint8, 8)" in source
    assert "s_nine = shared_array(uint8, 16)" in source

    def found(world, hole):
        arguments = world.bind({"x": np.arange(N), "y": np.full(8, -1), "n": 5, "hole": hole, "of": of})
        world.stream.launch(short, 1, arguments)
        world.stream.synchronize()
        return sorted((f.code, f.access[0].line, f.count) for f in world.findings if f.code.startswith("MEM"))

    assert found(World(device=ptx_device()), -1) == []
    for hole in range(of):
        assert found(World(device=ptx_device()), hole) == found(World(), hole)


class TestOwnArrays:
    """States of own arrays: bits of a number where all places are constants."""

    def source_of(self, tmp_path, body):
        text = f"""\
from numba import cuda, float32
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32


@kernel(block=32)
def made(x: f32_1d, y: f32_1d, n: i32) -> None:
    own = cuda.local.array(4, float32)
    large = cuda.local.array(65, float32)
    t = cuda.threadIdx.x
{body}
"""
        made = load_module(tmp_path / "made.py", text).made
        return checked_source(made.plan, made.access_table)[0]

    def test_a_bit_for_each(self, tmp_path):
        source = self.source_of(tmp_path, "    if n > 3:\n        own[2] = x[t]\n    y[t] = own[2]")
        assert "s_own = uint64(0)" in source
        assert source.count("s_own = s_own | uint64(4)") == 1

    @pytest.mark.parametrize("body", [
        "    own[n] = x[t]\n    y[t] = own[1]",
        "    large[1] = x[t]\n    y[t] = large[n]",
    ], ids=["moving", "large"])  # fmt: skip
    def test_bytes_for_others(self, tmp_path, body):
        source = self.source_of(tmp_path, body)
        name = "large" if "large" in body else "own"
        assert f"s_{name} = local_array(uint8" in source
        assert f"uint64({2})" not in source


class TestAllowedReads:
    """Arrays that are only read where what is read may be unwritten."""

    def test_keys_of_attention_and_no_others(self):
        free = {k.name: k.unread_states for k in all_kernels() if k.unread_states}
        assert free
        assert all(name.startswith("attention_") and states == {"k_cache"} for name, states in free.items())

    @pytest.mark.parametrize(("body", "wanted"), [
        ("    y[t] = x[t]  # unwritten: allowed", {"x"}),
        ("    y[t] = x[t]  # unwritten: allowed\n    y[t] = y[t] + x[t + 1]", set()),
        ("    y[t] = pick(x, t)  # unwritten: allowed", {"x"}),
        ("    y[t] = pick(x, t)", set()),
        ("    y[t] = careful(x, t)", {"x"}),
        ("    y[t] = careful(x, t)\n    x[t] = y[t]", set()),
    ], ids=["said", "once", "of a call", "unsaid call", "in a function", "written too"])  # fmt: skip
    def test_each_load_says_so(self, tmp_path, body, wanted):
        text = f"""\
from numba import cuda
from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import f32_1d


@device_function
def pick(x, i):
    return x[i]


@device_function
def careful(x, i):
    return x[i]  # unwritten: allowed


@kernel(block=32)
def made(x: f32_1d, y: f32_1d) -> None:
    t = cuda.threadIdx.x
{body}
"""
        assert load_module(tmp_path / "made.py", text).made.unread_states == wanted
