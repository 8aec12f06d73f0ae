"""Kernels that change shadows. They take raw addresses, which no buffer stands for."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
from numba import cuda

from instrumentation.kernel import kernel
from instrumentation.kernel.checked.runtime import WRITTEN
from instrumentation.kernel.types import u8_1d

BLOCK = 256


@kernel(block=BLOCK)
def mark_written(states: u8_1d) -> None:
    """Say of bytes that they were written."""
    i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
    if i < states.shape[0]:
        states[i] = WRITTEN
