"""The native loop that runs a batch of launches: one call from Python for a whole decode step."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import njit, prange

from instrumentation.kernel.host_runtime import call_blocks

#: columns of a launch record: entry address, argument block address, number of blocks, first and last canary range
ENTRY, ARGUMENTS, BLOCKS, FIRST_RANGE, LAST_RANGE = range(5)
RECORD = 5


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def run_launches(records: Any, begin: int, end: int, threads: int, ranges: Any) -> int:
    """Run launches ``begin`` to ``end``; after each, compare its canary ranges (address, nbytes, byte).

    Returns the index of the first launch after which a canary was damaged, or ``end``.
    """
    for i in range(begin, end):
        blocks = records[i, 2]
        if blocks < 2 or threads < 2:
            call_blocks(records[i, 0], records[i, 1], 0, blocks)
        else:
            for part in prange(threads):
                call_blocks(
                    records[i, 0], records[i, 1], blocks * part // threads, blocks * (part + 1) // threads
                )
        for r in range(records[i, 3], records[i, 4]):
            if not holds(ranges[r, 0], ranges[r, 1], ranges[r, 2]):
                return i
    return end


@njit(cache=True, error_model="numpy")
def holds(address: int, nbytes: int, byte: int) -> bool:
    """Whether every byte of a range has one value."""
    data = numba.carray(bytes_at(address), nbytes)
    for i in range(nbytes):  # noqa: SIM110 - Numba compiles no generator in all()
        if data[i] != byte:
            return False
    return True


@numba.extending.intrinsic
def bytes_at(_typing: Any, _address: Any) -> Any:
    """Pointer to bytes at an address."""
    result = numba.types.CPointer(numba.types.uint8)
    signature = result(numba.types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return signature, generate


NO_RANGES = np.zeros((0, 3), np.int64)
