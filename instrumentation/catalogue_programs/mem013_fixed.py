"""The launch has ended before its buffer is freed."""

from numba import cuda

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@kernel(block=64)
def copy(x: f32_1d, y: f32_1d) -> None:
    """Copy each element."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i]


target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.TRAP, findings=findings)
device.watch(allocator)
# Another allocator, which the device does not watch: nothing refuses the early free.
scratch = Allocator(device, level=Level.TRAP, findings=findings)
arena = scratch.reserve_arena(1 << 16, owner=target, name="scratch").unwrap()
x = arena.reserve(400, owner=target, name="x").unwrap().view("float32", 100)
y = arena.reserve(400, owner=target, name="y").unwrap().view("float32", 100)
stream = device.create_stream(owner=target, name="target")
stream.fill(x, 0)
stream.launch(copy, 2, {"x": x, "y": y})
stream.synchronize()
x.buffer.free()
