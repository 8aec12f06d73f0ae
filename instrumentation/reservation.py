"""The result of asking for memory, which cannot be used before it was looked at."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NoReturn, Protocol, TypeVar

from instrumentation.errors import BadInputError, OutOfMemoryError
from instrumentation.findings import Finding, Stack, capture_stack
from instrumentation.ownership import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.ledger import Row

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BufferRequest:
    """One buffer to reserve. ``nbytes`` is what the caller may use: at least 1."""

    nbytes: int
    owner: Owner
    name: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", check_request(self.nbytes, self.owner, self.name))


def check_request(nbytes: int, owner: Owner, name: str) -> int:
    """``nbytes`` as a Python int, when the request makes sense; otherwise raises ``BadInputError``."""
    if not isinstance(owner, Owner):
        raise BadInputError(f"the owner of {name!r} is {owner!r}; give an Owner")
    if not isinstance(name, str) or not name.strip():
        raise BadInputError(f"the name of a reservation of {owner} is {name!r}; give text that is not blank")
    return check_nbytes(nbytes, name)


def check_nbytes(nbytes: int, name: str) -> int:
    """``nbytes`` as a Python int, when it is a whole number above 0; otherwise raises ``BadInputError``."""
    try:
        count = None if isinstance(nbytes, bool) else operator.index(nbytes)
    except TypeError:
        count = None
    if count is None or count <= 0:
        raise BadInputError(f"{name} asks for {nbytes!r} bytes; give a whole number above 0")
    return count


def format_bytes(nbytes: int) -> str:
    """``1676685440 bytes (1599.0 MiB)``."""
    return f"{nbytes} bytes ({nbytes / 2**20:.1f} MiB)" if 2**20 <= nbytes < 2**80 else f"{nbytes} bytes"


class ReservationError(OutOfMemoryError):
    """A reservation failed. The allocator is as it was before.

    ``requested``, ``free`` and ``largest_free`` count bytes with redzones and alignment; ``holders`` are the
    largest ones of the memory that was asked, at most five.
    """

    code: ClassVar[str] = "RES002"

    def __init__(
        self,
        *,
        owner: Owner,
        name: str,
        where: str,
        requested: int,
        free: int,
        largest_free: int,
        holders: tuple[Row, ...] = (),
        reason: str = "",
    ) -> None:
        self.owner = owner
        self.name = name
        self.where = where
        self.requested = requested
        self.free = free
        self.largest_free = largest_free
        self.holders = holders[:5]
        self.reason = reason
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [
            f"{self.owner} cannot reserve {format_bytes(self.requested)} for {self.name} in {self.where}",
            self.reason
            or f"{format_bytes(self.free)} are free, the largest piece is {format_bytes(self.largest_free)}",
        ]
        if self.holders:
            held = ", ".join(f"{row.name} of {row.owner} {format_bytes(row.nbytes)}" for row in self.holders)
            parts.append(f"largest holders: {held}")
        parts.append("ask for less, free something, or reserve more memory")
        return "; ".join(parts)


class Keeper(Protocol):
    """The allocator, as a reservation sees it."""

    def settle(self, serial: int) -> None:
        """Forget a reservation that was checked."""

    def abandon(self, serial: int, finding: Finding | None, take_back: Callable[[], None]) -> None:
        """Report a reservation that was dropped unchecked, and call ``take_back`` when that is safe."""

    def refuse(self, finding: Finding) -> NoReturn:
        """Report and raise."""


class Reservation(Generic[T]):
    """Success or failure of one request for memory. Looking at ``ok`` (or the truth value) is the check.

    A reservation that is dropped without a check is finding RES001, and gives its memory back. After a
    check the value belongs to the caller, who frees or releases it.
    """

    __slots__ = (
        "__weakref__", "_checked", "_discard", "_error", "_keeper", "_reported", "_value", "actor", "made_at",
        "name", "nbytes", "serial",
    )  # fmt: skip

    def __init__(
        self,
        keeper: Keeper,
        serial: int,
        made_at: Stack,
        *,
        owner: Owner,
        name: str,
        nbytes: int,
        result: T | ReservationError,
        discard: Callable[[T], None],
    ) -> None:
        self.serial = serial
        self.made_at = made_at
        self.actor = owner
        self.name = name
        self.nbytes = nbytes
        self._error: ReservationError | None = None
        self._value: T | None = None
        if isinstance(result, ReservationError):
            self._error = result
        else:
            self._value = result
        self._keeper = keeper
        self._discard = discard
        self._checked = False
        self._reported = False

    @property
    def ok(self) -> bool:
        """Whether the memory is there. Reading this is the check."""
        self._check()
        return self._value is not None

    def __bool__(self) -> bool:
        return self.ok

    @property
    def error(self) -> ReservationError | None:
        """Why the reservation failed; None when it did not. Reading this is a check too."""
        self._check()
        return self._error

    @property
    def value(self) -> T:
        """What was reserved. Raises ``FindingError`` (RES001) unchecked, ``OutOfMemoryError`` on failure."""
        if not self._checked:
            self._reported = True
            self._keeper.refuse(
                self._unchecked("its value was taken before its result was looked at", capture_stack())
            )
        return self.unwrap()

    def unwrap(self) -> T:
        """Check, then the value. Raises ``OutOfMemoryError`` when the reservation failed."""
        self._check()
        if self._error is not None:
            raise self._error
        if self._value is None:
            self._keeper.refuse(
                self._unchecked("its memory was taken back before anyone looked", capture_stack())
            )
        return self._value

    def _check(self) -> None:
        if not self._checked:
            self._checked = True
            self._keeper.settle(self.serial)

    def _unchecked(self, what: str, access: Stack = ()) -> Finding:
        outcome = "succeeded" if self._error is None else "failed"
        return Finding(
            code="RES001",
            message=f"the reservation of {self.nbytes} bytes for {self.name} {outcome}, and {what}",
            size=self.nbytes,
            actor=self.actor.name,
            # Empty for a drop: the garbage collector may run anywhere, so its place says nothing.
            access=access,
            allocation=self.made_at,
        )

    def drop(self, what: str = "it was dropped before its result was looked at") -> None:
        """Report an unchecked reservation and give its memory back. Nothing happens to a checked one."""
        if self._checked:
            return
        self._checked = True
        finding = None if self._reported else self._unchecked(what)
        self._keeper.abandon(self.serial, finding, self._take_back)

    def _take_back(self) -> None:
        value, self._value = self._value, None
        if value is not None:
            self._discard(value)

    def __del__(self) -> None:
        # An __init__ that raised leaves no _checked; there is nothing to report then.
        if not getattr(self, "_checked", True):
            self.drop()

    def __repr__(self) -> str:
        outcome = "ok" if self._error is None else "failed"
        seen = "" if self._checked else ", not checked"
        return f"<Reservation of {self.nbytes} bytes for {self.name}: {outcome}{seen}>"
