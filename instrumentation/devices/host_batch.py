"""Launches of the host device as the native loop takes them: argument blocks, records, canaries, graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.devices.captured import CapturedGraph
from instrumentation.devices.host_driver import NO_RANGES, RECORD, run_launches
from instrumentation.devices.launch import number_bits
from instrumentation.devices.numerics import NumericChecks, fresh_state
from instrumentation.devices.steps import DeviceArray
from instrumentation.devices.trap import Trap, written_marks
from instrumentation.kernel import HostOptions
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from instrumentation.allocator import Allocator
    from instrumentation.devices.host_memory import HostMemory
    from instrumentation.devices.launch import Argument, Launch
    from instrumentation.devices.numerics import NumericsWatch
    from instrumentation.devices.steps import Step
    from instrumentation.devices.watched import WatchedDevice
    from instrumentation.ownership import Owner

#: bytes that a launch must touch before waking other threads pays
SHARED_BYTES = 64 * 1024
#: and blocks that a step must have
_SHARED_BLOCKS = 8
_PLAIN, _CHECKED = HostOptions(), HostOptions(checked=True)


class PreparedLaunch:
    """A checked launch with its argument block: grid, then for each parameter address and extents, or bits."""

    __slots__ = ("block", "launch", "numerics", "record", "shared", "trap")

    def __init__(self, launch: Launch, *, trap: bool = False, numerics: bool = False) -> None:
        self.launch = launch
        #: what looks at its numbers
        self.numerics = NumericChecks(launch) if numerics else None
        #: report and shadows of a checked launch
        self.trap = Trap(launch) if trap else None
        entry = launch.kernel.host(_CHECKED if trap else _PLAIN).address
        slots = list(launch.grid)
        for name, kind in launch.kernel.signature.items():
            slots += _argument_slots(kind, launch.arguments[name])
        if self.trap is not None:
            slots += self.trap.slots
        #: int64 [n_slots]; the record names its address, so it lives as long as the launch
        self.block = np.array(slots, np.int64)
        self.record = (entry, self.block.ctypes.data, launch.blocks)
        self.shared = sum(view.nbytes for view in launch.views.values()) >= SHARED_BYTES


def _argument_slots(kind: Any, value: Argument) -> list[int]:
    if isinstance(value, View):
        return [value.address, *value.shape]
    return [number_bits(kind, value)]


class Batch:
    """Launches that run in one native call, with the canary ranges to compare after each.

    With ``numerics`` there are steps that look at numbers before and behind each launch.
    """

    def __init__(
        self,
        launches: Sequence[PreparedLaunch],
        allocator: Allocator | None,
        numerics: NumericsWatch | None = None,
    ) -> None:
        self.launches = launches
        self.allocator = allocator
        self.numerics = numerics
        #: argument blocks of steps, which records name by their address
        self._blocks: list[Any] = []
        self._checks = [prepared.numerics for prepared in launches if prepared.numerics is not None]
        self._state = fresh_state()
        self._marks = np.zeros(max((checks.n_marks for checks in self._checks), default=0), np.uint32)
        ranges: list[tuple[int, int, int]] = []
        #: launch of each record
        self._launch_of: list[int] = []
        records: list[tuple[int, ...]] = []
        for i, prepared in enumerate(launches):
            first = len(ranges)
            if allocator is not None:
                views, writes = prepared.launch.views, prepared.launch.kernel.writes
                written = {view.buffer for name, view in views.items() if name in writes}
                ranges += allocator.canary_regions(written)
            before, behind = self._steps(prepared)
            records += before
            records.append((*prepared.record, first, len(ranges), prepared.shared))
            records += behind
            self._launch_of += [i] * (len(records) - len(self._launch_of))
        self.records = np.array(records, np.int64).reshape(-1, RECORD)
        self.ranges = np.array(ranges, np.int64) if ranges else NO_RANGES

    def _steps(self, prepared: PreparedLaunch) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Records in front of a launch and behind it."""
        before: list[Step] = []
        behind: list[Step] = []
        if prepared.numerics is not None and self.numerics is not None and not self.numerics.found:
            marks = DeviceArray(self._marks.ctypes.data, self._marks.shape, self._marks.itemsize)
            before, behind = prepared.numerics.steps(marks, self._state.ctypes.data)
        if prepared.trap is None:
            behind += written_marks(prepared.launch)
        return list(self._records(before)), list(self._records(behind))

    def _records(self, steps: Sequence[Step]) -> Iterator[tuple[int, ...]]:
        for step in steps:
            block = np.array(step.host_slots, np.int64)
            self._blocks.append(block)
            blocks = step.grid[0]
            yield step.kernel.host().address, block.ctypes.data, blocks, 0, 0, int(blocks >= _SHARED_BLOCKS)

    def run(self, memory: HostMemory, threads: int, stream: str, owner: Owner) -> Exception | None:
        """Run every launch. Damage is reported and repaired after the launch that did it, and the rest runs.

        Returns the first thing that a callback of the findings raised.
        """
        failure: Exception | None = None
        for prepared in self.launches:
            if prepared.trap is not None:
                prepared.trap.refresh(prepared.block)
        begin, count = 0, len(self.records)
        while begin < count:
            end = run_launches(self.records, begin, count, threads, self.ranges)
            if end < count:
                try:
                    self._report(memory, end, stream, owner)
                except Exception as error:  # noqa: BLE001 - the caller raises it when the queue is empty
                    failure = failure or error
            begin = end + 1
        reported = (self._report_accesses(stream, owner), self._report_numbers(stream, owner), failure)
        return next((error for error in reported if error is not None), None)

    def _report_numbers(self, stream: str, owner: Owner) -> Exception | None:
        if self.numerics is None:
            return None
        state, self._state[:] = self._state.copy(), fresh_state()
        try:
            self.numerics.report(state, self._checks, stream, owner)
        except Exception as error:  # noqa: BLE001 - as below
            return error
        return None

    def _report_accesses(self, stream: str, owner: Owner) -> Exception | None:
        failure: Exception | None = None
        for prepared in self.launches:
            if prepared.trap is None or self.allocator is None:
                continue
            for finding in prepared.trap.take(self.allocator, stream, owner):
                try:
                    self.allocator.findings.append(finding)
                except Exception as error:  # noqa: BLE001 - as below
                    failure = failure or error
        return failure

    def _report(self, memory: HostMemory, index: int, stream: str, owner: Owner) -> None:
        assert self.allocator is not None
        launch = self.launches[self._launch_of[index]].launch
        first, last = self.records[index, 3:5]
        for address, nbytes, byte in self.ranges[first:last].tolist():
            offset = memory.first_mismatch(address, nbytes, byte)
            if offset >= 0:
                self.allocator.find_damage(
                    address + offset,
                    kernel=launch.kernel.name,
                    launch=launch.number,
                    stream=stream,
                    actor=owner.name,
                )


class HostGraph(CapturedGraph):
    """Captured launches of the host device."""

    def __init__(self, device: WatchedDevice, name: str, batch: Batch) -> None:
        super().__init__(device, name, [prepared.launch for prepared in batch.launches])
        self.batch = batch
