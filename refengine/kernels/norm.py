"""Root-mean-square normalisation: y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019)."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import math

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32, f32_1d, f32_2d
from refengine.kernels.numerics import warp_sum


@kernel(block=32, strict=True)
def rms_norm(x: f32_2d, weight: f32_1d, y: f32_2d, eps: f32) -> None:
    """One warp per row. x, y [n_rows, n]; weight [n]. Grid: n_rows."""
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = x.shape[1]
    squares = float32(0.0)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        v = x[row, i] if i < n else float32(0.0)
        squares = cuda.fma(v, v, squares)
    mean = warp_sum(squares) / float32(n)
    scale = float32(1.0) / math.sqrt(mean + eps)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            y[row, i] = x[row, i] * scale * weight[i]


def rms_norm_f64(
    x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], eps: float
) -> npt.NDArray[np.float64]:
    """Twin of ``rms_norm``: x [n_rows, n], weight [n]."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return np.asarray(wide * scale * weight.astype(np.float64), np.float64)
