"""Products with a weight matrix in its file's quantisation: y = x W^T, and row lookup in such a matrix.

The weights are decoded in registers, 32 at a time, lane t holding weight t of a block; they never stand in memory as
floats. The order of additions is fixed: lane t sums its column over the blocks in order, then the 32 lanes are
summed by a butterfly. It does not depend on how many rows of x there are, so a token's result is the same bits
alone and in any batch.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.types import f32_2d, i32, i32_1d, u8_2d, u16_2d, u32_2d
from refengine.kernels.numerics import warp_sum
from refengine.kernels.quants import format_of

#: rows of x that one block takes when there are more than one: each decoded weight serves them all
TILE = 4


@functools.cache
def product(quantisation: GGMLQuantizationType, tile: int, *, adds: bool = False) -> DeviceFunction:
    """One column of y = x W^T for a tile of rows, plus r with ``adds``: what every kernel of products is made of."""
    weight = format_of(quantisation).weight
    rows = tuple(range(tile))
    residual = int(adds)

    @device_function
    def product(
        codes: u8_2d, halves: u16_2d, words: u32_2d, x: f32_2d, r: f32_2d, y: f32_2d, out: i32, first: i32
    ) -> None:
        """Takes x [n_rows, n_in]; r, y [n_rows, n_out]: column ``out`` and rows from ``first`` on are one warp's."""
        lane = cuda.threadIdx.x
        last = x.shape[0] - 1
        sums = cuda.local.array(tile, float32)
        for j in rows:
            sums[j] = float32(0.0)
        for b in range(x.shape[1] // 32):
            w = weight(codes, halves, words, out, b, lane)
            for j in rows:
                sums[j] = cuda.fma(w, x[min(first + j, last), b * 32 + lane], sums[j])
        for j in rows:
            total = warp_sum(sums[j])
            if lane == 0 and first + j <= last:
                y[first + j, out] = r[first + j, out] + total if residual > 0 else total

    return product


@functools.cache
def mul_mat(quantisation: GGMLQuantizationType, tile: int) -> Kernel:
    """Kernel for one quantisation and 1 or ``TILE`` rows of x per block; grid (n_out, ceil(n_rows / tile))."""
    column = product(quantisation, tile)

    @kernel(block=32, strict=True)
    def mul_mat(codes: u8_2d, halves: u16_2d, words: u32_2d, x: f32_2d, y: f32_2d) -> None:
        """Takes x [n_rows, n_in], y [n_rows, n_out], weights as packed by ``refengine.kernels.quants``."""
        column(codes, halves, words, x, x, y, cuda.blockIdx.x, cuda.blockIdx.y * tile)

    return _renamed(mul_mat, f"mul_mat_{quantisation.name.lower()}_x{tile}")


@functools.cache
def get_rows(quantisation: GGMLQuantizationType) -> Kernel:
    """Kernel that looks rows of a weight matrix up: the token embedding. Grid: number of rows wanted."""
    weight = format_of(quantisation).weight

    @kernel(block=32, strict=True)
    def get_rows(codes: u8_2d, halves: u16_2d, words: u32_2d, rows: i32_1d, y: f32_2d) -> None:
        """Takes rows [n] of the matrix, y [n, n_in]."""
        lane = cuda.threadIdx.x
        row = rows[cuda.blockIdx.x]
        for b in range(y.shape[1] // 32):
            y[cuda.blockIdx.x, b * 32 + lane] = weight(codes, halves, words, row, b, lane)

    return _renamed(get_rows, f"get_rows_{quantisation.name.lower()}")


def _renamed(made: Kernel, name: str) -> Kernel:
    made.name = name
    return made


def mul_mat_f64(x: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat``: x [n_rows, n_in], weights [n_out, n_in] as ``gguf.quants.dequantize`` gives them."""
    return np.asarray(x.astype(np.float64) @ weights.astype(np.float64).T)


def get_rows_f64(weights: npt.NDArray[np.floating], rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Twin of ``get_rows``."""
    return np.asarray(weights.astype(np.float64)[rows])
