"""The target lends what the draft writes in mode write."""

import numpy as np

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target, draft = Owner("target"), Owner("draft")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
device.watch(allocator)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
view = buffer.view("float32", 100)
stream = device.create_stream(owner=target, name="target")
other = device.create_stream(owner=draft, name="draft")
written = device.create_event(owner=target, name="written")
stream.fill(view, 0)
stream.record(written)
with buffer.lend(to=draft, mode="write", after=written):
    other.wait(written)
    other.copy_in(view, np.ones(100, np.float32))
    other.synchronize()
