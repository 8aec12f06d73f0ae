"""Arg-max and top-k over rows of logits. Equal values: the lower index comes first."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import numpy as np
import numpy.typing as npt
from numba import cuda, float32, int32

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_2d, i32_2d
from refengine.kernels.numerics import FULL, INFINITY


@kernel(block=32, strict=True)
def top_k(x: f32_2d, index: i32_2d, value: f32_2d) -> None:
    """The k largest of each row in descending order. x [n_rows, n]; index, value [n_rows, k]. Grid: n_rows.

    Pass j finds the largest element that comes after the one of pass j - 1 in the order (value down, index up);
    k = 1 is the arg-max. NaN is never chosen; index -1 where a row has fewer than k numbers.
    """
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = x.shape[1]
    last_value = float32(INFINITY)
    last_index = int32(-1)
    for j in range(index.shape[1]):
        best = float32(-INFINITY)
        best_index = int32(n)
        for b in range((n + 31) // 32):
            i = b * 32 + lane
            if i < n:
                v = x[row, i]
                after = v < last_value or (v == last_value and i > last_index)
                if after and (v > best or (v == best and i < best_index)):
                    best = v
                    best_index = int32(i)
        for offset in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, best, offset)
            other_index = cuda.shfl_xor_sync(FULL, best_index, offset)
            if other > best or (other == best and other_index < best_index):
                best = other
                best_index = other_index
        last_value = best
        last_index = best_index
        if lane == 0:
            index[row, j] = best_index if best_index < n else int32(-1)
            value[row, j] = best


def top_k_f64(x: npt.NDArray[np.floating], k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Twin of ``top_k`` for rows without NaN and k <= n."""
    order = np.argsort(-x.astype(np.float64), axis=1, kind="stable")[:, :k]
    return order.astype(np.int32), np.take_along_axis(x.astype(np.float64), order, axis=1)
