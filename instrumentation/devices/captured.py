"""Captured graphs: what they access, checked anew at each replay, and which buffers they pin."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from instrumentation.devices.monitor import Access, Standing, work_accesses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from instrumentation.devices.launch import Work
    from instrumentation.devices.watched import WatchedDevice
    from instrumentation.happens_before.footprint import Footprint


_serials = itertools.count(1)


class CapturedGraph:
    """Launches that are replayed as one. Pins every buffer that they name until ``destroy``."""

    def __init__(self, device: WatchedDevice, name: str, launches: Sequence[Work]) -> None:
        self.device = device
        self.name = name
        #: number of this graph among all
        self.serial = next(_serials)
        self.destroyed = False
        #: what a finding behind a replay can be blamed on
        self.captured = tuple(launches)
        #: all that its launches touch, as the audit of order keeps it; made at the first replay
        self.footprint: Footprint | None = None
        accesses: dict[tuple[int, str], Access] = {}
        for launch in launches:
            for access in work_accesses(launch):
                accesses.setdefault((access.view.buffer.serial, access.mode), access)
        #: one for each buffer and mode, checked anew at each replay
        self.standing = Standing(accesses.values())
        self._buffers = {access.view.buffer for access in self.accesses}
        for buffer in self._buffers:
            buffer.pin(self._pin)

    @property
    def accesses(self) -> tuple[Access, ...]:
        """What it reads and writes."""
        return self.standing.accesses

    @property
    def _pin(self) -> str:
        return f"graph {self.name}"

    @property
    def launches(self) -> int:
        """Number of captured launches."""
        return len(self.captured)

    def every_access(self) -> Iterator[Access]:
        """What each launch accesses, in order."""
        for launch in self.captured:
            yield from work_accesses(launch)

    def destroy(self) -> None:
        """Unpin the buffers."""
        if not self.destroyed:
            self.destroyed = True
            if self.device.audit is not None:
                self.device.audit.graphs.remove(self)
            for buffer in self._buffers:
                # A buffer that its allocator took back at close has no pins left.
                if not buffer.freed:
                    buffer.unpin(self._pin)
