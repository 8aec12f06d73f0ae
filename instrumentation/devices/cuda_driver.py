"""The driver's calls that the CUDA device makes: each checks its result and raises ``DriverCallError``.

``Driver`` is the seam that tests put a driver of their own into. Addresses are integers; handles are whatever the
driver gives, and are only handed back to it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, Protocol

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from instrumentation.devices.cuda_context import CudaContext

#: errors after which a context can do nothing any more; the driver returns them from every later call
STICKY = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT", "CONTAINED", "CONTEXT_IS_DESTROYED", "DEINITIALIZED", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE", "HARDWARE_STACK_ERROR", "ILLEGAL_ADDRESS", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
        "INVALID_PC", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "MISALIGNED_ADDRESS", "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK", "UNKNOWN",
    )
)  # fmt: skip


class DriverCallError(Exception):
    """A driver call failed. ``error`` is the driver's name for why, ``detail`` what else is known."""

    def __init__(self, call: str, error: str, detail: str = "") -> None:
        super().__init__(f"{call} failed with {error}{f': {detail}' if detail else ''}")
        self.call = call
        self.error = error
        self.detail = detail

    @property
    def sticky(self) -> bool:
        """Whether the context is lost."""
        return self.error in STICKY

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was missing."""
        return self.error == "CUDA_ERROR_OUT_OF_MEMORY"


class Driver(Protocol):
    """One process's driver. Every call but the first seven needs a current context."""

    #: of each GPU that was opened: they live as long as their driver
    contexts: dict[int, CudaContext]

    def version(self) -> int:
        """CUDA version that the driver is for: 1000 * major + 10 * minor."""
        ...

    def device_count(self) -> int:
        """Number of devices that this process may use."""
        ...

    def device_name(self, ordinal: int) -> str:
        """Marketing name."""
        ...

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        """Major and minor."""
        ...

    def total_memory(self, ordinal: int) -> int:
        """Bytes."""
        ...

    def retain_context(self, ordinal: int) -> Any:
        """The device's primary context, which other libraries use too."""
        ...

    def set_context(self, context: Any) -> None:
        """Make it this thread's current one."""
        ...

    def synchronize_context(self) -> None:
        """Wait for everything."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        ...

    def free(self, address: int) -> None:
        """Give device memory back."""
        ...

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        """Page-locked host memory: its address on the host, and the address that a kernel has for it."""
        ...

    def free_pinned(self, address: int) -> None:
        """Give page-locked memory back, by its address on the host."""
        ...

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy from page-locked memory."""
        ...

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy to page-locked memory."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy within the device."""
        ...

    def fill(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        """Queue setting bytes."""
        ...

    def create_stream(self) -> Any:
        """A stream that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: Any) -> None:
        """Give a stream up."""
        ...

    def synchronize_stream(self, stream: Any) -> None:
        """Wait for what a stream has queued."""
        ...

    def create_event(self) -> Any:
        """An event without times."""
        ...

    def destroy_event(self, event: Any) -> None:
        """Give an event up."""
        ...

    def record(self, event: Any, stream: Any) -> None:
        """Queue a mark."""
        ...

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream wait for an event's last record."""
        ...

    def synchronize_event(self, event: Any) -> None:
        """Wait for an event's last record."""
        ...

    def load(self, image: bytes, entry: str) -> Any:
        """The function of a kernel image; it stays loaded as long as the context."""
        ...

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        stream: Any,
        parameters: int,
        *,
        early: bool = False,
    ) -> None:
        """Queue a kernel. ``parameters``: address of an array of addresses, one for each parameter.

        ``early``: it may start while the kernel before it runs, for which it waits itself.
        """
        ...

    def begin_capture(self, stream: Any) -> None:
        """Collect what this thread queues on a stream."""
        ...

    def end_capture(self, stream: Any) -> Any:
        """End the capture; what was collected, ready to be replayed."""
        ...

    def replay(self, graph: Any, stream: Any) -> None:
        """Queue a captured graph."""
        ...

    def destroy_graph(self, graph: Any) -> None:
        """Give a captured graph up."""
        ...


def has_driver() -> bool:
    """Whether a CUDA driver is installed: a look for its library, which loads nothing else."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@functools.cache
def open_driver() -> Driver:
    """This process's driver. Raises ``BadInputError`` in one line when there is none that can be used."""
    if not has_driver():
        raise BadInputError("device cuda: no NVIDIA driver on this machine; install the driver, or use host")
    from instrumentation.devices.cuda_bindings import CudaDriver  # noqa: PLC0415

    try:
        from cuda.bindings import __version__, driver  # noqa: PLC0415
    except ImportError as error:
        raise BadInputError(
            f"device cuda: the driver is here and Python's bindings for it are not ({error}); "
            "pip install 'refengine[cu13]'"
        ) from error
    try:
        found = CudaDriver(driver)
        version = found.version()
    except Exception as error:
        raise BadInputError(
            f"device cuda: the NVIDIA driver cannot be used: {error}; see refengine doctor, or use host"
        ) from error
    check_version(version, __version__)
    return found


def check_version(driver_version: int, bindings_version: str) -> None:
    """Refuse a driver that is older than the toolkit wheels. Raises ``BadInputError``."""
    major = int(bindings_version.split(".", maxsplit=1)[0])
    if driver_version // 1000 < major:
        has = f"{driver_version // 1000}.{driver_version % 1000 // 10}"
        raise BadInputError(
            f"device cuda: the NVIDIA driver is for CUDA {has} and the installed toolkit is CUDA {major}; "
            f"install a newer driver, or pip install 'refengine[cu{driver_version // 1000}]'"
        )
