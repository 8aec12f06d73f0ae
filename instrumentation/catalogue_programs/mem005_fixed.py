"""One part owns the buffer and frees it."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.OFF, findings=findings)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
scratch = [buffer]
for each in scratch:
    each.free()
