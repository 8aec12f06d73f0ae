"""Who may touch what: owners, and leases that lend a buffer to another owner for a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, Stack, capture_stack

if TYPE_CHECKING:
    from types import TracebackType

    from instrumentation.buffer import Buffer
    from instrumentation.happens_before.order import Snapshot

Mode = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A context that memory and streams belong to, such as ``target``, ``draft`` or ``model``."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise BadInputError(f"an owner's name must be text that is not blank, not {self.name!r}")

    def __str__(self) -> str:
        return self.name


class Lease:
    """The right of ``to`` to read, or to read and write, a buffer of another owner until ``end()``.

    ``after`` is the event that orders the borrower behind the lender's last write; level ``audit`` asks for it at each
    access of the borrower. Made by ``Buffer.lend``. A lease is over when it is ended or when its buffer is freed.
    """

    __slots__ = ("_ended", "after", "buffer", "ended_at", "handed", "made_at", "mode", "to")

    def __init__(self, buffer: Buffer, *, to: Owner, mode: Mode, after: object | None) -> None:
        self.buffer = buffer
        self.to = to
        self.mode: Mode = mode
        self.after = after
        #: what ``after`` stood for when the lease was made, at level ``audit``; None when it had not been recorded
        self.handed: Snapshot | None = None
        self.made_at: Stack = capture_stack()
        self.ended_at: Stack = ()
        self._ended = False

    @property
    def active(self) -> bool:
        """Neither ended nor over because the buffer was freed."""
        return not self._ended and not self.buffer.freed

    def permits(self, owner: Owner, mode: Mode) -> bool:
        """Whether ``owner`` may access the buffer in ``mode`` now; a lease to write is one to read too."""
        return self.active and owner == self.to and (mode == "read" or self.mode == "write")

    def end(self) -> None:
        """Take the buffer back. Raises ``FindingError`` (OWN010) when the lease has ended before."""
        if self.buffer.end_lease(self):
            return
        self.buffer.refuse(
            Finding(
                code="OWN010",
                kind="lease ended twice",
                message=f"the {self.mode} lease of {self.buffer.name} to {self.to} had ended already",
                buffer=self.buffer.facts(),
                actor=self.to.name,
                access=capture_stack(),
                previous=self.ended_at,
                allocation=self.buffer.allocation,
                free=self.buffer.free_stack,
            )
        )

    def close_at(self, stack: Stack) -> bool:
        """Mark as ended; False when it was. Only the buffer calls this, under the allocator's lock."""
        if self._ended:
            return False
        self._ended = True
        self.ended_at = stack
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A body that frees the buffer or ends the lease itself has done what this would do.
        if self.active:
            self.end()

    def __repr__(self) -> str:
        state = "active" if self.active else "over"
        return f"<Lease {self.mode} of {self.buffer.name} to {self.to}, {state}>"
