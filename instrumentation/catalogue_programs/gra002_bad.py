"""A graph is captured anew for each step."""

from numba import cuda, float32

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@kernel(block=64)
def clear(y: f32_1d) -> None:
    """Set each element to zero."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = float32(0.0)


target = Owner("target")
findings = FindingLog()
device = open_device("host")
allocator = Allocator(device, level=Level.AUDIT, findings=findings)
device.watch(allocator)
arena = allocator.reserve_arena(1 << 16, owner=target, name="arena").unwrap()
buffer = arena.reserve(400, owner=target, name="kv.k.0").unwrap()
view = buffer.view("float32", 100)
stream = device.create_stream(owner=target, name="target")
for step in range(3):
    stream.begin_capture()
    stream.launch(clear, 2, {"y": view})
    graph = stream.end_capture(f"decode {step}")
    stream.replay(graph)
    stream.synchronize()
