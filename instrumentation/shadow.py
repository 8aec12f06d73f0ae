"""Shadow memory of level ``trap``: for each byte of an arena one that says what was done to it.

A shadow is a buffer like any other, in an arena of its own, so that the ledger counts it. Checked kernels read and
change it; so does what else writes memory: copies, fills, reservations, frees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.kernel.checked.runtime import FREED, NEVER, WRITTEN
from instrumentation.ranges import Ranges

if TYPE_CHECKING:
    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.findings import Stack
    from instrumentation.view import View

__all__ = ["FREED", "NEVER", "WRITTEN", "Shadow", "shadow_of"]


class Shadow:
    """The states of an arena's bytes, at ``delta`` bytes from them."""

    __slots__ = ("_memory", "buffer", "delta", "written")

    def __init__(self, arena: Arena, buffer: Buffer) -> None:
        assert buffer.nbytes == arena.nbytes, (buffer.nbytes, arena.nbytes)
        self.buffer = buffer
        self.delta = buffer.address - arena.address
        self._memory = arena.heap.memory
        #: bytes that are known to be written when what is queued from now on runs: nobody need look them up
        self.written = Ranges()
        self.mark(arena.address, arena.nbytes, NEVER)

    def mark(self, address: int, nbytes: int, state: int) -> None:
        """Say of ``nbytes`` bytes from ``address`` on that they are in one state."""
        if nbytes:
            if state != WRITTEN:
                self.written.remove(address, address + nbytes)
            self._memory.fill_bytes(address + self.delta, nbytes, state)

    def release_locked(self, stack: Stack) -> None:
        """Give the shadow's memory back with its arena's."""
        arena = self.buffer.arena
        arena.heap.retire_locked(self.buffer, stack)
        arena.heap.shadow_nbytes -= arena.driver_nbytes
        arena.give_back_locked([], stack)


def shadow_of(view: View) -> Shadow | None:
    """Shadow of a view's memory; None when none is kept of it, or the memory is no longer the view's."""
    buffer = view.buffer
    return buffer.shadow if view.generation == buffer.generation and buffer.live else None
