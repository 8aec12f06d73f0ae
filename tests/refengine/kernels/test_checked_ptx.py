"""The engine's kernels as a GPU runs them: their plain and their checked PTX make the same bits, near the twin's."""

from __future__ import annotations

import copy
import functools
import struct

import numpy as np
import pytest
from kernel_cases import cases
from numba.core import types as nb
from ptx_machine import Memory, run

from instrumentation.kernel.checked.report_cuda import DEVICE_REPORT_WORDS, FLAG_WORDS

CC = (9, 0)
#: a matter of seconds, one way of each kind: loops looked at before, own arrays, shared ones, shuffles, halves
KERNELS = ("swiglu", "rms_norm_w8", "gated_delta_16_w4", "mul_mat_f16_x1_wide4")


@functools.cache
def chosen():
    """The first case of each."""
    found = {}
    for case in cases():
        if case.kernel.name in KERNELS:
            found.setdefault(case.kernel.name, case)
        if len(found) == len(KERNELS):
            break
    return found


def bits_of(value, kind):
    if isinstance(kind, nb.Float):
        return int.from_bytes(struct.pack("<f" if kind.bitwidth == 32 else "<d", float(value)), "little")
    return int(value) & ((1 << kind.bitwidth) - 1)


def made(case, *, checked):
    """Outputs, and how much was found."""
    kernel = case.kernel
    arguments = {
        name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
        for name, value in copy.deepcopy(case.arguments).items()
    }
    report = np.zeros(DEVICE_REPORT_WORDS, np.int64)
    memory, parameters, n_arrays = [(report.ctypes.data, report.nbytes)], [], 0
    for name, kind in kernel.signature.items():
        value = arguments[name]
        if not isinstance(kind, nb.Array):
            parameters.append(bits_of(value, kind))
            continue
        n_arrays += 1
        memory.append((value.ctypes.data, value.nbytes))
        head = [] if checked else [0, 0, value.size, value.itemsize]
        strides = [] if checked else value.strides
        parameters += [*head, value.ctypes.data, *value.shape, *strides]
    if checked:
        parameters += [report.ctypes.data + 8 * FLAG_WORDS, *[0] * n_arrays]
    grid = case.grid if isinstance(case.grid, tuple) else (case.grid,)
    run(kernel.ptx(CC, checked=checked), grid, kernel.block, parameters, Memory(memory))
    return {name: arguments[name] for name in case.expected}, int(report[FLAG_WORDS])


@pytest.mark.parametrize("name", KERNELS)
def test_checked_code_has_the_bits_of_the_plain_one_and_finds_nothing(name):
    case = chosen()[name]
    (plain, _), (checked, found) = (made(case, checked=each) for each in (False, True))
    assert found == 0
    for output, wanted in case.expected.items():
        assert plain[output].tobytes() == checked[output].tobytes()
        known = np.isfinite(wanted)
        assert np.allclose(checked[output][known], wanted[known], rtol=1e-4, atol=1e-4)
