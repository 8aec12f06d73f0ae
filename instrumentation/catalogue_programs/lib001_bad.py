"""A library's handle works on another stream than the one on which it is called."""

from instrumentation.allocator import Allocator
from instrumentation.blas import product
from instrumentation.devices.host import HostDevice
from instrumentation.findings import FindingLog
from instrumentation.handles import LibraryHandle
from instrumentation.levels import Level
from instrumentation.ownership import Owner

target = Owner("target")
findings = FindingLog()
device = HostDevice()
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
device.watch(allocator)
arena = allocator.reserve_arena(1 << 20, owner=target, name="arena").unwrap()
buffers = [arena.reserve(1024, owner=target, name=name).unwrap() for name in ("x", "weight", "y")]
x, weight, y = (buffer.view("float32", (16, 16)) for buffer in buffers)
workspace = arena.reserve(1 << 16, owner=target, name="gemm.workspace").unwrap()
stream = device.create_stream(owner=target, name="target")
other = device.create_stream(owner=target, name="other")
handle = LibraryHandle(device, device.blas(), target, "gemm")
handle.set_workspace(workspace.view("uint8", 1 << 16))
handle.set_stream(other)
stream.call(product(handle, x, weight, y))
stream.synchronize()
