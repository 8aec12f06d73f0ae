"""The checks of this package around the arrays, streams and kernels of any Numba CUDA program: ``Sanitizer``."""

from __future__ import annotations

import sys
import types as python_types
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TextIO

import numpy as np
import numpy.typing as npt
from numba.core import types as nb

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, FindingLog, RefusedError
from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.divergence import DivergenceError
from instrumentation.kernel.parse import number_type
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reports.jsonlines import write
from instrumentation.reports.text import render
from instrumentation.reservation import BufferRequest
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.devices.base import Device, Event, Stream
    from instrumentation.devices.launch import Argument, Grid

#: arrays are taken from pieces of this size, or of their own where they are larger
ARENA_NBYTES = 16 << 20
_SANITIZER = Owner("sanitizer")


class UntypedKernel:
    """A kernel whose parameters have the types of its arguments, as with ``numba.cuda.jit``: made at its launch."""

    def __init__(self, function: Callable[..., None], block: int | tuple[int, ...]) -> None:
        self.function = function
        self.block = block
        self._typed: dict[tuple[Any, ...], Kernel] = {}

    def typed(self, arguments: Mapping[str, Argument]) -> Kernel:
        """The kernel for arguments of these types; parsed once for each. Raises ``KernelDialectError``."""
        code = self.function.__code__
        wanted = code.co_varnames[: code.co_argcount]
        if set(wanted) != set(arguments):
            raise BadInputError(
                f"{self.function.__name__}: arguments {', '.join(arguments)}; it takes {', '.join(wanted)}"
            )
        kinds = {name: _kind_of(self.function.__name__, name, value) for name, value in arguments.items()}
        key = tuple(sorted((name, str(kind)) for name, kind in kinds.items()))
        if key not in self._typed:
            plain = self.function
            copy = python_types.FunctionType(
                plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
            )
            copy.__qualname__, copy.__module__, copy.__doc__ = (
                plain.__qualname__,
                plain.__module__,
                plain.__doc__,
            )
            copy.__annotations__ = {name: Annotated[Any, kind] for name, kind in kinds.items()}
            self._typed[key] = kernel(block=self.block)(copy)
        return self._typed[key]


class Sanitizer:
    """Guarded arrays, streams and kernels of one device, and what was found. Use it as a context manager.

    ``device``: auto, host, cuda, cuda:N, or an open one. ``check``: off, guard, audit or trap. ``keep_going``: a call
    that is refused does nothing and the program goes on; otherwise it raises ``RefusedError``. ``check_numerics``:
    report the first launch that makes a NaN or an infinity, at any level. What was found is written to ``file`` at
    the end, standard error unless given, and as JSON lines to ``report_file`` where one is named. Owners are names;
    each may touch what is its own, shared or lent.
    Raises ``BadInputError``, ``DeviceError``.
    """

    def __init__(
        self,
        *,
        device: str | Device = "auto",
        check: str = "audit",
        keep_going: bool = False,
        redzone: int = 256,
        threads: int | None = None,
        check_numerics: bool = False,
        file: TextIO | None = None,
        report_file: str | Path | None = None,
    ) -> None:
        level = Level.parse(check)
        self.keep_going = keep_going
        self.log = FindingLog()
        self.device = open_device(device, threads=threads)
        self.allocator = Allocator(self.device, level=level, findings=self.log, redzone=redzone)
        self.device.watch(self.allocator, check_numerics=check_numerics)
        self._file = file
        self._report_file = None if report_file is None else Path(report_file)
        self._arenas: list[Arena] = []
        self._buffers: dict[int, Buffer] = {}
        self._loaders: dict[Owner, Stream] = {}
        self._closed = False
        self._undo = ExitStack()
        self._undo.callback(self.allocator.close)

    # --- arrays

    def array(self, source: npt.ArrayLike, *, owner: str | Owner = "main", name: str = "array") -> View:
        """A guarded copy of an array in device memory; it is there when this returns."""
        values = np.ascontiguousarray(source)
        view = self.empty(np.shape(source), values.dtype, owner=owner, name=name)
        if view.nbytes:
            loader = self._loader(view.buffer.owner)
            loader.copy_in(view, values)
            loader.synchronize()
        return view

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike,
        *,
        owner: str | Owner = "main",
        name: str = "array",
    ) -> View:
        """A guarded array of device memory whose elements are not set (C order). Raises ``OutOfMemoryError``."""
        kind = np.dtype(dtype)
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = int(np.prod(extents, dtype=np.int64)) * kind.itemsize
        if kind.hasobject or any(n < 0 for n in extents):
            raise BadInputError(
                f"array {name} of {kind} {extents}; give numbers, and a shape that is not negative"
            )
        buffer = self._reserve(BufferRequest(max(1, nbytes), _owner(owner), name))
        self._buffers[buffer.serial] = buffer
        return buffer.view(kind, extents)

    def free(self, view: View) -> bool:
        """Give an array up before the end, as a program does; its use from here on is found."""

        def free() -> None:
            view.buffer.free()
            self._buffers.pop(view.buffer.serial, None)

        return self._admitted(free)

    def _reserve(self, request: BufferRequest) -> Buffer:
        needed = self.allocator.arena_size([request])
        for arena in self._arenas:
            if arena.largest_free >= needed:
                return arena.reserve(request.nbytes, owner=request.owner, name=request.name).unwrap()
        arena = self.allocator.reserve_arena(
            max(needed, ARENA_NBYTES), owner=_SANITIZER, name="arrays"
        ).unwrap()
        self._undo.callback(arena.release)
        self._arenas.append(arena)
        return arena.reserve(request.nbytes, owner=request.owner, name=request.name).unwrap()

    def _loader(self, owner: Owner) -> Stream:
        if owner not in self._loaders:
            self._loaders[owner] = self.stream("load", owner=owner)
        return self._loaders[owner]

    # --- streams and events

    def stream(self, name: str = "main", *, owner: str | Owner = "main") -> Stream:
        """A stream, with all that ``Stream`` has; its own calls raise what they refuse."""
        stream = self.device.create_stream(owner=_owner(owner), name=name)
        self._undo.callback(stream.destroy)
        return stream

    def event(self, name: str = "event", *, owner: str | Owner = "main") -> Event:
        """An event, for ``record`` and ``wait`` of streams."""
        event = self.device.create_event(owner=_owner(owner), name=name)
        self._undo.callback(event.destroy)
        return event

    def synchronize(self) -> None:
        """Wait for every stream; what canaries show is reported then."""
        self.device.synchronize()

    def warmed_up(self) -> None:
        """From here on device memory that the ledger does not explain may not grow (level audit, on a GPU)."""
        if self.device.memory_watch is not None:
            self.device.memory_watch.begin()

    # --- kernels

    def kernel(self, function: Any, *, block: int | tuple[int, ...]) -> UntypedKernel:
        """A kernel of a plain function, or of what ``numba.cuda.jit`` made of one, for blocks of this shape.

        Its source must lie in the kernel dialect (docs/kernel-dialect.md); it is read at the first launch.
        """
        plain = getattr(function, "py_func", function)
        if not isinstance(plain, python_types.FunctionType):
            raise BadInputError(
                f"kernel of {type(function).__name__}; give a function, decorated by cuda.jit or not"
            )
        return UntypedKernel(plain, block)

    def launch(
        self, kernel: Kernel | UntypedKernel, grid: Grid, stream: Stream, /, **arguments: Argument
    ) -> bool:
        """Queue a kernel over ``grid`` blocks; arguments by parameter, arrays as views. False: it was refused.

        A kernel that part of a block would wait in for the rest is refused as SYN001, with a ``DivergenceError``.
        """
        try:
            typed = kernel.typed(arguments) if isinstance(kernel, UntypedKernel) else kernel
        except DivergenceError as error:
            self.log.append(error.finding)
            if not self.keep_going:
                raise
            return False
        return self._admitted(lambda: stream.launch(typed, grid, arguments))

    def copy_in(self, target: View, source: npt.NDArray[Any], stream: Stream) -> bool:
        """Queue a copy from host memory, which must not change until it ran. False: it was refused."""
        return self._admitted(lambda: stream.copy_in(target, source))

    def copy_out(self, source: View, stream: Stream) -> npt.NDArray[Any]:
        """Queue a copy to a new array, which is valid when the host has waited; all zeros where it was refused."""
        array = np.zeros(source.shape, source.dtype)
        self._admitted(lambda: stream.copy_out(array, source))
        return array

    def host_access(self, array: npt.NDArray[Any], owner: str | Owner = "main") -> bool:
        """Say that the host is about to use an array that copies were queued with. False: one is under way."""
        return self._admitted(lambda: self.device.host_access(array, owner=_owner(owner)))

    def _admitted(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except RefusedError:
            if not self.keep_going:
                raise
            return False
        return True

    # --- what was found

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, merged per site."""
        return list(self.log)

    @property
    def exit_code(self) -> int:
        """What a program that trusts this shall exit with: 1 with findings, else 0."""
        return int(len(self.log) > 0)

    def report(self) -> str:
        """All findings as text, and how many there are."""
        found = self.findings
        parts = [render(finding) for finding in found]
        count = f"{len(found)} finding{'s' * (len(found) != 1)}"
        ending = f"{count}: device {self.device.name}, level {self.allocator.level}"
        return "\n\n".join([*parts, ending])

    def close(self) -> None:
        """Run what is queued, give everything back and write the report. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._undo as undo:
                undo.callback(self._free_all)
                undo.callback(self.device.synchronize)
        finally:
            print(self.report(), file=self._file if self._file is not None else sys.stderr)
            if self._report_file is not None:
                with self._report_file.open("w", encoding="utf-8", newline="\n") as lines:
                    write(self.findings, lines)

    def _free_all(self) -> None:
        for buffer in list(self._buffers.values()):
            if not buffer.freed:
                buffer.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _owner(owner: str | Owner) -> Owner:
    return owner if isinstance(owner, Owner) else Owner(owner)


def _kind_of(function: str, name: str, value: Argument) -> Any:
    """Numba's type of an argument, as a call of ``numba.cuda.jit`` would have it."""
    kind: Any = None
    if isinstance(value, View):
        element = getattr(nb, value.dtype.name, None)
        if number_type(element) is not None and value.ndim:
            kind = nb.Array(element, value.ndim, "C")
    elif isinstance(value, np.generic):
        kind = getattr(nb, value.dtype.name, None)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        kind = nb.int64 if isinstance(value, int) else nb.float64
    if kind is None:
        seen = f"a view of {value.dtype} {value.shape}" if isinstance(value, View) else repr(value)
        raise BadInputError(
            f"{function}: argument {name} is {seen}; give a view of integers, float32 or float64, or a number"
        )
    return kind
