"""A CUDA driver on host memory: the CUDA device runs on it whole, with each kernel's host lowering.

Streams really queue: nothing runs before somebody waits, whatever the caller did to its arrays meanwhile. What the real
driver would punish fails here too: no current context, memory that is not page-locked, memory freed under queued work,
allocations and kernel loading during a capture, arguments that are not as Numba's CUDA target takes them.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter, deque
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.core import types as nb

from instrumentation.devices.cuda import CudaDevice
from instrumentation.devices.cuda_context import parameter_sizes
from instrumentation.devices.cuda_driver import STICKY, DriverCallError
from instrumentation.devices.host_driver import NO_RANGES, RECORD, run_launches
from instrumentation.kernel import HostOptions
from instrumentation.kernel.checked.report import REPORT_WORDS
from instrumentation.kernel.checked.report_cuda import DEVICE_REPORT_WORDS, FLAG_WORDS, add_from_the_host
from instrumentation.kernel.cuda_image import CudaImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.cuda_context import CudaContext
    from instrumentation.kernel import Kernel

CONTEXT = 0xC0
_functions: dict[bytes, FakeFunction] = {}


class FakeFunction:
    """A loaded kernel, or its checked form."""

    def __init__(self, kernel: Kernel, *, checked: bool) -> None:
        self.kernel = kernel
        self.name = kernel.name
        self.block = kernel.block
        self.checked = checked

    @property
    def address(self) -> int:
        """Of its host lowering."""
        return self.kernel.host(HostOptions(checked=self.checked)).address


def fake_image(kernel: Kernel, compute_capability: tuple[int, int], *, checked: bool = False) -> CudaImage:
    """What the fake driver loads a kernel from."""
    key = f"{kernel.name} {id(kernel):#x} {compute_capability} {checked}".encode()
    _functions[key] = FakeFunction(kernel, checked=checked)
    return CudaImage("ptx", kernel.name, parameter_sizes(kernel, checked=checked), key)


def fake_device(**settings: Any) -> CudaDevice:
    """A CUDA device on a driver of its own."""
    return CudaDevice(driver=FakeDriver(**settings), compile_kernel=fake_image)


class FakeStream:
    """Operations that wait to run."""

    def __init__(self) -> None:
        #: each with the page-locked address that it uses, or 0
        self.queue: deque[tuple[Callable[[], Any], int]] = deque()
        self.queued = 0
        self.capture: list[Any] | None = None
        self.broken_capture = False


class FakeEvent:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.mark = 0


class FakeLaunch:
    """A kernel with its arguments as the host lowering takes them; a checked one's report lies on the host."""

    def __init__(self, function: FakeFunction, slots: list[int], blocks: int) -> None:
        self.name = function.name
        self.block = np.array(slots, np.int64)
        self.record = (function.address, self.block.ctypes.data, blocks, 0, 0, 0)
        self.report = np.zeros(REPORT_WORDS, np.int64)
        #: address of the report that the GPU would write
        self.reported = 0
        if function.checked:
            n_arrays = sum(isinstance(kind, nb.Array) for kind in function.kernel.signature.values())
            self.reported = slots[-2 - n_arrays]
            self.block[-2 - n_arrays] = self.report.ctypes.data

    def tell(self) -> None:
        """Put what the host's code found where a GPU's would have put it."""
        if self.report[0]:
            words = np.frombuffer(
                (ctypes.c_int64 * DEVICE_REPORT_WORDS).from_address(self.reported - 8 * FLAG_WORDS), np.int64
            )
            add_from_the_host(words[FLAG_WORDS:], self.report)
            ctypes.c_int32.from_address(int(words[0])).value = 1
            self.report[:] = 0


class FakeCall:
    """What a library put on a stream while it was captured."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work


class FakeDriver:
    """See the module. ``fail`` makes a call fail, ``broken`` names kernels that end the context when they run."""

    def __init__(self, *, n_devices: int = 2, total: int = 1 << 30) -> None:
        self.contexts: dict[int, CudaContext] = {}
        self.n_devices = n_devices
        self.total = total
        #: bytes of device memory that somebody else took
        self.hidden = 0
        #: bytes that the driver takes for a graph when it is instantiated, and gives back with it
        self.graph_nbytes = 0
        self.calls: Counter[str] = Counter()
        self.broken: dict[str, str] = {}
        self.lost: str | None = None
        self.memory: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: set[FakeStream] = set()
        self.events: set[FakeEvent] = set()
        self.graphs: list[list[FakeLaunch | FakeCall]] = []
        self._failures: dict[tuple[str, int], str] = {}
        self._current = threading.local()

    def fail(self, call: str, error: str, nth: int = 1) -> None:
        """Let the ``nth`` call from here on fail with a driver's error."""
        self._failures[call, self.calls[call] + nth] = f"CUDA_ERROR_{error}"

    @property
    def used(self) -> int:
        """Bytes of device memory that are allocated."""
        return sum(block.nbytes for block in self.memory.values()) + self.graph_nbytes * len(self.graphs)

    def _enter(self, call: str, *, context: bool = True) -> None:
        self.calls[call] += 1
        if self.lost is not None:
            raise DriverCallError(call, self.lost)
        error = self._failures.pop((call, self.calls[call]), None)
        if error is not None:
            self.lost = error if error in STICKY else None
            raise DriverCallError(call, error)
        if context and getattr(self._current, "context", None) != CONTEXT:
            raise DriverCallError(call, "CUDA_ERROR_INVALID_CONTEXT")

    def _not_while_capturing(self, call: str) -> None:
        for stream in self.streams:
            if stream.capture is not None:
                stream.broken_capture = True
                raise DriverCallError(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")

    # --- devices

    def version(self) -> int:
        return 13000

    def device_count(self) -> int:
        self._enter("device_count", context=False)
        return self.n_devices

    def device_name(self, ordinal: int) -> str:
        self._enter("device_name", context=False)
        return f"Fake GPU {ordinal}"

    def compute_capability(self, _ordinal: int) -> tuple[int, int]:
        self._enter("compute_capability", context=False)
        return 9, 0

    def total_memory(self, _ordinal: int) -> int:
        self._enter("total_memory", context=False)
        return self.total

    def retain_context(self, _ordinal: int) -> Any:
        self._enter("retain_context", context=False)
        return CONTEXT

    def set_context(self, context: Any) -> None:
        self._enter("set_context", context=False)
        self._current.context = context

    def synchronize_context(self) -> None:
        self._enter("synchronize_context")
        self._not_while_capturing("synchronize_context")
        for stream in list(self.streams):
            self._run(stream, stream.queued, "synchronize_context")

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self.total - self.used - self.hidden, self.total

    def allocate(self, nbytes: int) -> int:
        self._enter("allocate")
        self._not_while_capturing("allocate")
        assert nbytes > 0
        if nbytes > self.total - self.used:
            raise DriverCallError("allocate", "CUDA_ERROR_OUT_OF_MEMORY")
        return _keep(self.memory, nbytes)

    def free(self, address: int) -> None:
        self._enter("free")
        self._not_while_capturing("free")
        waiting = sum(len(stream.queue) for stream in self.streams)
        assert not waiting, f"memory at {address:#x} was freed with {waiting} operations queued"
        del self.memory[address]

    def allocate_pinned(self, nbytes: int) -> tuple[int, int]:
        self._enter("allocate_pinned")
        self._not_while_capturing("allocate_pinned")
        address = _keep(self.pinned, nbytes)
        return address, address

    def free_pinned(self, address: int) -> None:
        self._enter("free_pinned")
        block = self.pinned.pop(address)
        used = (at for stream in self.streams for _, at in stream.queue)
        waiting = sum(address <= at < address + block.nbytes for at in used)
        assert not waiting, f"pinned memory was freed with {waiting} copies queued that use it"

    def copy_in(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._enter("copy_in")
        _require_inside(self.memory, target, nbytes, "the target of copy_in")
        _require_inside(self.pinned, source, nbytes, "the source of copy_in")
        self._queue(stream, lambda: ctypes.memmove(target, source, nbytes), source)

    def copy_out(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._enter("copy_out")
        _require_inside(self.pinned, target, nbytes, "the target of copy_out")
        _require_inside(self.memory, source, nbytes, "the source of copy_out")
        self._queue(stream, lambda: ctypes.memmove(target, source, nbytes), target)

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._enter("copy")
        _require_inside(self.memory, target, nbytes, "the target of copy")
        _require_inside(self.memory, source, nbytes, "the source of copy")
        self._queue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, target: int, value: int, nbytes: int, stream: Any) -> None:
        self._enter("fill")
        _require_inside(self.memory, target, nbytes, "the target of fill")
        self._queue(stream, lambda: ctypes.memset(target, value, nbytes))

    # --- streams and events

    def create_stream(self) -> Any:
        self._enter("create_stream")
        stream = FakeStream()
        self.streams.add(stream)
        return stream

    def destroy_stream(self, stream: Any) -> None:
        self._enter("destroy_stream")
        self._run(stream, stream.queued, "destroy_stream")
        self.streams.remove(stream)

    def synchronize_stream(self, stream: Any) -> None:
        self._enter("synchronize_stream")
        self._not_while_capturing("synchronize_stream")
        self._run(stream, stream.queued, "synchronize_stream")

    def create_event(self) -> Any:
        self._enter("create_event")
        event = FakeEvent()
        self.events.add(event)
        return event

    def destroy_event(self, event: Any) -> None:
        self._enter("destroy_event")
        self.events.remove(event)

    def record(self, event: Any, stream: Any) -> None:
        self._enter("record")
        assert event in self.events
        self._queue(stream, _nothing)
        event.stream, event.mark = stream, stream.queued

    def wait(self, stream: Any, event: Any) -> None:
        self._enter("wait")
        other, mark = event.stream, event.mark
        self._queue(stream, _nothing if other is None else lambda: self._run(other, mark, "wait"))

    def synchronize_event(self, event: Any) -> None:
        self._enter("synchronize_event")
        assert event in self.events
        if event.stream is not None:
            self._run(event.stream, event.mark, "synchronize_event")

    # --- kernels and graphs

    def load(self, image: bytes, entry: str) -> Any:
        self._enter("load")
        self._not_while_capturing("load")
        function = _functions[image]
        assert entry == function.name
        return function

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
        self._enter("launch")
        assert stream.capture or not early, "nothing stands before it that it could wait for"
        assert block == (*function.block, 1, 1)[:3]
        launch = FakeLaunch(function, [*grid, *_host_slots(function, parameters)], prod(grid))
        if stream.capture is not None:
            stream.capture.append(launch)
        else:
            self._queue(stream, lambda: self._execute([launch]))

    def begin_capture(self, stream: Any) -> None:
        self._enter("begin_capture")
        assert stream.capture is None
        stream.capture, stream.broken_capture = [], False

    def end_capture(self, stream: Any) -> Any:
        graph, stream.capture = stream.capture, None
        self._enter("end_capture")
        assert graph is not None
        if stream.broken_capture:
            raise DriverCallError("end_capture", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
        self.graphs.append(graph)
        return graph

    def replay(self, graph: Any, stream: Any) -> None:
        self._enter("replay")
        assert any(graph is known for known in self.graphs)
        self._queue(stream, lambda: self._execute(graph))

    def destroy_graph(self, graph: Any) -> None:
        self._enter("destroy_graph")
        self.graphs = [known for known in self.graphs if known is not graph]

    # --- running

    def _queue(self, stream: FakeStream, operation: Callable[[], Any], pinned: int = 0) -> None:
        assert stream in self.streams
        assert stream.capture is None, "only launches are captured"
        stream.queue.append((operation, pinned))
        stream.queued += 1

    def _run(self, stream: FakeStream, mark: int, call: str) -> None:
        while stream.queue and stream.queued - len(stream.queue) < mark:
            stream.queue.popleft()[0]()
        if self.lost is not None:
            raise DriverCallError(call, self.lost)

    def _execute(self, work: list[FakeLaunch | FakeCall]) -> None:
        for of_library, group in itertools.groupby(work, lambda each: isinstance(each, FakeCall)):
            if self.lost is not None:
                return
            if of_library:
                for call in group:
                    call.work()
            else:
                self._execute_launches(list(group))

    def _execute_launches(self, launches: list[FakeLaunch]) -> None:
        for launch in launches:
            if launch.name in self.broken:
                self.lost = f"CUDA_ERROR_{self.broken[launch.name]}"
                return
        records = np.array([launch.record for launch in launches], np.int64).reshape(-1, RECORD)
        run_launches(records, 0, len(launches), 1, NO_RANGES)
        for launch in launches:
            launch.tell()


def _nothing() -> None:
    pass


def _keep(blocks: dict[int, Any], nbytes: int) -> int:
    block = np.full(nbytes + 1024, 0xA7, np.uint8)
    address = -(-block.ctypes.data // 512) * 512
    blocks[address] = block[address - block.ctypes.data :][:nbytes]
    return address


def _require_inside(blocks: dict[int, Any], address: int, nbytes: int, what: str) -> None:
    for start, block in blocks.items():
        if start <= address and address + nbytes <= start + block.nbytes:
            return
    raise AssertionError(f"{what}, {nbytes} bytes at {address:#x}, is not inside an allocation of its kind")


def _host_slots(function: FakeFunction, parameters: int) -> list[int]:
    """Arguments of the host lowering, from parameters as Numba's CUDA target has them."""
    signature = function.kernel.signature
    sizes = parameter_sizes(function.kernel, checked=function.checked)
    table = (ctypes.c_int64 * len(sizes)).from_address(parameters)
    values = itertools.starmap(_read, zip(table, sizes, strict=True))
    if function.checked:
        return [*values, 0]  # in the same order; and races are not looked for
    slots: list[int] = []
    for name, kind in signature.items():
        if not isinstance(kind, nb.Array):
            slots.append(next(values))
            continue
        meminfo, parent, nitems, itemsize, address = itertools.islice(values, 5)
        shape = list(itertools.islice(values, kind.ndim))
        strides = list(itertools.islice(values, kind.ndim))
        assert (meminfo, parent) == (0, 0), name
        assert nitems == prod(shape), name
        assert itemsize == np.dtype(str(kind.dtype)).itemsize, name
        assert strides == [itemsize * prod(shape[axis + 1 :]) for axis in range(kind.ndim)], name
        slots += [address, *shape]
    return slots


def _read(address: int, size: int) -> int:
    return int.from_bytes(ctypes.string_at(address, size).ljust(8, b"\0"), "little", signed=True)
