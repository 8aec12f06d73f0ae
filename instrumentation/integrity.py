"""Findings out of guard bytes: which buffer, which side, how far, and what was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, MemoryWindow, capture_stack
from instrumentation.redzones import FREED, Damage, Region, find_damage, window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.devices.base import DeviceMemory
    from instrumentation.heap import Heap
    from instrumentation.redzones import Block

Side = Literal["left", "right"]


def block_regions(heap: Heap, arena: Arena, block: Block) -> tuple[Region, ...]:
    """Canaries of one block: left, right; none at level off or with redzones of no width."""
    both = (heap.zones.left(arena.address, block), heap.zones.right(arena.address, block))
    return tuple(region for region in both if region.nbytes) if heap.guarded else ()


def canary_regions(heap: Heap, buffers: Iterable[Buffer]) -> list[Region]:
    """Canaries of those of ``buffers`` that are live."""
    return [
        region
        for buffer in buffers
        if buffer.live
        for region in block_regions(heap, buffer.arena, buffer.block)
    ]


def repair(memory: DeviceMemory, damage: Iterable[Damage]) -> None:
    """Restore the guard bytes, so that the same damage is not blamed on the next launch too."""
    for item in damage:
        memory.fill_bytes(item.first, item.region.stop - item.first, item.region.byte)


def canary_findings(heap: Heap, buffers: Iterable[Buffer]) -> tuple[list[Finding], list[Damage]]:
    """MEM001 and MEM002 of live buffers, and the damage to repair once every one of them was looked at."""
    pairs = [
        (buffer, region) for buffer in buffers for region in block_regions(heap, buffer.arena, buffer.block)
    ]
    # One question for all of them: on a GPU each costs a wait.
    damaged = heap.memory.mismatches([region for _, region in pairs])
    found = [
        (buffer, damage)
        for buffer, region in (pairs[i] for i in damaged)
        if (damage := find_damage(heap.memory, region)) is not None
    ]
    findings = [canary_finding(heap, buffer, damage) for buffer, damage in found]
    return findings, [damage for _, damage in found]


def canary_finding(heap: Heap, buffer: Buffer, damage: Damage) -> Finding:
    """MEM001 or MEM002 of one live buffer, from damage that is still there."""
    side: Side = "left" if damage.first < buffer.address else "right"
    neighbour = _neighbour(heap, buffer, side, damage)
    notes = []
    if neighbour is not None and neighbour.crossed:
        notes.append(
            f"everything between {buffer.name} and {neighbour.buffer.name} is overwritten: "
            f"either may have been written past, and then the other's contents are damaged too"
        )
    return Finding(
        code="MEM001" if side == "left" else "MEM002",
        message=f"{side} of {buffer.name}, {damage.describe()}",
        size=damage.nbytes,
        offset=damage.first - buffer.address,
        buffer=buffer.facts(),
        neighbour=neighbour.buffer.facts() if neighbour is not None else None,
        reached_neighbour=neighbour is not None and neighbour.reached,
        access=capture_stack(),
        allocation=buffer.allocation,
        window=_window(heap, buffer.arena, damage),
        device=heap.memory.name,
        notes=tuple(notes),
    )


def freed_findings(heap: Heap, buffers: Iterable[Buffer]) -> tuple[list[Finding], list[Damage]]:
    """MEM003 of quarantined buffers: in the poison of their payload, or in what were their redzones."""
    findings = []
    damages = []
    for buffer in buffers:
        for region in freed_regions(heap, buffer):
            damage = find_damage(heap.memory, region)
            if damage is not None:
                findings.append(freed_finding(heap, buffer, damage))
                damages.append(damage)
    return findings, damages


def freed_regions(heap: Heap, buffer: Buffer) -> tuple[Region, ...]:
    """Return what must not change while ``buffer`` is in quarantine."""
    payload = Region(buffer.address, buffer.nbytes, FREED)
    return (payload, *block_regions(heap, buffer.arena, buffer.block))


def freed_finding(heap: Heap, buffer: Buffer, damage: Damage) -> Finding:
    """MEM003 of one quarantined buffer."""
    return Finding(
        code="MEM003",
        message=f"in {buffer.name}, which was freed, {damage.describe()}",
        size=damage.nbytes,
        offset=damage.first - buffer.address,
        buffer=buffer.facts(),
        access=capture_stack(),
        allocation=buffer.allocation,
        free=buffer.free_stack,
        window=_window(heap, buffer.arena, damage),
        device=heap.memory.name,
    )


def find_at(heap: Heap, address: int) -> tuple[Finding, Damage]:
    """Make the finding for a guard byte seen damaged at ``address``. Raises ``BadInputError``."""
    for arena in heap.arenas.values():
        if not arena.address <= address < arena.address + arena.nbytes:
            continue
        for buffer in arena.live_buffers():
            for region in block_regions(heap, arena, buffer.block):
                if region.address <= address < region.stop:
                    damage = _damage_at(heap.memory, region, address)
                    return canary_finding(heap, buffer, damage), damage
        for buffer in heap.quarantine.of(arena):
            for region in freed_regions(heap, buffer):
                if region.address <= address < region.stop:
                    damage = _damage_at(heap.memory, region, address)
                    return freed_finding(heap, buffer, damage), damage
    raise BadInputError(
        f"{address:#x} is no guard byte of a live or quarantined buffer on {heap.memory.name}; "
        f"give an address out of canary_regions()"
    )


def _damage_at(memory: DeviceMemory, region: Region, address: int) -> Damage:
    """Damage of ``region``; of the byte at ``address`` alone when what was there has been put right since."""
    damage = find_damage(memory, region)
    return damage or Damage(region, address, address + 1, memory.read_bytes(address, 1), cut=False)


def _window(heap: Heap, arena: Arena, damage: Damage) -> MemoryWindow:
    return window(heap.memory, damage, arena.address, arena.address + arena.nbytes)


class _Neighbour(NamedTuple):
    """Nearest live buffer; whether damage runs into its redzone that faces us, and through all of it."""

    buffer: Buffer
    reached: bool
    crossed: bool


def _neighbour(heap: Heap, buffer: Buffer, side: Side, damage: Damage) -> _Neighbour | None:
    others = buffer.arena.live_buffers()
    if side == "right":
        beyond = [other for other in others if other.address > buffer.address]
        nearest = min(beyond, key=lambda other: other.address, default=None)
        to_edge = damage.stop == damage.region.stop
    else:
        beyond = [other for other in others if other.address < buffer.address]
        nearest = max(beyond, key=lambda other: other.address, default=None)
        to_edge = damage.first == damage.region.address
    if nearest is None:
        return None
    left, right = block_regions(heap, nearest.arena, nearest.block)
    facing = left if side == "right" else right
    first, last = facing.address, facing.stop - 1
    near, far = (first, last) if side == "right" else (last, first)

    def damaged(address: int) -> bool:
        return heap.memory.read_bytes(address, 1)[0] != facing.byte

    reached = to_edge and damaged(near)
    return _Neighbour(nearest, reached, reached and damaged(far))
