"""A lease is ended by hand, and again by its owner."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target, draft = Owner("target"), Owner("draft")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
lease = buffer.lend(to=draft, mode="read")
lease.end()
lease.end()
