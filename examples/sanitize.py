"""A race and an overflow in a program of plain Numba CUDA kernels, found at their source. No GPU is needed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from instrumentation import Sanitizer


@cuda.jit
def double(x: Any, y: Any) -> None:
    """Y = 2 x, with the classic mistake: <= where < belongs."""
    i = cuda.grid(1)
    if i <= y.shape[0]:
        y[i] = x[min(i, x.shape[0] - 1)] + x[min(i, x.shape[0] - 1)]


def main() -> None:
    """Launch on one stream, and copy the result out on another that does not wait for it."""
    with Sanitizer(device="host", keep_going=True, file=sys.stdout) as san:
        x = san.array(np.arange(100, dtype=np.float32), name="x")
        y = san.array(np.zeros(100, dtype=np.float32), name="y")
        compute, copies = san.stream("compute"), san.stream("copies")
        san.launch(san.kernel(double, block=64), 2, compute, x=x, y=y)
        san.copy_out(y, copies)
        # What was missing, and the copy again: now it is in order.
        done = san.event("done")
        compute.record(done)
        copies.wait(done)
        result = san.copy_out(y, copies)
        san.synchronize()
        print(f"y = {result[:4]} ... {result[-1]}\n")
    assert san.exit_code == 1
    assert [finding.code for finding in san.findings] == ["STR011", "MEM002"]


if __name__ == "__main__":
    main()
