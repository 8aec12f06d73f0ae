"""A kernel of your own writes one element too far; the guard names kernel, buffer, side and bytes."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reports.text import render


@kernel(block=64)
def scale(x: f32_1d, y: f32_1d) -> None:
    """Y = 2 x, with the classic mistake: <= where < belongs."""
    i = cuda.grid(1)
    if i <= y.shape[0]:
        y[i] = float32(2.0) * x[min(i, x.shape[0] - 1)]


def main() -> None:
    """Launch it once on 100 elements and print what the guard saw."""
    me = Owner("example")
    findings = FindingLog()
    device = open_device("host")
    allocator = Allocator(device, level=Level.GUARD, findings=findings)
    device.watch(allocator)
    arena = allocator.reserve_arena(1 << 16, owner=me, name="arena").unwrap()
    x = arena.reserve(400, owner=me, name="x").unwrap()
    y = arena.reserve(400, owner=me, name="y").unwrap()
    stream = device.create_stream(owner=me, name="stream")
    stream.copy_in(x.view(np.float32, 100), np.arange(100, dtype=np.float32))
    stream.launch(scale, 2, {"x": x.view(np.float32, 100), "y": y.view(np.float32, 100)})
    stream.synchronize()
    for finding in findings:
        print(render(finding))
    for buffer in (x, y):
        buffer.free()
    arena.release()
    allocator.close()


if __name__ == "__main__":
    main()
