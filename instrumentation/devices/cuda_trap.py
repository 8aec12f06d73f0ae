"""Level ``trap`` on a GPU: where checked launches report, which shadows they look into, and what marks those.

Reports lie in device memory, in blocks of some; a flag in page-locked memory tells the host which of them hold
something, when the launch's stream was synchronised. A launch has one report for good, so a graph can be replayed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from instrumentation.devices.cuda_context import PROCESS
from instrumentation.devices.host_memory import bytes_at
from instrumentation.devices.trap import Run, findings
from instrumentation.findings import CallSite
from instrumentation.kernel.checked.report_cuda import (
    COUNTED_WORDS,
    DEVICE_REPORT_WORDS,
    FLAG_WORDS,
    as_on_the_host,
)
from instrumentation.shadow import FREED, WRITTEN, shadow_of

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable
    from typing import Any

    import numpy.typing as npt

    from instrumentation.devices.cuda import CudaDevice
    from instrumentation.devices.cuda_driver import Driver
    from instrumentation.devices.launch import Launch, Work
    from instrumentation.findings import Finding
    from instrumentation.ownership import Owner
    from instrumentation.view import View

#: reports of a block
_REPORTS = 128
_WORD = 8
_NBYTES = DEVICE_REPORT_WORDS * _WORD
_SHADOW_ALIGNMENT = 64


class _Slot:
    """Room for one report: ``address`` is that of its counter, ``flag`` the place of its flag in ``flags``."""

    __slots__ = ("address", "flag", "flags")

    def __init__(self, address: int, flags: npt.NDArray[np.int32], flag: int) -> None:
        self.address = address
        self.flags = flags
        self.flag = flag


class CudaTrap:
    """Report and shadows of one checked launch, which may run many times."""

    def __init__(self, reports: CudaTraps, launch: Launch, slot: _Slot) -> None:
        self.launch = launch
        self.called_at = CallSite()
        self.slot = slot
        self._reports = reports
        free = launch.kernel.unread_states
        self._views = tuple((view, name in free) for name, view in launch.views.items())

    @property
    def slots(self) -> list[int]:
        """What a checked kernel's parameters end with: the report's address, the distance of each shadow."""
        return [self.slot.address, *(self._reports.distance(view, free) for view, free in self._views)]


class CudaTraps:
    """The reports of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        #: of all devices of one GPU
        self._free: deque[_Slot] = device.context.reports
        #: shadow of memory that is a view's no more: address and bytes, the largest last
        self._freed: list[tuple[int, int]] = []

    def trap(self, launch: Launch) -> CudaTrap:
        """Room for what a launch finds. Raises ``OutOfMemoryError``."""
        try:
            slot = self._free.pop()
        except IndexError:
            self._grow()
            slot = self._free.pop()
        if slot.flags[slot.flag]:
            self._clear(slot)
        trap = CudaTrap(self, launch, slot)
        weakref.finalize(trap, self._free.append, slot).atexit = False
        return trap

    def _grow(self) -> None:
        device = self._device
        context = device.context
        address = device.allocate(_REPORTS * _NBYTES)
        with context.calls("reports of checked kernels"):
            try:
                host, flags_at = context.driver.allocate_pinned(4 * _REPORTS)
            except BaseException:
                device.release(address)
                raise
        flags = bytes_at(host, 4 * _REPORTS).view(np.int32)
        flags[:] = 0
        words = np.zeros((_REPORTS, DEVICE_REPORT_WORDS), np.int64)
        words[:, 0] = flags_at + 4 * np.arange(_REPORTS)
        device.write_bytes(address, words.tobytes())
        context.account.hold(
            PROCESS, "reports of checked launches", device=_REPORTS * _NBYTES, host=4 * _REPORTS
        )
        starts = (address + i * _NBYTES + FLAG_WORDS * _WORD for i in range(_REPORTS))
        self._free.extend(_Slot(start, flags, i) for i, start in enumerate(starts))

    def _clear(self, slot: _Slot) -> None:
        slot.flags[slot.flag] = 0
        self._device.fill_bytes(slot.address, _NBYTES - FLAG_WORDS * _WORD, 0)

    # --- shadows

    def distance(self, view: View, may_be_unwritten: bool) -> int:
        """How far the shadow of a view lies from it; 0 where nobody need look."""
        if not view.nbytes:
            return 0
        buffer = view.buffer
        if view.generation != buffer.generation or not buffer.live:
            return self._stale(view)
        shadow = buffer.shadow
        if shadow is None:
            return 0
        # What is written stays so, unless it is freed: which is refused while a launch may run, where somebody looks.
        watched = buffer.heap.audit is not None and buffer.heap.audit is self._device.audit
        end = view.address + view.nbytes
        if watched and (may_be_unwritten or shadow.written.covers(view.address, end)):
            return 0
        return shadow.delta

    def _stale(self, view: View) -> int:
        """Distance of a shadow that says freed of all of a view."""
        needed = view.nbytes + _SHADOW_ALIGNMENT
        if not self._freed or self._freed[-1][1] < needed:
            start = self._device.allocate(needed)
            self._device.context.account.hold(PROCESS, "shadow of freed memory", device=needed)
            self._device.fill_bytes(start, needed, FREED)
            self._device.settle()
            self._freed.append((start, needed))
        start, _ = self._freed[-1]
        return start + (view.address - start) % _SHADOW_ALIGNMENT - view.address

    # --- findings

    def collect(self, traps: Iterable[CudaTrap], stream: str, owner: Owner) -> Exception | None:
        """Report what launches found: they ran. Returns the first error of a callback."""
        failure: Exception | None = None
        allocator = self._device.allocator
        for trap in traps:
            if allocator is None or not trap.slot.flags[trap.slot.flag]:
                continue
            for finding in self._take(trap, Run(trap.launch, trap.called_at, allocator, stream, owner)):
                try:
                    allocator.findings.append(finding)
                except Exception as error:  # noqa: BLE001 - the caller raises it when all is reported
                    failure = failure or error
        self._device.settle()
        return failure

    def _take(self, trap: CudaTrap, run: Run) -> list[Finding]:
        words = np.frombuffer(self._device.read_bytes(trap.slot.address, COUNTED_WORDS * _WORD), np.int64)
        self._clear(trap.slot)
        return list(findings(as_on_the_host(words), run))


def written_marks(work: Work) -> list[tuple[int, int]]:
    """Address and bytes of the states that work which runs unchecked among checked launches leaves written."""
    views = [view for name, view in work.views.items() if name in work.writes and view.nbytes]
    shadows = [(view, shadow_of(view)) for view in views]
    return [(view.address + shadow.delta, view.nbytes) for view, shadow in shadows if shadow is not None]


def mark_written(driver: Driver, stream: Any, target: View) -> None:
    """Queue the mark of what was queued to be written; whoever uses it runs behind that."""
    shadow = shadow_of(target)
    if shadow is None or not target.nbytes:
        return
    driver.fill(target.address + shadow.delta, WRITTEN, target.nbytes, stream)
    shadow.written.add(target.address, target.address + target.nbytes)


def mark_copied(driver: Driver, stream: Any, target: View, source: View) -> None:
    """Queue the mark of a copy: what was never written is not so once it is copied."""
    to, of = shadow_of(target), shadow_of(source)
    if to is None or of is None or of.written.covers(source.address, source.address + source.nbytes):
        mark_written(driver, stream, target)
        return
    to.written.remove(target.address, target.address + target.nbytes)
    driver.copy(target.address + to.delta, source.address + of.delta, target.nbytes, stream)
