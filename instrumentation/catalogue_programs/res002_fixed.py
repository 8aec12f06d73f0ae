"""A reservation that fails is seen, and less is asked for."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.GUARD, findings=findings)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
reservation = arena.reserve(1 << 20, owner=target, name="kv.k.0")
if not reservation.ok:
    reservation = arena.reserve(1 << 12, owner=target, name="kv.k.0")
buffer = reservation.unwrap()
