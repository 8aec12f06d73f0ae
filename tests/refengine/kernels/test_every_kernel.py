"""Every kernel of the engine on the host: its twin's values, and the same bits however a block's threads run."""

from __future__ import annotations

import copy

import pytest
from kernel_cases import cases, distance
from kernel_runner import run

from instrumentation.kernel import HostOptions
from refengine.kernels import all_kernels

CASES = list(cases())


def outputs(case, options):
    arguments = {name: copy.deepcopy(case.arguments[name]) for name in case.kernel.signature}
    run(case.kernel, case.grid, *arguments.values(), options=options)
    return {name: arguments[name] for name in case.expected}


def names(case):
    return case.kernel.name


@pytest.mark.parametrize("case", CASES, ids=names)
def test_kernel_equals_its_twin_and_no_order_of_threads_changes_a_bit(case):
    plain = outputs(case, HostOptions())
    for name, wanted in case.expected.items():
        assert distance(plain[name], wanted) < 1e-11, name
    hostile = outputs(case, HostOptions(reverse_lanes=True, poison=True))
    assert {n: v.tobytes() for n, v in hostile.items()} == {n: v.tobytes() for n, v in plain.items()}


def test_no_kernel_is_left_out():
    assert {case.kernel.name for case in CASES} == {kernel.name for kernel in all_kernels()}
