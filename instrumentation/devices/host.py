"""The host device: the CPU, with streams that really queue.

Work put on a stream does not run before somebody waits for it (``synchronize``, or an event that another stream
needs), as on a GPU: code that forgets to wait sees stale bytes here too. Launches that follow each other run in one
native call. With a seed the queues run in a random order that is legal: see ``host_schedule``.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numba

from instrumentation.devices.host_blas import HostBlas
from instrumentation.devices.host_memory import Bytes, HostMemory
from instrumentation.devices.host_schedule import Schedule, check_seed
from instrumentation.devices.host_stream import HostEvent, HostStream
from instrumentation.devices.watched import WatchedDevice
from instrumentation.errors import BadInputError
from instrumentation.faults import pass_site
from instrumentation.handles import Library

if TYPE_CHECKING:
    from instrumentation.blas import BlasCalls
    from instrumentation.ownership import Owner

__all__ = ["HostDevice", "HostEvent", "HostStream"]


class HostDevice(HostMemory, WatchedDevice):
    """The CPU as a device.

    ``threads``: how many blocks run at a time; all cores unless given. ``schedule_seed``: queued work of all streams
    runs in the random order of this seed; in the order in which it is needed unless given. After ``watch`` the device
    checks owners and liveness before each launch and copy, and canaries after each launch.
    """

    kind = "host"
    wide_loads = False
    behind_bus = False
    stages_copies = False
    own_memory = False
    traps = True

    def __init__(self, threads: int | None = None, *, schedule_seed: int | None = None) -> None:
        HostMemory.__init__(self)
        WatchedDevice.__init__(self)
        most = int(numba.config.NUMBA_NUM_THREADS)
        try:
            self.threads = most if threads is None else operator.index(threads)
        except TypeError:
            self.threads = 0
        if not 1 <= self.threads <= most:
            raise BadInputError(f"threads is {threads!r}; give a whole number from 1 to {most}")
        self.streams: set[HostStream] = set()
        #: what chooses the order of queued work; None: it runs when it is needed
        self.schedule: Schedule | None = None
        if schedule_seed is not None:
            self.schedule = Schedule(check_seed(schedule_seed), self.streams)
        self._retired: list[Bytes] = []
        self._library: Library[BlasCalls] | None = None

    def create_stream(self, *, owner: Owner, name: str) -> HostStream:
        """A new queue."""
        stream = HostStream(self, owner, name)
        self.streams.add(stream)
        return stream

    def create_event(self, *, owner: Owner, name: str) -> HostEvent:
        """A new event."""
        pass_site(self.faults, "event", f"create_event {name}")
        return HostEvent(self, owner, name)

    def synchronize(self) -> None:
        """Run everything queued on every stream."""
        for stream in sorted(self.streams, key=lambda s: s.handle):
            stream.synchronize()

    def blas(self) -> Library[BlasCalls]:
        """NumPy's products behind a library's interface."""
        if self._library is None:
            self._library = Library(HostBlas(self))
        return self._library

    def release(self, address: int) -> None:
        """Give back what ``allocate`` returned; queued work may still name it, so it stays mapped until that ran."""
        block = self.take(address)
        if any(stream.pending for stream in self.streams):
            self._retired.append(block)

    def drop_retired(self) -> None:
        """Unmap released memory when nothing is queued that could touch it."""
        if self._retired and not any(stream.pending for stream in self.streams):
            self._retired.clear()

    def describe(self) -> str:
        """One line for people."""
        return f"host: {self.threads} threads, {self.memory_info().total / 2**30:.1f} GiB"
