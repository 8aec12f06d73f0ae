"""Root-mean-square normalisation: y = x / sqrt(mean(x**2) + eps) * weight (Zhang and Sennrich 2019)."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
import math

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.types import f32, f32_1d, f32_2d, i32, i32_1d
from refengine.kernels.numerics import only_warp, own_warp, warp_sum

#: blocks of 32 elements whose squares are one running sum of a lane
RUN = 8


@functools.cache
def _row_norm(warps: int) -> DeviceFunction:
    """Norm of row ``source`` of x into a row of y, from element ``first`` on.

    A lane has a running sum for each ``RUN`` blocks of 32 elements, in which its column is added by fma. These sums
    are added in order, then the 32 columns by a butterfly: a row's warps share its runs, and the bits are the same.
    """
    wide = int(warps > 1)
    warp_of = own_warp if wide else only_warp

    @device_function
    def norm_row(x: f32_2d, source: i32, weight: f32_1d, y: f32_2d, row: i32, first: i32, eps: f32) -> None:
        lane = cuda.threadIdx.x
        warp = warp_of()
        n = x.shape[1]
        n_blocks = (n + 31) // 32
        n_runs = (n_blocks + RUN - 1) // RUN
        runs = cuda.shared.array((warps, 32), float32)
        total = float32(0.0)
        for turn in range((n_runs + warps - 1) // warps):
            run = turn * warps + warp
            squares = float32(0.0)
            for u in range(RUN):
                i = (run * RUN + u) * 32 + lane
                v = x[source, i] if i < n else float32(0.0)
                squares = cuda.fma(v, v, squares)
            if wide > 0:
                runs[warp, lane] = squares
                cuda.syncthreads()
                for w in range(warps):
                    total = total + runs[w, lane]
                cuda.syncthreads()
            else:
                total = total + squares
        mean = warp_sum(total) / float32(n)
        scale = float32(1.0) / math.sqrt(mean + eps)
        for turn in range((n_runs + warps - 1) // warps):
            for u in range(RUN):
                at = ((turn * warps + warp) * RUN + u) * 32 + lane
                if at < n:
                    y[row, first + at] = x[source, at] * scale * weight[at]

    return norm_row


@functools.cache
def rms_norm(warps: int = 1) -> Kernel:
    """Kernel for so many warps per row, which changes no bit. Grid: n_rows."""
    norm_row = _row_norm(warps)

    @kernel(block=(32, warps), strict=True)
    def rms_norm(x: f32_2d, weight: f32_1d, y: f32_2d, eps: f32) -> None:
        """x, y [n_rows, n]; weight [n]."""
        norm_row(x, cuda.blockIdx.x, weight, y, cuda.blockIdx.x, 0, eps)

    return _named(rms_norm, warps)


@functools.cache
def rms_norm_rows(warps: int = 1) -> Kernel:
    """As ``select_rows``, then ``rms_norm``. Grid: n_wanted."""
    norm_row = _row_norm(warps)

    @kernel(block=(32, warps), strict=True)
    def rms_norm_rows(x: f32_2d, rows: i32_1d, weight: f32_1d, y: f32_2d, eps: f32) -> None:
        """X [n_rows, n]; rows [n_wanted]; y [n_wanted, n]."""
        norm_row(x, rows[cuda.blockIdx.x], weight, y, cuda.blockIdx.x, 0, eps)

    return _named(rms_norm_rows, warps)


@functools.cache
def rms_norm_concat(warps: int = 1) -> Kernel:
    """As ``rms_norm`` of a [n_rows, n] and of b [n_rows, m], then ``concat_rows``. Grid: (2, n_rows)."""
    norm_row = _row_norm(warps)

    @kernel(block=(32, warps), strict=True)
    def rms_norm_concat(
        a: f32_2d, b: f32_2d, weight_a: f32_1d, weight_b: f32_1d, y: f32_2d, eps: f32
    ) -> None:
        """Y [n_rows, n + m]."""
        if cuda.blockIdx.x == 0:
            norm_row(a, cuda.blockIdx.y, weight_a, y, cuda.blockIdx.y, 0, eps)
        else:
            norm_row(b, cuda.blockIdx.y, weight_b, y, cuda.blockIdx.y, a.shape[1], eps)

    return _named(rms_norm_concat, warps)


def _named(made: Kernel, warps: int) -> Kernel:
    if warps > 1:
        made.name = f"{made.name}_w{warps}"
    return made


def rms_norm_f64(
    x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], eps: float
) -> npt.NDArray[np.float64]:
    """Twin of ``rms_norm``: x [n_rows, n], weight [n]."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return np.asarray(wide * scale * weight.astype(np.float64), np.float64)
