"""A named piece of device memory with an owner, a state, pins and leases."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NoReturn

from instrumentation.errors import BadInputError
from instrumentation.findings import BufferFacts, Finding, Stack, capture_stack
from instrumentation.ownership import Lease, Mode, Owner
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from instrumentation.arena import Arena
    from instrumentation.heap import Heap
    from instrumentation.overlay import Overlay
    from instrumentation.redzones import Block
    from instrumentation.shadow import Shadow

__all__ = ["Buffer", "BufferState", "View"]


class BufferState(enum.Enum):
    """What a buffer's memory is now."""

    LIVE = "live"
    #: part of an overlay that is not active: other buffers live at this address
    DORMANT = "dormant"
    FREED = "freed"


class Buffer:
    """``nbytes`` bytes at ``address``, a multiple of 256, until ``free()``. Made by a reservation."""

    __slots__ = (
        "_last_leases", "_leases", "_pins", "_read_only", "address", "allocation", "arena", "block",
        "free_stack", "freed", "generation", "heap", "name", "nbytes", "overlay", "owner", "serial",
    )  # fmt: skip

    def __init__(
        self,
        heap: Heap,
        arena: Arena,
        block: Block,
        *,
        owner: Owner,
        name: str,
        serial: int,
        allocation: Stack,
        overlay: Overlay | None = None,
    ) -> None:
        self.heap = heap
        self.arena = arena
        self.block = block
        self.owner = owner
        self.name = name
        self.nbytes = block.payload_nbytes
        self.address = arena.address + block.payload
        #: number of this buffer among all that the allocator ever made
        self.serial = serial
        #: changes at free, so that a view made before sees it
        self.generation = 0
        self.allocation = allocation
        self.free_stack: Stack = ()
        self.freed = False
        self.overlay = overlay
        self._read_only = False
        self._pins: dict[str, int] = {}
        self._leases: list[Lease] = []
        #: the last one that each borrower had, active or over
        self._last_leases: dict[Owner, Lease] = {}

    @property
    def state(self) -> BufferState:
        """Live, dormant or freed."""
        if self.freed:
            return BufferState.FREED
        return BufferState.LIVE if self.live else BufferState.DORMANT

    @property
    def live(self) -> bool:
        """Neither freed nor dormant: the memory is this buffer's."""
        return not self.freed and (self.overlay is None or self.arena.active is self.overlay)

    @property
    def shadow(self) -> Shadow | None:
        """States of its bytes, where they are kept."""
        return self.arena.shadow if self.heap.shadowed_buffers.matches(self.name) else None

    @property
    def read_only(self) -> bool:
        """Shared with every owner for reading, and written by nobody."""
        return self._read_only

    @property
    def pins(self) -> Mapping[str, int]:
        """Who pinned this buffer, and how often."""
        return dict(self._pins)

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Leases that are active now."""
        return tuple(lease for lease in self._leases if lease.active)

    def last_lease(self, to: Owner) -> Lease | None:
        """What ``to`` was lent this buffer by last: active, or over by now. None when it never was, or since a free."""
        return self._last_leases.get(to)

    def leases_for(self, owner: Owner, mode: Mode) -> list[Lease]:
        """Leases by which ``owner`` may access this buffer in ``mode`` now."""
        return [lease for lease in self._leases if lease.permits(owner, mode)]

    def facts(self) -> BufferFacts:
        """Return what a finding keeps of this buffer."""
        return BufferFacts(self.name, self.owner.name, self.address, self.nbytes)

    def share_read_only(self) -> None:
        """Let every owner read, and nobody write, from now on: model weights after loading."""
        if not self.live:
            self.refuse_dead("share_read_only()")
        self._read_only = True
        self.heap.changes += 1

    def permits(self, owner: Owner, mode: Mode) -> bool:
        """Whether ``owner`` may access this buffer in ``mode`` now: its own, shared, or lent to it."""
        if self._read_only:
            return mode == "read"
        return owner == self.owner or any(lease.permits(owner, mode) for lease in self._leases)

    def view(
        self,
        dtype: npt.DTypeLike,
        shape: int | Sequence[int],
        *,
        offset: int = 0,
        name: str | None = None,
        bits: str = "",
    ) -> View:
        """View of ``shape`` elements (C order) from byte ``offset`` on.

        ``bits``: integers that are the bits of numbers, such as ``f16``: see ``numbers.FORMATS``.
        Raises ``BadInputError`` for what does not lie inside or is not aligned, and ``FindingError`` (MEM004)
        when the buffer was freed. A dormant buffer may be viewed: the view can be used once it is active.
        """
        if self.freed:
            self.refuse_dead(f"view {name or self.name}")
        return View.of(self, dtype, shape, offset, name, bits)

    def free(self) -> None:
        """Give the memory back.

        Raises ``FindingError``, and changes nothing: MEM005 when it was freed before or belongs to an
        overlay, GRA001 while it is pinned.
        """
        self.heap.free(self)

    def pin(self, by: str) -> None:
        """Refuse to free this buffer until ``unpin(by)``: something such as a captured graph names it."""
        with self.heap.section():
            if not self.freed:
                self._pins[by] = self._pins.get(by, 0) + 1
                return
        self.refuse_dead(f"a pin by {by}")

    def unpin(self, by: str) -> None:
        """Undo one ``pin(by)``. Raises ``BadInputError`` when there is none."""
        with self.heap.section():
            count = self._pins.get(by, 0)
            if count == 0:
                held = ", ".join(self._pins) or "nobody"
                raise BadInputError(f"{self.name} is not pinned by {by}; it is pinned by {held}")
            if count == 1:
                del self._pins[by]
            else:
                self._pins[by] = count - 1

    def lend(self, *, to: Owner, mode: Mode, after: object | None = None, by: Owner | None = None) -> Lease:
        """Let ``to`` access this buffer until the lease ends. ``by`` lends it: the owner unless given.

        Raises ``FindingError``: OWN001 when ``by`` is not the owner, MEM004 when the buffer is not live;
        and ``BadInputError`` for a mode that cannot be given.
        """
        if by is not None and by != self.owner:
            self.refuse(
                Finding(
                    code="OWN001",
                    message=f"{by} lends {self.name} to {to}, but it belongs to {self.owner}",
                    buffer=self.facts(),
                    actor=by.name,
                    access=capture_stack(),
                    allocation=self.allocation,
                )
            )
        if mode not in ("read", "write"):
            raise BadInputError(f"{self.name} cannot be lent in mode {mode!r}; use 'read' or 'write'")
        if to == self.owner:
            raise BadInputError(f"{self.name} belongs to {to} already; lend it to another owner")
        if self._read_only and mode == "write":
            raise BadInputError(f"{self.name} is shared read-only; lend it in mode 'read'")
        lease = Lease(self, to=to, mode=mode, after=after)
        if self.heap.audit is not None and after is not None:
            lease.handed = self.heap.audit.snapshot(after)
        with self.heap.section():
            live = self.live
            if live:
                self._leases.append(lease)
                self._last_leases[to] = lease
        if not live:
            self.refuse_dead(f"a lease to {to}")
        return lease

    def end_lease(self, lease: Lease) -> bool:
        """End one lease; False when it had ended. ``Lease.end`` is the way to call this."""
        with self.heap.section():
            if not lease.close_at(capture_stack()):
                return False
            self._leases = [kept for kept in self._leases if kept is not lease]
            return True

    def check_canaries(self) -> list[Finding]:
        """Damage left (MEM001) and right (MEM002) of the payload. Reported, then repaired: found once.

        Nothing at level ``off``, and for a buffer that is not live.
        """
        return self.heap.check_canaries((self,))

    def retire(self, stack: Stack) -> None:
        """Turn freed. Only the allocator calls this, under its lock."""
        self.freed = True
        self.free_stack = stack
        self.generation += 1
        self.heap.changes += 1
        for lease in self._leases:
            lease.close_at(stack)
        self._leases.clear()
        self._last_leases.clear()
        self._pins.clear()

    def refuse(self, finding: Finding) -> NoReturn:
        """Report ``finding`` and raise it."""
        self.heap.refuse(finding)

    def refuse_dead(
        self,
        what: str,
        *,
        kernel: str | None = None,
        argument: str | None = None,
        launch: int | None = None,
        stream: str | None = None,
        actor: str | None = None,
    ) -> NoReturn:
        """Report and raise MEM004: ``what`` needs memory that this buffer does not have now."""
        kind = "use of a freed buffer"
        if self.freed:
            message = f"{what} names {self.name}, which was freed"
        else:
            kind = "use of a dormant buffer"
            overlay = self.overlay.name if self.overlay is not None else "nothing"
            active = self.arena.active.name if self.arena.active is not None else "none"
            message = (
                f"{what} names {self.name} of overlay {overlay}, but the active overlay of arena "
                f"{self.arena.name} is {active}; activate {overlay} first"
            )
        self.refuse(
            Finding(
                code="MEM004",
                kind=kind,
                message=message,
                buffer=self.facts(),
                kernel=kernel,
                argument=argument,
                launch=launch,
                stream=stream,
                actor=actor,
                device=self.heap.memory.name,
                access=capture_stack(),
                allocation=self.allocation,
                free=self.free_stack,
            )
        )

    def __repr__(self) -> str:
        at = f"{self.nbytes} bytes at {self.address:#x}"
        return f"<Buffer {self.name} of {self.owner}: {at}, {self.state.value}>"
