"""Level ``trap``: what a checked launch has beside its arguments, and findings out of its report."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.devices.promises import divergence
from instrumentation.devices.races import Race, merged, position, race_of
from instrumentation.devices.shadow_kernels import BLOCK, mark_written
from instrumentation.devices.steps import DeviceArray, Step
from instrumentation.findings import CallSite, Finding
from instrumentation.kernel.checked.races import tables
from instrumentation.kernel.checked.report import (
    DIVERGED,
    OUTSIDE,
    RACE,
    REPORT_WORDS,
    UNWRITTEN,
    Record,
    read_records,
)
from instrumentation.redzones import access_window
from instrumentation.shadow import FREED, shadow_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from instrumentation.allocator import Allocator
    from instrumentation.buffer import Buffer
    from instrumentation.devices.launch import Launch
    from instrumentation.findings import BufferFacts, MemoryWindow
    from instrumentation.kernel.checked.access import Resolved
    from instrumentation.ownership import Owner
    from instrumentation.view import View

Words = npt.NDArray[np.int64]
_MODES = {OUTSIDE: "out of bounds", UNWRITTEN: "of never-written memory"}
_SHADOW_ALIGNMENT = 64


class Trap:
    """Report and shadows of one checked launch, which may run many times."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.called_at = CallSite()
        #: see ``checked.report``
        self.report: Words = np.zeros(REPORT_WORDS, np.int64)
        self._views = tuple(launch.views.values())
        #: where races are looked for
        self._tables = tables()
        #: shadows that say of memory which is a view's no more that it was freed
        self._stale: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def slots(self) -> list[int]:
        """What a checked kernel's argument block ends with: the report's address, the distance of each shadow."""
        distances = (self._distance(i, view) for i, view in enumerate(self._views))
        return [self.report.ctypes.data, *distances, self._tables]

    def refresh(self, block: Words) -> None:
        """Before a run: memory may have been freed since the launch was queued."""
        slots = self.slots
        block[-len(slots) :] = slots

    def _distance(self, number: int, view: View) -> int:
        if not view.nbytes:
            return 0
        if view.generation != view.buffer.generation or not view.buffer.live:
            return self._freed(number, view)
        shadow = view.buffer.shadow
        return 0 if shadow is None else shadow.delta

    def _freed(self, number: int, view: View) -> int:
        if number not in self._stale:
            self._stale[number] = np.full(view.nbytes + _SHADOW_ALIGNMENT, FREED, np.uint8)
        start = self._stale[number].ctypes.data
        return start + (view.address - start) % _SHADOW_ALIGNMENT - view.address

    def take(self, allocator: Allocator, stream: str, owner: Owner) -> list[Finding]:
        """Findings of what was reported since the last call, in the order of the source."""
        if not self.report[0]:
            return []
        words, self.report[:] = self.report.copy(), 0
        return list(findings(words, Run(self.launch, self.called_at, allocator, stream, owner)))


def written_marks(launch: Launch) -> list[Step]:
    """Steps behind a launch that runs plain among checked ones: all that it may have written counts as written."""
    steps = []
    for name, view in launch.views.items():
        shadow = shadow_of(view) if name in launch.kernel.writes and view.nbytes else None
        if shadow is not None:
            states = DeviceArray(view.address + shadow.delta, (view.nbytes,), 1)
            steps.append(Step(mark_written, (-(-view.nbytes // BLOCK), 1, 1), (states,)))
    return steps


@dataclass(frozen=True)
class Run:
    """A launch that ran: called from where, on whose stream, over whose memory."""

    launch: Launch
    called_at: CallSite
    allocator: Allocator
    stream: str
    owner: Owner


def findings(words: Words, run: Run) -> Iterator[Finding]:
    """One finding for each record of a launch's report."""
    records, left = read_records(words)
    more = (f"{left} more at other places, for which the report has no room",) if left else ()
    for record in merged(records):
        yield _finding(record, run, more)


def _finding(record: Record, run: Run, notes: tuple[str, ...]) -> Finding:
    if record.kind == DIVERGED:
        return divergence(record, run, notes)
    launch, kind = run.launch, record.kind
    resolved = launch.kernel.access_table.resolve(record.site, record.chain)
    declared = launch.kernel.parsed.arrays.get(resolved.array or "")
    space = declared.space if declared is not None else resolved.site.space
    view = None if space else launch.views.get(resolved.array or "")
    axes = (axis + 1 for axis, extent in enumerate(record.extents) if extent)
    rank = view.ndim if view is not None else max(axes, default=1)
    indices, extents = record.indices[:rank], record.extents[:rank]
    place = _Place(view, indices, run.allocator) if view is not None else None
    race = race_of(record, launch)
    called_at = run.called_at.stack
    return Finding(
        code=_code(kind, resolved),
        kind=race.kind if race is not None else _kind(kind, resolved),
        message=_message(kind, resolved, indices, extents, space, race),
        size=view.itemsize if view is not None else None,
        buffer=view.buffer.facts() if view is not None else None,
        offset=place.offset if place is not None else None,
        neighbour=place.neighbour if place is not None else None,
        access=(*resolved.frames, *called_at),
        previous=(*race.other.frames, *called_at) if race is not None else (),
        allocation=view.buffer.allocation if view is not None else (),
        free=view.buffer.free_stack if view is not None else (),
        window=place.window if place is not None else None,
        kernel=launch.kernel.name,
        launch=launch.number,
        source=resolved.frames[0],
        column=resolved.site.origin.column,
        argument=_shown(resolved.array or resolved.site.array),
        block=position(record.block, launch.grid),
        thread=position(record.thread, launch.kernel.block),
        notes=(*(race.notes if race is not None else (_consequence(kind, resolved),)), *notes),
        count=record.count,
        stream=run.stream,
        actor=run.owner.name,
        device=run.allocator.memory.name,
    )


def _code(kind: int, resolved: Resolved) -> str:
    if kind == OUTSIDE:
        return "MEM010" if resolved.site.how == "load" else "MEM011"
    return {UNWRITTEN: "MEM012", RACE: "RAC001"}.get(kind, "MEM013")


def _kind(kind: int, resolved: Resolved) -> str:
    return f"{resolved.site.how} {_MODES[kind]}" if kind in _MODES else ""


def _shown(name: str) -> str:
    """An array's name as the source has it: the normal form numbers those of inlined functions."""
    return name.partition("__")[0] or name


def _message(
    kind: int,
    resolved: Resolved,
    indices: Sequence[int],
    extents: Sequence[int],
    space: str,
    race: Race | None,
) -> str:
    text, array = resolved.site.origin.text, _shown(resolved.site.array)
    element = f"{array}[{', '.join(map(str, indices))}]"
    what = f"{resolved.site.how} of {text}" + ("" if text == element else f" as {element}")
    what += f" in {space} memory" if space else ""
    if race is not None:
        return f"{what}: {race.message}"
    if kind == OUTSIDE:
        wrong = [
            f"index {index} of axis {axis}, which has {extent} {'element' if extent == 1 else 'elements'}"
            for axis, (index, extent) in enumerate(zip(indices, extents, strict=True))
            if not 0 <= index < extent
        ]
        return f"{what}: {' and '.join(wrong) or 'an index of an axis behind the fourth'}"
    if kind == UNWRITTEN:
        since = "the block began" if space else "it was reserved"
        return f"{what}: nothing wrote all bytes of the element since {since}"
    return f"{what}: the memory was freed after the launch was queued"


def _consequence(kind: int, resolved: Resolved) -> str:
    if kind == UNWRITTEN:
        return "the kernel went on with what the memory held"
    return "the load gave 0" if resolved.site.how == "load" else f"the {resolved.site.how} was dropped"


class _Place:
    """Where an element would lie: counted from its buffer's start, in which other buffer, and what is around it."""

    def __init__(self, view: View, indices: Sequence[int], allocator: Allocator) -> None:
        element = sum(index * prod(view.shape[axis + 1 :]) for axis, index in enumerate(indices))
        address = view.address + element * view.itemsize
        buffer = view.buffer
        self.offset = address - buffer.address
        self.neighbour = self._neighbour(buffer, address, allocator)
        self.window: MemoryWindow | None = None
        arena = buffer.arena
        stop = arena.address + arena.nbytes
        if not arena.released and arena.address <= address and address + view.itemsize <= stop:
            self.window = access_window(allocator.memory, address, view.itemsize, arena.address, stop)

    @staticmethod
    def _neighbour(buffer: Buffer, address: int, allocator: Allocator) -> BufferFacts | None:
        for other in allocator.live_buffers():
            if other is not buffer and other.address <= address < other.address + other.nbytes:
                return other.facts()
        return None
