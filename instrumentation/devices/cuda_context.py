"""One GPU's primary context as this process has it: threads enter it, kernels are loaded into it, errors leave it.

The primary context is the one that Numba and PyTorch use, so that all of them in one process see one memory. It stays
retained until the process ends, as it does with them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from numba.core import types as nb

from instrumentation.account import Account
from instrumentation.devices.cuda_driver import DriverCallError
from instrumentation.devices.launch import dtype_of
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError
from instrumentation.kernel.cuda_image import CudaImage, compile_image
from instrumentation.ownership import Owner

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from instrumentation.devices.cuda_driver import Driver
    from instrumentation.kernel import Kernel


class Compile(Protocol):
    """Makes the image of a kernel, or of its checked form."""

    def __call__(
        self, kernel: Kernel, compute_capability: tuple[int, int], *, checked: bool = False
    ) -> CudaImage:
        """As ``compile_image``."""


_lock = threading.RLock()
#: who holds what belongs to the whole process
PROCESS = Owner("process")


def open_context(driver: Driver, ordinal: int, compile_kernel: Compile = compile_image) -> CudaContext:
    """The context of a GPU; the same one each time. Raises ``BadInputError``, ``DeviceError``, ``OutOfMemoryError``."""
    with _lock:
        if ordinal not in driver.contexts:
            driver.contexts[ordinal] = CudaContext(driver, ordinal, compile_kernel)
        context = driver.contexts[ordinal]
    context.require()
    return context


class CudaContext:
    """Made by ``open_context``."""

    def __init__(self, driver: Driver, ordinal: int, compile_kernel: Compile) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        try:
            count = driver.device_count()
            if ordinal >= count:
                there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "only cuda:0"
                raise BadInputError(
                    f"device {self.name}: no such GPU; there is {there}"
                    if count
                    else f"device {self.name}: the driver sees no GPU; check CUDA_VISIBLE_DEVICES, or use host"
                )
            self.model = driver.device_name(ordinal)
            self.compute_capability = driver.compute_capability(ordinal)
            self.total_memory = driver.total_memory(ordinal)
            self.handle = driver.retain_context(ordinal)
        except DriverCallError as error:
            if error.out_of_memory:
                raise OutOfMemoryError(
                    f"{self.name}: the GPU has no memory left for another process; end one that uses it, or take "
                    "another GPU"
                ) from None
            raise DeviceError(f"{self.name} cannot be used: {error}; see refengine doctor") from None
        #: why nothing works any more; None while all is well
        self.lost: str | None = None
        #: what was launched last on any stream, in words when an error needs them
        self.last_launch: Any = None
        self._compile = compile_kernel
        self._functions: dict[tuple[Kernel, bool], Any] = {}
        self._thread = threading.local()
        self._scratch: Scratch | None = None
        #: room for reports of checked launches: see ``cuda_trap``
        self.reports: deque[Any] = deque()
        #: what this process took from the GPU, whichever device object did
        self.account = Account()
        self._modules = self.account.hold(PROCESS, "loaded kernels", measured=True)

    def calls(self, who: str, on_lost: Callable[[], None] | None = None) -> DriverCalls:
        """A block of driver calls on behalf of ``who``; enter it as often as needed."""
        return DriverCalls(self, who, on_lost)

    def require(self) -> None:
        """Raise ``DeviceError`` when the context is lost."""
        if self.lost is not None:
            raise DeviceError(f"{self.name}: device lost ({self.lost}); start the process again")

    def enter(self, *, again: bool = False) -> None:
        """Make this context the current thread's.

        ``again``: even if it was before; another library may have changed it since.
        """
        if again or not getattr(self._thread, "entered", False):
            self.driver.set_context(self.handle)
            self._thread.entered = True

    def translate(self, error: DriverCallError, who: str) -> Exception:
        """What callers are told of a failed call. A sticky one makes the device lost."""
        last = (
            f"the last launch was {self.last_launch}"
            if self.last_launch is not None
            else "nothing was launched"
        )
        if error.out_of_memory:
            return OutOfMemoryError(f"{self.name}: {error.call} of {who}: not enough memory; {last}")
        if not error.sticky:
            return DeviceError(f"{self.name}: {error}, called for {who}; {last}")
        if self.lost is None:
            self.lost = f"{error.call} failed with {error.error}; {last}"
        return DeviceError(
            f"{self.name}: {error}, called for {who}; {last}. The device is lost to this process: start it again"
        )

    def function(self, kernel: Kernel, *, checked: bool = False) -> Any:
        """The loaded function of a kernel; compiled and loaded on first use. Call it outside captures."""
        key = kernel, checked
        found = self._functions.get(key)
        if found is None:
            with _lock:
                found = self._functions.get(key)
                if found is None:
                    found = self._functions[key] = self._load(kernel, checked=checked)
        return found

    def _load(self, kernel: Kernel, *, checked: bool) -> Any:
        image = self._compile(kernel, self.compute_capability, checked=checked)
        wanted = parameter_sizes(kernel, checked=checked)
        if image.parameters != wanted:
            raise DeviceError(
                f"{kernel.name}: its compiled form takes parameters of {image.parameters} bytes, and arguments are "
                f"passed as {wanted}; this numba-cuda is not one that this version knows"
            )
        with self.calls(f"loading kernel {kernel.name}"):
            self.enter(again=True)
            before = self.free_memory()
            function = self.driver.load(image.data, image.entry)
            self._modules.grow(device=max(0, before - self.free_memory()))
            return function

    def free_memory(self) -> int:
        """Bytes of the GPU that nobody holds. A driver's call, as those around it."""
        return self.driver.memory_info()[0]

    def scratch(self) -> Scratch:
        """What synchronous memory calls use, made on first use."""
        with _lock:
            if self._scratch is None:
                self._scratch = Scratch(self)
            return self._scratch


def parameter_sizes(kernel: Kernel, *, checked: bool = False) -> tuple[int, ...]:
    """Bytes of each parameter of a kernel as Numba's CUDA target passes them; see ``cuda_launch``."""
    sizes: list[int] = []
    for kind in kernel.signature.values():
        if isinstance(kind, nb.Array):
            sizes += [8] * (1 + kind.ndim if checked else 5 + 2 * kind.ndim)
        else:
            sizes.append(dtype_of(kind).itemsize)
    if checked:
        arrays = sum(isinstance(kind, nb.Array) for kind in kernel.signature.values())
        sizes += [8] * (1 + arrays)
    return tuple(sizes)


class DriverCalls:
    """Driver calls inside are made in the context, and what fails is raised as callers know it."""

    __slots__ = ("_context", "_on_lost", "who")

    def __init__(self, context: CudaContext, who: str, on_lost: Callable[[], None] | None) -> None:
        self._context = context
        self._on_lost = on_lost
        self.who = who

    def __enter__(self) -> None:
        context = self._context
        if context.lost is not None:
            self._drop()
            context.require()
        try:
            context.enter()
        except DriverCallError as error:
            raise self._translated(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, DriverCallError):
            raise self._translated(error) from None

    def _translated(self, error: DriverCallError) -> Exception:
        told = self._context.translate(error, self.who)
        if self._context.lost is not None:
            self._drop()
        return told

    def _drop(self) -> None:
        if self._on_lost is not None:
            self._on_lost()


class Scratch:
    """A stream of its own, page-locked memory and a word of device memory, for calls that wait for their result."""

    NBYTES = 256 * 1024
    MAX_REGIONS = 2048

    def __init__(self, context: CudaContext) -> None:
        driver = context.driver
        self.lock = threading.RLock()
        with context.calls("memory"):
            context.enter(again=True)
            self.stream = driver.create_stream()
            self.host, _ = driver.allocate_pinned(self.NBYTES)
            #: for ``check_regions``: int64 [MAX_REGIONS, 3], then int32 [MAX_REGIONS]
            self.table = driver.allocate(32 * self.MAX_REGIONS)
            self.flags = self.table + 24 * self.MAX_REGIONS
            #: uint64: where ``find_mismatch`` puts what it found
            self.word = self.table + 28 * self.MAX_REGIONS
        context.account.hold(PROCESS, "scratch", device=32 * self.MAX_REGIONS, host=self.NBYTES)
        #: fills are queued on ``stream``, and not known to be done
        self.unsettled = False
