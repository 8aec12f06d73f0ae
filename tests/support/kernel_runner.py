"""Run a kernel's host form on NumPy arrays, without a device: each array between red zones, checked after each run."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from numba.core import types as nb

from instrumentation.devices.host_driver import NO_RANGES, run_launches
from instrumentation.kernel import HostOptions, Kernel
from instrumentation.kernel.checked.races import tables
from instrumentation.kernel.checked.report import REPORT_WORDS, read_records

#: plain; poisoned shared and local arrays; and reversed lanes too: a correct kernel gives the same bits in each.
#: Reversed lanes over arrays as they come show no more: what reads them before they are written is found by poison.
OPTION_SETS = (HostOptions(), HostOptions(poison=True), HostOptions(reverse_lanes=True, poison=True))
#: every launch of the tests once more in the checked form, which takes long to compile: all shapes that they draw
CHECKED_TOO = os.environ.get("REFENGINE_TEST_CHECKED") == "1"
_ZONE = 256
_ZONE_BYTE = 0xA5


class _Guarded:
    """A copy of an array with a red zone on each side."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        assert array.flags.c_contiguous, f"{name}: kernels take C-contiguous arrays"
        self.name = name
        self.nbytes = array.nbytes
        raw = np.full(_ZONE * 2 + array.nbytes + 64, _ZONE_BYTE, np.uint8)
        start = _ZONE + (-(raw.ctypes.data + _ZONE)) % 64
        self.raw, self.start = raw, start
        self.array = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.before = array.copy()

    def check(self, *, written: bool) -> None:
        left, right = self.raw[: self.start], self.raw[self.start + self.nbytes :]
        assert (left == _ZONE_BYTE).all(), f"{self.name}: written before its first element"
        assert (right == _ZONE_BYTE).all(), f"{self.name}: written after its last element"
        if not written:
            assert self.array.tobytes() == self.before.tobytes(), (
                f"{self.name}: changed, and not in kernel.writes"
            )


def run(
    kernel: Kernel,
    grid: int | tuple[int, ...],
    *arguments: Any,
    options: HostOptions = OPTION_SETS[0],
    threads: int = 1,
) -> None:
    """Launch ``kernel`` once. ``arguments``: arrays, changed in place, and numbers, in the kernel's order.

    A checked kernel runs without shadows of its arguments, and must report nothing. With ``CHECKED_TOO`` the checked
    form runs on copies as well, and must make the same bits.
    """
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments] if CHECKED_TOO else []
    _launch(kernel, grid, *arguments, options=options, threads=threads)
    if CHECKED_TOO and not options.checked:
        _launch(kernel, grid, *copies, options=replace(options, checked=True), threads=threads)
        for name, one, other in zip(kernel.signature, arguments, copies, strict=True):
            same = not isinstance(one, np.ndarray) or one.tobytes() == other.tobytes()
            assert same, f"{kernel.name}: the checked form makes other bits of {name}"


def _launch(
    kernel: Kernel, grid: int | tuple[int, ...], *arguments: Any, options: HostOptions, threads: int
) -> None:
    shape = (grid,) if isinstance(grid, int) else grid
    shape = (*shape, *(1,) * (3 - len(shape)))
    assert len(arguments) == len(kernel.signature), f"{kernel.name} takes {list(kernel.signature)}"
    slots: list[int] = list(shape)
    guarded: list[tuple[np.ndarray, _Guarded]] = []
    for (name, kind), argument in zip(kernel.signature.items(), arguments, strict=True):
        if isinstance(kind, nb.Array):
            assert str(argument.dtype) == str(kind.dtype), f"{name}: {argument.dtype} for {kind}"
            assert argument.ndim == kind.ndim, f"{name}: {argument.shape} for {kind}"
            guarded.append((argument, _Guarded(name, argument)))
            slots += [guarded[-1][1].array.ctypes.data, *argument.shape]
        elif isinstance(kind, nb.Float):
            size = "<f" if kind.bitwidth == 32 else "<d"
            slots.append(int.from_bytes(struct.pack(size, argument).ljust(8, b"\0"), "little", signed=True))
        else:
            slots.append(int(np.array(argument, str(kind)).astype(np.int64)))
    report = np.zeros(REPORT_WORDS, np.int64)
    if options.checked:
        slots += [report.ctypes.data, *[0] * len(guarded), tables()]
    block = np.array(slots, np.int64)
    entry = kernel.host(options).address
    blocks = prod(shape)
    launch = np.array([[entry, block.ctypes.data, blocks, 0, 0, 1]], np.int64)
    run_launches(launch, 0, 1, threads, NO_RANGES)
    found, _ = read_records(report)
    assert not found, f"{kernel.name}: {found[0]} of {kernel.access_table.sites[found[0].site].origin.text}"
    for (array, copy), name in zip(guarded, [g.name for _, g in guarded], strict=True):
        copy.check(written=name in kernel.writes)
        array[...] = copy.array


def run_all(kernel: Kernel, grid: int | tuple[int, ...], *arguments: Any) -> list[np.ndarray]:
    """Launch in each option set on fresh copies, assert equal bits, and return the arrays after the launch."""
    first: list[np.ndarray] = []
    for options in OPTION_SETS:
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        run(kernel, grid, *copies, options=options)
        arrays = [a for a in copies if isinstance(a, np.ndarray)]
        first = first or arrays
        for name, one, other in zip(kernel.signature, first, arrays, strict=False):
            assert one.tobytes() == other.tobytes(), f"{kernel.name}: bits depend on {options} (near {name})"
    return first
