"""Every kernel of the engine on the host: its twin's values, and the same bits however a block's threads run."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace

import pytest
from kernel_cases import cases, distance
from kernel_runner import run

from instrumentation.kernel import HostOptions
from refengine.drill.variants import without_a_barrier
from refengine.kernels import all_kernels
from refengine.kernels.kv_types import KV_TYPES
from refengine.kernels.quants import FORMATS

CASES = list(cases())
FORMAT = "|".join(form.name.lower() for form in FORMATS)
PRODUCT = re.compile(rf"(mul_mat\w*?|experts_swiglu)_((?:{FORMAT})(?:_(?:{FORMAT}))*)_(x\d+)(_wide\d+)?")
ATTENTION = re.compile(r"(attention(?:_whole|_gated)?)_([a-z]+\d+(?:_0)?)_([a-z]+\d+(?:_0)?)_(\d+)(_w\d+)?")


def outputs(case, options):
    arguments = {name: copy.deepcopy(case.arguments[name]) for name in case.kernel.signature}
    run(case.kernel, case.grid, *arguments.values(), options=options)
    return {name: arguments[name] for name in case.expected}


def names(case):
    return case.kernel.name


def traits(kernel):
    """What a kernel is made of: its template in one form with one shape of blocks, and each format in that form.

    Threads meet, and storage is kept, in the template alone: see the test below. ``get_rows`` has each format for the
    host.
    """
    if found := PRODUCT.fullmatch(kernel.name):
        family, formats, tile, wide = found.groups()
        each = re.findall(rf"{FORMAT}", formats)
        assert "_".join(each) == formats
        return {(family, len(each), tile, wide), *(each if wide else ())}
    if found := ATTENTION.fullmatch(kernel.name):
        family, type_k, type_v, head_dim, warps = found.groups()
        return {(family, head_dim, warps), ("k", type_k, warps), ("v", type_v, warps)}
    return {kernel.name}


def hostile_cases():
    """The first kernel with each trait: an order of threads or a content of storage reaches no more in the others."""
    seen = set()
    for case in CASES:
        found = traits(case.kernel)
        if not found <= seen:
            seen |= found
            yield case


@pytest.mark.parametrize("case", CASES, ids=names)
def test_kernel_equals_its_twin(case):
    plain = outputs(case, HostOptions())
    for name, wanted in case.expected.items():
        assert distance(plain[name], wanted) < 1e-11, name


@pytest.mark.parametrize("case", list(hostile_cases()), ids=names)
def test_no_order_of_threads_and_no_content_of_storage_changes_a_bit(case):
    plain = outputs(case, HostOptions())
    hostile = outputs(case, HostOptions(reverse_lanes=True, poison=True))
    assert {n: v.tobytes() for n, v in hostile.items()} == {n: v.tobytes() for n, v in plain.items()}


def test_what_is_special_to_a_format_keeps_nothing_and_waits_for_nobody():
    """So one kernel of a template, in each form, stands for the orders of threads of all of its formats."""
    for form in FORMATS.values():
        functions = [form.weight, form.wide.weight]
        while functions:
            parsed = functions.pop().parsed
            assert not parsed.arrays, parsed.name
            assert not any(parsed.collective(node) for node in parsed.walk()), parsed.name
            functions += [value for value in parsed.captured.values() if hasattr(value, "parsed")]
    for kind in KV_TYPES.values():
        for function in (kind.decode, kind.load_scale):
            assert not function.parsed.arrays
            assert not any(function.parsed.collective(node) for node in function.parsed.walk())


def test_orders_of_threads_are_tried_on_every_format_in_both_forms():
    hostile = {case.kernel.name for case in hostile_cases()}
    for form in FORMATS:
        name = form.name.lower()
        assert f"get_rows_{name}" in hostile
        assert any(re.fullmatch(rf"mul_mat_{name}_x\d_wide\d", each) for each in hostile)


def checked_cases():
    """The first kernel of each template with each shape of blocks, whose accesses are written once; all in a deep run.

    In a block of several warps others meet than in a block of one.
    """
    if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
        return CASES
    kinds = {(case.kernel.function.__qualname__, case.kernel.block): case for case in reversed(CASES)}
    return list(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", checked_cases(), ids=names)
def test_a_checked_kernel_gives_the_same_bits_and_reports_nothing(case):
    plain, checked = (outputs(case, HostOptions(checked=checked)) for checked in (False, True))
    assert {n: v.tobytes() for n, v in checked.items()} == {n: v.tobytes() for n, v in plain.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best_of_chunks_16", "best_of_rows_16", "gated_delta_16_w4"])
def test_without_any_one_of_its_barriers_a_kernel_races(name):
    """So that nothing is found in these kernels says something."""
    [case] = [case for case in CASES if case.kernel.name == name]
    barriers = list(without_a_barrier(case.kernel))
    assert len(barriers) >= 3
    for kernel in barriers:
        with pytest.raises(AssertionError, match="kind=3"):
            outputs(replace(case, kernel=kernel), HostOptions(checked=True))


def test_no_kernel_is_left_out():
    assert {case.kernel.name for case in CASES} == {kernel.name for kernel in all_kernels()}
