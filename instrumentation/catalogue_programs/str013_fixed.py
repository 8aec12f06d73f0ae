"""The copy is waited for before its array is filled anew."""

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
stream = device.create_stream(owner=target, name="target")
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
view = buffer.view("float32", 100)
staging = np.ones(100, np.float32)
stream.copy_in(view, staging)
stream.synchronize()
device.host_access(staging, "write")
staging[:] = 0
