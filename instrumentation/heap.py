"""What everything of one allocator shares: lock, ledger, quarantine, findings, and how memory is freed."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from instrumentation import interrupts
from instrumentation.findings import Finding, FindingLog, Stack, capture_stack
from instrumentation.globs import EVERY_BUFFER
from instrumentation.integrity import (
    block_regions,
    canary_findings,
    freed_findings,
    repair,
)
from instrumentation.ledger import Ledger
from instrumentation.levels import Level
from instrumentation.redzones import FREED, FRESH, Redzones
from instrumentation.reports.text import refused
from instrumentation.reservation import Reservation, ReservationError
from instrumentation.shadow import FREED as FREED_STATE
from instrumentation.shadow import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.devices.base import DeviceMemory
    from instrumentation.faults import Faults
    from instrumentation.findings import BufferFacts
    from instrumentation.happens_before.audit import DeviceAudit
    from instrumentation.ownership import Owner
    from instrumentation.redzones import Block

T = TypeVar("T")


class Section:
    """The allocator's lock, held. Findings gathered inside are published when it is open again."""

    __slots__ = ("_heap", "found")

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.found: list[Finding] = []

    def __enter__(self) -> list[Finding]:
        interrupts.enter()
        self._heap.lock.acquire()
        return self.found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._heap.lock.release()
            for finding in self.found:
                self._heap.findings.append(finding)
            self._heap.drain()
        finally:
            interrupts.leave()


class Quarantine:
    """Freed buffers whose memory waits, first in, first out, before it is used again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._waiting: dict[int, Buffer] = {}

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._waiting.values())

    def of(self, arena: Arena) -> list[Buffer]:
        """Buffers of ``arena``, oldest first."""
        return [buffer for buffer in self._waiting.values() if buffer.arena is arena]

    def push(self, buffer: Buffer) -> None:
        """Take in a buffer that was just freed."""
        self._waiting[buffer.serial] = buffer
        self.nbytes += buffer.block.nbytes

    def remove(self, buffer: Buffer) -> None:
        """Let go of ``buffer``."""
        del self._waiting[buffer.serial]
        self.nbytes -= buffer.block.nbytes

    def overflow(self) -> Buffer | None:
        """Oldest buffer when more bytes wait than may."""
        return next(iter(self._waiting.values())) if self.nbytes > self.limit else None


class Heap:
    """One device's memory as the allocator, its arenas and its buffers see it.

    Methods whose names end in ``_locked`` expect the lock, and add to the ``found`` of the section.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        *,
        level: Level,
        findings: FindingLog,
        limit: int | None,
        redzone: int,
        quarantine_bytes: int,
        faults: Faults | None,
    ) -> None:
        self.memory = memory
        self.level = level
        self.guarded = level >= Level.GUARD
        self.findings = findings
        self.limit = limit
        self.zones = Redzones(redzone if self.guarded else 0)
        self.faults = faults
        #: whether arenas are filled when they are reserved, so that no NaN lies there that nobody made
        self.fills_fresh = False
        #: whether arenas get shadows: at level ``trap``, on a device that runs checked kernels
        self.shadowed = False
        #: buffers whose bytes have states there; an arena without any gets no shadow
        self.shadowed_buffers = EVERY_BUFFER
        #: gives an arena its shadow; the allocator's
        self.make_shadow: Callable[[Arena, Stack], None] | None = None
        #: bytes of the ledger that are shadows, which the limit leaves out: it is about what is watched
        self.shadow_nbytes = 0
        self.ledger = Ledger(memory.account)
        self.quarantine = Quarantine(quarantine_bytes)
        self.arenas: dict[int, Arena] = {}
        #: buffers that were freed or shared since the start: what was found of any buffer may be otherwise now
        self.changes = 0
        self.closed_at: Stack | None = None
        #: knows what queued work may still touch, at level ``audit``
        self.audit: DeviceAudit | None = None
        # Not re-entrant: what the garbage collector drops in the middle of a change must wait, see drain().
        self.lock = threading.Lock()
        self._serials = itertools.count(1)
        self._unchecked: dict[int, weakref.ref[Reservation[Any]]] = {}
        self._dropped: deque[tuple[Finding | None, Callable[[], None]]] = deque()

    def section(self) -> Section:
        """Hold the lock as a context manager, which yields the list for findings."""
        return Section(self)

    @property
    def limit_left(self) -> int | None:
        """Bytes that may still be taken from the device; None without a limit."""
        return None if self.limit is None else self.limit - (self.ledger.reserved - self.shadow_nbytes)

    def shadow_for_locked(self, arena: Arena, names: Iterable[str], stack: Stack) -> None:
        """Give an arena its shadow when the first buffer comes whose states are kept, unless it was tried before."""
        wanted = self.shadowed_buffers
        if self.make_shadow is None or not self.shadowed or arena.shadow_tried or arena.is_shadow:
            return
        if any(wanted.matches(name) for name in names):
            arena.shadow_tried = True
            self.make_shadow(arena, stack)

    def next_serial(self) -> int:
        """Return a number that no other thing of this allocator has."""
        return next(self._serials)

    # Findings

    def refuse(self, finding: Finding) -> NoReturn:
        """Report and raise. Not for use inside a section: see ``reject``."""
        self.findings.append(finding)
        raise refused(finding)

    @staticmethod
    def reject(found: list[Finding], finding: Finding) -> NoReturn:
        """Raise inside a section, which reports ``finding`` when the lock is open."""
        found.append(finding)
        raise refused(finding)

    # Reservations

    def reservation(
        self,
        result: T | ReservationError,
        discard: Callable[[T], None],
        *,
        owner: Owner,
        name: str,
        nbytes: int,
        stack: Stack,
    ) -> Reservation[T]:
        """Wrap ``result`` and watch that it is checked."""
        serial = next(self._serials)
        reservation = Reservation(
            self, serial, stack, owner=owner, name=name, nbytes=nbytes, result=result, discard=discard
        )
        self._unchecked[serial] = weakref.ref(reservation)
        return reservation

    def settle(self, serial: int) -> None:
        """Forget a reservation that was checked."""
        self._unchecked.pop(serial, None)

    def abandon(self, serial: int, finding: Finding | None, take_back: Callable[[], None]) -> None:
        """Report a dropped reservation. May run anywhere, even where this thread holds the lock."""
        self._unchecked.pop(serial, None)
        self._dropped.append((finding, take_back))
        self.drain()

    def drain(self) -> None:
        """Take dropped reservations back and report them; whoever holds the lock now does it later."""
        while self._dropped:
            if not self.lock.acquire(blocking=False):
                return
            self.lock.release()
            try:
                finding, take_back = self._dropped.popleft()
            except IndexError:
                return
            # A callback may call the allocator, so the report waits for the lock as the memory does.
            take_back()
            if finding is not None:
                self.findings.append(finding)

    def drop_unchecked(self) -> None:
        """Report every reservation that was never checked, though something still holds it."""
        for reference in list(self._unchecked.values()):
            reservation = reference()
            if reservation is not None:
                reservation.drop("the allocator was closed before its result was looked at")

    def injected_failure(self, owner: Owner, name: str, nbytes: int, where: str) -> str | None:
        """Why this reservation shall fail on purpose; None when it shall not."""
        if self.faults is None:
            return None
        return self.faults.refusal("reserve", f"{owner}/{name}: {nbytes} bytes in {where}")

    # Memory

    def prepare_locked(self, arena: Arena, block: Block) -> None:
        """Fill a fresh block: canaries and poison. Nothing at level off."""
        if not self.guarded:
            return
        self.memory.fill_bytes(arena.address + block.payload, block.payload_nbytes, FRESH)
        if arena.shadow is not None:
            arena.shadow.mark(arena.address + block.payload, block.payload_nbytes, NEVER)
        for region in block_regions(self, arena, block):
            self.memory.fill_bytes(*region)

    def write_canaries_locked(self, buffers: Iterable[Buffer]) -> None:
        """Write the canaries of ``buffers`` anew."""
        for buffer in buffers:
            for region in block_regions(self, buffer.arena, buffer.block):
                self.memory.fill_bytes(*region)

    def check_canaries(self, buffers: Iterable[Buffer]) -> list[Finding]:
        """Damage around live buffers, reported and repaired."""
        with self.section() as found:
            found.extend(self.inspect_locked([buffer for buffer in buffers if buffer.live]))
        return found

    def inspect_locked(self, buffers: Iterable[Buffer]) -> list[Finding]:
        """Damage around ``buffers``, repaired but not reported yet."""
        if not self.guarded:
            return []
        findings, damage = canary_findings(self, buffers)
        repair(self.memory, damage)
        return findings

    def verify_freed_locked(self, buffers: Iterable[Buffer]) -> list[Finding]:
        """Damage to poison and canaries of quarantined buffers, repaired but not reported yet."""
        findings, damage = freed_findings(self, buffers)
        repair(self.memory, damage)
        return findings

    def leave_quarantine_locked(self, buffers: Iterable[Buffer]) -> list[Finding]:
        """Verify buffers for the last time and make their memory free."""
        leaving = list(buffers)
        findings = self.verify_freed_locked(leaving)
        for buffer in leaving:
            self.quarantine.remove(buffer)
            buffer.arena.free_list.give(buffer.block.offset, buffer.block.nbytes)
        return findings

    def free(self, buffer: Buffer) -> None:
        """See ``Buffer.free``."""
        stack = capture_stack()
        if self.audit is not None:
            self.watch_capture(f"free() of {buffer.name}", buffer.owner)
            with self.section() as found:
                self._require_freeable(buffer, stack, found)
            self.require_idle(f"free() of {buffer.name}", buffer.facts())
        with self.section() as found:
            self._require_freeable(buffer, stack, found)
            if self.guarded:
                found.extend(self.inspect_locked((buffer,)))
                self.memory.fill_bytes(buffer.address, buffer.nbytes, FREED)
                if buffer.arena.shadow is not None:
                    buffer.arena.shadow.mark(buffer.address, buffer.nbytes, FREED_STATE)
            self.retire_locked(buffer, stack)
            # A block beyond the bound would only push everything else out.
            if self.guarded and buffer.block.nbytes <= self.quarantine.limit:
                self.quarantine.push(buffer)
                while (oldest := self.quarantine.overflow()) is not None:
                    found.extend(self.leave_quarantine_locked((oldest,)))
            else:
                buffer.arena.free_list.give(buffer.block.offset, buffer.block.nbytes)

    def retire_locked(self, buffer: Buffer, stack: Stack) -> None:
        """Take a live buffer of an arena off the books; its block goes nowhere yet."""
        buffer.retire(stack)
        del buffer.arena.buffers[buffer.serial]
        self.ledger.remove(buffer.owner, buffer.arena.name, buffer.name, buffer.nbytes)

    def _require_freeable(self, buffer: Buffer, stack: Stack, found: list[Finding]) -> None:
        if buffer.freed:
            self.reject(
                found,
                Finding(
                    code="MEM005",
                    kind="double free",
                    message=f"{buffer.name} of {buffer.owner} was freed already",
                    buffer=buffer.facts(),
                    access=stack,
                    allocation=buffer.allocation,
                    free=buffer.free_stack,
                ),
            )
        if buffer.overlay is not None:
            self.reject(
                found,
                Finding(
                    code="MEM005",
                    kind="free of a part of an overlay",
                    message=f"{buffer.name} is part of overlay {buffer.overlay.name}; release the overlay",
                    buffer=buffer.facts(),
                    access=stack,
                    allocation=buffer.allocation,
                ),
            )
        self.require_unpinned(buffer, stack, found)

    def require_unpinned(self, buffer: Buffer, stack: Stack, found: list[Finding]) -> None:
        """Raise GRA001 when something outside still names ``buffer``."""
        if not buffer.pins:
            return
        holders = ", ".join(buffer.pins)
        self.reject(
            found,
            Finding(
                code="GRA001",
                kind="free of a pinned buffer",
                message=f"{buffer.name} of {buffer.owner} cannot be freed while it is pinned by {holders}",
                buffer=buffer.facts(),
                access=stack,
                allocation=buffer.allocation,
            ),
        )

    def require_idle(self, what: str, facts: BufferFacts) -> None:
        """Raise STR012 when queued work may still touch memory that is about to be given up.

        Not for use inside a section: the audit has a lock of its own, which comes first.
        """
        finding = self.audit.free_finding(what, facts) if self.audit is not None else None
        if finding is not None:
            self.refuse(finding)

    def watch_capture(self, what: str, owner: Owner) -> None:
        """Report (GRA003) a change of what is reserved while a stream is captured. Not for use inside a section."""
        if self.audit is not None:
            self.audit.graphs.during_capture(what, owner)

    def forget(self, arena: Arena) -> None:
        """An arena was released. Not for use inside a section, as above."""
        if self.audit is not None:
            self.audit.forget(arena.driver_address, arena.driver_nbytes)
