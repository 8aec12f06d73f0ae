"""The checked lowering for CUDA: its PTX, the numbers of its sites, and the report that it writes."""

from __future__ import annotations

import re

import numpy as np
import planted_kernels
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_source import load_module
from sample_kernels import arg_max, bits, calls, collectives_inside, tiled_product

from instrumentation.devices.cuda_context import parameter_sizes
from instrumentation.kernel import Kernel
from instrumentation.kernel.checked.lower_cuda import checked_source
from instrumentation.kernel.checked.report import RECORD_WORDS, RECORDS, REPORT_WORDS, Record, read_records
from instrumentation.kernel.checked.report_cuda import COUNTED_WORDS, add_from_the_host, as_on_the_host
from instrumentation.kernel.cuda_image import entry_of, image_path
from refengine.kernels import norm
from refengine.kernels.elementwise import swiglu
from refengine.kernels.short_conv import short_conv

CC = (9, 0)
PLANTED = [value for value in vars(planted_kernels).values() if isinstance(value, Kernel)]
SAMPLE = [
    *PLANTED,
    arg_max,
    bits,
    calls,
    collectives_inside,
    tiled_product,
    norm.rms_norm(8),
    swiglu,
    short_conv(4),
]


@pytest.fixture(scope="module")
def ptx():
    return {kernel: kernel.ptx(CC, checked=True) for kernel in SAMPLE}


@pytest.mark.parametrize("kernel", SAMPLE, ids=lambda kernel: kernel.name)
class TestPtx:
    def test_parameters_are_as_they_are_passed(self, ptx, kernel):
        _, sizes = entry_of(kernel.name, ptx[kernel])
        assert sizes == parameter_sizes(kernel, checked=True)

    def test_the_entry_says_its_threads_and_waits(self, ptx, kernel):
        x, y, z = (*kernel.block, 1, 1)[:3]
        text = ptx[kernel].partition(".visible .entry")[2]
        assert f".reqntid {x}, {y}, {z}" in text
        assert text.index("griddepcontrol.wait") < text.index("ld.param")
        assert "prefetch" not in text
        assert ".minnctapersm" not in text

    def test_nothing_is_called_but_where_something_was_found(self, ptx, kernel):
        """A call would keep what lives across it out of most registers."""
        before, _, found = ptx[kernel].partition(".visible .entry")[2].partition("RF_FOUND_1:")
        assert not re.search(r"\bcall\b", before)
        assert set(re.findall(r"\bcall(?:\.\w+)? ([^,]+)", found)) <= {
            f"refengine_record_{n}" for n in range(1, 6)
        }

    def test_every_site_has_the_number_of_the_table(self, kernel):
        source, _ = checked_source(kernel.plan, kernel.access_table)
        numbers = {int(n) for n in re.findall(r", (\d+), (?:unwritten_allowed\()?_where", source)}
        assert numbers <= set(range(len(kernel.access_table.sites)))


@pytest.mark.parametrize("kernel", [swiglu, planted_kernels.sums, norm.rms_norm(8)], ids=str)
def test_floats_are_computed_by_the_same_instructions(kernel):
    """What is contracted in one form and not in the other would round otherwise. Loops are unrolled in one of them."""
    plain, checked = (
        set(re.findall(r"\b(?:fma|mul|add|sub|div|ex2|rcp)\.[a-z.]*f(?:32|64)\b", text))
        for text in (kernel.ptx(CC), kernel.ptx(CC, checked=True))
    )
    assert plain == checked


def test_images_are_cached_apart():
    assert image_path(swiglu, CC) != image_path(swiglu, CC, checked=True)


def source_of(tmp_path, body):
    text = f"""\
from numba import cuda, float32
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32


@kernel(block=32)
def made(x: f32_1d, y: f32_1d, n: i32) -> None:
    own = cuda.local.array(4, float32)
    t = cuda.threadIdx.x
{body}
"""
    made = load_module(tmp_path / "made.py", text).made
    return checked_source(made.plan, made.access_table)[0]


class TestOwnArrays:
    """What is not checked: constant places inside of what was written on every way."""

    def test_elements_that_are_written_at_constant_places(self, tmp_path):
        source = source_of(tmp_path, "    for k in range(4):\n        own[k] = x[k]\n    y[t] = own[3]")
        assert source.count("s_own = s_own | uint64(15)") == 1
        assert "load_own(v_own, 3)" in source
        assert "try_load_lane" not in source

    def test_an_element_that_only_some_ways_write(self, tmp_path):
        source = source_of(tmp_path, "    if n > 3:\n        own[1] = x[t]\n    y[t] = own[1]")
        assert "try_load_lane(v_own, (1,), (4,), own_state(s_own, 1)" in source
        assert "load_own" not in source

    def test_a_loop_that_may_not_run(self, tmp_path):
        source = source_of(tmp_path, "    for k in range(n):\n        own[1] = x[k]\n    y[t] = own[1]")
        assert "load_own" not in source

    def test_a_place_outside(self, tmp_path):
        source = source_of(tmp_path, "    for k in range(4):\n        own[k] = x[k]\n    y[t] = own[2 + 2]")
        assert "try_load_lane(v_own, ((2 + 2),), (4,)" in source

    def test_a_name_that_a_loop_changes_is_no_constant(self, tmp_path):
        body = "    at = 0\n    for k in range(n):\n        own[at] = x[k]\n        at = at + 1\n    y[t] = own[0]"
        source = source_of(tmp_path, body)
        assert "try_store_lane(v_own, (v_at,)" in source
        assert "load_own" not in source

    def test_a_loop_that_can_be_left_is_not_written_out(self, tmp_path):
        loop = "    for k in range(4):\n        if x[k] > n:\n            break\n        own[k] = x[k]\n"
        source = source_of(tmp_path, loop + "    y[t] = own[0]")
        assert "for v_k" in source
        assert "load_own" not in source

    def test_places_that_are_not_constant_are_checked_for_bounds_alone(self, tmp_path):
        source = source_of(tmp_path, "    for k in range(4):\n        own[k] = x[k]\n    y[t] = own[n]")
        assert "try_load_lane(v_own, (v_n,), (4,), 0, " in source


def test_shared_arrays_without_room_for_shadows_have_their_bounds_checked(tmp_path):
    text = """\
from numba import cuda, float64
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f64_1d


@kernel(block=32)
def full(y: f64_1d) -> None:
    tile = cuda.shared.array(6144, float64)
    t = cuda.threadIdx.x
    tile[t] = y[t]
    y[t] = tile[t]
"""
    full = load_module(tmp_path / "full.py", text).full
    source, _ = checked_source(full.plan, full.access_table)
    assert "s_tile = 0" in source
    assert entry_of("full", full.ptx(CC, checked=True))


records = st.builds(
    Record,
    site=st.integers(0, 99),
    chain=st.integers(0, 1 << 39),
    kind=st.integers(0, 2),
    count=st.integers(1, 1 << 40),
    block=st.integers(0, 1 << 30),
    thread=st.integers(0, 1023),
    indices=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4),
    extents=st.tuples(*[st.integers(0, 2**40)] * 4),
)


class TestReport:
    def host(self, found):
        report = np.zeros(REPORT_WORDS, np.int64)
        report[0] = sum(record.count for record in found)
        rows = report[1:].reshape(RECORDS, RECORD_WORDS)
        for row, record in zip(rows, found, strict=False):
            row[:] = record.words
        return report

    @given(st.lists(records, max_size=20, unique_by=lambda r: (r.site, r.chain, r.kind)))
    def test_what_a_gpu_writes_is_read_as_on_the_host(self, found):
        words = np.zeros(COUNTED_WORDS, np.int64)
        report = self.host(found)
        add_from_the_host(words, report)
        assert read_records(as_on_the_host(words)) == read_records(report)

    @given(records, st.integers(0, 1 << 30), st.integers(0, 1023))
    def test_the_lowest_block_and_thread_is_shown(self, record, block, thread):
        from dataclasses import replace  # noqa: PLC0415

        other = replace(record, block=block, thread=thread)
        words = np.zeros(COUNTED_WORDS, np.int64)
        for each in (record, other):
            add_from_the_host(words, self.host([each]))
        ((found,), left) = read_records(as_on_the_host(words))
        assert (found.block, found.thread) == min((record.block, record.thread), (block, thread))
        assert (found.count, left) == (2 * record.count, 0)
