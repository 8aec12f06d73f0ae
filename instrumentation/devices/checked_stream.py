"""What every stream checks before work is queued, the same on every device; how it is queued is the device's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from instrumentation.devices.captured import CapturedGraph
from instrumentation.devices.launch import bind
from instrumentation.devices.monitor import Access, allowed, work_accesses
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.faults import FaultKind, pass_site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from instrumentation.devices.base import Event, Graph
    from instrumentation.devices.launch import Argument, Grid, Launch, Work
    from instrumentation.devices.watched import WatchedDevice
    from instrumentation.handles import LibraryCall
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Mode, Owner
    from instrumentation.view import View

#: fault sites of what is no copy
_SITE_KINDS: dict[str, FaultKind] = {"record": "event", "wait": "event", "replay": "graph"}
#: what is a mistake during any capture, not only one that this package's captures cannot take
_HOST_COPIES = frozenset({"copy_in", "copy_out"})
_NOT_AUDITED = nullcontext()


class CheckedEvent(ABC):
    """An event of a device that checks its use."""

    def __init__(self, device: WatchedDevice, owner: Owner, name: str) -> None:
        self.device = device
        self.owner = owner
        self.name = name
        self.destroyed = False
        #: the driver's; set by the device's part, which registers it
        self.handle: Any = None

    def synchronize(self) -> None:
        """Wait for what the event's stream queued before the last record."""
        if self.destroyed:
            self.device.refuse("STR001", f"synchronize of event {self.name}, which was destroyed", self.owner)
        self.device.check_handle(self, f"event {self.name}", self.handle, self.owner, None)
        self._wait_for_record()

    def destroy(self) -> None:
        """Give the event up."""
        if not self.destroyed:
            device = self.device
            self.handle = device.given_handle(self, f"event {self.name}", self.handle, self.owner)
            self.destroyed = True
            device.handles.remove(self)
            if device.audit is not None:
                device.audit.destroyed_event(self)

    def _host_waited(self) -> None:
        """The host has waited for the last record."""
        if self.device.audit is not None:
            self.device.audit.host_waited_event(self)

    @abstractmethod
    def _wait_for_record(self) -> None: ...


#: a launch that is ready to be queued; an event; a captured graph
P = TypeVar("P")
E = TypeVar("E", bound=CheckedEvent)
G = TypeVar("G", bound=CapturedGraph)


class CheckedStream(ABC, Generic[P, E, G]):
    """The calls of ``Stream``: each is checked, then passes its fault site, then is queued by the device's part."""

    def __init__(self, device: WatchedDevice, owner: Owner, name: str) -> None:
        self.device = device
        self.owner = owner
        self.name = name
        self.destroyed = False
        #: the driver's; set by the device's part, which registers it
        self.handle: Any = None
        self._capture: list[P] | None = None

    # --- the device's part

    @abstractmethod
    def _prepare(self, launch: Launch) -> P: ...

    @abstractmethod
    def _queue_launch(self, prepared: P) -> None: ...

    @abstractmethod
    def _queue_call(self, call: LibraryCall) -> None: ...

    @abstractmethod
    def _capture_call(self, call: LibraryCall) -> P: ...

    @abstractmethod
    def _queue_copy_in(self, target: View, source: npt.NDArray[Any]) -> None: ...

    @abstractmethod
    def _queue_copy_out(self, target: npt.NDArray[Any], source: View) -> None: ...

    @abstractmethod
    def _queue_copy(self, target: View, source: View) -> None: ...

    @abstractmethod
    def _queue_fill(self, target: View, value: int) -> None: ...

    @abstractmethod
    def _queue_record(self, event: E) -> None: ...

    @abstractmethod
    def _queue_wait(self, event: E) -> None: ...

    @abstractmethod
    def _make_graph(self, name: str, launches: list[P]) -> G: ...

    @abstractmethod
    def _queue_replay(self, graph: G) -> None: ...

    # --- queueing

    def launch(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Argument]) -> None:
        """Queue a kernel; see ``Stream.launch``."""
        self._require_usable()
        launch = bind(kernel, grid, arguments)
        accesses = self._admit_work(launch, "launch")
        prepared = self._prepare(launch)
        if self._capture is not None:
            self._capture.append(prepared)
        else:
            with self._ordered(accesses):
                self._queue_launch(prepared)

    def _admit_work(self, work: Work, kind: FaultKind) -> Sequence[Access]:
        accesses: Sequence[Access] = ()
        if self.device.monitor is not None:
            accesses = work_accesses(work)
            self.device.monitor.check(accesses, self.owner, self.name)
        if self.device.faults is not None:
            pass_site(self.device.faults, kind, f"{work.name} on {self.name}")
        return accesses

    def call(self, call: LibraryCall) -> None:
        """Queue a call of a library; see ``Stream.call``."""
        self._require_usable()
        call = call.admitted(self)
        accesses = self._admit_work(call, "library")
        if self._capture is not None:
            self._capture.append(self._capture_call(call))
            return
        call.require_alone(self)
        with self._ordered(accesses):
            self._queue_call(call)

    def copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        """Queue a copy from host memory."""
        _require_same_bytes(target, source, "copy_in")
        accesses = self._admit("copy_in", write=target)
        audit = self.device.audit
        with _NOT_AUDITED if audit is None else audit.copy_in(self, accesses, source):
            self._queue_copy_in(target, source)

    def copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        """Queue a copy to host memory."""
        _require_same_bytes(source, target, "copy_out")
        if not target.flags.writeable:
            raise BadInputError(
                f"copy_out of {source.name}: the target array is read-only; give a writable one"
            )
        accesses = self._admit("copy_out", read=source)
        audit = self.device.audit
        with _NOT_AUDITED if audit is None else audit.copy_out(self, accesses, target):
            self._queue_copy_out(target, source)

    def copy(self, target: View, source: View) -> None:
        """Queue a copy within the device."""
        if target.nbytes != source.nbytes:
            raise BadInputError(
                f"copy from {source.name} ({source.nbytes} bytes) to {target.name} ({target.nbytes} bytes): "
                "give views of one size"
            )
        with self._ordered(self._admit("copy", read=source, write=target)):
            self._queue_copy(target, source)

    def fill(self, target: View, value: int) -> None:
        """Queue setting every byte of a view."""
        if not isinstance(value, int) or not 0 <= value <= 255:
            raise BadInputError(f"fill of {target.name} with {value!r}; give a byte, 0 to 255")
        with self._ordered(self._admit("fill", write=target)):
            self._queue_fill(target, value)

    def record(self, event: Event) -> None:
        """Queue a mark."""
        own = self._own_event(event, "record")
        if own.owner != self.owner and self.device.monitor is not None:
            self.device.refuse(
                "OWN002",
                f"stream {self.name} of {self.owner} would record event {own.name} of {own.owner}; record events of "
                f"{self.owner} there, and let others wait for them",
                self.owner,
                self.name,
            )
        self._admit("record")
        self._queue_record(own)
        if self.device.audit is not None:
            self.device.audit.recorded(self, own)

    def wait(self, event: Event) -> None:
        """Let what is queued from here on wait for the event's last record."""
        own = self._own_event(event, "wait")
        self._admit("wait")
        self._queue_wait(own)
        if self.device.audit is not None:
            self.device.audit.waits(self, own)

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
        if self.device.audit is not None:
            self.device.audit.graphs.begin(self, self.name, self.owner)

    def end_capture(self, name: str) -> G:
        """Return the captured launches as one graph. At level ``audit`` one too many is reported (GRA002)."""
        if self._capture is None:
            raise DeviceError(f"stream {self.name}: end_capture without begin_capture")
        pass_site(self.device.faults, "graph", f"end_capture of {name} on {self.name}")
        launches = self._capture
        self.abandon_capture()
        graph = self._make_graph(name, [self._checked_again(prepared) for prepared in launches])
        if self.device.audit is not None:
            try:
                self.device.audit.graphs.add(graph, self.owner, self.name)
            except BaseException:  # of a callback of the findings: nobody gets to know the graph
                graph.destroy()
                raise
        return graph

    def _checked_again(self, prepared: P) -> P:
        """Before what was collected is captured in one go: what may be otherwise than when it was collected."""
        return prepared

    def abandon_capture(self) -> None:
        """Forget a capture."""
        self._capture = None
        if self.device.audit is not None:
            self.device.audit.graphs.end(self)

    def replay(self, graph: Graph) -> None:
        """Queue a graph after the checks that its launches had when they were captured."""
        self._require_usable()
        if not isinstance(graph, CapturedGraph) or graph.device is not self.device:
            kind = self.device.kind
            raise BadInputError(f"stream {self.name}: replay of {graph!r}; give a graph of the {kind} device")
        if graph.destroyed:
            raise DeviceError(f"stream {self.name}: replay of graph {graph.name}, which was destroyed")
        if self.device.monitor is not None:
            self.device.monitor.check_graph(graph, self.owner, self.name)
        self._admit("replay")
        own: Any = graph  # one of this device is of its kind
        audit = self.device.audit
        with _NOT_AUDITED if audit is None else audit.replay(self, graph):
            self._queue_replay(own)

    # --- checks

    def _ordered(self, accesses: Sequence[Access]) -> AbstractContextManager[None]:
        """Around what queues an operation: refuses it when nothing orders it, keeps it when it was queued."""
        audit = self.device.audit
        return _NOT_AUDITED if audit is None else audit.operation(self, accesses)

    def _host_waited(self) -> None:
        """The host has waited for all that is queued, or it will never run."""
        if self.device.audit is not None:
            self.device.audit.host_waited_stream(self)
            if self._capture is not None:
                self.device.audit.graphs.during_capture(
                    f"synchronize of stream {self.name}", self.owner, self
                )

    def _restore_handle(self) -> None:
        """The stream is about to be destroyed: by the handle that was given for it."""
        self.handle = self.device.given_handle(self, f"stream {self.name}", self.handle, self.owner)

    def _forget(self) -> None:
        """The stream was waited for and destroyed."""
        self.destroyed = True
        self.device.handles.remove(self)
        if self.device.audit is not None:
            self.device.audit.destroyed_stream(self)

    def _admit(self, what: str, *, read: View | None = None, write: View | None = None) -> Sequence[Access]:
        self._require_usable()
        if self._capture is not None:
            if self.device.audit is not None and what in _HOST_COPIES:
                self.device.audit.graphs.during_capture(f"{what} on stream {self.name}", self.owner, self)
            raise DeviceError(f"stream {self.name}: {what} during capture; only launches can be captured")
        if read is not None:
            self._admit_access(what, read, "read")
        if write is not None:
            self._admit_access(what, write, "write")
        if self.device.faults is not None:
            view = read if write is None else write
            named = what if view is None else f"{what} of {view.name}"
            pass_site(self.device.faults, _SITE_KINDS.get(what, "copy"), f"{named} on {self.name}")
        if self.device.audit is None:
            return ()
        modes: tuple[tuple[View | None, Mode], ...] = ((read, "read"), (write, "write"))
        return [Access(what, view, mode) for view, mode in modes if view is not None]

    def _admit_access(self, what: str, view: View, mode: Mode) -> None:
        monitor = self.device.monitor
        if monitor is None:
            view.check_live(stream=self.name, actor=self.owner.name)
        elif not allowed(view, mode, self.owner):
            monitor.check([Access(what, view, mode)], self.owner, self.name)

    def _require_usable(self) -> None:
        if self.destroyed:
            self.device.refuse(
                "STR001", f"stream {self.name} of {self.owner} was destroyed", self.owner, self.name
            )
        self.device.check_handle(self, f"stream {self.name}", self.handle, self.owner, self.name)

    def _own_event(self, event: Event, what: str) -> E:
        if not isinstance(event, CheckedEvent) or event.device is not self.device:
            self.device.refuse(
                "STR001", f"{what} of an event that this device did not create", self.owner, self.name
            )
        if event.destroyed:
            self.device.refuse(
                "STR001", f"{what} of event {event.name}, which was destroyed", self.owner, self.name
            )
        self.device.check_handle(event, f"{what}: event {event.name}", event.handle, event.owner, self.name)
        own: Any = event  # as above
        return own  # type: ignore[no-any-return]


def _require_same_bytes(view: View, array: npt.NDArray[Any], what: str) -> None:
    nbytes = view.nbytes
    numbers = isinstance(array, np.ndarray) and not array.dtype.hasobject
    if numbers and array.flags.c_contiguous and array.nbytes == nbytes:
        return
    wanted = f"give a contiguous array of {nbytes} bytes"
    if not numbers:
        raise BadInputError(f"{what} of {view.name}: {type(array).__name__} is no array of numbers; {wanted}")
    order = "" if array.flags.c_contiguous else "not contiguous "
    raise BadInputError(f"{what} of {view.name}: the array is {order}{array.dtype} {array.shape}; {wanted}")
