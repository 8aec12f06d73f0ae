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
    from instrumentation.devices.cuda_context import Compile
    from instrumentation.devices.cuda_driver import Driver
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
