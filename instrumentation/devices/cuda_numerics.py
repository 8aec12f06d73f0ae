"""``--check-numerics`` on a GPU: the steps around each launch, on the same stream, also in captured graphs.

A stream has a state and marks in device memory, which its graphs share: what runs on a stream runs one by one. The host
reads the state when the stream was synchronised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from instrumentation.devices.cuda_launch import DeviceArray, block_of, pack
from instrumentation.devices.numerics import KERNELS, fresh_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from instrumentation.devices.cuda import CudaDevice
    from instrumentation.devices.cuda_launch import Prepared
    from instrumentation.devices.cuda_stream import CudaStream
    from instrumentation.devices.numerics import NumericChecks, NumericsWatch
    from instrumentation.devices.steps import Step

#: bytes of marks that a stream begins with: enough for 8 Mi numbers
_MARKS_NBYTES = 1 << 20


class CudaNumerics:
    """The steps of one stream. Its calls are made inside the stream's ``DriverCalls``, but ``collect``."""

    def __init__(self, device: CudaDevice, stream: CudaStream, watch: NumericsWatch) -> None:
        self.stream = stream
        self.watch = watch
        self._device = device
        self._driver = device.context.driver
        self._functions = {kernel.name: device.context.function(kernel) for kernel in KERNELS}
        #: where its memory is accounted for
        self.held = device.account.hold(stream.owner, f"numerics of stream {stream.name}")
        #: all that was allocated: graphs name marks that were too small for others
        self._memory: list[int] = []
        self._running: dict[int, NumericChecks] = {}
        try:
            state = fresh_state()
            self._state = self._allocate(state.nbytes)
            stream.staging.copy_in(self._state, state.view(np.uint8))
            stream.mark_pending()
            self._marks = self._new_marks(_MARKS_NBYTES)
        except BaseException:
            self.release()
            raise

    def queue(self, prepared: Prepared, launch: Callable[[], None]) -> None:
        """Queue, or capture, a launch with its steps."""
        checks = prepared.numerics
        if checks is None or self.watch.found:
            launch()
            return
        marks = self._marks
        before, behind = checks.steps(marks, self._state)
        self._queue(before)
        launch()
        self._queue(behind)
        self.runs((checks,))

    def make_room(self, launches: Iterable[Prepared]) -> None:
        """Have marks for each of these launches, which a capture cannot allocate."""
        wanted = max((each.numerics.n_marks for each in launches if each.numerics is not None), default=0)
        if wanted > self._marks.shape[0]:
            self._marks = self._new_marks(max(4 * wanted, 8 * self._marks.shape[0]))

    def runs(self, checks: Iterable[NumericChecks]) -> None:
        """What was queued, until it is collected."""
        self._running.update((each.launch.number, each) for each in checks)

    def collect(self) -> Exception | None:
        """Report what was found: the stream was synchronised. Returns the error of a callback."""
        running, self._running = self._running, {}
        if not running or self.watch.found:
            return None
        state = np.frombuffer(self._device.read_bytes(self._state, fresh_state().nbytes), np.int64)
        try:
            self.watch.report(state, list(running.values()), self.stream.name, self.stream.owner)
        except Exception as error:  # noqa: BLE001 - the caller raises it when all is reported
            return error
        return None

    def drop(self) -> None:
        """Forget what is queued."""
        self._running.clear()

    def release(self) -> None:
        """Give the memory back, when nothing is queued."""
        memory, self._memory = self._memory, []
        for address in memory:
            self._driver.free(address)
        self.held.drop()

    def _queue(self, steps: Iterable[Step]) -> None:
        for step in steps:
            parameters = pack(step.kernel.signature, step.values)
            function, block = self._functions[step.kernel.name], block_of(step.kernel.block)
            self._driver.launch(function, step.grid, block, self.stream.handle, parameters.address)

    def _new_marks(self, nbytes: int) -> DeviceArray:
        return DeviceArray(self._allocate(nbytes), (nbytes // 4,), 4)

    def _allocate(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self._memory.append(address)
        self.held.grow(device=nbytes)
        return address
