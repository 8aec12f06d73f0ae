"""Streams and events of the host device: queues whose work runs when somebody waits for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from instrumentation.devices.checked_stream import CheckedEvent, CheckedStream
from instrumentation.devices.host_batch import Batch, HostGraph, PreparedLaunch
from instrumentation.devices.host_memory import bytes_at
from instrumentation.errors import DeviceError
from instrumentation.shadow import WRITTEN, shadow_of

if TYPE_CHECKING:
    from instrumentation.devices.host import HostDevice
    from instrumentation.devices.launch import Launch
    from instrumentation.handles import LibraryCall
    from instrumentation.ownership import Owner
    from instrumentation.view import View

#: queued work; returns what a callback of the findings raised meanwhile
Operation: TypeAlias = Callable[[], Exception | None]


@dataclass(frozen=True, slots=True, eq=False)
class WaitFor:
    """Queued work: runs another stream up to a mark."""

    stream: HostStream
    mark: int

    def __call__(self) -> None:
        """Run what is not done yet; with a schedule all is, or this would not have been chosen."""
        if self.stream.done < self.mark:
            self.stream.run_until(self.mark)


_handles = itertools.count(0x1000)


class HostEvent(CheckedEvent):
    """An event of the host device: the point of a stream that a record marked."""

    def __init__(self, device: HostDevice, owner: Owner, name: str) -> None:
        super().__init__(device, owner, name)
        self.handle = next(_handles)
        device.handles.add(self, self.handle)
        self.stream: HostStream | None = None
        #: operations of ``stream`` that were queued up to the record, the record included
        self.mark = 0

    def _wait_for_record(self) -> None:
        try:
            if self.stream is not None:
                self.stream.run_until(self.mark)
        finally:
            # What did not run was dropped.
            self._host_waited()


class HostStream(CheckedStream[PreparedLaunch, HostEvent, HostGraph]):
    """A queue of operations, run in order when somebody waits."""

    device: HostDevice

    def __init__(self, device: HostDevice, owner: Owner, name: str) -> None:
        super().__init__(device, owner, name)
        self.handle = next(_handles)
        device.handles.add(self, self.handle)
        #: streams in the order in which they were made, whatever becomes of the handle
        self.number: int = self.handle
        self._queue: deque[PreparedLaunch | Operation] = deque()
        self._queued = 0
        #: what a callback of the findings raised, for who waits next; with a schedule only
        self._failure: Exception | None = None

    @property
    def pending(self) -> int:
        """Operations that wait to run."""
        return len(self._queue)

    @property
    def done(self) -> int:
        """Operations that ran, since the stream began."""
        return self._queued - len(self._queue)

    @property
    def ready(self) -> bool:
        """Whether the next operation can run now: there is one, and it waits for no other stream."""
        if not self._queue:
            return False
        head = self._queue[0]
        return not isinstance(head, WaitFor) or head.stream.done >= head.mark

    # --- queueing

    def _prepare(self, launch: Launch) -> PreparedLaunch:
        return PreparedLaunch(
            launch, trap=self.device.traps_kernel(launch.kernel), numerics=self.device.numerics is not None
        )

    def _queue_launch(self, prepared: PreparedLaunch) -> None:
        self._enqueue(prepared)

    def _queue_call(self, call: LibraryCall) -> None:
        call.queue()
        self._enqueue(lambda: self._after_call(call))

    def _after_call(self, call: LibraryCall) -> Exception | None:
        """Compare the canaries of what a library's call wrote."""
        views = [view for name, view in call.views.items() if name in call.writes]
        for view in views:
            _mark_written(view)
        allocator = self.device.allocator
        failure: Exception | None = None
        regions = [] if allocator is None else allocator.canary_regions({view.buffer for view in views})
        for address, nbytes, byte in regions:
            offset = self.device.first_mismatch(address, nbytes, byte)
            if offset >= 0 and allocator is not None:
                try:
                    allocator.find_damage(
                        address + offset,
                        kernel=call.name,
                        launch=call.number,
                        stream=self.name,
                        actor=self.owner.name,
                    )
                except Exception as error:  # noqa: BLE001 - of a callback: who waits raises it
                    failure = failure or error
        return failure

    def _capture_call(self, call: LibraryCall) -> PreparedLaunch:
        raise DeviceError(
            f"stream {self.name}: {call.name} during capture; the host device captures launches of kernels only"
        )

    def enqueue_call(self, work: Callable[[], None]) -> None:
        """For a library that has this stream: put its work behind what is queued."""
        self._enqueue(work)

    def _queue_copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        self._enqueue(lambda: _copy_host(target, source, into_view=True))

    def _queue_copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        self._enqueue(lambda: _copy_host(source, target, into_view=False))

    def _queue_copy(self, target: View, source: View) -> None:
        def run() -> None:
            bytes_at(target.address, target.nbytes)[:] = bytes_at(source.address, source.nbytes)
            _mark_copied(target, source)

        self._enqueue(run)

    def _queue_fill(self, target: View, value: int) -> None:
        def run() -> None:
            self.device.fill_bytes(target.address, target.nbytes, value)
            _mark_written(target)

        self._enqueue(run)

    def _queue_record(self, event: HostEvent) -> None:
        self._enqueue(_nothing)
        event.stream, event.mark = self, self._queued

    def _queue_wait(self, event: HostEvent) -> None:
        """Run the other stream up to the event's record before what is queued from here on."""
        if event.stream is None:
            # An event that was never recorded orders nothing, as on CUDA.
            self._enqueue(_nothing)
        else:
            self._enqueue(WaitFor(event.stream, event.mark))

    def _make_graph(self, name: str, launches: list[PreparedLaunch]) -> HostGraph:
        return HostGraph(self.device, name, self._batch(launches))

    def _queue_replay(self, graph: HostGraph) -> None:
        self._enqueue(lambda: self._run_batch(graph.batch))

    def _enqueue(self, work: PreparedLaunch | Operation) -> None:
        self._queue.append(work)
        self._queued += 1
        if self.device.schedule is not None:
            self.device.schedule.queued()

    # --- running

    def synchronize(self) -> None:
        """Run everything queued so far."""
        self._require_usable()
        try:
            self.run_until(self._queued)
        finally:
            # What did not run was dropped.
            self._host_waited()
        self.device.look_at_memory()

    def run_until(self, mark: int) -> None:
        """Run queued operations until ``mark`` of them, counted since the stream began, are done.

        What a callback of the findings raises is raised when they are. An operation that is interrupted ends the
        queue: what stands behind it relies on what it should have done.
        """
        if self.device.schedule is not None:
            self.device.schedule.run_until(self, mark)
            failure, self._failure = self._failure, None
        else:
            failure = self._run(mark)
        if failure is not None:
            raise failure

    def run_ready(self, count: int) -> None:
        """Run up to ``count`` operations, as many as wait for no other stream. What callbacks raise is kept."""
        stop = self.done + count
        while self.ready and self.done < stop:
            failure = self._run(
                self.done + 1 if isinstance(self._queue[0], WaitFor) else self._launches(stop)
            )
            self._failure = self._failure or failure

    def drop(self) -> None:
        """Forget what is queued."""
        self._queue.clear()

    def _launches(self, stop: int) -> int:
        """The mark up to which nothing waits for another stream, ``stop`` at most."""
        ahead = itertools.takewhile(lambda work: not isinstance(work, WaitFor), self._queue)
        return self.done + sum(1 for _ in itertools.islice(ahead, stop - self.done))

    def _run(self, mark: int) -> Exception | None:
        failure: Exception | None = None
        try:
            while self._queue and self.done < mark:
                # Run first: a failure that is known must not keep what stands behind it from running.
                came = self._run_next(mark)
                failure = failure or came
        except BaseException:
            self._queue.clear()
            raise
        finally:
            self.device.drop_retired()
        return failure

    def _run_next(self, mark: int) -> Exception | None:
        operation = self._queue.popleft()
        if not isinstance(operation, PreparedLaunch):
            return operation()
        launches = [operation]
        while self._queue and self.done < mark:
            following = self._queue[0]
            if not isinstance(following, PreparedLaunch):
                break
            launches.append(following)
            self._queue.popleft()
        return self._run_batch(self._batch(launches))

    def _batch(self, launches: list[PreparedLaunch]) -> Batch:
        return Batch(launches, self.device.allocator, self.device.numerics)

    def _run_batch(self, batch: Batch) -> Exception | None:
        return batch.run(self.device, self.device.threads, self.name, self.owner)

    def destroy(self) -> None:
        """Run what is queued, then give the stream up."""
        if not self.destroyed:
            self.abandon_capture()
            self._restore_handle()
            self.synchronize()
            self.device.streams.discard(self)
            self._forget()


def _nothing() -> None:
    pass


def _mark_written(view: View) -> None:
    shadow = shadow_of(view)
    if shadow is not None:
        shadow.mark(view.address, view.nbytes, WRITTEN)


def _mark_copied(target: View, source: View) -> None:
    """What was never written is not so once it is copied."""
    to, of = shadow_of(target), shadow_of(source)
    if to is not None and of is not None:
        states = bytes_at(source.address + of.delta, source.nbytes)
        bytes_at(target.address + to.delta, target.nbytes)[:] = states
    else:
        _mark_written(target)


def _copy_host(view: View, array: npt.NDArray[Any], *, into_view: bool) -> None:
    if view.nbytes == 0:
        return
    device, host = bytes_at(view.address, view.nbytes), array.reshape(-1).view(np.uint8)
    if into_view:
        device[:] = host
        _mark_written(view)
    else:
        host[:] = device
