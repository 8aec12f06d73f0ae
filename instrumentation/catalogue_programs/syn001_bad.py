"""Each thread decides for itself whether it waits for the others."""

from numba import cuda

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@kernel(block=64)
def clear(x: f32_1d) -> None:
    """Set 64 elements to 0 unless that is done."""
    i = cuda.threadIdx.x
    if x[i] > 0:  # uniform: promised
        cuda.syncthreads()
        x[i] = 0


target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.TRAP, findings=findings)
device.watch(allocator)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
x = arena.reserve(256, owner=target, name="x").unwrap().view("float32", 64)
stream = device.create_stream(owner=target, name="target")
stream.fill(x, 0)
stream.fill(x.buffer.view("float32", 32), 1)
stream.launch(clear, 1, {"x": x})
stream.synchronize()
