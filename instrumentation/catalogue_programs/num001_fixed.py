"""The divisor has a least value, which zeros cannot miss."""

from numba import cuda, float32

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@kernel(block=64)
def divide(x: f32_1d, y: f32_1d) -> None:
    """Divide each element by the first."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i] / max(x[0], float32(1e-6))


target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.OFF, findings=findings)
device.watch(allocator, check_numerics=True)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
x = arena.reserve(400, owner=target, name="x").unwrap().view("float32", 100)
y = arena.reserve(400, owner=target, name="y").unwrap().view("float32", 100)
stream = device.create_stream(owner=target, name="target")
stream.fill(x, 0)
stream.launch(divide, 2, {"x": x, "y": y})
stream.synchronize()
