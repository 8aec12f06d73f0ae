"""The second stream waits for what the first one wrote."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
device.watch(allocator)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
view = buffer.view("float32", 100)
one = device.create_stream(owner=target, name="one")
two = device.create_stream(owner=target, name="two")
one.fill(view, 0)
written = device.create_event(owner=target, name="written")
one.record(written)
two.wait(written)
two.fill(view, 1)
device.synchronize()
