"""One driver allocation, cut into buffers first-fit, or shared by overlays."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NoReturn

from instrumentation.buffer import Buffer
from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, Stack, capture_stack
from instrumentation.ledger import rows_by_size
from instrumentation.overlay import Overlay
from instrumentation.reservation import BufferRequest, Reservation, ReservationError, check_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from instrumentation.heap import Heap
    from instrumentation.ownership import Owner
    from instrumentation.redzones import Block
    from instrumentation.shadow import Shadow


class FreeList:
    """Free pieces of an arena as (offset, nbytes), sorted, never adjacent."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        self.pieces = list(pieces)

    def copy(self) -> FreeList:
        """Make an independent copy."""
        return FreeList(self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return max((nbytes for _, nbytes in self.pieces), default=0)

    def take(self, nbytes: int) -> int | None:
        """Offset of the first piece that is large enough, which becomes smaller; None when none is."""
        pieces = self.pieces
        for index, (offset, size) in enumerate(pieces):
            if size >= nbytes:
                if size == nbytes:
                    del pieces[index]
                else:
                    pieces[index] = (offset + nbytes, size - nbytes)
                return offset
        return None

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets for all ``sizes``; None, and a list that is of no more use, when one does not fit."""
        offsets = []
        for nbytes in sizes:
            offset = self.take(nbytes)
            if offset is None:
                return None
            offsets.append(offset)
        return offsets

    def give(self, offset: int, nbytes: int) -> None:
        """Put a piece back and join it with its neighbours."""
        pieces = self.pieces
        at = bisect_left(pieces, (offset, 0))
        stop = offset + nbytes
        if at < len(pieces):
            following, size = pieces[at]
            assert stop <= following, f"[{offset}, {stop}) is free already from {following} on"
            if stop == following:
                del pieces[at]
                nbytes += size
        if at > 0:
            previous, size = pieces[at - 1]
            assert previous + size <= offset, f"[{offset}, {stop}) is free already up to {previous + size}"
            if previous + size == offset:
                pieces[at - 1] = (previous, size + nbytes)
                return
        pieces.insert(at, (offset, nbytes))


class Arena:
    """``nbytes`` bytes of device memory of one owner. Made by ``Allocator.reserve_arena``."""

    def __init__(
        self,
        heap: Heap,
        *,
        owner: Owner,
        name: str,
        serial: int,
        allocation: Stack,
        driver_address: int,
        driver_nbytes: int,
        address: int,
        nbytes: int,
    ) -> None:
        self.heap = heap
        self.owner = owner
        self.name = name
        self.serial = serial
        self.allocation = allocation
        self.driver_address = driver_address
        self.driver_nbytes = driver_nbytes
        self.address = address
        self.nbytes = nbytes
        self.free_stack: Stack = ()
        self.released = False
        self.free_list = FreeList([(0, nbytes)])
        #: live buffers outside overlays, by serial
        self.buffers: dict[int, Buffer] = {}
        self.overlays: dict[int, Overlay] = {}
        self.active: Overlay | None = None
        #: what was done to each byte, at level ``trap``
        self.shadow: Shadow | None = None
        self.shadow_tried = False
        #: holds another arena's shadow, and goes with it
        self.is_shadow = False

    def reserve(self, nbytes: int, *, owner: Owner, name: str) -> Reservation[Buffer]:
        """Reserve one buffer of ``nbytes`` bytes. Raises ``BadInputError`` for a size below 1."""
        request = BufferRequest(nbytes, owner, name)
        stack = capture_stack()
        result = self._reserve((request,), stack)
        return self.heap.reservation(
            result if isinstance(result, ReservationError) else result[0],
            _discard_buffer,
            owner=owner,
            name=name,
            nbytes=request.nbytes,
            stack=stack,
        )

    def reserve_all(self, requests: Iterable[BufferRequest]) -> Reservation[tuple[Buffer, ...]]:
        """Reserve all of ``requests``, in that order, or none of them."""
        wanted = _checked(requests, self.name)
        stack = capture_stack()
        return self.heap.reservation(
            self._reserve(wanted, stack),
            _discard_buffers,
            owner=wanted[0].owner,
            name=", ".join(dict.fromkeys(request.name for request in wanted[:4])),
            nbytes=sum(request.nbytes for request in wanted),
            stack=stack,
        )

    def reserve_overlay(
        self, requests: Iterable[BufferRequest], *, owner: Owner, name: str
    ) -> Reservation[Overlay]:
        """Reserve one more layout of this arena's memory, dormant until ``Overlay.activate``.

        Layouts share the memory and one at most is active, so an arena has either overlays or buffers.
        """
        wanted = _checked(requests, name)
        total = check_request(sum(request.nbytes for request in wanted), owner, name)
        stack = capture_stack()
        return self.heap.reservation(
            self._reserve_overlay(wanted, stack, owner, name),
            _discard_overlay,
            owner=owner,
            name=name,
            nbytes=total,
            stack=stack,
        )

    def check_plan(self, requests: Iterable[BufferRequest], *, name: str) -> bool:
        """Whether a layout fits this arena, which was reserved for the largest there is; one that does not is RES003.

        It is reported and nothing else: whoever asks may reserve more, and look at the result.
        """
        needed = sum(self.heap.zones.block_nbytes(request.nbytes) for request in _checked(requests, name))
        if needed <= self.nbytes:
            return True
        finding = Finding(
            code="RES003",
            message=(
                f"plan {name} of {self.owner} needs {needed} bytes, and arena {self.name} was reserved with "
                f"{self.nbytes} for the largest plan; reserve for the one that needs the most"
            ),
            size=needed - self.nbytes,
            actor=self.owner.name,
            device=self.heap.memory.name,
            access=capture_stack(),
            allocation=self.allocation,
        )
        self.heap.findings.append(finding)
        return False

    def release(self) -> None:
        """Give the memory back to the device.

        What is still reserved in it is reported (MEM006) and turns freed. Raises ``FindingError``, and
        changes nothing: MEM005 when it was released before, GRA001 while a buffer in it is pinned.
        """
        stack = capture_stack()
        self.heap.watch_capture(f"release() of arena {self.name}", self.owner)
        with self.heap.section() as found:
            self.require_usable(found, stack, "release")
            for buffer in self.all_buffers():
                self.heap.require_unpinned(buffer, stack, found)
            self.release_locked(found, stack)
        self.heap.forget(self)

    def release_locked(self, found: list[Finding], stack: Stack) -> None:
        """Report leaks and damage, then give the memory back; see ``release``."""
        waiting = self.heap.quarantine.of(self)
        try:
            found.extend(self.heap.inspect_locked(self.live_buffers()))
            found.extend(self.heap.verify_freed_locked(waiting))
        finally:
            # A device that cannot be read any more has to get its memory back all the same.
            for buffer in waiting:
                self.heap.quarantine.remove(buffer)
            self.give_back_locked(found, stack)

    def give_back_locked(self, found: list[Finding], stack: Stack) -> None:
        """Report leaks, and give the memory back."""
        heap = self.heap
        for buffer in list(self.buffers.values()):
            found.append(_leak("buffer", buffer, stack))
            heap.retire_locked(buffer, stack)
        for overlay in list(self.overlays.values()):
            found.append(_leak("overlay", overlay, stack))
            overlay.retire_locked(stack)
        self.released = True
        self.free_stack = stack
        del heap.arenas[self.serial]
        heap.ledger.release_driver(self.driver_nbytes)
        heap.memory.release(self.driver_address)
        if self.shadow is not None:
            self.shadow.release_locked(stack)

    def leak_locked(self, stack: Stack) -> Finding:
        """Make the finding for an arena that nobody released."""
        return _leak("arena", self, stack)

    def live_buffers(self) -> tuple[Buffer, ...]:
        """Buffers whose memory is theirs now: those reserved here, or those of the active overlay."""
        if self.active is not None:
            return self.active.buffers
        return tuple(self.buffers.values())

    def all_buffers(self) -> tuple[Buffer, ...]:
        """Live and dormant buffers."""
        overlaid = (buffer for overlay in self.overlays.values() for buffer in overlay.buffers)
        return (*self.buffers.values(), *overlaid)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved, quarantine included; redzones and padding of new buffers come off."""
        with self.heap.section():
            return 0 if self.overlays else self._free_list_without_quarantine().nbytes

    @property
    def largest_free(self) -> int:
        """Bytes of the largest piece that can be reserved, counted as in ``free_bytes``."""
        with self.heap.section():
            return 0 if self.overlays else self._free_list_without_quarantine().largest

    def require_usable(self, found: list[Finding], stack: Stack, what: str) -> None:
        """Raise MEM005 when the arena was released."""
        if self.released:
            self._reject_released(found, stack, what)

    def _reject_released(self, found: list[Finding], stack: Stack, what: str) -> NoReturn:
        self.heap.reject(
            found,
            Finding(
                code="MEM005",
                kind="double release" if what == "release" else "use of a released arena",
                message=f"{what} of arena {self.name} of {self.owner}, which was released",
                actor=self.owner.name,
                access=stack,
                allocation=self.allocation,
                free=self.free_stack,
            ),
        )

    def _reserve(
        self, requests: Sequence[BufferRequest], stack: Stack
    ) -> tuple[Buffer, ...] | ReservationError:
        heap = self.heap
        sizes = [heap.zones.block_nbytes(request.nbytes) for request in requests]
        first = requests[0]
        heap.watch_capture(f"a reservation for {first.name}", first.owner)
        injected = heap.injected_failure(first.owner, first.name, sum(sizes), f"arena {self.name}")
        if injected is not None:
            return self._failure(first, sum(sizes), injected)
        with heap.section() as found:
            self.require_usable(found, stack, f"a reservation for {first.name}")
            if self.overlays:
                raise BadInputError(
                    f"arena {self.name} holds overlays; reserve {first.name} in another arena"
                )
            placement = self._place(sizes)
            if placement is None:
                return self._failure_locked(first, sum(sizes), "")
            free_list, offsets, leaving = placement
            if leaving:
                found.extend(heap.verify_freed_locked(leaving))
            blocks = [
                heap.zones.block(offset, request.nbytes)
                for offset, request in zip(offsets, requests, strict=True)
            ]
            heap.shadow_for_locked(self, (request.name for request in requests), stack)
            # A device that fails here leaves no trace: nothing is on the books yet.
            for block in blocks:
                heap.prepare_locked(self, block)
            for buffer in leaving:
                heap.quarantine.remove(buffer)
            self.free_list = free_list
            return tuple(
                self.enter_locked(block, request, stack)
                for block, request in zip(blocks, requests, strict=True)
            )

    def enter_locked(self, block: Block, request: BufferRequest, stack: Stack) -> Buffer:
        """Put a buffer on the books."""
        heap = self.heap
        buffer = Buffer(
            heap,
            self,
            block,
            owner=request.owner,
            name=request.name,
            serial=heap.next_serial(),
            allocation=stack,
        )
        self.buffers[buffer.serial] = buffer
        heap.ledger.add(request.owner, self.name, request.name, request.nbytes)
        heap.ledger.reservations += 1
        return buffer

    def _place(self, sizes: Sequence[int]) -> tuple[FreeList, list[int], list[Buffer]] | None:
        """Free list afterwards, offsets, and the quarantined buffers whose memory is needed for that."""
        free_list = self.free_list.copy()
        offsets = free_list.take_all(sizes)
        if offsets is not None:
            return free_list, offsets, []
        if self._free_list_without_quarantine().take_all(sizes) is None:
            return None
        given = self.free_list.copy()
        leaving: list[Buffer] = []
        for buffer in self.heap.quarantine.of(self):
            given.give(buffer.block.offset, buffer.block.nbytes)
            leaving.append(buffer)
            free_list = given.copy()
            offsets = free_list.take_all(sizes)
            if offsets is not None:
                break
        assert offsets is not None, "what fits an empty quarantine fits at the latest when it is empty"
        return free_list, offsets, leaving

    def _free_list_without_quarantine(self) -> FreeList:
        free_list = self.free_list.copy()
        for buffer in self.heap.quarantine.of(self):
            free_list.give(buffer.block.offset, buffer.block.nbytes)
        return free_list

    def _reserve_overlay(
        self, requests: Sequence[BufferRequest], stack: Stack, owner: Owner, name: str
    ) -> Overlay | ReservationError:
        heap = self.heap
        sizes = [heap.zones.block_nbytes(request.nbytes) for request in requests]
        total = sum(sizes)
        whole = BufferRequest(total, owner, name)
        heap.watch_capture(f"a reservation for overlay {name}", owner)
        injected = heap.injected_failure(owner, name, total, f"arena {self.name}")
        if injected is not None:
            return self._failure(whole, total, injected)
        with heap.section() as found:
            self.require_usable(found, stack, f"a reservation for {name}")
            if self.buffers:
                raise BadInputError(
                    f"arena {self.name} holds buffers; reserve overlay {name} in another arena"
                )
            if total > self.nbytes:
                reason = f"the arena has {self.nbytes} bytes, with redzones and alignment"
                return self._failure_locked(whole, total, reason)
            heap.shadow_for_locked(self, (request.name for request in requests), stack)
            found.extend(heap.leave_quarantine_locked(heap.quarantine.of(self)))
            overlay = Overlay(
                self, owner=owner, name=name, nbytes=total, serial=heap.next_serial(), allocation=stack
            )
            overlay.lay_out(requests)
            self.overlays[overlay.serial] = overlay
            heap.ledger.reservations += 1
            return overlay

    def _failure(self, request: BufferRequest, requested: int, reason: str) -> ReservationError:
        with self.heap.section():
            return self._failure_locked(request, requested, reason)

    def _failure_locked(self, request: BufferRequest, requested: int, reason: str) -> ReservationError:
        free_list = self._free_list_without_quarantine()
        return ReservationError(
            owner=request.owner,
            name=request.name,
            where=f"arena {self.name}",
            requested=requested,
            free=free_list.nbytes,
            largest_free=free_list.largest,
            holders=rows_by_size(
                (buffer.owner, buffer.name, buffer.nbytes, 0) for buffer in self.live_buffers()
            ),
            reason=reason,
        )

    def __repr__(self) -> str:
        state = "released" if self.released else f"{len(self.buffers)} buffers, {len(self.overlays)} overlays"
        return f"<Arena {self.name} of {self.owner}: {self.nbytes} bytes, {state}>"


def _checked(requests: Iterable[BufferRequest], where: str) -> tuple[BufferRequest, ...]:
    wanted = tuple(requests)
    if not wanted:
        raise BadInputError(f"nothing is asked of {where}; give at least one BufferRequest")
    for request in wanted:
        if not isinstance(request, BufferRequest):
            raise BadInputError(f"{request!r} is asked of {where}; give a BufferRequest")
    return wanted


def _leak(what: str, item: Buffer | Overlay | Arena, stack: Stack) -> Finding:
    notes: tuple[str, ...] = ()
    if isinstance(item, Buffer) and item.pins:
        notes = (f"it is pinned by {', '.join(item.pins)}",)
    return Finding(
        code="MEM006",
        message=f"{what} {item.name} of {item.owner} ({item.nbytes} bytes) was never given back",
        size=item.nbytes,
        buffer=item.facts() if isinstance(item, Buffer) else None,
        actor=None if isinstance(item, Buffer) else item.owner.name,
        access=stack,
        allocation=item.allocation,
        notes=notes,
    )


def _discard_buffer(buffer: Buffer) -> None:
    if not buffer.freed:
        buffer.free()


def _discard_buffers(buffers: tuple[Buffer, ...]) -> None:
    for buffer in buffers:
        _discard_buffer(buffer)


def _discard_overlay(overlay: Overlay) -> None:
    if not overlay.released:
        overlay.release()
