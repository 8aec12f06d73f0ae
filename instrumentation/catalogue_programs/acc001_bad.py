"""A library takes memory of its own at each step, behind the allocator's back."""

from instrumentation.allocator import Allocator
from instrumentation.devices.base import MemoryInfo
from instrumentation.devices.host import HostDevice
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.memory_watch import MemoryWatch
from instrumentation.ownership import Owner


class Library(HostDevice):
    """A device with a library that brings its own workspace unless it is given one."""

    taken = 0

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes."""
        return MemoryInfo(free=(1 << 30) - self.taken, total=1 << 30)

    def multiply(self, workspace: object) -> None:
        """One step of the program."""
        self.taken += 0 if workspace else 4 << 20


target = Owner("target")
findings = FindingLog()
device = Library()
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
watch = MemoryWatch(allocator, spacing=0)
watch.begin()
for _ in range(4):
    device.multiply(None)
    watch.sample()
