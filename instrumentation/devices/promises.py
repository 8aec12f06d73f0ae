"""What a report says of a value that was promised to be the same in all threads of a block, and is not."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from instrumentation.devices.races import position
from instrumentation.findings import Finding

if TYPE_CHECKING:
    from instrumentation.devices.trap import Run
    from instrumentation.kernel.checked.access import Site
    from instrumentation.kernel.checked.report import Record


def divergence(record: Record, run: Run, notes: tuple[str, ...]) -> Finding:
    """The finding of a promise that was not kept: who reaches a barrier, and who does not."""
    launch, called_at = run.launch, run.called_at.stack
    resolved = launch.kernel.access_table.resolve(record.site, record.chain)
    site, shape = resolved.site, launch.kernel.block
    barrier = site.barrier
    return Finding(
        code="SYN001",
        message=f"{site.origin.text} is promised to be one value for the block: {_seen(record, site, shape)}",
        access=(*resolved.frames, *called_at),
        previous=(*barrier.frames, *called_at) if barrier is not None else (),
        kernel=launch.kernel.name,
        launch=launch.number,
        source=resolved.frames[0],
        column=site.origin.column,
        block=position(record.block, launch.grid),
        thread=position(record.thread, shape),
        notes=(_consequence(site), *notes),
        count=record.count,
        stream=run.stream,
        actor=run.owner.name,
        device=run.allocator.memory.name,
    )


def _seen(record: Record, site: Site, shape: tuple[int, ...]) -> str:
    block, other, count, last = record.indices
    threads, floats = record.extents[:2]
    first = position(record.thread, shape)
    who = f"thread {first}"
    if count > 1:
        who = f"{count} of {threads} threads, from {first} to {position(last, shape)},"
    if site.wanted is not None and site.barrier is not None:
        does, do = ("reaches", "not") if bool(block) == site.wanted else ("does not reach", "")
        barrier = f"{site.barrier.text} at line {site.barrier.line}"
        return f"thread {position(0, shape)} {does} {barrier}; {who} {'do' if count > 1 else 'does'} {do}".rstrip()
    values = [_shown(value, floats=bool(floats)) for value in (block, other)]
    has = "have others" if count > 1 else "another"
    return f"it is {values[0]} in thread {position(0, shape)}, and {values[1]} in thread {first}" + (
        f"; {who} {has}" if count > 1 else ""
    )


def _consequence(site: Site) -> str:
    if site.barrier is None:
        return "what depends on it was done once for the block, as its first thread has it"
    return (
        f"{site.barrier.text} at line {site.barrier.line} is reached by part of the block; the block went on as its "
        "first thread does"
    )


def _shown(value: int, *, floats: bool) -> str:
    return f"{struct.unpack('<d', struct.pack('<q', value))[0]:g}" if floats else str(value)
