"""Streams and events of the host device: queues whose work runs when somebody waits for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from instrumentation.devices.host_batch import Batch, HostGraph, PreparedLaunch
from instrumentation.devices.host_memory import bytes_at
from instrumentation.devices.launch import bind
from instrumentation.devices.monitor import Access, launch_accesses
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.faults import FaultKind, pass_site

if TYPE_CHECKING:
    from instrumentation.devices.base import Event, Graph
    from instrumentation.devices.host import HostDevice
    from instrumentation.devices.launch import Argument, Grid
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Mode, Owner
    from instrumentation.view import View

#: queued work; returns what a callback of the findings raised meanwhile
#: fault sites of what is no copy
_SITE_KINDS: dict[str, FaultKind] = {"record": "event", "wait": "event", "replay": "graph"}
Operation: TypeAlias = Callable[[], Exception | None]


class HostEvent:
    """An event of the host device: the point of a stream that a record marked."""

    def __init__(self, device: HostDevice, owner: Owner, name: str) -> None:
        self.device = device
        self.owner = owner
        self.name = name
        self.destroyed = False
        self.stream: HostStream | None = None
        #: operations of ``stream`` that were queued up to the record, the record included
        self.mark = 0

    def synchronize(self) -> None:
        """Run what the event's stream queued before the last record."""
        if self.destroyed:
            self.device.refuse("STR001", f"synchronize of event {self.name}, which was destroyed", self.owner)
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
        self._queued = 0
        self._capture: list[PreparedLaunch] | None = None

    @property
    def pending(self) -> int:
        """Operations that wait to run."""
        return len(self._queue)

    # --- queueing

    def launch(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Argument]) -> None:
        """Queue a kernel; see ``Stream.launch``."""
        self._require_usable()
        launch = bind(kernel, grid, arguments)
        if self.device.monitor is not None:
            self.device.monitor.check(launch_accesses(launch), self.owner, self.name)
        pass_site(self.device.faults, "launch", f"{kernel.name} on {self.name}")
        prepared = PreparedLaunch(launch)
        if self._capture is not None:
            self._capture.append(prepared)
        else:
            self._enqueue(prepared)

    def copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        """Queue a copy from host memory."""
        _require_same_bytes(target, source, "copy_in")
        self._put("copy_in", lambda: _copy_host(target, source, into_view=True), write=target)

    def copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        """Queue a copy to host memory."""
        _require_same_bytes(source, target, "copy_out")
        if not target.flags.writeable:
            raise BadInputError(
                f"copy_out of {source.name}: the target array is read-only; give a writable one"
            )
        self._put("copy_out", lambda: _copy_host(source, target, into_view=False), read=source)

    def copy(self, target: View, source: View) -> None:
        """Queue a copy within the device."""
        if target.nbytes != source.nbytes:
            raise BadInputError(
                f"copy from {source.name} ({source.nbytes} bytes) to {target.name} ({target.nbytes} bytes): "
                "give views of one size"
            )

        def run() -> None:
            bytes_at(target.address, target.nbytes)[:] = bytes_at(source.address, source.nbytes)

        self._put("copy", run, read=source, write=target)

    def fill(self, target: View, value: int) -> None:
        """Queue setting every byte of a view."""
        if not isinstance(value, int) or not 0 <= value <= 255:
            raise BadInputError(f"fill of {target.name} with {value!r}; give a byte, 0 to 255")

        def run() -> None:
            self.device.fill_bytes(target.address, target.nbytes, value)

        self._put("fill", run, write=target)

    def record(self, event: Event) -> None:
        """Queue a mark."""
        own = self._own_event(event, "record")
        self._put("record", _nothing)
        own.stream, own.mark = self, self._queued

    def wait(self, event: Event) -> None:
        """Run the other stream up to the event's record before what is queued from here on."""
        own = self._own_event(event, "wait")
        other, mark = own.stream, own.mark
        # An event that was never recorded orders nothing, as on CUDA.
        self._put("wait", _nothing if other is None else lambda: other.run_until(mark))

    # --- graphs

    def begin_capture(self) -> None:
        """Collect launches instead of queueing them."""
        self._require_usable()
        if self._capture is not None:
            raise DeviceError(
                f"stream {self.name}: begin_capture while a capture is going on; end that one first"
            )
        pass_site(self.device.faults, "graph", f"begin_capture on {self.name}")
        self._capture = []

    def end_capture(self, name: str) -> HostGraph:
        """Return the captured launches as one graph."""
        if self._capture is None:
            raise DeviceError(f"stream {self.name}: end_capture without begin_capture")
        pass_site(self.device.faults, "graph", f"end_capture of {name} on {self.name}")
        launches, self._capture = self._capture, None
        return HostGraph(name, Batch(launches, self.device.allocator))

    def abandon_capture(self) -> None:
        """Forget a capture."""
        self._capture = None

    def replay(self, graph: Graph) -> None:
        """Queue a graph after the checks that its launches had when they were captured."""
        self._require_usable()
        if not isinstance(graph, HostGraph):
            raise BadInputError(f"stream {self.name}: replay of {graph!r}; give a graph of the host device")
        if graph.destroyed:
            raise DeviceError(f"stream {self.name}: replay of graph {graph.name}, which was destroyed")
        if self.device.monitor is not None:
            self.device.monitor.check(graph.accesses, self.owner, self.name)
        self._put("replay", lambda: self._run_batch(graph.batch))

    # --- running

    def synchronize(self) -> None:
        """Run everything queued so far."""
        self._require_usable()
        self.run_until(self._queued)

    def run_until(self, mark: int) -> None:
        """Run queued operations until ``mark`` of them, counted since the stream began, are done.

        What a callback of the findings raises is raised when they are. An operation that is interrupted ends the
        queue: what stands behind it relies on what it should have done.
        """
        failure: Exception | None = None
        try:
            while self._queue and self._queued - len(self._queue) < mark:
                failure = failure or self._run_next(mark)
        except BaseException:
            self._queue.clear()
            raise
        finally:
            self.device.drop_retired()
        if failure is not None:
            raise failure

    def _run_next(self, mark: int) -> Exception | None:
        operation = self._queue.popleft()
        if not isinstance(operation, PreparedLaunch):
            return operation()
        launches = [operation]
        while self._queue and self._queued - len(self._queue) < mark:
            following = self._queue[0]
            if not isinstance(following, PreparedLaunch):
                break
            launches.append(following)
            self._queue.popleft()
        return self._run_batch(Batch(launches, self.device.allocator))

    def _run_batch(self, batch: Batch) -> Exception | None:
        return batch.run(self.device, self.device.threads, self.name, self.owner)

    def destroy(self) -> None:
        """Run what is queued, then give the stream up."""
        if not self.destroyed:
            self.abandon_capture()
            self.synchronize()
            self.destroyed = True
            self.device.streams.discard(self)

    # --- checks

    def _enqueue(self, work: PreparedLaunch | Operation) -> None:
        self._queue.append(work)
        self._queued += 1

    def _put(
        self, what: str, operation: Operation, *, read: View | None = None, write: View | None = None
    ) -> None:
        self._require_usable()
        if self._capture is not None:
            raise DeviceError(f"stream {self.name}: {what} during capture; only launches can be captured")
        modes: tuple[tuple[View | None, Mode], ...] = ((read, "read"), (write, "write"))
        accesses = [Access(what, view, mode) for view, mode in modes if view is not None]
        if self.device.monitor is not None:
            self.device.monitor.check(accesses, self.owner, self.name)
        else:
            for access in accesses:
                access.view.check_live(stream=self.name, actor=self.owner.name)
        named = f"{what} of {accesses[-1].view.name}" if accesses else what
        pass_site(self.device.faults, _SITE_KINDS.get(what, "copy"), f"{named} on {self.name}")
        self._enqueue(operation)

    def _require_usable(self) -> None:
        if self.destroyed:
            self.device.refuse(
                "STR001", f"stream {self.name} of {self.owner} was destroyed", self.owner, self.name
            )

    def _own_event(self, event: Event, what: str) -> HostEvent:
        if not isinstance(event, HostEvent) or event.device is not self.device:
            self.device.refuse(
                "STR001", f"{what} of an event that this device did not create", self.owner, self.name
            )
        if event.destroyed:
            self.device.refuse(
                "STR001", f"{what} of event {event.name}, which was destroyed", self.owner, self.name
            )
        return event


def _nothing() -> None:
    pass


def _require_same_bytes(view: View, array: npt.NDArray[Any], what: str) -> None:
    wanted = f"give a contiguous array of {view.nbytes} bytes"
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise BadInputError(f"{what} of {view.name}: {type(array).__name__} is no array of numbers; {wanted}")
    if not array.flags.c_contiguous or array.nbytes != view.nbytes:
        order = "" if array.flags.c_contiguous else "not contiguous "
        raise BadInputError(
            f"{what} of {view.name}: the array is {order}{array.dtype} {array.shape}; {wanted}"
        )


def _copy_host(view: View, array: npt.NDArray[Any], *, into_view: bool) -> None:
    if view.nbytes == 0:
        return
    device, host = bytes_at(view.address, view.nbytes), array.reshape(-1).view(np.uint8)
    if into_view:
        device[:] = host
    else:
        host[:] = device
