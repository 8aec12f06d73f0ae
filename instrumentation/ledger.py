"""Who holds how much: the allocator's own account of device memory, to hold against the device's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from instrumentation.account import Account, DriverUsage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from instrumentation.ownership import Owner


class Row(NamedTuple):
    """Bytes that an owner holds under one name: payload of buffers, or what the driver holds beside arenas."""

    owner: Owner
    name: str
    #: of the device's memory
    nbytes: int
    #: of the host's memory, page-locked
    host: int = 0


class Usage(NamedTuple):
    """Payload bytes now, and the most there ever were."""

    current: int
    peak: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger at one moment. Equal snapshots mean that nothing happened between them."""

    #: bytes taken from the device: whole arenas
    reserved: int
    reserved_peak: int
    #: payload bytes of live buffers; redzones and padding are not in here
    used: Usage
    owners: Mapping[Owner, Usage]
    #: by arena name; arenas of one name are added up
    arenas: Mapping[str, Usage]
    #: reservations that succeeded, since the start
    reservations: int
    #: what the driver holds for this device beside arenas: captured graphs, staging, checks
    driver: DriverUsage

    def __post_init__(self) -> None:
        assert 0 <= self.reserved <= self.reserved_peak, self
        assert self.used.current == sum(usage.current for usage in self.owners.values()), self
        assert self.used.current == sum(usage.current for usage in self.arenas.values()), self


class Ledger:
    """Counters. Not locked: the allocator calls it under its own lock.

    ``account`` knows what the driver holds beside arenas; a ledger without one knows of buffers alone.
    """

    def __init__(self, account: Account | None = None) -> None:
        self.account = account if account is not None else Account()
        self.reserved = 0
        self.reserved_peak = 0
        self.reservations = 0
        self.used = 0
        self.used_peak = 0
        self._owners: Counter[Owner] = Counter()
        self._owner_peaks: dict[Owner, int] = {}
        self._arenas: Counter[str] = Counter()
        self._arena_peaks: dict[str, int] = {}
        self._rows: dict[tuple[Owner, str], int] = {}

    def reserve_driver(self, nbytes: int) -> None:
        """Count ``nbytes`` that the device gave."""
        self.account.arena(nbytes)
        self.reserved += nbytes
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def release_driver(self, nbytes: int) -> None:
        """Count ``nbytes`` that the device got back."""
        self.account.arena(-nbytes)
        self.reserved -= nbytes
        assert self.reserved >= 0, self.reserved

    def add(self, owner: Owner, arena: str, name: str, nbytes: int) -> None:
        """Enter a buffer that became live."""
        self.used += nbytes
        self.used_peak = max(self.used_peak, self.used)
        now = self._owners[owner] = self._owners[owner] + nbytes
        self._owner_peaks[owner] = max(now, self._owner_peaks.get(owner, 0))
        now = self._arenas[arena] = self._arenas[arena] + nbytes
        self._arena_peaks[arena] = max(now, self._arena_peaks.get(arena, 0))
        key = (owner, name)
        self._rows[key] = self._rows.get(key, 0) + nbytes

    def remove(self, owner: Owner, arena: str, name: str, nbytes: int) -> None:
        """Strike out a buffer that is live no longer."""
        self.used -= nbytes
        self._owners[owner] -= nbytes
        self._arenas[arena] -= nbytes
        key = (owner, name)
        left = self._rows[key] - nbytes
        assert left >= 0, (key, left)
        if left:
            self._rows[key] = left
        else:
            del self._rows[key]

    def snapshot(self) -> Snapshot:
        """All counters as they are."""
        return Snapshot(
            reserved=self.reserved,
            reserved_peak=self.reserved_peak,
            used=Usage(self.used, self.used_peak),
            owners={owner: Usage(self._owners[owner], peak) for owner, peak in self._owner_peaks.items()},
            arenas={arena: Usage(self._arenas[arena], peak) for arena, peak in self._arena_peaks.items()},
            reservations=self.reservations,
            driver=self.account.usage,
        )

    def buffers(self) -> tuple[Row, ...]:
        """List live buffers, largest first; those of one owner and name are one row."""
        return rows_by_size((owner, name, nbytes, 0) for (owner, name), nbytes in self._rows.items())

    def table(self, *, process: bool = False) -> tuple[Row, ...]:
        """List what is held now, largest first: buffers, and what the driver holds beside arenas.

        ``process``: with what it holds for all devices of this GPU in this process, such as loaded kernels.
        """
        accounts = {self.account, self.account.shared} if process else {self.account}
        beside = [row for account in accounts for row in account.rows]
        return rows_by_size(
            [(owner, name, usage.device, usage.host) for owner, name, usage in beside]
            + [(row.owner, row.name, row.nbytes, 0) for row in self.buffers()]
        )


def rows_by_size(holdings: Iterable[tuple[Owner, str, int, int]]) -> tuple[Row, ...]:
    """Add holdings (owner, name, bytes, page-locked bytes) up by owner and name, and sort them, largest first."""
    sums: Counter[tuple[Owner, str]] = Counter()
    locked: Counter[tuple[Owner, str]] = Counter()
    for owner, name, nbytes, host in holdings:
        sums[owner, name] += nbytes
        locked[owner, name] += host
    rows = (Row(owner, name, nbytes, locked[owner, name]) for (owner, name), nbytes in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, -row.host, row.owner.name, row.name)))
