"""Hidden rows on their way from the trunk to the MTP block, and from one of its steps to the next."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_2d, i32_1d


@kernel(block=32, strict=True)
def gather_hidden(hidden: f32_2d, chain: f32_2d, rows: i32_1d, y: f32_2d) -> None:
    """Writes y[i] = hidden[rows[i]]; zeros where rows[i] is -1, chain[-2 - rows[i]] where it is less.

    hidden [n_hidden, n], chain [n_chain, n], rows [n_rows], y [n_rows, n]. Grid: n_rows.
    """
    lane = cuda.threadIdx.x
    row = rows[cuda.blockIdx.x]
    n = y.shape[1]
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            if row >= 0:
                y[cuda.blockIdx.x, i] = hidden[row, i]
            elif row == -1:
                y[cuda.blockIdx.x, i] = float32(0.0)
            else:
                y[cuda.blockIdx.x, i] = chain[-2 - row, i]


@kernel(block=32, strict=True)
def scatter_rows(x: f32_2d, rows: i32_1d, y: f32_2d) -> None:
    """Writes y[rows[i]] = x[i], nothing where rows[i] is negative; the others must be distinct.

    x [n_rows, n], rows [n_rows], y [n_wide, n]. Grid: n_rows.
    """
    lane = cuda.threadIdx.x
    row = rows[cuda.blockIdx.x]
    n = x.shape[1]
    if row >= 0:
        for b in range((n + 31) // 32):
            i = b * 32 + lane
            if i < n:
                y[row, i] = x[cuda.blockIdx.x, i]


@kernel(block=32, strict=True)
def concat_rows(a: f32_2d, b: f32_2d, y: f32_2d) -> None:
    """Writes y[i] = [a[i] | b[i]]. a [n_rows, n], b [n_rows, m], y [n_rows, n + m]. Grid: n_rows."""
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    first = a.shape[1]
    n = y.shape[1]
    for part in range((n + 31) // 32):
        i = part * 32 + lane
        if i < first:
            y[row, i] = a[row, i]
        elif i < n:
            y[row, i] = b[row, i - first]


Floats = npt.NDArray[np.floating]
Indices = npt.NDArray[np.integer]


def gather_hidden_f64(hidden: Floats, chain: Floats, rows: Indices) -> npt.NDArray[np.float64]:
    """Twin of ``gather_hidden``."""
    # One table: the chain backwards, a row of zeros, the hidden rows, which begin at row 0.
    zeros = np.zeros((1, hidden.shape[1]))
    table = np.concatenate([chain[::-1], zeros, hidden]).astype(np.float64)
    return np.asarray(table[rows.astype(np.int64) + len(chain) + 1])


def scatter_rows_f64(x: Floats, rows: Indices, y: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``scatter_rows``: y with the rows written."""
    out = y.astype(np.float64)
    out[rows[rows >= 0]] = x[rows >= 0]
    return out


def concat_rows_f64(a: Floats, b: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``concat_rows``."""
    return np.concatenate([a, b], axis=1).astype(np.float64)
