"""Memory of a soaked engine at one moment, and whether it has grown."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.engine import Engine

#: what a device may take beyond the ledger after warm-up: modules that load late, a larger stack
DEVICE_TOLERANCE = 16 << 20
#: what a process may take after warm-up: its allocator's leftovers, what a soak remembers
RESIDENT_TOLERANCE = (0.05, 16 << 20)


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes at one moment."""

    #: by the ledger: taken from the device
    reserved: int
    #: most that was reserved until then
    reserved_peak: int
    #: by the ledger: payload of live buffers
    used: int
    #: in use of the whole device, by its own count; None where that is the machine's memory
    device: int | None
    #: resident memory of the process; None where the system does not say
    resident: int | None
    #: in use of the device, by the account of this process: arenas, captured graphs, loaded kernels
    explained: int = 0

    @classmethod
    def of(cls, engine: Engine) -> MemoryPoint:
        """Of an engine now."""
        snapshot = engine.allocator.snapshot()
        return cls(
            snapshot.reserved,
            snapshot.reserved_peak,
            snapshot.used.current,
            _device(engine),
            resident(),
            engine.device.account.shared.explained,
        )


def _device(engine: Engine) -> int | None:
    if engine.device.name == "host":
        return None
    info = engine.device.memory_info()
    return info.total - info.free


def resident() -> int | None:
    """Bytes of this process that are in memory; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(
    warm: MemoryPoint, end: MemoryPoint, *, may_reserve: int = 0, warmed_up: bool = True
) -> Iterator[str]:
    """What grew after warm-up, in words. ``warm`` was taken under load, ``end`` when nothing was left to do.

    Of a run that ended before it had ``warmed_up`` the ledger alone is judged: kernels were still being loaded.

    ``may_reserve``: bytes that the ledger may reach anyway, where compute memory follows the largest batch so far.
    """
    allowed = max(warm.reserved_peak, may_reserve)
    if end.reserved > allowed:
        yield f"the ledger has {end.reserved} bytes reserved, {end.reserved - allowed} more than warm-up needed"
    if not warmed_up:
        return
    if warm.device is not None and end.device is not None:
        # What the account may explain is its growth.
        explained = max(0, end.explained - warm.explained)
        grown = end.device - warm.device - explained
        if grown > DEVICE_TOLERANCE:
            yield f"the device has {grown} bytes more in use than after warm-up, and the ledger does not know them"
    if warm.resident is not None and end.resident is not None:
        part, more = RESIDENT_TOLERANCE
        if end.resident > warm.resident * (1 + part) + more:
            yield (
                f"the process has {end.resident - warm.resident} bytes more in memory than after warm-up, which had "
                f"{warm.resident}"
            )
