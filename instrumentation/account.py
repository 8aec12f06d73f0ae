"""What this process took from a device's driver: arenas, and what lies beside them: graphs, staging, modules.

The driver says of a graph or a module only how much less is free behind it than before, in steps of its own (2 MiB on
today's GPUs): a small one counts nothing, and the one behind it everything.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from instrumentation.ownership import Owner


class DriverUsage(NamedTuple):
    """Bytes that the driver holds beside arenas: device memory, and page-locked memory of the host."""

    device: int
    host: int


class Held:
    """One entry of an account, until ``drop``."""

    __slots__ = ("_account", "device", "host", "measured", "name", "owner")

    def __init__(self, account: Account, owner: Owner, name: str, *, measured: bool) -> None:
        self._account = account
        self.owner = owner
        self.name = name
        #: told by the driver's free memory, and not by the size that was asked for
        self.measured = measured
        self.device = 0
        self.host = 0

    def grow(self, *, device: int = 0, host: int = 0) -> None:
        """It holds so many bytes more."""
        assert min(device, host) >= 0, (device, host)
        self._account.change(self, device, host)

    def drop(self, returned: int | None = None) -> None:
        """It was given up. ``returned``: bytes by which free memory grew then; all that it held unless given."""
        device = self.device
        self._account.change(self, -device, -self.host)
        self._account.forget(self)
        if self.measured and returned is not None:
            self._account.keep(device - max(0, returned))


class Account:
    """Counters of one device. Safe to use from any thread.

    ``shared`` is the account of all devices of one GPU in this process: what is entered here counts there too.
    """

    def __init__(self, shared: Account | None = None) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        #: whose size was asked for: arenas, tables of canaries
        self._given = 0
        self._held: dict[Held, None] = {}
        self._measured = 0
        self._measured_peak = 0
        #: what the driver kept of things that were given up
        self._kept = 0

    def arena(self, nbytes: int) -> None:
        """The driver gave so many bytes for an arena; it got them back where the number is negative."""
        with self._lock:
            self._given += nbytes
            assert self._given >= 0, self._given
        if self._shared is not None:
            self._shared.arena(nbytes)

    def hold(
        self, owner: Owner, name: str, *, device: int = 0, host: int = 0, measured: bool = False
    ) -> Held:
        """Enter something. ``measured``: its size is told by the driver's free memory."""
        held = Held(self, owner, name, measured=measured)
        if measured:
            # What is too small to be seen in free memory is there all the same.
            with self._lock:
                self._held[held] = None
        held.grow(device=device, host=host)
        return held

    def change(self, held: Held, device: int, host: int) -> None:
        """For ``Held``: it has so many bytes more, of this account and of those above it."""
        with self._lock:
            held.device += device
            held.host += host
            assert min(held.device, held.host) >= 0, (held.name, held.device, held.host)
            if held.device or held.host:
                self._held[held] = None
        account: Account | None = self
        while account is not None:
            account._add(device, measured=held.measured)  # noqa: SLF001 - of its own kind
            account = account._shared  # noqa: SLF001

    def forget(self, held: Held) -> None:
        """For ``Held``: it holds nothing any more."""
        with self._lock:
            self._held.pop(held, None)

    def keep(self, nbytes: int) -> None:
        """The driver kept so many bytes of what was given up; where negative, it gave back what it had kept."""
        with self._lock:
            self._kept = max(0, self._kept + nbytes)
        if self._shared is not None:
            self._shared.keep(nbytes)

    def _add(self, device: int, *, measured: bool) -> None:
        with self._lock:
            if measured:
                self._measured += device
                self._measured_peak = max(self._measured_peak, self._measured)
            else:
                self._given += device

    @property
    def rows(self) -> tuple[tuple[Owner, str, DriverUsage], ...]:
        """What is held beside arenas now, entry by entry, in the order in which it came."""
        with self._lock:
            return tuple((each.owner, each.name, DriverUsage(each.device, each.host)) for each in self._held)

    @property
    def usage(self) -> DriverUsage:
        """All of ``rows`` together."""
        rows = self.rows
        return DriverUsage(sum(usage.device for *_, usage in rows), sum(usage.host for *_, usage in rows))

    @property
    def shared(self) -> Account:
        """The account of the whole GPU in this process: this one, where there is no other."""
        return self if self._shared is None else self._shared

    @property
    def explained(self) -> int:
        """Bytes of device memory in use that are accounted for here.

        Drivers keep memory of graphs that were given up for the next ones. That explains no more than there once was
        of live ones: a driver that keeps something of each for good leaks.
        """
        with self._lock:
            kept = min(self._kept, self._measured_peak - self._measured)
            return self._given + self._measured + kept
