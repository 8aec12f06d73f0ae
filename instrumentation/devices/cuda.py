"""The CUDA device: one GPU through the driver, with every check that the host device has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.devices.cuda_context import open_context
from instrumentation.devices.cuda_driver import open_driver
from instrumentation.devices.cuda_memory import CudaMemory
from instrumentation.devices.cuda_stream import CudaEvent, CudaGraph, CudaStream
from instrumentation.devices.cuda_trap import CudaTraps
from instrumentation.devices.watched import WatchedDevice
from instrumentation.faults import pass_site
from instrumentation.kernel.cuda_image import compile_image

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from instrumentation.blas import BlasCalls
    from instrumentation.devices.cuda_context import Compile
    from instrumentation.devices.cuda_driver import Driver
    from instrumentation.handles import Library
    from instrumentation.ownership import Owner

__all__ = ["CudaDevice", "CudaEvent", "CudaGraph", "CudaStream"]


class CudaDevice(CudaMemory, WatchedDevice):
    """A GPU as a device.

    After ``watch`` it checks owners and liveness before each launch, copy and replay, and canaries behind each launch
    and replay; damage is reported when its stream is synchronised. A GPU that fails for good is reported once: from
    then on work is refused in one line, and giving things up only drops them from the books.

    ``driver`` and ``compile_kernel`` are the machine's own unless given. Raises ``BadInputError``, ``DeviceError``,
    ``OutOfMemoryError``.
    """

    kind = "CUDA"
    wide_loads = True
    behind_bus = True
    stages_copies = True
    own_memory = True
    traps = True

    def __init__(
        self, ordinal: int = 0, *, driver: Driver | None = None, compile_kernel: Compile = compile_image
    ) -> None:
        context = open_context(driver if driver is not None else open_driver(), ordinal, compile_kernel)
        CudaMemory.__init__(self, context)
        WatchedDevice.__init__(self)
        #: streams that live, in the order in which they were made
        self.streams: dict[CudaStream, None] = {}
        #: reports of checked launches
        self.reports = CudaTraps(self)
        #: opened when it is asked for
        self.library: Library[BlasCalls] | None = None

    def create_stream(self, *, owner: Owner, name: str) -> CudaStream:
        """A new queue."""
        stream = CudaStream(self, owner, name)
        self.streams[stream] = None
        return stream

    def create_event(self, *, owner: Owner, name: str) -> CudaEvent:
        """A new event."""
        pass_site(self.faults, "event", f"create_event {name}")
        return CudaEvent(self, owner, name)

    def synchronize(self) -> None:
        """Wait for every stream."""
        for stream in list(self.streams):
            stream.synchronize()

    def blas(self) -> Library[BlasCalls]:
        """The library of products: cuBLAS. Raises ``BadInputError`` where it is not installed."""
        if self.library is None:
            from instrumentation.devices.cublas import open_cublas  # noqa: PLC0415 - for who asks for it

            self.library = open_cublas()
        return self.library

    def calls_of(self, who: str) -> AbstractContextManager[object]:
        """Calls of a library in the device's context."""
        return self.context.calls(who)

    def free_memory(self) -> int:
        """Bytes that nobody holds."""
        return self.memory_info().free

    @property
    def lost(self) -> bool:
        """Whether the device failed for good, so that nothing that is queued will run."""
        return self.context.lost is not None

    def _before_release(self) -> None:
        if any(stream.pending for stream in self.streams):
            with self._memory_calls:
                self.context.driver.synchronize_context()
        super()._before_release()

    def describe(self) -> str:
        """One line for people."""
        major, minor = self.context.compute_capability
        size = self.context.total_memory / 2**30
        return f"{self.name}: {self.context.model}, compute capability {major}.{minor}, {size:.1f} GiB"
