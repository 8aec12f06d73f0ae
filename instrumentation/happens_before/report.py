"""Conflicts in words: both accesses, and what would put one behind the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from instrumentation.findings import BufferFacts, Finding, Stack
from instrumentation.happens_before.accesses import HostTouch, Kind, Touch
from instrumentation.happens_before.clocks import StreamClock

if TYPE_CHECKING:
    import numpy.typing as npt

    from instrumentation.devices.monitor import Access
    from instrumentation.happens_before.accesses import Conflict
    from instrumentation.happens_before.clocks import Clock
    from instrumentation.ownership import Owner


class HostArray(NamedTuple):
    """An array of the host that something touches; held here, its memory cannot become another array's."""

    what: str
    array: npt.NDArray[Any]
    owner: Owner | None = None


class Freed(NamedTuple):
    """Memory that is given up by the host: a buffer, or the layout of an arena."""

    what: str
    facts: BufferFacts


Detail: TypeAlias = "Access | HostArray | Freed"
_VERBS = {Kind.READ: "read", Kind.WRITE: "write", Kind.FREE: "give up"}


class _Side(NamedTuple):
    """One of the two accesses. ``name`` is short, ``who`` says whose it is and where it runs."""

    name: str
    who: str
    verb: str
    #: the bytes that both touch, as those of this side's buffer or array
    place: str
    buffer: BufferFacts | None
    allocation: Stack
    kernel: str | None
    argument: str | None
    launch: int | None
    stream: str | None
    owner: str | None


def finding_of(conflict: Conflict, device: str, host: Clock) -> Finding:
    """The finding of a conflict, about its later access, with the earlier one in a note."""
    earlier, later = (_side(touch, conflict) for touch in (conflict.earlier, conflict.later))
    op = conflict.earlier.op
    lands = not isinstance(op.timeline, StreamClock)
    notes = [f"other access: {earlier.who}: {earlier.verb} {earlier.place}", _why(conflict, host)]
    return Finding(
        code=conflict.code,
        message=(
            f"{later.who} would {later.verb} {later.place}, which {earlier.who} may still "
            f"{'fill' if lands else earlier.verb}; {_cure(conflict, earlier, later)}"
        ),
        size=conflict.stop - conflict.start,
        offset=conflict.start - later.buffer.address if later.buffer is not None else None,
        buffer=later.buffer,
        actor=later.owner,
        access=_stack(conflict.later),
        previous=_stack(conflict.earlier),
        allocation=later.allocation,
        device=device,
        kernel=later.kernel,
        argument=later.argument,
        launch=later.launch,
        stream=later.stream,
        notes=tuple(notes),
    )


def _stack(touch: Touch | HostTouch) -> Stack:
    site = touch.site if isinstance(touch, HostTouch) else touch.op.site
    return site.stack if site is not None else ()


def _side(touch: Touch | HostTouch, conflict: Conflict) -> _Side:
    detail: Detail = touch.detail
    op = touch.op if isinstance(touch, Touch) else None
    kernel = argument = launch = None
    buffer: BufferFacts | None = None
    allocation: Stack = ()
    owner: str | None = None
    base = touch.start
    if isinstance(detail, HostArray):
        name = detail.what
        what = f"the host array {detail.array.dtype} {detail.array.shape}"
        owner = detail.owner.name if detail.owner is not None else None
    elif isinstance(detail, Freed):
        name, buffer = detail.what, detail.facts
        what, owner = buffer.name, buffer.owner
    else:
        kernel, argument, launch = detail.kernel, detail.argument, detail.launch
        name = f"kernel {kernel} (launch {launch})" if kernel is not None else detail.what
        buffer, allocation = detail.view.buffer.facts(), detail.view.buffer.allocation
        what = f"{buffer.name}{f' through {argument}' if argument is not None else ''}"
    if buffer is not None:
        base = buffer.address
    if op is not None and op.graph:
        name = f"graph {op.graph}, {name}"
    who = "the host" if isinstance(detail, HostArray) else name
    if op is not None:
        owner = op.timeline.owner
        who = f"{name} of {owner} on stream {op.timeline.name}"
    place = f"bytes [{conflict.start - base}, {conflict.stop - base}) of {what}"
    stream = op.timeline.name if op is not None else None
    verb = _VERBS[touch.kind]
    return _Side(name, who, verb, place, buffer, allocation, kernel, argument, launch, stream, owner)


def _cure(conflict: Conflict, earlier: _Side, later: _Side) -> str:
    on = earlier.stream
    if isinstance(conflict.earlier.op.timeline, StreamClock) and isinstance(conflict.later, Touch):
        return (
            f"record an event on stream {on} after {earlier.name}, and wait for it on stream {later.stream} "
            f"before {later.name}"
        )
    return (
        f"synchronise stream {on}, or wait on the host for an event recorded on it after {earlier.name}, "
        f"before {later.name}"
    )


def _why(conflict: Conflict, host: Clock) -> str:
    """How far the later side can be sure of the earlier side's stream."""
    timeline = conflict.earlier.op.timeline
    if isinstance(conflict.later, Touch):
        clock, who = conflict.later.op.timeline.clock, f"stream {conflict.later.op.timeline.name}"
    else:
        clock, who = host, "the host"
    known = clock.get(timeline, 0)
    if not isinstance(timeline, StreamClock):
        return f"what copy_out brings to stream {timeline.name} is there when the host has waited for it"
    if not known:
        return f"{who} has waited for nothing that stream {timeline.name} did"
    behind = conflict.earlier.op.seq - known
    return (
        f"{who} has waited for stream {timeline.name} up to {behind} operation{'s' if behind > 1 else ''} before "
        "that access: the event was recorded, or the wait was made, too early"
    )
