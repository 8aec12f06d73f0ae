"""What a device must offer, whatever it is made of: the seam between this package and hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from instrumentation.globs import EVERY_BUFFER, EVERY_KERNEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from instrumentation.account import Account
    from instrumentation.allocator import Allocator
    from instrumentation.blas import BlasCalls
    from instrumentation.devices.launch import Argument, Grid
    from instrumentation.faults import Faults
    from instrumentation.globs import Globs
    from instrumentation.handles import Library, LibraryCall
    from instrumentation.kernel import Kernel
    from instrumentation.memory_watch import MemoryWatch
    from instrumentation.ownership import Owner
    from instrumentation.view import View


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of device memory, as the device itself counts them."""

    free: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.free <= self.total, (self.free, self.total)


class DeviceMemory(Protocol):
    """Raw memory of one device. Only the allocator calls this; everyone else holds a ``Buffer``.

    Every call here is synchronous: it returns when the bytes are there.
    """

    name: str
    #: every address returned by ``allocate`` is a multiple of this many bytes
    alignment: int
    #: what was taken from the device, by ``allocate`` and beside it
    account: Account

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Address of ``nbytes`` fresh bytes (at least 1); raises ``OutOfMemoryError``."""
        ...

    def release(self, address: int) -> None:
        """Give back what ``allocate`` returned."""
        ...

    def fill_bytes(self, address: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes to ``value`` (0-255)."""
        ...

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Copy of ``nbytes`` bytes."""
        ...

    def first_mismatch(self, address: int, nbytes: int, value: int) -> int:
        """Offset of the first byte that is not ``value``; -1 when all are."""
        ...

    def mismatches(self, regions: Sequence[tuple[int, int, int]]) -> list[int]:
        """Indices of those of ``regions`` (address, nbytes, value) that hold another byte somewhere."""
        ...


class Event(Protocol):
    """A point in a stream's work. Made by ``Device.create_event``."""

    name: str
    owner: Owner

    def synchronize(self) -> None:
        """Wait until the work before the last record is done."""
        ...

    def destroy(self) -> None:
        """Give the event up."""
        ...


class Graph(Protocol):
    """A captured sequence of launches, replayed as one. It pins every buffer that it names until destroyed."""

    name: str

    @property
    def launches(self) -> int:
        """Number of captured launches."""
        ...

    def destroy(self) -> None:
        """Unpin the buffers and give the graph up."""
        ...


class Stream(Protocol):
    """An ordered queue of work. Nothing here waits for the work, except ``synchronize``."""

    name: str
    owner: Owner

    def launch(self, kernel: Kernel, grid: Grid, arguments: Mapping[str, Argument]) -> None:
        """Queue a kernel over ``grid`` blocks. Raises ``BadInputError`` or ``FindingError`` and queues nothing."""
        ...

    def call(self, call: LibraryCall) -> None:
        """Queue a call of a library, whose handle has this stream. Raises as ``launch`` does, and queues nothing."""
        ...

    def copy_in(self, target: View, source: npt.NDArray[Any]) -> None:
        """Queue a copy from host memory, which must not change until the copy ran."""
        ...

    def copy_out(self, target: npt.NDArray[Any], source: View) -> None:
        """Queue a copy to host memory, which is valid when the host waited for the stream or an event behind it."""
        ...

    def copy(self, target: View, source: View) -> None:
        """Queue a copy within the device."""
        ...

    def fill(self, target: View, value: int) -> None:
        """Queue setting every byte of a view to ``value`` (0-255)."""
        ...

    def record(self, event: Event) -> None:
        """Queue a mark that others can wait for."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is queued from here on wait for the event's last record."""
        ...

    def begin_capture(self) -> None:
        """From here on launches are collected, not queued."""
        ...

    def end_capture(self, name: str) -> Graph:
        """End the capture and return what was collected."""
        ...

    def abandon_capture(self) -> None:
        """Forget a capture that failed half-way; does nothing when none is going on."""
        ...

    def replay(self, graph: Graph) -> None:
        """Queue a captured graph."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued so far is done."""
        ...

    def destroy(self) -> None:
        """Wait, then give the stream up."""
        ...


class Device(DeviceMemory, Protocol):
    """One device: memory, streams, events. ``instrumentation.devices.host`` and ``.cuda`` are the two kinds."""

    #: whether a thread had better load several neighbouring elements at once: a GPU's threads do, a vector's lanes not
    wide_loads: bool
    #: whether copies from and to host memory go over a bus, so that what the host need not see had better stay
    behind_bus: bool
    #: which calls fail on purpose
    faults: Faults | None
    #: whether memory grows beyond what is accounted for; None where nobody looks
    memory_watch: MemoryWatch | None

    def watch(
        self,
        allocator: Allocator,
        *,
        check_numerics: bool = False,
        trap_kernels: Globs = EVERY_KERNEL,
        trap_buffers: Globs = EVERY_BUFFER,
    ) -> None:
        """Check work against an allocator of this device, from level ``guard`` on.

        ``check_numerics``, at any level: report the first launch that makes a NaN or an infinity (NUM001).
        ``trap_kernels``, ``trap_buffers``: those of level ``trap``. Other kernels run plain, and of other buffers no
        shadow is kept: bounds alone are checked.
        """
        ...

    def create_stream(self, *, owner: Owner, name: str) -> Stream:
        """A new queue of ``owner``."""
        ...

    def create_event(self, *, owner: Owner, name: str) -> Event:
        """A new event of ``owner``."""
        ...

    def blas(self) -> Library[BlasCalls]:
        """The library of products that works on this device's streams. Raises ``BadInputError`` without one."""
        ...

    def bound_graphs(self, owner: Owner, at_most: int) -> None:
        """Say how many captured graphs ``owner`` keeps at a time: one more is reported (GRA002) at level ``audit``."""
        ...

    def host_access(
        self,
        array: npt.NDArray[Any] | View,
        use: Literal["read", "write", "free"] = "read",
        *,
        owner: Owner | None = None,
    ) -> None:
        """Say that the host is about to use an array that copies were queued with; refused while one is under way."""
        ...

    def synchronize(self) -> None:
        """Wait for every stream."""
        ...

    def describe(self) -> str:
        """One line for people: what the device is."""
        ...
