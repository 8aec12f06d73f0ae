"""Handles of libraries such as cuBLAS: whose they are, which stream and workspace they work with, and what holds of it.

A library keeps a stream and a workspace in its handle and works with whatever these are when it is called, and whoever
has the handle can change them. So a handle here is an owned object with one stream and one workspace, which is a buffer
like any other, and before each call at level ``audit`` both are compared with what the library has: the stream is read
back from the library; the workspace, which libraries do not tell, from a record of all that is set by way of
``Library``, and what went past that is set right.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from instrumentation.devices.launch import next_number, refuse_overlap
from instrumentation.devices.registry import handle_value
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError
from instrumentation.faults import pass_site
from instrumentation.findings import Stack, capture_stack
from instrumentation.handle_checks import require_alone, require_handle, require_usable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from instrumentation.devices.base import Device, Stream
    from instrumentation.devices.checked_stream import CheckedStream
    from instrumentation.devices.launch import Argument
    from instrumentation.devices.watched import WatchedDevice
    from instrumentation.ownership import Owner
    from instrumentation.view import View

#: the parameter that a call's workspace is known by
WORKSPACE = "workspace"


class LibraryCallError(Exception):
    """A library's function failed. ``status`` is the library's name for why."""

    def __init__(self, call: str, status: str, *, out_of_memory: bool = False) -> None:
        super().__init__(f"{call} failed with {status}")
        self.call = call
        self.status = status
        self.out_of_memory = out_of_memory


class LibraryCalls(Protocol):
    """What every library with handles offers: one method a function, each raises ``LibraryCallError``.

    A new stream takes the workspace away: from then on the library works in memory of its own.
    """

    name: str
    #: bytes of workspace below which calls may fail
    least_workspace: int
    #: first bytes of workspaces are multiples of this
    workspace_alignment: int

    def create(self) -> int:
        """A handle."""
        ...

    def destroy(self, handle: int) -> None:
        """Give a handle up; waits for its work."""
        ...

    def set_stream(self, handle: int, stream: Any) -> None:
        """Let calls work on a driver's stream, in the library's own workspace."""
        ...

    def stream_of(self, handle: int) -> int:
        """The driver's stream that calls work on, as a number."""
        ...

    def set_workspace(self, handle: int, address: int, nbytes: int) -> None:
        """Let calls use this memory on the current stream."""
        ...


C = TypeVar("C", bound=LibraryCalls)


@dataclass(slots=True)
class Told:
    """What a handle was told last through ``Library``, by whomever."""

    stream: int = 0
    stream_at: Stack = ()
    #: address and bytes; None: the library's own
    workspace: tuple[int, int] | None = None
    workspace_at: Stack = ()
    #: the object that stands for the stream, when it was set by way of one
    stream_object: CheckedStream[Any, Any, Any] | None = None


class Library(Generic[C]):
    """A library as this process uses it. What is set here is recorded; what is set past it can only be read back."""

    def __init__(self, calls: C) -> None:
        self.calls = calls
        self._told: dict[int, Told] = {}

    @property
    def name(self) -> str:
        """The library's."""
        return self.calls.name

    def create(self) -> int:
        """A handle."""
        handle = self.calls.create()
        self._told[handle] = Told()
        return handle

    def destroy(self, handle: int) -> None:
        """Give a handle up."""
        self.forget(handle)
        self.calls.destroy(handle)

    def forget(self, handle: int) -> None:
        """A handle went with its device."""
        self._told.pop(handle, None)

    def told(self, handle: int) -> Told:
        """What a handle was told; nothing, for one that was not made here."""
        return self._told.get(handle, Told())

    def set_stream(self, handle: int, stream: Any) -> None:
        """Let calls work on a driver's stream, which takes the workspace away."""
        self.calls.set_stream(handle, stream)
        self._told[handle] = Told(handle_value(stream), capture_stack())

    def set_workspace(self, handle: int, address: int, nbytes: int) -> None:
        """Let calls use this memory, until the next ``set_stream``."""
        self.calls.set_workspace(handle, address, nbytes)
        told = self._told.setdefault(handle, Told())
        told.workspace, told.workspace_at = (address, nbytes), capture_stack()


class LibraryHandle(Generic[C]):
    """A handle of a library, with an owner. Give it a stream, a workspace, and the calls of its owner alone.

    Raises ``DeviceError`` and ``OutOfMemoryError`` when the library does not make one.
    """

    def __init__(self, device: WatchedDevice, library: Library[C], owner: Owner, name: str) -> None:
        self.device = device
        self.library = library
        self.owner = owner
        self.name = name
        self.destroyed = False
        #: the last one that was given
        self.workspace: View | None = None
        self._seen: set[Hashable] = set()
        self._site("create")
        self._held = device.account.hold(owner, f"handle {name}", measured=True)
        try:
            with self._measuring(), self.calling() as calls:
                #: the library's; set by nobody else
                self.value = self._given = calls.create()
        except BaseException:
            self._held.drop()
            raise
        device.library_handles[self] = None

    @classmethod
    def on(cls, device: Device, library: Library[C], owner: Owner, name: str) -> LibraryHandle[C]:
        """A handle of any device of this package."""
        own: Any = device  # each is a ``WatchedDevice``
        return cls(own, library, owner, name)

    def __str__(self) -> str:
        return f"handle {self.name} of {self.owner}"

    @property
    def given(self) -> int:
        """The handle that the library gave, whatever became of ``value``."""
        return self._given

    # --- what it works with

    def set_stream(self, to: Stream) -> None:
        """Work on a stream from here on; the workspace is given to the library again, which a new stream takes away."""
        stream: Any = to  # each is a ``CheckedStream``
        require_usable(self)
        if stream.device is not self.device:
            raise BadInputError(
                f"{self}: stream {stream.name} is of another device; give one of {self.device.name}"
            )
        if stream.destroyed:
            self.device.refuse(
                "STR001", f"{self}: stream {stream.name} was destroyed", self.owner, stream.name
            )
        self.device.check_handle(stream, f"stream {stream.name}", stream.handle, stream.owner, stream.name)
        self._site(f"set_stream to {stream.name}")
        with self.calling() as library:
            library.set_stream(self.value, stream.handle)
            library.told(self.value).stream_object = stream
            self._give_workspace()

    def set_workspace(self, view: View) -> None:
        """Work in a view, which belongs to the handle's owner. Raises ``BadInputError`` for one that is not aligned."""
        require_usable(self)
        alignment = self.library.calls.workspace_alignment
        if view.address % alignment:
            raise BadInputError(
                f"{self}: workspace {view.name} begins at {view.address:#x}; give a multiple of {alignment}"
            )
        self._site(f"set_workspace to {view.name}")
        self.workspace = view
        with self.calling():
            self._give_workspace()

    def _give_workspace(self) -> None:
        if self.workspace is not None:
            self.library.set_workspace(self.value, self.workspace.address, self.workspace.nbytes)

    def restore_workspace(self) -> None:
        """Give the workspace to the library once more: what was set past ``Library`` cannot be read back."""
        if self.workspace is not None:
            self.library.calls.set_workspace(self.value, self.workspace.address, self.workspace.nbytes)

    def destroy(self) -> None:
        """Give the handle up; work of it that is queued runs before. By the handle that the library gave."""
        if self.destroyed:
            return
        self.destroyed = True
        self.device.library_handles.pop(self, None)
        if self.device.lost:
            self.library.forget(self._given)
            self._held.drop()
            return
        returned = None
        try:
            before = self._free_memory()
            with self.calling() as library:
                library.destroy(self._given)
            returned = self._free_memory() - before
        finally:
            self._held.drop(returned=returned)

    # --- calls

    @contextmanager
    def calling(self) -> Iterator[Library[C]]:
        """A block of calls of the library for this handle; what fails is raised as callers know it."""
        try:
            with self.device.calls_of(str(self)):
                yield self.library
        except LibraryCallError as error:
            where = f"{self.device.name}: {error.call} of {self} failed with {error.status}"
            if error.out_of_memory:
                raise OutOfMemoryError(f"{where}: not enough memory for the library") from None
            raise DeviceError(where) from None

    def measure_first(self, key: Hashable, call: Callable[[], None]) -> None:
        """Make a call; of the first one of its kind, that the library may have taken memory for its kernels."""
        if key in self._seen:
            call()
            return
        with self._measuring():
            call()
        self._seen.add(key)

    def _free_memory(self) -> int:
        return self.device.free_memory() if self.device.own_memory else 0

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        before = self._free_memory()
        yield
        self._held.grow(device=max(0, before - self._free_memory()))

    def _site(self, what: str) -> None:
        pass_site(self.device.faults, "library", f"{what} of {self}")


@dataclass(frozen=True, eq=False)
class LibraryCall:
    """A call of a library's function with checked arguments; ``CheckedStream.call`` queues it. Made by ``blas``.

    ``run`` makes the call; ``key`` says which calls load the same code of the library.
    """

    handle: LibraryHandle[Any]
    name: str
    arguments: Mapping[str, Argument]
    outputs: frozenset[str]
    run: Callable[[int], None]
    key: Hashable
    #: the handle's when the call was made; part of what it writes
    workspace: View | None
    number: int

    @classmethod
    def of(
        cls,
        handle: LibraryHandle[Any],
        name: str,
        arguments: Mapping[str, Argument],
        outputs: frozenset[str],
        run: Callable[[int], None],
        key: Hashable,
    ) -> LibraryCall:
        """A call with the handle's workspace. Raises ``BadInputError`` when what it writes overlaps an argument."""
        call = cls(handle, name, arguments, outputs, run, key, handle.workspace, next_number())
        refuse_overlap(call)
        return call

    @property
    def views(self) -> dict[str, View]:
        """Array arguments by parameter, and the workspace."""
        views = {name: value for name, value in self.arguments.items() if not isinstance(value, int | float)}
        return views if self.workspace is None else {**views, WORKSPACE: self.workspace}

    @property
    def writes(self) -> frozenset[str]:
        """Parameters whose arrays it writes; the workspace is one."""
        return self.outputs | {WORKSPACE}

    @property
    def contents(self) -> Hashable:
        """See ``Work``."""
        views = tuple((view.address, view.dtype.str, view.shape) for view in self.views.values())
        numbers = tuple(value for value in self.arguments.values() if isinstance(value, int | float))
        return self.name, self.handle.given, views, numbers

    def __str__(self) -> str:
        return f"{self.name} (call {self.number})"

    # --- for streams

    def admitted(self, stream: CheckedStream[Any, Any, Any]) -> LibraryCall:
        """The call as it may be queued on a stream, with the workspace that the handle has now.

        Raises ``RefusedError``: LIB001, LIB002, OWN002.
        """
        call = self
        if self.workspace is not self.handle.workspace:
            call = replace(self, workspace=self.handle.workspace)
            refuse_overlap(call)
        require_handle(call, stream)
        return call

    def require_alone(self, stream: CheckedStream[Any, Any, Any]) -> None:
        """Refuse (LIB002) a workspace in which another handle may still work, at level ``audit``."""
        require_alone(self, stream)

    def queue(self, *, captured: bool = False) -> None:
        """Make the call, in a capture or not. What fails is raised as ``DeviceError`` or ``OutOfMemoryError``."""
        handle = self.handle

        def run() -> None:
            with handle.calling():
                if handle.device.audit is not None:
                    handle.restore_workspace()
                self.run(handle.value)

        if captured:
            run()
        else:
            handle.measure_first((self.name, self.key), run)
