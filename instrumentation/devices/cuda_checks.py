"""Canaries on a GPU: a small kernel compares them behind each launch and each replay, on the same stream.

It has a flag in page-locked memory for each canary behind each launch or replay, and sets those of damaged ones; the
host looks at the flags when the stream was synchronised. Work that is queued between the damage and that point runs on:
the finding names the first launch, or the graph, behind which the canary was damaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from instrumentation.devices.cuda_kernels import check_regions
from instrumentation.devices.cuda_launch import DeviceArray, Parameters, block_of, pack, region_rows
from instrumentation.devices.host_memory import bytes_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from instrumentation.allocator import Allocator
    from instrumentation.buffer import Buffer
    from instrumentation.devices.cuda import CudaDevice
    from instrumentation.devices.cuda_stream import CudaStream
    from instrumentation.devices.launch import Work
    from instrumentation.redzones import Region

#: canaries that are compared between two looks at the flags
FLAGS = 16384
#: regions of launches outside graphs that are kept in device memory
MAX_ROWS = 4096
_ROW_NBYTES = 24
#: parameters of ``check_regions``, counted from the last: the flags' array has seven, then come slot and step
_FLAGS_ADDRESS, _FIRST_FLAG = -5, -2


Regions: TypeAlias = "tuple[tuple[Buffer, Region], ...]"


@dataclass(frozen=True)
class RegionTable:
    """Canaries of the buffers that something writes, in device memory."""

    #: each canary with its buffer
    regions: Regions
    #: of ``check_regions``; where its flags are changes from check to check
    parameters: Parameters

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return len(self.regions) * _ROW_NBYTES


@dataclass(frozen=True)
class Queued:
    """One check that was queued. ``graph`` is empty for a direct launch."""

    first: int
    table: RegionTable
    launches: Sequence[Work]
    graph: str


def written_buffers(launches: Iterable[Work]) -> tuple[Buffer, ...]:
    """Buffers that launches write, each once."""
    views = (view for launch in launches for name, view in launch.views.items() if name in launch.writes)
    return tuple({view.buffer.serial: view.buffer for view in views}.values())


class CanaryChecks:
    """The checks of one stream. Their calls are made inside the stream's ``DriverCalls``."""

    def __init__(self, device: CudaDevice, stream: CudaStream, allocator: Allocator) -> None:
        driver = device.context.driver
        self.allocator = allocator
        self._device = device
        self._stream = stream
        self._function = device.context.function(check_regions)
        self._host, flags = driver.allocate_pinned(4 * FLAGS)
        self._flags: npt.NDArray[np.int32] = bytes_at(self._host, 4 * FLAGS).view(np.int32)
        self._flags[:] = 0
        self._flags_array = DeviceArray(flags, (FLAGS,), 4)
        #: how many of the flags belong to checks that are queued
        self._used = 0
        #: tables of launches outside graphs, by the serials of their buffers, in rows of one block
        self._tables: dict[tuple[int, ...], RegionTable | None] = {}
        self._rows = 0
        self._queued: list[Queued] = []
        try:
            self._block = driver.allocate(MAX_ROWS * _ROW_NBYTES)
        except BaseException:
            driver.free_pinned(self._host)
            raise
        #: where its memory is accounted for
        self.held = device.account.hold(
            stream.owner, f"checks of stream {stream.name}", device=MAX_ROWS * _ROW_NBYTES, host=4 * FLAGS
        )

    def after_launch(self, launch: Work) -> None:
        """Queue the check of what a launch wrote."""
        buffers = written_buffers((launch,))
        key = tuple(buffer.serial for buffer in buffers)
        if key not in self._tables:
            self._tables[key] = self._short_table(buffers)
        self._check(self._tables[key], (launch,), "")

    def after_replay(self, table: RegionTable | None, launches: Sequence[Work], graph: str) -> None:
        """Queue the check of what a graph wrote."""
        self._check(table, launches, graph)

    def table(self, buffers: tuple[Buffer, ...]) -> tuple[RegionTable | None, int]:
        """Table of a graph, and the address of its memory (0: none), which the graph frees."""
        regions = self._regions(buffers)
        if not regions:
            return None, 0
        driver = self._device.context.driver
        address = driver.allocate(len(regions) * _ROW_NBYTES)
        try:
            table = self._fill(address, regions)
            self._stream.drain()  # another stream may replay the graph
        except BaseException:
            driver.free(address)
            raise
        return table, address

    def collect(self) -> Exception | None:
        """Report the damage behind what ran: the stream was synchronised. Returns the first error of a callback."""
        queued, self._queued = self._queued, []
        flags, self._used = self._flags[: self._used], 0
        if not flags.any():
            return None
        hit = flags.copy()
        flags[:] = 0
        failure: Exception | None = None
        for check in queued:
            shared = len(check.table.regions) > FLAGS
            for index, (buffer, region) in enumerate(check.table.regions):
                if hit[check.first + (0 if shared else index)]:
                    try:
                        self._report(check, buffer, region)
                    except Exception as error:  # noqa: BLE001 - the caller raises it when all is reported
                        failure = failure or error
        return failure

    def drop(self) -> None:
        """Forget what is queued."""
        self._queued.clear()
        self._used = 0

    def release(self) -> None:
        """Give the memory back, when nothing is queued."""
        driver = self._device.context.driver
        driver.free(self._block)
        driver.free_pinned(self._host)
        self.held.drop()

    def _short_table(self, buffers: tuple[Buffer, ...]) -> RegionTable | None:
        regions = self._regions(buffers)
        if not regions:
            return None
        if self._rows + len(regions) > MAX_ROWS:
            # Checks that read the rows must have run before others take their place.
            self._drain()
            self._tables.clear()
            self._rows = 0
        address = self._block + self._rows * _ROW_NBYTES
        self._rows += len(regions)
        return self._fill(address, regions)

    def _regions(self, buffers: tuple[Buffer, ...]) -> Regions:
        return tuple(
            (buffer, region) for buffer in buffers for region in self.allocator.canary_regions((buffer,))
        )

    def _fill(self, address: int, regions: Regions) -> RegionTable:
        memory, rows = region_rows([region for _, region in regions])
        self._stream.staging.copy_in(address, rows.reshape(-1).view(np.uint8))
        self._stream.mark_pending()
        table = DeviceArray(address, rows.shape, 8)
        # More canaries than flags share one.
        step = int(len(regions) <= FLAGS)
        values = (memory, table, self._flags_array, 0, step)
        return RegionTable(regions, pack(check_regions.signature, values))

    def _check(self, table: RegionTable | None, launches: Sequence[Work], graph: str) -> None:
        if table is None:
            return
        n = len(table.regions)
        taken = n if n <= FLAGS else 1
        if self._used + taken > FLAGS:
            self._drain()
        first = self._used
        self._used += taken
        # A graph may be replayed on another stream than the one that captured it.
        table.parameters[_FLAGS_ADDRESS] = self._flags_array.address
        table.parameters[_FIRST_FLAG] = first
        grid, block = (n, 1, 1), block_of(check_regions.block)
        self._device.context.driver.launch(
            self._function, grid, block, self._stream.handle, table.parameters.address
        )
        self._queued.append(Queued(first, table, launches, graph))

    def _drain(self) -> None:
        self._stream.drain()
        self._device.settle()  # repairs come before the next look

    def _report(self, check: Queued, buffer: Buffer, region: Region) -> None:
        offset = self._device.first_mismatch(*region) if buffer.live else -1
        if offset < 0:
            return  # a launch before this one was blamed for it, or the buffer was looked at when it was freed
        writers = [launch for launch in check.launches if buffer in written_buffers((launch,))]
        blamed = writers[0] if len(writers) == 1 else None
        self.allocator.find_damage(
            region.address + offset,
            kernel=blamed.name if blamed is not None else f"graph {check.graph}",
            launch=blamed.number if blamed is not None else None,
            stream=self._stream.name,
            actor=self._stream.owner.name,
        )
