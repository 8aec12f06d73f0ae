"""Level ``audit`` for a device: its calls as operations of a race detector, conflicts as refusals."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from instrumentation.devices.monitor import Access
from instrumentation.findings import CallSite
from instrumentation.graphs import GraphRegistry
from instrumentation.happens_before import handover
from instrumentation.happens_before.accesses import HOST, HostTouch, Kind, Operation, Touch
from instrumentation.happens_before.detector import RaceDetector
from instrumentation.happens_before.footprint import Footprint
from instrumentation.happens_before.report import Freed, HostArray, finding_of
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    import numpy.typing as npt

    from instrumentation.devices.captured import CapturedGraph
    from instrumentation.devices.checked_stream import CheckedEvent, CheckedStream
    from instrumentation.devices.watched import WatchedDevice
    from instrumentation.findings import BufferFacts, Finding, FindingLog
    from instrumentation.happens_before.accesses import Conflict
    from instrumentation.happens_before.clocks import StreamClock
    from instrumentation.happens_before.order import Snapshot
    from instrumentation.ownership import Owner
    from instrumentation.view import View

HostUse = Literal["read", "write", "free"]
_KINDS = {"read": Kind.READ, "write": Kind.WRITE, "free": Kind.FREE}
_NO_ONE: Any = None


class Shared:
    """One detector for all devices that report to one log: a host array may be copied to by several."""

    def __init__(self) -> None:
        self.detector = RaceDetector()
        self.lock = threading.RLock()


_shared: WeakKeyDictionary[FindingLog, Shared] = WeakKeyDictionary()


class Step:
    """An operation that passed its checks. As a context manager around what queues it: kept if that succeeds."""

    __slots__ = ("_audit", "_footprint", "_operations", "_touches")

    def __init__(
        self,
        audit: DeviceAudit,
        operations: Sequence[Operation],
        touches: Sequence[Touch] = (),
        footprint: Footprint | None = None,
    ) -> None:
        self._audit = audit
        self._operations = operations
        self._touches = touches
        self._footprint = footprint

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        shared = self._audit.shared
        with shared.lock:
            if self._footprint is not None:
                shared.detector.commit_footprint(self._operations[0], self._footprint)
            else:
                shared.detector.commit(self._operations, self._touches)


class DeviceAudit:
    """What happens on one device, in the order of the host's calls. Safe to use from any thread."""

    def __init__(self, device: WatchedDevice, findings: FindingLog) -> None:
        self.device = device
        self.findings = findings
        self.shared = _shared.setdefault(findings, Shared())
        #: apart from the memory of other devices of that name
        self.space = f"{device.name} {id(self):#x}"
        self._streams: dict[CheckedStream[Any, Any, Any], StreamClock] = {}
        #: graphs that were captured here, and captures under way
        self.graphs = GraphRegistry(findings, device.name)

    # --- operations: each is refused here, or kept by the Step

    def operation(self, stream: CheckedStream[Any, Any, Any], accesses: Sequence[Access]) -> Step:
        """A launch, copy or fill. Raises ``RefusedError`` (STR010, STR011; of lent buffers OWN011, OWN012)."""
        with self.shared.lock:
            op = self._begin(stream)
            broken = self._broken(stream, accesses)
            touches = self._touches(op, accesses)
            conflict = self.shared.detector.check(touches)
        self._refuse(conflict, broken)
        return Step(self, (op,), touches)

    def unordered(self, stream: CheckedStream[Any, Any, Any], accesses: Sequence[Access]) -> Conflict | None:
        """What accesses would conflict with, were they queued now. Reports nothing."""
        with self.shared.lock:
            return self.shared.detector.check(self._touches(self._begin(stream), accesses))

    def copy_in(
        self, stream: CheckedStream[Any, Any, Any], accesses: Sequence[Access], source: npt.NDArray[Any]
    ) -> Step:
        """A copy from a host array. Raises ``RefusedError``: as above, and STR013."""
        detail = HostArray("copy_in", source, stream.owner)
        with self.shared.lock:
            op = self._begin(stream)
            broken = self._broken(stream, accesses)
            touches = self._touches(op, accesses)
            read = Touch(op, HOST, *_extent(source), Kind.READ, detail)
            conflict = None
            if self.device.stages_copies:
                conflict = self.shared.detector.check_host(read)
            else:
                touches.insert(0, read)
            conflict = conflict or self.shared.detector.check(touches)
        self._refuse(conflict, broken)
        return Step(self, (op,), touches)

    def copy_out(
        self, stream: CheckedStream[Any, Any, Any], accesses: Sequence[Access], target: npt.NDArray[Any]
    ) -> Step:
        """A copy to a host array, which lands when the host waits. Raises ``RefusedError``, as ``copy_in``."""
        with self.shared.lock:
            op = self._begin(stream)
            broken = self._broken(stream, accesses)
            touches = self._touches(op, accesses)
            landing = Operation(self._clock(stream).landing, op.site)
            detail = HostArray("copy_out", target, stream.owner)
            touches.append(Touch(landing, HOST, *_extent(target), Kind.WRITE, detail))
            conflict = self.shared.detector.check(touches)
        self._refuse(conflict, broken)
        return Step(self, (op, landing), touches)

    def replay(self, stream: CheckedStream[Any, Any, Any], graph: CapturedGraph) -> Step:
        """A replay. Raises ``RefusedError``, as ``operation``."""
        with self.shared.lock:
            op = self._begin(stream, graph.name)
            broken = self._broken(stream, graph.standing.lent)
            footprint = graph.footprint
            if footprint is None or footprint.space != self.space:
                footprint = Footprint(self.space, self._touches(_NO_ONE, graph.every_access()))
                graph.footprint = footprint
            conflict = self.shared.detector.check_footprint(op, footprint)
        self._refuse(conflict, broken)
        return Step(self, (op,), footprint=footprint)

    # --- events and waiting: told when it was done

    def recorded(self, stream: CheckedStream[Any, Any, Any], event: CheckedEvent) -> None:
        """An event was recorded."""
        with self.shared.lock:
            self.shared.detector.order.record(event, self._clock(stream))

    def waits(self, stream: CheckedStream[Any, Any, Any], event: CheckedEvent) -> None:
        """A stream was made to wait for an event."""
        with self.shared.lock:
            self.shared.detector.order.wait(self._clock(stream), event)

    def snapshot(self, event: object) -> Snapshot | None:
        """What an event stands for now; None when it was never recorded."""
        with self.shared.lock:
            return self.shared.detector.order.snapshot(event)

    def destroyed_event(self, event: CheckedEvent) -> None:
        """An event was given up."""
        with self.shared.lock:
            self.shared.detector.order.destroy_event(event)

    def host_waited_stream(self, stream: CheckedStream[Any, Any, Any]) -> None:
        """The host waited for all that a stream has queued."""
        with self.shared.lock:
            clock = self._streams.get(stream)
            if clock is not None:
                self.shared.detector.order.host_waits_stream(clock)
                self.shared.detector.host_waited()

    def host_waited_event(self, event: CheckedEvent) -> None:
        """The host waited for an event."""
        with self.shared.lock:
            self.shared.detector.order.host_waits_event(event)
            self.shared.detector.host_waited()

    def destroyed_stream(self, stream: CheckedStream[Any, Any, Any]) -> None:
        """A stream was given up; the host waited for it before."""
        with self.shared.lock:
            clock = self._streams.pop(stream, None)
            if clock is not None:
                self.shared.detector.order.destroy_stream(clock)

    # --- the host

    def host_access(self, array: npt.NDArray[Any], use: HostUse, owner: Owner | None = None) -> None:
        """The host is about to use an array itself. Raises ``RefusedError`` (STR013)."""
        detail = HostArray(f"the host's {use}", array, owner)
        with self.shared.lock:
            touch = HostTouch(HOST, *_extent(array), _KINDS[use], CallSite(), detail)
            conflict = self.shared.detector.check_host(touch)
        self._refuse(conflict)

    def host_access_memory(self, view: View, use: Literal["read", "write"], owner: Owner) -> None:
        """The host is about to use device memory itself. Raises ``RefusedError``, as ``operation``."""
        access = Access(f"the host's {use}", view, use)
        stop = view.address + view.nbytes
        with self.shared.lock:
            touch = HostTouch(self.space, view.address, stop, _KINDS[use], CallSite(), access)
            order = self.shared.detector.order
            broken = handover.broken((access,), owner, None, order.host, order, self.device.name)
            conflict = self.shared.detector.check_host(touch)
        self._refuse(conflict, broken, owner)

    def free_finding(self, what: str, facts: BufferFacts) -> Finding | None:
        """STR012 when queued work may still touch memory that is about to be given up; for the caller to report."""
        if self.device.lost:
            return None
        with self.shared.lock:
            stop = facts.address + facts.nbytes
            touch = HostTouch(self.space, facts.address, stop, Kind.FREE, CallSite(), Freed(what, facts))
            conflict = self.shared.detector.check_host(touch)
            return None if conflict is None else self._finding(conflict)

    def forget(self, address: int, nbytes: int) -> None:
        """Memory went back to the device, which runs what names it before."""
        with self.shared.lock:
            self.shared.detector.forget(self.space, address, address + nbytes)

    # --- parts

    def _clock(self, stream: CheckedStream[Any, Any, Any]) -> StreamClock:
        clock = self._streams.get(stream)
        if clock is None:
            order = self.shared.detector.order
            clock = order.create_stream(self.space, stream.name, stream.owner.name)
            self._streams[stream] = clock
        return clock

    def _begin(self, stream: CheckedStream[Any, Any, Any], graph: str = "") -> Operation:
        clock = self._clock(stream)
        self.shared.detector.enter(clock)
        return Operation(clock, CallSite(), graph)

    def _broken(self, stream: CheckedStream[Any, Any, Any], accesses: Iterable[Access]) -> Finding | None:
        """OWN011 or OWN012 of what is lent and not handed over yet. After ``_begin``."""
        order, clock = self.shared.detector.order, self._clock(stream).clock
        return handover.broken(accesses, stream.owner, stream.name, clock, order, self.device.name)

    def _touches(self, op: Operation, accesses: Iterable[Access]) -> list[Touch]:
        space = self.space
        touches = []
        for access in accesses:
            view = access.view
            start = view.address
            kind = Kind.READ if access.mode == "read" else Kind.WRITE
            touches.append(Touch(op, space, start, start + view.nbytes, kind, access))
        return touches

    def _finding(self, conflict: Conflict) -> Finding:
        return finding_of(conflict, self.device.name, self.shared.detector.order.host)

    def _refuse(
        self, conflict: Conflict | None, broken: Finding | None = None, owner: Owner | None = None
    ) -> None:
        """Raise for a lease that is broken, or else for a conflict, of the host's doing when ``owner`` is given."""
        finding = broken
        if finding is None and conflict is not None:
            with self.shared.lock:
                finding = self._finding(conflict)
            if owner is not None:
                finding = replace(finding, actor=owner.name)
            finding = handover.blamed(finding, conflict)
        if finding is not None:
            self.findings.append(finding)
            raise refused(finding)


def _extent(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Addresses of an array's first byte, and behind its last: all between, for one that is not contiguous."""
    address: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous:
        return address, address + array.nbytes
    if not array.size:
        return address, address
    low = sum(min(0, step * (n - 1)) for step, n in zip(array.strides, array.shape, strict=True))
    high = sum(max(0, step * (n - 1)) for step, n in zip(array.strides, array.shape, strict=True))
    return address + low, address + high + array.itemsize
