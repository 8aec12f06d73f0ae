"""What a report says of two accesses that race."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from instrumentation.kernel.checked.report import RACE, Other, Record

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.devices.launch import Launch
    from instrumentation.kernel.checked.access import Resolved

_WARP = 32
Position = tuple[int, int, int]


def position(number: int, extents: tuple[int, ...]) -> Position:
    """Place of a block or thread in its grid or block of ``extents``, x first."""
    x, y, _ = (*extents, 1, 1)[:3]
    return number % x, number // x % y, number // (x * y)


def merged(records: Iterable[Record]) -> list[Record]:
    """Records, of which those of one pair of accesses are one, whichever of the two came first."""
    found: dict[object, Record] = {}
    for record in records:
        key: object = (record.kind, record.chain, record.site)
        if record.other is not None:
            sites = (record.chain, record.site), (record.other.chain, record.other.site)
            key = (record.kind, frozenset(sites))
        known = found.get(key)
        found[key] = replace(known, count=known.count + record.count) if known else record
    return list(found.values())


@dataclass(frozen=True)
class Race:
    """Two accesses of one element by two threads, of which ``other`` came first on the host."""

    thread: Position
    other_thread: Position
    #: None where it is that of the access
    other_block: Position | None
    #: whether threads of one warp race
    same_warp: bool
    other: Resolved

    @property
    def kind(self) -> str:
        """For the headline; empty where the catalogue's title says it."""
        return "two blocks race" if self.other_block is not None else ""

    @property
    def message(self) -> str:
        """Continues what says of the access how and to what it was made."""
        site = self.other.site
        whose = f"thread {self.other_thread}"
        if self.other_block is not None:
            whose += f" of block {self.other_block}"
        return (
            f"thread {self.thread} is not ordered behind {whose}, "
            f"which came first here with the {site.how} of {site.origin.text}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the other access is, and what would order the two."""
        origin = self.other.site.origin
        where = f"the {self.other.site.how} of {origin.text} is at line {origin.line}, column {origin.column}"
        if self.other_block is not None:
            return where, "nothing orders two blocks of a launch: only atomics may meet at an element"
        if self.same_warp:
            return where, "the threads are of one warp: cuda.syncwarp() between the two orders them"
        return where, "the threads are of two warps: only cuda.syncthreads() between the two orders them"


def race_of(record: Record, launch: Launch) -> Race | None:
    """The race that a record tells of."""
    if record.kind != RACE:
        return None
    other = record.other
    assert other is not None, record
    block, shape = _other_block(record, other), launch.kernel.block
    return Race(
        position(record.thread, shape),
        position(other.thread, shape),
        None if block == record.block else position(block, launch.grid),
        record.thread // _WARP == other.thread // _WARP,
        launch.kernel.access_table.resolve(other.site, other.chain),
    )


def _other_block(record: Record, other: Other) -> int:
    """The block of which the last bits are known: blocks of one call run in order, so it is the next one below."""
    span = 1 << 24
    return record.block - (record.block - other.block) % span
