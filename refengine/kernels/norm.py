"""Root-mean-square normalisation: y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019)."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import math

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.types import f32, f32_1d, f32_2d, i32, i32_1d
from refengine.kernels.numerics import warp_sum


@device_function
def _norm_row(x: f32_2d, source: i32, weight: f32_1d, y: f32_2d, row: i32, first: i32, eps: f32) -> None:
    """Norm of row ``source`` of x into a row of y, from element ``first`` on; one warp."""
    lane = cuda.threadIdx.x
    n = x.shape[1]
    squares = float32(0.0)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        v = x[source, i] if i < n else float32(0.0)
        squares = cuda.fma(v, v, squares)
    mean = warp_sum(squares) / float32(n)
    scale = float32(1.0) / math.sqrt(mean + eps)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            y[row, first + i] = x[source, i] * scale * weight[i]


@kernel(block=32, strict=True)
def rms_norm(x: f32_2d, weight: f32_1d, y: f32_2d, eps: f32) -> None:
    """One warp per row. x, y [n_rows, n]; weight [n]. Grid: n_rows."""
    _norm_row(x, cuda.blockIdx.x, weight, y, cuda.blockIdx.x, 0, eps)


@kernel(block=32, strict=True)
def rms_norm_rows(x: f32_2d, rows: i32_1d, weight: f32_1d, y: f32_2d, eps: f32) -> None:
    """As ``select_rows``, then ``rms_norm``: x [n_rows, n]; rows [n_wanted]; y [n_wanted, n]. Grid: n_wanted."""
    _norm_row(x, rows[cuda.blockIdx.x], weight, y, cuda.blockIdx.x, 0, eps)


@kernel(block=32, strict=True)
def rms_norm_concat(a: f32_2d, b: f32_2d, weight_a: f32_1d, weight_b: f32_1d, y: f32_2d, eps: f32) -> None:
    """As ``rms_norm`` of a [n_rows, n] and of b [n_rows, m], then ``concat_rows``: y [n_rows, n + m].

    Grid: (2, n_rows).
    """
    if cuda.blockIdx.x == 0:
        _norm_row(a, cuda.blockIdx.y, weight_a, y, cuda.blockIdx.y, 0, eps)
    else:
        _norm_row(b, cuda.blockIdx.y, weight_b, y, cuda.blockIdx.y, a.shape[1], eps)


def rms_norm_f64(
    x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], eps: float
) -> npt.NDArray[np.float64]:
    """Twin of ``rms_norm``: x [n_rows, n], weight [n]."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return np.asarray(wide * scale * weight.astype(np.float64), np.float64)
