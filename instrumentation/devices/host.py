"""The host device: the CPU, with streams that really queue.

Work put on a stream does not run before somebody waits for it (``synchronize``, or an event that another stream
needs), as on a GPU: code that forgets to wait sees stale bytes here too. Launches that follow each other run in one
native call.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
from numba.core import types as nb

from instrumentation.devices.host_driver import NO_RANGES, RECORD, run_launches
from instrumentation.devices.host_memory import HostMemory, bytes_at
from instrumentation.devices.launch import Argument, Launch, LaunchMonitor, bind
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import Finding, FindingLog, RefusedError, capture_stack
from instrumentation.levels import Level
from instrumentation.reports.text import render

if TYPE_CHECKING:
    from instrumentation.allocator import Allocator
    from instrumentation.devices.base import Event, Graph
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Owner
    from instrumentation.view import View

Operation = Callable[[], None]
_native = threading.Lock()  # Numba's work-queue layer runs one parallel region at a time


class PreparedLaunch:
    """A checked launch with its argument block: what the native loop needs."""

    __slots__ = ("block", "launch", "record")

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        entry = launch.kernel.host().address
        slots: list[Any] = list(launch.grid)
        self.block = np.zeros(3 + sum(_slots(kind) for kind in launch.kernel.signature.values()), np.int64)
        for name, kind in launch.kernel.signature.items():
            value = launch.arguments[name]
            if isinstance(kind, nb.Array):
                slots += [value.address, *value.shape]  # type: ignore[union-attr]
            else:
                raw = np.zeros(8, np.uint8)
                number = np.array([value], str(kind)).view(np.uint8)
                raw[: number.size] = number
                slots.append(int(raw.view(np.int64)[0]))
        self.block[:] = slots
        self.record = (entry, self.block.ctypes.data, launch.blocks)


def _slots(kind: Any) -> int:
    return 1 + kind.ndim if isinstance(kind, nb.Array) else 1


class Batch:
    """Launches that run in one native call, with the canary ranges to compare after each."""

    def __init__(self, launches: list[PreparedLaunch], allocator: Allocator | None) -> None:
        self.launches = launches
        self.records = np.zeros((len(launches), RECORD), np.int64)
        ranges: list[tuple[int, int, int]] = []
        for i, prepared in enumerate(launches):
            first = len(ranges)
            if allocator is not None:
                views = prepared.launch.views
                written = {views[name].buffer for name in prepared.launch.kernel.writes if name in views}
                ranges += [tuple(r) for r in allocator.canary_regions(written)]  # type: ignore[misc]
            self.records[i] = (*prepared.record, first, len(ranges))
        self.ranges = np.array(ranges, np.int64) if ranges else NO_RANGES

    def run(self, device: HostDevice, stream: HostStream) -> None:
        begin = 0
        while begin < len(self.launches):
            with _native:
                end = run_launches(self.records, begin, len(self.launches), device.threads, self.ranges)
            if end < len(self.launches):
                self._report(device, stream, end)
                end += 1
            begin = end

    def _report(self, device: HostDevice, stream: HostStream, index: int) -> None:
        launch = self.launches[index].launch
        first, last = self.records[index, 3:5]
        assert device.allocator is not None
        for address, nbytes, byte in self.ranges[first:last].tolist():
            offset = device.first_mismatch(address, nbytes, byte)
            if offset >= 0:
                device.allocator.find_damage(
                    address + offset,
                    kernel=launch.kernel.name,
                    launch=launch.number,
                    stream=stream.name,
                    actor=stream.owner.name,
                )


class HostGraph:
    """Captured launches of the host device."""

    def __init__(self, name: str, batch: Batch, owner: Owner) -> None:
        self.name = name
        self.batch = batch
        self.owner = owner
        self.destroyed = False
        self.buffers = {view.buffer for p in batch.launches for view in p.launch.views.values()}
        for buffer in self.buffers:
            buffer.pin(f"graph {name}")

    @property
    def launches(self) -> int:
        """Number of captured launches."""
        return len(self.batch.launches)

    def destroy(self) -> None:
        """Unpin the buffers."""
        if not self.destroyed:
            self.destroyed = True
            for buffer in self.buffers:
                buffer.unpin(f"graph {self.name}")


class HostEvent:
    """An event of the host device: the point of a stream that a record marked."""

    def __init__(self, device: HostDevice, owner: Owner, name: str) -> None:
        self.device = device
        self.owner = owner
        self.name = name
        self.destroyed = False
        self.stream: HostStream | None = None
        self.mark = 0

    def synchronize(self) -> None:
        """Run what the event's stream queued before the last record."""
        if self.stream is not None:
            self.stream.run_until(self.mark)

    def destroy(self) -> None:
        """Give the event up."""
        self.destroyed = True


class HostStream:
    """A queue of operations, run in order when somebody waits."""

    _handles = itertools.count(0x1000)

    def __init__(self, device: HostDevice, owner: Owner, name: str) -> None:
        self.device = device
        self.owner = owner
        self.name = name
        self.handle = next(self._handles)
        self.destroyed = False
        self._queue: deque[PreparedLaunch | Operation] = deque()
        self._done = 0
        self._capture: list[PreparedLaunch] | None = None

    # --- queueing

    def launch(self, kernel: Kernel, grid: int | tuple[int, ...], arguments: Mapping[str, Argument]) -> None:
        """Queue a kernel; see ``Stream.launch``."""
        self._require_usable()
        launch = bind(kernel, grid, arguments)
        if self.device.monitor is not None:
            self.device.monitor.check(launch, self.owner, self.name)
        prepared = PreparedLaunch(launch)
        (self._capture if self._capture is not None else self._queue).append(prepared)

    def copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        """Queue a copy from host memory."""
        self._require_bytes(target, source, "copy_in")
        self._put("copy_in", lambda: _host_bytes(target, source, into_view=True))

    def copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        """Queue a copy to host memory."""
        self._require_bytes(source, target, "copy_out")
        if not target.flags.writeable:
            raise BadInputError(f"copy_out of {source.name}: the target array is read-only")
        self._put("copy_out", lambda: _host_bytes(source, target, into_view=False))

    def copy(self, target: View, source: View) -> None:
        """Queue a copy within the device."""
        if target.nbytes != source.nbytes:
            raise BadInputError(
                f"copy from {source.name} ({source.nbytes} bytes) to {target.name} ({target.nbytes} bytes): sizes differ"
            )
        for view in (target, source):
            view.check_live(stream=self.name, actor=self.owner.name)

        def run() -> None:
            bytes_at(target.address, target.nbytes)[:] = bytes_at(source.address, source.nbytes)

        self._put("copy", run)

    def fill(self, target: View, value: int) -> None:
        """Queue setting every byte of a view."""
        target.check_live(stream=self.name, actor=self.owner.name)
        self._put("fill", lambda: self.device.fill_bytes(target.address, target.nbytes, value))

    def record(self, event: Event) -> None:
        """Queue a mark."""
        own = self._own_event(event, "record")
        self._put("record", lambda: None)
        own.stream, own.mark = self, self._done + len(self._queue)

    def wait(self, event: Event) -> None:
        """Run the other stream up to the event's record before what is queued from here on."""
        own = self._own_event(event, "wait")
        other, mark = own.stream, own.mark
        self._put("wait", lambda: other.run_until(mark) if other is not None else None)

    # --- graphs

    def begin_capture(self) -> None:
        """Collect launches instead of queueing them."""
        self._require_usable()
        if self._capture is not None:
            raise DeviceError(f"stream {self.name}: begin_capture while a capture is going on")
        self._capture = []

    def end_capture(self, name: str) -> HostGraph:
        """Return the captured launches as one graph."""
        if self._capture is None:
            raise DeviceError(f"stream {self.name}: end_capture without begin_capture")
        launches, self._capture = self._capture, None
        return HostGraph(name, Batch(launches, self.device.allocator), self.owner)

    def abandon_capture(self) -> None:
        """Forget a capture."""
        self._capture = None

    def replay(self, graph: Graph) -> None:
        """Queue a graph after the checks that its launches had when they were captured."""
        assert isinstance(graph, HostGraph)
        self._require_usable()
        if graph.destroyed:
            raise DeviceError(f"stream {self.name}: replay of graph {graph.name}, which was destroyed")
        if self.device.monitor is not None:
            for buffer in graph.buffers:
                if not buffer.live:
                    buffer.refuse_dead(f"graph {graph.name}", stream=self.name, actor=self.owner.name)
        self._put("replay", lambda: graph.batch.run(self.device, self))

    # --- running

    def synchronize(self) -> None:
        """Run everything queued so far."""
        self._require_usable()
        self.run_until(self._done + len(self._queue))

    def run_until(self, mark: int) -> None:
        """Run queued operations until ``mark`` of them, counted since the stream began, are done."""
        while self._done < mark:
            launches: list[PreparedLaunch] = []
            while self._done < mark and isinstance(self._queue[0], PreparedLaunch):
                launches.append(self._queue.popleft())  # type: ignore[arg-type]
                self._done += 1
            if launches:
                Batch(launches, self.device.allocator).run(self.device, self)
                continue
            operation = self._queue.popleft()
            self._done += 1
            assert not isinstance(operation, PreparedLaunch)
            operation()

    def destroy(self) -> None:
        """Run what is queued, then give the stream up."""
        if not self.destroyed:
            self.synchronize()
            self.destroyed = True
            self.device.streams.discard(self)

    # --- checks

    def _put(self, what: str, operation: Operation) -> None:
        self._require_usable()
        if self._capture is not None:
            raise DeviceError(f"stream {self.name}: {what} during capture; only launches can be captured")
        self._queue.append(operation)

    def _require_usable(self) -> None:
        if self.destroyed:
            self.device.refuse("STR001", f"stream {self.name} of {self.owner} was destroyed", self)

    def _own_event(self, event: Event, what: str) -> HostEvent:
        if not isinstance(event, HostEvent) or event.device is not self.device:
            self.device.refuse("STR001", f"{what} of an event that this device did not create", self)
        if event.destroyed:
            self.device.refuse("STR001", f"{what} of event {event.name}, which was destroyed", self)
        return event

    def _require_bytes(self, view: View, array: npt.NDArray[Any], what: str) -> None:
        view.check_live(stream=self.name, actor=self.owner.name)
        if not array.flags.c_contiguous or array.nbytes != view.nbytes:
            raise BadInputError(
                f"{what} of {view.name}: the array is {array.dtype} {array.shape}; give {view.nbytes} contiguous bytes"
            )


def _host_bytes(view: View, array: npt.NDArray[Any], *, into_view: bool) -> None:
    if view.nbytes == 0:
        return
    device, host = bytes_at(view.address, view.nbytes), array.reshape(-1).view(np.uint8)
    if into_view:
        device[:] = host
    else:
        host[:] = device


class HostDevice(HostMemory):
    """The CPU as a device.

    ``threads``: how many blocks run at a time; all cores unless given. After ``watch`` the device checks owners and
    liveness before each launch and canaries after it.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__()
        most = int(numba.config.NUMBA_NUM_THREADS)
        self.threads = most if threads is None else threads
        if not 1 <= self.threads <= most:
            raise BadInputError(f"threads is {threads}; give 1 to {most}")
        self.streams: set[HostStream] = set()
        self.allocator: Allocator | None = None
        self.monitor: LaunchMonitor | None = None
        self.findings: FindingLog | None = None

    def watch(self, allocator: Allocator) -> None:
        """Check launches against an allocator of this device, from level ``guard`` on."""
        self.findings = allocator.findings
        if allocator.level >= Level.GUARD:
            self.allocator = allocator
            self.monitor = LaunchMonitor(allocator.findings, self.name)

    def create_stream(self, *, owner: Owner, name: str) -> HostStream:
        """A new queue."""
        stream = HostStream(self, owner, name)
        self.streams.add(stream)
        return stream

    def create_event(self, *, owner: Owner, name: str) -> HostEvent:
        """A new event."""
        return HostEvent(self, owner, name)

    def synchronize(self) -> None:
        """Run everything queued on every stream."""
        for stream in sorted(self.streams, key=lambda s: s.handle):
            stream.synchronize()

    def describe(self) -> str:
        """One line for people."""
        return f"host: {self.threads} threads, {self.memory_info().total / 2**30:.1f} GiB"

    def refuse(self, code: str, message: str, stream: HostStream) -> Any:
        """Report and raise a finding about a stream or event."""
        finding = Finding(
            code=code,
            message=message,
            stream=stream.name,
            actor=stream.owner.name,
            device=self.name,
            access=capture_stack(),
        )
        if self.findings is not None:
            self.findings.append(finding)
        raise RefusedError(finding, render(finding))
