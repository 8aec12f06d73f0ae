"""The guarded allocator: device memory as checked reservations of arenas, and of buffers inside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import structlog

from instrumentation.arena import Arena
from instrumentation.buffer import Buffer
from instrumentation.errors import BadInputError, OutOfMemoryError
from instrumentation.findings import Finding, Stack, capture_stack
from instrumentation.globs import EVERY_BUFFER
from instrumentation.heap import Heap
from instrumentation.integrity import canary_regions, find_at, repair
from instrumentation.ledger import rows_by_size
from instrumentation.levels import Level
from instrumentation.redzones import ALIGNMENT, FRESH, Region, align_up
from instrumentation.reservation import (
    BufferRequest,
    Reservation,
    ReservationError,
    check_nbytes,
    check_request,
)
from instrumentation.shadow import Shadow
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.devices.base import DeviceMemory
    from instrumentation.faults import Faults
    from instrumentation.findings import FindingLog
    from instrumentation.globs import Globs
    from instrumentation.happens_before.audit import DeviceAudit
    from instrumentation.ledger import Row, Snapshot
    from instrumentation.ownership import Owner

_log = structlog.get_logger(__name__)

__all__ = ["Allocator", "Arena", "Buffer", "BufferRequest", "Reservation", "ReservationError"]


class Allocator:
    """All memory of one device. Safe to use from any thread.

    ``limit`` makes the device behave as if it had that many bytes. ``redzone`` is the least number of guard
    bytes on each side of a buffer, ``quarantine_bytes`` bounds the freed memory that is held back to see
    writes after free; neither has a meaning at level ``off``. ``faults`` decides which reservations fail on
    purpose.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        level: Level,
        findings: FindingLog,
        limit: int | None = None,
        redzone: int = 256,
        quarantine_bytes: int = 64 << 20,
        faults: Faults | None = None,
    ) -> None:
        if limit is not None:
            limit = check_nbytes(limit, f"the memory limit of {memory.name}")
        if redzone < 1:
            raise BadInputError(f"redzone is {redzone!r} bytes; give at least 1, or use level off")
        if quarantine_bytes < 0:
            raise BadInputError(f"quarantine_bytes is {quarantine_bytes!r}; give 0 or more")
        self._heap = Heap(
            memory,
            level=Level(level),
            findings=findings,
            limit=limit,
            redzone=redzone,
            quarantine_bytes=quarantine_bytes,
            faults=faults,
        )

    @property
    def level(self) -> Level:
        """What is checked."""
        return self._heap.level

    @property
    def memory(self) -> DeviceMemory:
        """The device underneath."""
        return self._heap.memory

    @property
    def findings(self) -> FindingLog:
        """Where findings go."""
        return self._heap.findings

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Arenas that are reserved now."""
        with self._heap.section():
            return tuple(self._heap.arenas.values())

    def watch_frees(self, audit: DeviceAudit | None) -> None:
        """Refuse (STR012) to give up memory that queued work may still touch; None: do not."""
        self._heap.audit = audit

    def fill_fresh(self, fill: bool) -> None:
        """Fill arenas that are reserved from here on with a byte of which no format makes NaN, or leave them."""
        self._heap.fills_fresh = fill

    def keep_shadows(self, keep: bool, buffers: Globs = EVERY_BUFFER) -> None:
        """Give arenas that are reserved from here on a shadow, which takes as much memory again, or none.

        ``buffers``: those whose states are kept. An arena gets its shadow with the first such buffer.
        """
        self._heap.shadowed = keep
        self._heap.shadowed_buffers = buffers
        self._heap.make_shadow = self._shadow_locked

    def reserve_arena(self, nbytes: int, *, owner: Owner, name: str) -> Reservation[Arena]:
        """Reserve ``nbytes`` bytes, rounded up to a multiple of 256, with one allocation of the driver.

        ``nbytes`` includes redzones and alignment of the buffers to come: see ``arena_size``. Raises
        ``BadInputError`` for a size below 1.
        """
        nbytes = check_request(nbytes, owner, name)
        stack = capture_stack()
        return self._heap.reservation(
            self._reserve_arena(nbytes, owner, name, stack),
            _discard_arena,
            owner=owner,
            name=name,
            nbytes=nbytes,
            stack=stack,
        )

    def arena_size(self, requests: Iterable[BufferRequest]) -> int:
        """Bytes of an arena that just holds ``requests`` at this level."""
        return sum(self._heap.zones.block_nbytes(request.nbytes) for request in requests)

    def free(self, buffer: Buffer) -> None:
        """As ``buffer.free()``; anything that is not a buffer of this allocator is refused (MEM005)."""
        if isinstance(buffer, Buffer) and buffer.heap is self._heap:
            self._heap.free(buffer)
        else:
            self._refuse_foreign(buffer)

    def live_buffers(self) -> tuple[Buffer, ...]:
        """Buffers whose memory is theirs now."""
        with self._heap.section():
            return self._live_locked()

    def canary_regions(self, buffers: Iterable[Buffer] | None = None) -> list[Region]:
        """(address, nbytes, byte) of the canaries of ``buffers`` (all live ones unless given).

        For a device that compares them itself after each launch; what it finds goes to ``find_damage``.
        """
        with self._heap.section():
            return canary_regions(self._heap, self._live_locked() if buffers is None else buffers)

    def find_damage(
        self,
        address: int,
        *,
        kernel: str | None = None,
        launch: int | None = None,
        argument: str | None = None,
        stream: str | None = None,
        actor: str | None = None,
    ) -> Finding:
        """Report the damaged guard byte at ``address``, and repair it. The rest says what ran before.

        Raises ``BadInputError`` when no guard byte of a live or quarantined buffer is there.
        """
        with self._heap.section() as found:
            finding, damage = find_at(self._heap, address)
            finding = replace(
                finding, kernel=kernel, launch=launch, argument=argument, stream=stream, actor=actor
            )
            repair(self._heap.memory, (damage,))
            found.append(finding)
        return finding

    def check_integrity(self) -> list[Finding]:
        """Verify all canaries and the quarantine, and the allocator's own books.

        Damage is reported and repaired. Books that contradict each other raise ``AssertionError``: that is a
        bug in the allocator.
        """
        heap = self._heap
        with heap.section() as found:
            self._check_books_locked()
            found.extend(heap.inspect_locked(self._live_locked()))
            found.extend(heap.verify_freed_locked(heap.quarantine))
        return found

    def snapshot(self) -> Snapshot:
        """Copy the ledger as it is now."""
        with self._heap.section():
            return self._heap.ledger.snapshot()

    def table(self, *, process: bool = False) -> tuple[Row, ...]:
        """Who holds how much now, largest first: buffers, captured graphs, page-locked staging.

        ``process``: with what the driver holds for the whole process, such as loaded kernels.
        """
        with self._heap.section():
            return self._heap.ledger.table(process=process)

    def close(self) -> list[Finding]:
        """Report what is still reserved (MEM006) or was never checked (RES001), and give everything back.

        At level ``audit`` also graphs that nobody destroyed (GRA002).

        Closing twice does nothing. A device that fails is closed as far as it goes, then its first error is
        raised.
        """
        heap = self._heap
        stack = capture_stack()
        if heap.closed_at is not None:
            return []
        heap.drop_unchecked()
        errors = []
        leaked = heap.audit.graphs.leaks(stack) if heap.audit is not None else []
        with heap.section() as found:
            heap.closed_at = stack
            found.extend(leaked)
            arenas = [arena for arena in heap.arenas.values() if not arena.is_shadow]
            for arena in arenas:
                if not arena.buffers and not arena.overlays:
                    found.append(arena.leak_locked(stack))
                try:
                    arena.release_locked(found, stack)
                except Exception as error:  # noqa: BLE001 - raised below, when the other arenas are released
                    errors.append(error)
        for arena in arenas:
            heap.forget(arena)
        if errors:
            raise errors[0]
        return found

    def _reserve_arena(self, nbytes: int, owner: Owner, name: str, stack: Stack) -> Arena | ReservationError:
        heap = self._heap
        memory = heap.memory
        size = align_up(nbytes)
        heap.watch_capture(f"a reservation for arena {name}", owner)
        # A device that aligns to less than a payload needs gets a little more, so that a start can be found.
        need = size if memory.alignment % ALIGNMENT == 0 else size + ALIGNMENT
        injected = heap.injected_failure(owner, name, need, f"device {memory.name}")
        if injected is not None:
            return self._failure(owner, name, need, injected)
        with heap.section() as found:
            if heap.closed_at is not None:
                heap.reject(
                    found, self._closed(f"a reservation for {name} of {owner}", heap.closed_at, stack)
                )
            left = heap.limit_left
            if left is not None and need > left:
                return self._failure_locked(owner, name, need, "")
            arena = self._allocate_locked(size, need, owner, name, stack)
            if isinstance(arena, Arena) and heap.shadowed_buffers.all:
                heap.shadow_for_locked(arena, (name,), stack)
            return arena

    def _allocate_locked(
        self, size: int, need: int, owner: Owner, name: str, stack: Stack
    ) -> Arena | ReservationError:
        heap = self._heap
        if need > heap.memory.memory_info().total:
            return self._failure_locked(owner, name, need, "")
        try:
            driver_address = heap.memory.allocate(need)
        except OutOfMemoryError as error:
            return self._failure_locked(owner, name, need, str(error))
        arena = Arena(
            heap,
            owner=owner,
            name=name,
            serial=heap.next_serial(),
            allocation=stack,
            driver_address=driver_address,
            driver_nbytes=need,
            address=align_up(driver_address),
            nbytes=size,
        )
        if heap.fills_fresh:
            try:
                heap.memory.fill_bytes(driver_address, need, FRESH)
            except BaseException:
                heap.memory.release(driver_address)
                raise
        heap.arenas[arena.serial] = arena
        heap.ledger.reserve_driver(need)
        heap.ledger.reservations += 1
        return arena

    def _shadow_locked(self, arena: Arena, stack: Stack) -> None:
        """Give an arena a shadow. Where there is no memory for it, bounds alone are checked."""
        heap = self._heap
        name = f"shadow.{arena.name}"
        size = align_up(heap.zones.block_nbytes(arena.nbytes))
        need = size + arena.driver_nbytes - arena.nbytes
        made = self._allocate_locked(size, need, arena.owner, name, stack)
        if isinstance(made, ReservationError):
            _log.warning(
                "no memory for a shadow: reads of never-written memory are not checked there; keep fewer shadows "
                "with trap_buffers (--trap-buffers GLOB), or ask for a smaller context",
                arena=arena.name,
                nbytes=need,
            )
            return
        made.is_shadow = True
        heap.shadow_nbytes += made.driver_nbytes
        offset = made.free_list.take(heap.zones.block_nbytes(arena.nbytes))
        assert offset is not None, made
        block = heap.zones.block(offset, arena.nbytes)
        heap.prepare_locked(made, block)
        request = BufferRequest(arena.nbytes, arena.owner, name)
        arena.shadow = Shadow(arena, made.enter_locked(block, request, stack))

    def _failure(self, owner: Owner, name: str, requested: int, reason: str) -> ReservationError:
        with self._heap.section():
            return self._failure_locked(owner, name, requested, reason)

    def _failure_locked(self, owner: Owner, name: str, requested: int, reason: str) -> ReservationError:
        heap = self._heap
        free = heap.memory.memory_info().free
        where = f"device {heap.memory.name}"
        left = heap.limit_left
        if left is not None:
            free = min(free, left)
            where += f" (limited to {heap.limit} bytes)"
        return ReservationError(
            owner=owner,
            name=name,
            where=where,
            requested=requested,
            free=free,
            largest_free=free,
            holders=rows_by_size(
                (arena.owner, arena.name, arena.driver_nbytes, 0) for arena in heap.arenas.values()
            ),
            reason=reason,
        )

    def _live_locked(self) -> tuple[Buffer, ...]:
        return tuple(buffer for arena in self._heap.arenas.values() for buffer in arena.live_buffers())

    def _check_books_locked(self) -> None:
        heap = self._heap
        expected: Counter[tuple[Owner, str]] = Counter()
        for buffer in self._live_locked():
            _require(buffer.live, f"{buffer!r} is held as live")
            expected[buffer.owner, buffer.name] += buffer.nbytes
        table = {(row.owner, row.name): row.nbytes for row in heap.ledger.buffers()}
        _require(table == dict(expected), f"the ledger has {table}, live buffers are {dict(expected)}")
        snapshot = heap.ledger.snapshot()
        _require(snapshot.used.current == expected.total(), f"{snapshot.used.current} != {expected.total()}")
        reserved = sum(arena.driver_nbytes for arena in heap.arenas.values())
        _require(
            snapshot.reserved == reserved, f"the ledger has {snapshot.reserved} reserved, not {reserved}"
        )
        waiting = sum(buffer.block.nbytes for buffer in heap.quarantine)
        _require(
            heap.quarantine.nbytes == waiting, f"quarantine counts {heap.quarantine.nbytes}, not {waiting}"
        )
        for arena in heap.arenas.values():
            self._check_arena_locked(arena)

    def _check_arena_locked(self, arena: Arena) -> None:
        """Free, live and quarantined blocks tile the arena, and free ones are never adjacent."""
        held = [*arena.buffers.values(), *self._heap.quarantine.of(arena)]
        blocks = [(buffer.block.offset, buffer.block.nbytes, False) for buffer in held]
        blocks += [(offset, nbytes, True) for offset, nbytes in arena.free_list.pieces]
        end, was_free = 0, False
        for offset, nbytes, free in sorted(blocks):
            _require(
                offset == end, f"arena {arena.name}: a block starts at {offset}, the one before ends at {end}"
            )
            _require(not (free and was_free), f"arena {arena.name}: two free pieces meet at {offset}")
            end, was_free = offset + nbytes, free
        _require(end == arena.nbytes, f"arena {arena.name}: blocks end at {end} of {arena.nbytes}")
        _require(not (arena.overlays and held), f"arena {arena.name} has overlays and {len(held)} buffers")
        active = arena.active
        _require(
            active is None or active.serial in arena.overlays, f"arena {arena.name}: {active!r} is foreign"
        )

    def _refuse_foreign(self, thing: object) -> NoReturn:
        buffer = None
        if isinstance(thing, View):
            buffer = thing.buffer
            kind, what = "free of a view", f"view {thing.name} of {thing.buffer.name}; free the buffer"
        elif isinstance(thing, Buffer):
            buffer = thing
            device = thing.heap.memory.name
            kind, what = "free of a foreign buffer", f"{thing.name}, which another allocator of {device} made"
        else:
            kind, what = "free of a foreign pointer", f"{thing!r}, which is not a buffer"
            if isinstance(thing, int):
                inside = (each for each in self.live_buffers() if 0 <= thing - each.address < each.nbytes)
                buffer = next(inside, None)
                what = f"address {thing:#x}; free the Buffer"
        self._heap.refuse(
            Finding(
                code="MEM005",
                kind=kind,
                message=f"free() was given {what}",
                buffer=buffer.facts() if buffer is not None else None,
                offset=thing - buffer.address if isinstance(thing, int) and buffer is not None else None,
                device=self._heap.memory.name,
                access=capture_stack(),
                allocation=buffer.allocation if buffer is not None else (),
            )
        )

    @staticmethod
    def _closed(what: str, closed_at: Stack, stack: Stack) -> Finding:
        return Finding(
            code="MEM005",
            kind="use after close",
            message=f"{what} came after the allocator was closed",
            access=stack,
            free=closed_at,
        )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _discard_arena(arena: Arena) -> None:
    if not arena.released:
        arena.release()
