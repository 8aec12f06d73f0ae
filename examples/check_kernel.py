"""A plain Numba CUDA kernel under level trap: a bad access is told with its line, index, block and thread."""

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
        y[i] = 2 * x[i]


def main() -> None:
    """Launch it once on 100 elements; what was found is printed at the end."""
    with Sanitizer(device="host", check="trap", file=sys.stdout) as san:
        x = san.array(np.arange(100, dtype=np.float32), name="x")
        y = san.empty(100, np.float32, name="y")
        stream = san.stream()
        san.launch(san.kernel(double, block=64), 2, stream, x=x, y=y)
        result = san.copy_out(y, stream)
        san.synchronize()
        print(f"y = {result[:4]} ... {result[-1]}\n")


if __name__ == "__main__":
    main()
