"""Memory is reserved for one row, and 512 come."""

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest

target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.OFF, findings=findings)
plans = {rows: [BufferRequest(4096 * rows, target, "compute.x")] for rows in (1, 512)}
size = allocator.arena_size(plans[1])
arena = allocator.reserve_arena(size, owner=target, name="compute").unwrap()
for rows, plan in plans.items():
    name = f"{rows} rows"
    if arena.check_plan(plan, name=name):
        arena.reserve_overlay(plan, owner=target, name=name).unwrap().release()
arena.release()
