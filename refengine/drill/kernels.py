"""Kernels that faults are planted with."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
from numba import cuda, float32

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32


@kernel(block=32, strict=True)
def stray(y: f32_1d, at: i32) -> None:
    """Writes y[at], wherever that is."""
    if cuda.threadIdx.x == 0:
        y[at] = float32(1.0)


@kernel(block=32, strict=True)
def linger(x: f32_1d, y: f32_1d, rounds: i32) -> None:
    """Adds x[0] to half of y[0] so many times: work that what is queued behind it waits for."""
    if cuda.threadIdx.x == 0:
        total = y[0]
        step = x[0]
        for _ in range(rounds):
            total = cuda.fma(total, float32(0.5), step)
        y[0] = total
