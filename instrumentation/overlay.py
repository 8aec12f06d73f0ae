"""Alternative layouts of one arena's memory, one active: compute memory whose layout follows the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.buffer import Buffer
from instrumentation.findings import BufferFacts, Finding, Stack, capture_stack
from instrumentation.redzones import FREED, FRESH
from instrumentation.shadow import FREED as FREED_STATE
from instrumentation.shadow import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.arena import Arena
    from instrumentation.ownership import Owner
    from instrumentation.reservation import BufferRequest


class Overlay:
    """Buffers laid one behind the other from the arena's start. Made by ``Arena.reserve_overlay``.

    What the buffers hold is lost when another overlay of the arena becomes active.
    """

    def __init__(
        self, arena: Arena, *, owner: Owner, name: str, nbytes: int, serial: int, allocation: Stack
    ) -> None:
        self.arena = arena
        self.owner = owner
        self.name = name
        #: bytes from the arena's start, redzones and alignment included
        self.nbytes = nbytes
        self.serial = serial
        self.allocation = allocation
        self.free_stack: Stack = ()
        self.released = False
        self.buffers: tuple[Buffer, ...] = ()
        self._poisoned = False

    def lay_out(self, requests: Iterable[BufferRequest]) -> None:
        """Make the buffers. Only the arena calls this, once, under the lock."""
        heap = self.arena.heap
        offset = 0
        buffers = []
        for request in requests:
            block = heap.zones.block(offset, request.nbytes)
            buffers.append(
                Buffer(
                    heap,
                    self.arena,
                    block,
                    owner=request.owner,
                    name=request.name,
                    serial=heap.next_serial(),
                    allocation=self.allocation,
                    overlay=self,
                )
            )
            offset = block.stop
        assert offset == self.nbytes, (offset, self.nbytes)
        self.buffers = tuple(buffers)

    def facts(self) -> BufferFacts:
        """What a finding keeps of this layout as a whole."""
        return BufferFacts(f"overlay {self.name}", self.owner.name, self.arena.address, self.nbytes)

    @property
    def active(self) -> bool:
        """Whether the arena's memory is laid out this way now."""
        return self.arena.active is self

    def activate(self) -> None:
        """Lay the arena's memory out this way; free of cost when it is.

        The buffers of the overlay that was active turn dormant, after a check of their canaries. Raises
        ``FindingError`` (MEM004) when this overlay was released.
        """
        if self.arena.active is self:
            return
        heap = self.arena.heap
        stack = capture_stack()
        previous = self.arena.active
        if previous is not None and not self.released:
            heap.require_idle(f"activate() of overlay {self.name}", previous.facts())
        with heap.section() as found:
            if self.released:
                heap.reject(found, self._misuse("MEM004", "use of a released overlay", "activate()", stack))
            found.extend(self._deactivate_other_locked())
            if heap.guarded:
                if not self._poisoned:
                    heap.memory.fill_bytes(self.arena.address, self.nbytes, FRESH)
                    self._poisoned = True
                heap.write_canaries_locked(self.buffers)
            if self.arena.shadow is not None:
                self.arena.shadow.mark(self.arena.address, self.nbytes, NEVER)
            for buffer in self.buffers:
                heap.ledger.add(buffer.owner, self.arena.name, buffer.name, buffer.nbytes)
            self.arena.active = self

    def release(self) -> None:
        """Give this layout up; the arena keeps its memory.

        Raises ``FindingError``, and changes nothing: MEM005 when it was released before, GRA001 while one of
        its buffers is pinned.
        """
        heap = self.arena.heap
        stack = capture_stack()
        heap.watch_capture(f"release() of overlay {self.name}", self.owner)
        if self.active and not any(buffer.pins for buffer in self.buffers):
            heap.require_idle(f"release() of overlay {self.name}", self.facts())
        with heap.section() as found:
            if self.released:
                heap.reject(found, self._misuse("MEM005", "double release", "release()", stack))
            for buffer in self.buffers:
                heap.require_unpinned(buffer, stack, found)
            if self.active and heap.guarded:
                found.extend(heap.inspect_locked(self.buffers))
                heap.memory.fill_bytes(self.arena.address, self.nbytes, FREED)
                if self.arena.shadow is not None:
                    self.arena.shadow.mark(self.arena.address, self.nbytes, FREED_STATE)
            self.retire_locked(stack)

    def retire_locked(self, stack: Stack) -> None:
        """Take it off the books."""
        if self.active:
            self._forget_rows_locked()
            self.arena.active = None
        for buffer in self.buffers:
            buffer.retire(stack)
        self.released = True
        self.free_stack = stack
        del self.arena.overlays[self.serial]

    def _deactivate_other_locked(self) -> list[Finding]:
        previous = self.arena.active
        if previous is None:
            return []
        findings = self.arena.heap.inspect_locked(previous.buffers)
        previous._forget_rows_locked()  # noqa: SLF001 - another object of this class
        # If the device fails from here on, no overlay is active, and none is blamed for missing canaries.
        self.arena.active = None
        return findings

    def _forget_rows_locked(self) -> None:
        for buffer in self.buffers:
            self.arena.heap.ledger.remove(buffer.owner, self.arena.name, buffer.name, buffer.nbytes)

    def _misuse(self, code: str, kind: str, what: str, stack: Stack) -> Finding:
        return Finding(
            code=code,
            kind=kind,
            message=f"{what} of overlay {self.name} of {self.owner}, which was released",
            actor=self.owner.name,
            access=stack,
            allocation=self.allocation,
            free=self.free_stack,
        )

    def __repr__(self) -> str:
        state = "released" if self.released else "active" if self.active else "dormant"
        parts = f"{len(self.buffers)} buffers, {self.nbytes} bytes"
        return f"<Overlay {self.name} of {self.owner}: {parts}, {state}>"
