"""Kernels with which the CUDA device looks at memory. They take raw addresses, which no buffer stands for."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
from numba import cuda

from instrumentation.kernel import kernel
from instrumentation.kernel.types import i32, i32_1d, i64_2d, u8_1d, u64_1d

#: most blocks of ``find_mismatch``; each thread takes every such byte
FIND_BLOCKS = 1024


@kernel(block=256)
def find_mismatch(data: u8_1d, found: u64_1d, value: i32) -> None:
    """found[0] = min(found[0], index of the first byte of ``data`` that is not ``value``)."""
    i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
    while i < data.shape[0]:
        if data[i] != value:
            cuda.atomic.min(found, 0, i)
        i += cuda.gridDim.x * 256


@kernel(block=128)
def check_regions(memory: u8_1d, regions: i64_2d, flags: i32_1d, slot: i32, step: i32) -> None:
    """flags[slot + step * r] = 1 when a byte of region r is damaged; one block a region.

    ``regions`` [n, 3]: offset in ``memory``, nbytes, byte.
    """
    region = cuda.blockIdx.x
    stop = regions[region, 0] + regions[region, 1]
    i = regions[region, 0] + cuda.threadIdx.x
    while i < stop:
        if memory[i] != regions[region, 2]:
            flags[slot + step * region] = 1
        i += 128
