"""What is checked of a library's handle before it is called: LIB001 of its stream, LIB002 of its workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from instrumentation.devices.monitor import Access
from instrumentation.devices.registry import handle_value
from instrumentation.findings import Finding, Stack, capture_stack
from instrumentation.happens_before.report import finding_of
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from instrumentation.devices.checked_stream import CheckedStream
    from instrumentation.handles import LibraryCall, LibraryHandle, Told
    from instrumentation.view import View

    Stream = CheckedStream[Any, Any, Any]
    Handle = LibraryHandle[Any]


class _Problem(NamedTuple):
    """What is wrong, as a few words for the headline and as the end of a sentence that begins with the handle."""

    kind: str
    what: str
    cure: str
    #: where it was done
    at: Stack = ()


def require_usable(handle: Handle) -> None:
    """Refuse (LIB001) to use a handle that was destroyed, or is not what the library gave: at every level."""
    problem = _unusable(handle)
    if problem is not None:
        finding = Finding(
            code="LIB001",
            kind=problem.kind,
            message=f"{handle} {problem.what}; {problem.cure}",
            actor=handle.owner.name,
            device=handle.device.name,
            access=capture_stack(),
        )
        handle.device.keep(finding)
        raise refused(finding)


def require_handle(call: LibraryCall, stream: Stream) -> None:
    """Refuse a call whose handle was destroyed, is not the caller's, or works with something else than its owner gave.

    At every level a handle that is none (LIB001), from level ``guard`` on one of another owner (OWN002), at level
    ``audit`` the rest. Raises ``RefusedError``.
    """
    handle, device = call.handle, stream.device
    unusable = _unusable(handle, stream)
    if unusable is not None:
        _refuse("LIB001", unusable, call, stream)
    if device.monitor is not None and handle.owner != stream.owner:
        what = f"belongs to {handle.owner}"
        cure = f"give {stream.owner} a handle of its own"
        _refuse("OWN002", _Problem("library handle of another owner", what, cure), call, stream)
    if device.audit is None:
        return
    told = handle.library.told(handle.given)
    wrong = _stream_problem(handle, stream, told)
    if wrong is not None:
        _refuse("LIB001", wrong, call, stream)
    wrong = _workspace_problem(handle, told)
    if wrong is not None:
        _refuse("LIB002", wrong, call, stream)


def require_alone(call: LibraryCall, stream: Stream) -> None:
    """Refuse (LIB002) a workspace that another handle may be working in: nothing orders the two."""
    audit, mine = stream.device.audit, call.workspace
    if audit is None or mine is None:
        return
    others = [other for other in stream.device.library_handles if other is not call.handle]
    if not any(_overlap(mine, other.workspace) for other in others):
        return
    access = Access(call.name, mine, "write", call.name, "workspace", call.number)
    conflict = audit.unordered(stream, [access])
    if conflict is None or getattr(conflict.earlier.detail, "argument", None) != "workspace":
        return
    found = finding_of(conflict, stream.device.name, audit.shared.detector.order.host)
    finding = replace(
        found,
        code="LIB002",
        kind="library workspace shared by two handles",
        message=f"{call.handle} would work where another handle may still work: {found.message}; or give each "
        "handle a workspace of its own",
    )
    stream.device.keep(finding)
    raise refused(finding)


def _overlap(mine: View, other: View | None) -> bool:
    return (
        other is not None
        and mine.address < other.address + other.nbytes
        and other.address < mine.address + mine.nbytes
    )


def _unusable(handle: Handle, stream: Stream | None = None) -> _Problem | None:
    if handle.destroyed:
        return _Problem("destroyed library handle", "was destroyed", "make another one")
    if handle.value != handle.given:
        return _Problem(
            "library handle overwritten",
            f"is {handle.value:#x}, and the library gave {handle.given:#x} for it: something overwrote it",
            "look at the findings before this one",
        )
    if stream is not None and handle.device is not stream.device:
        return _Problem(
            "library handle of another device",
            f"is of {handle.device.name}, and the stream is of {stream.device.name}",
            "make one on the device that works",
        )
    return None


# --- the stream


def _stream_problem(handle: Handle, stream: Stream, told: Told) -> _Problem | None:
    with handle.calling() as library:
        value = library.calls.stream_of(handle.value)
    cure = f"set the handle's stream to {stream.name} once, and let no other code have the handle"
    stale = told.stream_object if told.stream == value else None
    if value == handle_value(stream.handle):
        if stale is None or stale is stream or not stale.destroyed:
            return None
        what = f"works on stream {stale.name}, which was destroyed, and whose handle {stream.name} has now"
        return _Problem("library handle on a destroyed stream", what, cure, told.stream_at)
    kind = "library handle on another stream"
    owner = handle.device.handles.find(value)
    if owner is not None:
        what = f"stream {owner.name} of {owner.owner}"
    elif stale is not None and stale.destroyed:
        kind, what = "library handle on a destroyed stream", f"stream {stale.name}, which was destroyed"
    elif value == 0:
        what = "the default stream"
    else:
        what = f"stream {value:#x}, which device {handle.device.name} has not created"
    at = told.stream_at if told.stream == value else ()
    return _Problem(kind, f"works on {what}", cure, at)


# --- the workspace


def _workspace_problem(handle: Handle, told: Told) -> _Problem | None:
    view = handle.workspace
    again = "set the workspace again after each change of the stream: the handle's own set_stream does"
    reserve = "reserve the workspace as a buffer and give it to the handle's set_workspace"
    if view is None:
        where = "memory of the library, which is in no ledger"
        if told.workspace is not None:
            where = (
                f"{told.workspace[1]} bytes at {told.workspace[0]:#x}, which is no buffer that it was given"
            )
        return _Problem("library workspace not owned", f"works in {where}", reserve, told.workspace_at)
    if told.workspace is None:
        return _Problem(
            "library workspace reset",
            f"was given workspace {view.name}, and a change of the stream has taken it away",
            again,
            told.stream_at,
        )
    address, nbytes = told.workspace
    if (address, nbytes) != (view.address, view.nbytes):
        return _Problem(
            "library workspace not owned",
            f"was told to work in {nbytes} bytes at {address:#x}, and its workspace {view.name} is {view.nbytes} "
            f"bytes at {view.address:#x}",
            "let the handle's set_workspace alone tell the library",
            told.workspace_at,
        )
    return _buffer_problem(handle, view, told, reserve)


def _buffer_problem(handle: Handle, view: View, told: Told, reserve: str) -> _Problem | None:
    buffer = view.buffer
    if view.generation != buffer.generation or buffer.freed:
        now = _holder(handle, view)
        return _Problem(
            "library workspace freed",
            f"works in {view.name}, which was freed{now}",
            "destroy the handle, or give it another workspace, before its workspace is freed",
            told.workspace_at,
        )
    if not buffer.live:
        return _Problem(
            "library workspace not owned",
            f"works in {view.name}, which is part of a layout that is not active",
            "give workspaces memory of their own",
            told.workspace_at,
        )
    if not buffer.permits(handle.owner, "write"):
        return _Problem(
            "library workspace not owned",
            f"works in {view.name} of {buffer.owner}",
            reserve,
            told.workspace_at,
        )
    least = handle.library.calls.least_workspace
    if view.nbytes < least:
        return _Problem(
            "library workspace too small",
            f"works in {view.name}, which has {view.nbytes} bytes",
            f"give at least {least}",
            told.workspace_at,
        )
    return None


def _holder(handle: Handle, view: View) -> str:
    """Whose the memory of a freed workspace is now, as the end of a sentence."""
    allocator = handle.device.allocator
    for buffer in allocator.live_buffers() if allocator is not None else ():
        if buffer.address < view.address + view.nbytes and view.address < buffer.address + buffer.nbytes:
            return f": its memory is {buffer.name} of {buffer.owner} now"
    return ""


def _refuse(code: str, problem: _Problem, call: LibraryCall, stream: Stream) -> NoReturn:
    view = call.handle.workspace if code == "LIB002" else None
    buffer = view.buffer if view is not None else None
    finding = Finding(
        code=code,
        kind=problem.kind,
        message=(
            f"{call.name} of {stream.owner} on stream {stream.name}: {call.handle} {problem.what}; {problem.cure}"
        ),
        buffer=buffer.facts() if buffer is not None else None,
        kernel=call.name,
        launch=call.number,
        stream=stream.name,
        actor=stream.owner.name,
        device=stream.device.name,
        access=capture_stack(),
        previous=problem.at,
        allocation=buffer.allocation if buffer is not None else (),
        free=buffer.free_stack if buffer is not None else (),
    )
    stream.device.keep(finding)
    raise refused(finding)
