"""Streams, events and captured graphs of a GPU."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from instrumentation.devices.captured import CapturedGraph
from instrumentation.devices.checked_stream import CheckedEvent, CheckedStream
from instrumentation.devices.cuda_checks import CanaryChecks, RegionTable, written_buffers
from instrumentation.devices.cuda_driver import DriverCallError
from instrumentation.devices.cuda_launch import Prepared, PreparedCall, PreparedLaunch
from instrumentation.devices.cuda_numerics import CudaNumerics
from instrumentation.devices.cuda_staging import Staging
from instrumentation.devices.cuda_trap import CudaTrap, mark_copied, mark_written, written_marks
from instrumentation.devices.launch import bind
from instrumentation.devices.numerics import NumericChecks
from instrumentation.kernel.cuda_entry import LEAST_CAPABILITY
from instrumentation.shadow import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from instrumentation.devices.cuda import CudaDevice
    from instrumentation.devices.cuda_driver import Driver
    from instrumentation.devices.launch import Argument, Grid, Launch
    from instrumentation.handles import LibraryCall
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Owner
    from instrumentation.view import View


#: blocks of launches that overlap at their ends
MOST_BLOCKS = 8192
#: checked launches outside graphs whose reports wait to be looked at
MOST_TRAPPED = 1024


class CudaEvent(CheckedEvent):
    """An event of a GPU."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, owner: Owner, name: str) -> None:
        super().__init__(device, owner, name)
        self._calls = device.context.calls(f"event {name} of {owner}")
        with self._calls:
            self.handle = device.context.driver.create_event()
        device.handles.add(self, self.handle)
        #: where it was recorded last, and how many pieces of copies out had been queued there
        self.stream: CudaStream | None = None
        self.landings = 0

    def _wait_for_record(self) -> None:
        # An event that was never recorded is done, for the driver too.
        with self._calls:
            self.device.context.driver.synchronize_event(self.handle)
            if self.stream is not None:
                self.stream.staging.land_first(self.landings)
        self._host_waited()

    def destroy(self) -> None:
        """Give the event up."""
        if not self.destroyed:
            super().destroy()
            if self.device.context.lost is None:
                with self._calls:
                    self.device.context.driver.destroy_event(self.handle)


class CudaGraph(CapturedGraph):
    """Captured launches of a GPU, instantiated."""

    device: CudaDevice

    def __init__(self, stream: CudaStream, name: str, launches: list[Prepared]) -> None:
        super().__init__(stream.device, name, [prepared.launch for prepared in launches])
        self._calls = stream.device.context.calls(f"graph {name}")
        self.table: RegionTable | None = None
        #: of its checked launches
        self.traps = [prepared.trap for prepared in launches if prepared.trap is not None]
        self._table_address = 0
        #: where it was replayed last
        self.stream = stream
        self.handle: Any = None
        account = stream.device.account
        # What the driver took for it, which free memory tells, and what it was asked for.
        self._held = account.hold(stream.owner, f"graph {name}", measured=True)
        self._held_table = account.hold(stream.owner, f"graph {name}")
        self._replayed = False
        try:
            with self._calls:
                checks = stream.checks()
                #: what looks at numbers in it
                self.numerics = stream.numerics()
                if self.numerics is not None:
                    self.numerics.make_room(launches)
                self.number_checks = tuple(each.numerics for each in launches if each.numerics is not None)
                if checks is not None:
                    self.table, self._table_address = checks.table(written_buffers(self.captured))
                    if self.table is not None:
                        self._held_table.grow(device=self.table.nbytes)
                with self._measuring():
                    self.handle = self._capture(launches)
        except BaseException:
            self.destroy()
            raise

    def _may_overlap(self, *launches: Prepared) -> bool:
        """Whether the second may start while the first runs: it waits for it, but takes room that large ones need."""
        if self.device.context.compute_capability < LEAST_CAPABILITY or launches[0].marks:
            return False
        # A library's kernels do not wait for those before them.
        return all(
            isinstance(prepared, PreparedLaunch) and prod(prepared.grid) <= MOST_BLOCKS
            for prepared in launches
        )

    def _capture(self, launches: list[Prepared]) -> Any:
        driver, handle = self.device.context.driver, self.stream.handle
        driver.begin_capture(handle)
        try:
            for before, prepared in zip((None, *launches), launches, strict=False):
                if self.numerics is not None:
                    self.numerics.queue(prepared, partial(prepared.queue, driver, handle))
                    continue
                prepared.queue(
                    driver, handle, early=before is not None and self._may_overlap(before, prepared)
                )
        except BaseException:
            with suppress(DriverCallError):  # what made the launch fail may have ended the capture too
                driver.destroy_graph(driver.end_capture(handle))
            raise
        return driver.end_capture(handle)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Around what may make the driver take memory for this graph."""
        context = self.device.context
        before = context.free_memory()
        yield
        self._held.grow(device=max(0, before - context.free_memory()))

    def queue(self, driver: Driver, stream: Any) -> None:
        """Queue a replay; the first one brings the graph to the GPU."""
        if self._replayed:
            driver.replay(self.handle, stream)
            return
        with self._measuring():
            driver.replay(self.handle, stream)
        self._replayed = True

    def destroy(self) -> None:
        """Unpin the buffers and give the graph up."""
        if self.destroyed:
            return
        super().destroy()
        try:
            self._release()
        finally:
            self._held.drop()
            self._held_table.drop()

    def _release(self) -> None:
        context = self.device.context
        graph, self.handle = self.handle, None
        address, self._table_address = self._table_address, 0
        if context.lost is not None or (graph is None and not address):
            return
        self.device.settle()
        with self._calls:
            if self.stream.pending:
                context.driver.synchronize_stream(self.stream.handle)
            if address:
                context.driver.free(address)
            if graph is not None:
                before = context.free_memory()
                context.driver.destroy_graph(graph)
                self._held.drop(returned=context.free_memory() - before)

    def __str__(self) -> str:
        return f"graph {self.name}"


class CudaStream(CheckedStream[Prepared, CudaEvent, CudaGraph]):
    """A stream of a GPU. Work begins when it is queued; what a copy out brings is there after ``synchronize``."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, owner: Owner, name: str) -> None:
        super().__init__(device, owner, name)
        self._driver = device.context.driver
        self._calls = device.context.calls(f"stream {name} of {owner}", self._drop)
        #: whether anything was queued since the last ``synchronize``
        self.pending = False
        self._checks: CanaryChecks | None = None
        #: checked launches that were queued, each once, and whose reports nobody looked at since
        self._trapped: dict[CudaTrap, None] = {}
        self._numerics: CudaNumerics | None = None
        self._failure: Exception | None = None
        with device.context.calls(f"stream {name} of {owner}"):
            self.handle = self._driver.create_stream()
        device.handles.add(self, self.handle)
        held = device.account.hold(owner, f"staging of stream {name}")
        self.staging = Staging(self._driver, self.handle, held=held)

    # --- launches

    def prepare(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Argument]) -> PreparedLaunch:
        """A launch that is checked and packed once and queued often: see ``launch_prepared``."""
        self._require_usable()
        launch = bind(kernel, grid, arguments)
        self._admit_work(launch, "launch")
        return self._prepare(launch)

    def launch_prepared(self, prepared: PreparedLaunch) -> None:
        """Queue a prepared launch, after the checks that can have another result by now."""
        self._require_usable()
        with self._ordered(self._admit_work(prepared.launch, "launch")):
            self._queue_launch(prepared)

    def _prepare(self, launch: Launch) -> PreparedLaunch:
        device = self.device
        checked = device.traps_kernel(launch.kernel)
        return PreparedLaunch(
            launch,
            device.context.function(launch.kernel, checked=checked),
            device.reports.trap(launch) if checked else None,
            NumericChecks(launch) if device.numerics is not None else None,
            written_marks(launch) if device.trap and not checked else (),
        )

    def _queue_call(self, call: LibraryCall) -> None:
        device = self.device
        device.settle()
        self.pending = True
        call.queue()
        with self._calls:
            device.context.last_launch = call
            for address, nbytes in written_marks(call):
                self._driver.fill(address, WRITTEN, nbytes, self.handle)
            checks = self.checks()
            if checks is not None:
                checks.after_launch(call)

    def _capture_call(self, call: LibraryCall) -> PreparedCall:
        return PreparedCall(call, written_marks(call))

    def _checked_again(self, prepared: Prepared) -> Prepared:
        if isinstance(prepared, PreparedCall):
            return self._capture_call(prepared.launch.admitted(self))
        return prepared

    def _queue_launch(self, prepared: Prepared) -> None:
        device = self.device
        if prepared.trap is not None:
            self._expect_reports([prepared.trap])
        device.settle()
        with self._calls:
            self.pending = True
            numerics = self.numerics()
            queue = partial(prepared.queue, self._driver, self.handle)
            if numerics is None:
                queue()
            else:
                numerics.make_room((prepared,))
                numerics.queue(prepared, queue)
            device.context.last_launch = prepared
            checks = self.checks()
            if checks is not None:
                checks.after_launch(prepared.launch)

    def checks(self) -> CanaryChecks | None:
        """The checks of this stream; None when nobody watches the canaries."""
        allocator = self.device.allocator
        if self._checks is not None and self._checks.allocator is not allocator:
            self.drain()
            self._checks.release()
            self._checks = None
        if self._checks is None and allocator is not None:
            self._checks = CanaryChecks(self.device, self, allocator)
        return self._checks

    def numerics(self) -> CudaNumerics | None:
        """What looks at the numbers of this stream's launches; None when nobody does."""
        watch = self.device.numerics
        if self._numerics is not None and self._numerics.watch is not watch:
            self.drain()
            self._numerics.release()
            self._numerics = None
        if self._numerics is None and watch is not None:
            self._numerics = CudaNumerics(self.device, self, watch)
        return self._numerics

    # --- copies

    def _queue_copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        self.device.settle()
        with self._calls:
            self.pending = True
            self.staging.copy_in(target.address, source.reshape(-1).view(np.uint8))
            mark_written(self._driver, self.handle, target)

    def _queue_copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        self.device.settle()
        with self._calls:
            self.pending = True
            self.staging.copy_out(target.reshape(-1).view(np.uint8), source.address)

    def _queue_copy(self, target: View, source: View) -> None:
        self.device.settle()
        with self._calls:
            if target.nbytes:
                self.pending = True
                self._driver.copy(target.address, source.address, target.nbytes, self.handle)
                mark_copied(self._driver, self.handle, target, source)

    def _queue_fill(self, target: View, value: int) -> None:
        self.device.settle()
        with self._calls:
            if target.nbytes:
                self.pending = True
                self._driver.fill(target.address, value, target.nbytes, self.handle)
                mark_written(self._driver, self.handle, target)

    # --- events

    def _queue_record(self, event: CudaEvent) -> None:
        with self._calls:
            self._driver.record(event.handle, self.handle)
            event.stream, event.landings = self, self.staging.n_queued

    def _queue_wait(self, event: CudaEvent) -> None:
        with self._calls:
            self.pending = True
            self._driver.wait(self.handle, event.handle)

    # --- graphs

    def _make_graph(self, name: str, launches: list[Prepared]) -> CudaGraph:
        # Launches are collected first and captured in one go: while a capture is going on the driver refuses to
        # allocate and to load kernels, and whoever gives a capture up leaves nothing behind.
        self.device.settle()
        return CudaGraph(self, name, launches)

    def _queue_replay(self, graph: CudaGraph) -> None:
        device = self.device
        self._expect_reports(graph.traps)
        device.settle()
        numerics = graph.numerics
        if numerics is not None and numerics.stream is not self:
            # State and marks are those of the stream that captured it, whose launches must not run meanwhile.
            numerics.stream.drain()
        with self._calls:
            self.pending = True
            graph.stream = self
            graph.queue(self._driver, self.handle)
            device.context.last_launch = graph
            checks = self.checks()
            if checks is not None:
                checks.after_replay(graph.table, graph.captured, graph.name)
        if numerics is not None:
            numerics.runs(graph.number_checks)
            if numerics.stream is not self:
                self.drain()
                failure = numerics.collect()
                self._failure = self._failure or failure

    # --- waiting

    def synchronize(self) -> None:
        """Wait until everything queued so far is done; what canaries show is reported then."""
        self._require_usable()
        self.drain()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.device.look_at_memory()

    def drain(self) -> None:
        """Wait, let copies land and report damage. What a callback of the findings raises waits for ``synchronize``."""
        if not self.pending:
            self._host_waited()
            return
        with self._calls:
            self._driver.synchronize_stream(self.handle)
            self.pending = False
            self.staging.land()
        self._host_waited()
        for checks in (self._checks, self._numerics):
            failure = checks.collect() if checks is not None else None
            self._failure = self._failure or failure
        if self._trapped:
            trapped, self._trapped = self._trapped, {}
            failure = self.device.reports.collect(trapped, self.name, self.owner)
            self._failure = self._failure or failure

    def _expect_reports(self, traps: Sequence[CudaTrap]) -> None:
        """Look at the reports of launches that are about to be queued when they ran; not at too many at once."""
        if len(self._trapped) >= MOST_TRAPPED:
            self.drain()
        self._trapped.update(dict.fromkeys(traps))

    def mark_pending(self) -> None:
        """Something was queued behind this stream's back."""
        self.pending = True

    def _drop(self) -> None:
        """Forget what is queued: the device is lost, and with it what the work should have done."""
        self.pending = False
        self.staging.drop()
        self._trapped.clear()
        self._host_waited()
        for checks in (self._checks, self._numerics):
            if checks is not None:
                checks.drop()

    def destroy(self) -> None:
        """Wait, then give the stream up."""
        if self.destroyed:
            return
        self.abandon_capture()
        self._restore_handle()
        try:
            self.synchronize()
        finally:
            self.device.streams.pop(self, None)
            self._forget()
            if self.device.context.lost is None:
                self._release()
            else:
                self._drop_account()

    def _drop_account(self) -> None:
        """What is left on a lost device goes with the process."""
        for held in (self.staging.held, *(each.held for each in (self._checks, self._numerics) if each)):
            if held is not None:
                held.drop()

    def _release(self) -> None:
        self.device.settle()
        with self._calls:
            self.staging.release()
            for checks in (self._checks, self._numerics):
                if checks is not None:
                    checks.release()
            self._driver.destroy_stream(self.handle)
