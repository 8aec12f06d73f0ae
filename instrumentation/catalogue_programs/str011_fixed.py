"""The reader waits for the writer."""

import numpy as np

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
values = np.empty(100, np.float32)
one.fill(view, 0)
written = device.create_event(owner=target, name="written")
one.record(written)
two.wait(written)
two.copy_out(values, view)
device.synchronize()
