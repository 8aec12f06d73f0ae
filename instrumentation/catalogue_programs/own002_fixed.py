"""Who records an event owns it; others wait for it."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target, draft = Owner("target"), Owner("draft")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.GUARD, findings=findings)
device.watch(allocator)
stream = device.create_stream(owner=target, name="target")
other = device.create_stream(owner=draft, name="draft")
written = device.create_event(owner=target, name="written")
stream.record(written)
other.wait(written)
