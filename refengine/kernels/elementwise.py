"""Elementwise stages: SwiGLU (Shazeer 2020), the residual addition, and the choice of rows."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import numpy as np
import numpy.typing as npt
from numba import cuda

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, f32_2d, i32_1d
from refengine.kernels.numerics import sigmoid_f32

#: elements that one block takes
SPAN = 512


@kernel(block=32, strict=True)
def swiglu(gate: f32_1d, up: f32_1d, y: f32_1d) -> None:
    """Writes y = gate * sigmoid(gate) * up, all [n]. Grid: ceil(n / SPAN)."""
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * SPAN
    n = y.shape[0]
    for b in range(SPAN // 32):
        i = first + b * 32 + lane
        if i < n:
            y[i] = gate[i] * sigmoid_f32(gate[i]) * up[i]


@kernel(block=32, strict=True)
def add(a: f32_1d, b: f32_1d, y: f32_1d) -> None:
    """Writes y = a + b, all [n]. Grid: ceil(n / SPAN)."""
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * SPAN
    n = y.shape[0]
    for span in range(SPAN // 32):
        i = first + span * 32 + lane
        if i < n:
            y[i] = a[i] + b[i]


@kernel(block=32, strict=True)
def select_rows(x: f32_2d, rows: i32_1d, y: f32_2d) -> None:
    """Writes y[i] = x[rows[i]]. x [n_rows, n], rows [n_wanted], y [n_wanted, n]. Grid: n_wanted."""
    lane = cuda.threadIdx.x
    row = rows[cuda.blockIdx.x]
    n = x.shape[1]
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            y[cuda.blockIdx.x, i] = x[row, i]


def swiglu_f64(gate: npt.NDArray[np.floating], up: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Twin of ``swiglu``."""
    wide = gate.astype(np.float64)
    return np.asarray(wide / (1.0 + np.exp(-wide)) * up.astype(np.float64))


def add_f64(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Twin of ``add``."""
    return np.asarray(a.astype(np.float64) + b.astype(np.float64))
