"""Products with what would be a launch of its own before or behind them: the bits are those of the separate kernels.

Kernels of several products are made for the quantisation of each, so that matrices of different ones go together.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_2d, u8_2d, u16_2d, u32_2d
from refengine.kernels.elementwise import swiglu_f64
from refengine.kernels.mul_mat import mul_mat_f64, product
from refengine.kernels.numerics import sigmoid_f32, warp_sum
from refengine.kernels.quants import format_of

#: products of one x that one launch can hold
MAX_PRODUCTS = 4
Quantisations: TypeAlias = tuple[GGMLQuantizationType, ...]


@functools.cache
def mul_mat_add(quantisation: GGMLQuantizationType, tile: int) -> Kernel:
    """As ``mul_mat``, then ``add``: y = r + x W^T. Grid: (n_out, ceil(n_rows / tile))."""
    column = product(quantisation, tile, adds=True)

    @kernel(block=32, strict=True)
    def mul_mat_add(codes: u8_2d, halves: u16_2d, words: u32_2d, x: f32_2d, r: f32_2d, y: f32_2d) -> None:
        """Takes x [n_rows, n_in]; r, y [n_rows, n_out]."""
        column(codes, halves, words, x, r, y, cuda.blockIdx.x, cuda.blockIdx.y * tile)

    mul_mat_add.name = f"mul_mat_add_{_suffix((quantisation,), tile)}"
    return mul_mat_add


@functools.cache
def mul_mat_swiglu(quantisations: Quantisations, tile: int) -> Kernel:
    """As two ``mul_mat``, then ``swiglu`` of both. Grid: (n_out, ceil(n_rows / tile)).

    On the host a sigmoid for each block's few results costs more than a launch for all results does.
    """
    gate_weight, up_weight = (format_of(quantisation).weight for quantisation in quantisations)
    rows = tuple(range(tile))

    @kernel(block=32, strict=True)
    def mul_mat_swiglu(
        gate_codes: u8_2d,
        gate_halves: u16_2d,
        gate_words: u32_2d,
        up_codes: u8_2d,
        up_halves: u16_2d,
        up_words: u32_2d,
        x: f32_2d,
        y: f32_2d,
    ) -> None:
        """Writes y = gate * sigmoid(gate) * up of the products of x [n_rows, n_in]; y [n_rows, n_out]."""
        lane = cuda.threadIdx.x
        out = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        last = x.shape[0] - 1
        gates = cuda.local.array(tile, float32)
        ups = cuda.local.array(tile, float32)
        for j in rows:
            gates[j] = float32(0.0)
            ups[j] = float32(0.0)
        for b in range(x.shape[1] // 32):
            gate_w = gate_weight(gate_codes, gate_halves, gate_words, out, b, lane)
            up_w = up_weight(up_codes, up_halves, up_words, out, b, lane)
            for j in rows:
                gates[j] = cuda.fma(gate_w, x[min(first + j, last), b * 32 + lane], gates[j])
                ups[j] = cuda.fma(up_w, x[min(first + j, last), b * 32 + lane], ups[j])
        # Lane j takes row j, so that one evaluation of the sigmoid serves them all.
        gate = float32(0.0)
        up = float32(0.0)
        for j in rows:
            gate_sum = warp_sum(gates[j])
            up_sum = warp_sum(ups[j])
            if lane == j:
                gate = gate_sum
                up = up_sum
        if lane < tile and first + lane <= last:
            y[first + lane, out] = gate * sigmoid_f32(gate) * up

    mul_mat_swiglu.name = f"mul_mat_swiglu_{_suffix(quantisations, tile)}"
    return mul_mat_swiglu


def mul_mats(quantisations: Quantisations, tile: int) -> Kernel:
    """As a ``mul_mat`` for each of 2 to ``MAX_PRODUCTS`` matrices, of one x. Grid: (sum of n_out, ceil(n_rows / tile)).

    Parameters: codes_i, halves_i, words_i of each matrix; x [n_rows, n_in]; y_i [n_rows, n_out of the matrix].
    """
    return _MUL_MATS[len(quantisations)](quantisations, tile)


@functools.cache
def _mul_mat_2(quantisations: Quantisations, tile: int) -> Kernel:
    column_0, column_1 = (product(quantisation, tile) for quantisation in quantisations)

    @kernel(block=32, strict=True)
    def mul_mat_2(
        codes_0: u8_2d,
        halves_0: u16_2d,
        words_0: u32_2d,
        codes_1: u8_2d,
        halves_1: u16_2d,
        words_1: u32_2d,
        x: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
    ) -> None:
        out = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        end_0 = y_0.shape[1]
        if out < end_0:
            column_0(codes_0, halves_0, words_0, x, x, y_0, out, first)
        else:
            column_1(codes_1, halves_1, words_1, x, x, y_1, out - end_0, first)

    mul_mat_2.name = f"mul_mat_2_{_suffix(quantisations, tile)}"
    return mul_mat_2


@functools.cache
def _mul_mat_3(quantisations: Quantisations, tile: int) -> Kernel:
    column_0, column_1, column_2 = (product(quantisation, tile) for quantisation in quantisations)

    @kernel(block=32, strict=True)
    def mul_mat_3(
        codes_0: u8_2d,
        halves_0: u16_2d,
        words_0: u32_2d,
        codes_1: u8_2d,
        halves_1: u16_2d,
        words_1: u32_2d,
        codes_2: u8_2d,
        halves_2: u16_2d,
        words_2: u32_2d,
        x: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
        y_2: f32_2d,
    ) -> None:
        out = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        end_0 = y_0.shape[1]
        end_1 = end_0 + y_1.shape[1]
        if out < end_0:
            column_0(codes_0, halves_0, words_0, x, x, y_0, out, first)
        elif out < end_1:
            column_1(codes_1, halves_1, words_1, x, x, y_1, out - end_0, first)
        else:
            column_2(codes_2, halves_2, words_2, x, x, y_2, out - end_1, first)

    mul_mat_3.name = f"mul_mat_3_{_suffix(quantisations, tile)}"
    return mul_mat_3


@functools.cache
def _mul_mat_4(quantisations: Quantisations, tile: int) -> Kernel:
    column_0, column_1, column_2, column_3 = (product(quantisation, tile) for quantisation in quantisations)

    @kernel(block=32, strict=True)
    def mul_mat_4(
        codes_0: u8_2d,
        halves_0: u16_2d,
        words_0: u32_2d,
        codes_1: u8_2d,
        halves_1: u16_2d,
        words_1: u32_2d,
        codes_2: u8_2d,
        halves_2: u16_2d,
        words_2: u32_2d,
        codes_3: u8_2d,
        halves_3: u16_2d,
        words_3: u32_2d,
        x: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
        y_2: f32_2d,
        y_3: f32_2d,
    ) -> None:
        out = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        end_0 = y_0.shape[1]
        end_1 = end_0 + y_1.shape[1]
        end_2 = end_1 + y_2.shape[1]
        if out < end_0:
            column_0(codes_0, halves_0, words_0, x, x, y_0, out, first)
        elif out < end_1:
            column_1(codes_1, halves_1, words_1, x, x, y_1, out - end_0, first)
        elif out < end_2:
            column_2(codes_2, halves_2, words_2, x, x, y_2, out - end_1, first)
        else:
            column_3(codes_3, halves_3, words_3, x, x, y_3, out - end_2, first)

    mul_mat_4.name = f"mul_mat_4_{_suffix(quantisations, tile)}"
    return mul_mat_4


_MUL_MATS = {2: _mul_mat_2, 3: _mul_mat_3, MAX_PRODUCTS: _mul_mat_4}


def _suffix(quantisations: Quantisations, tile: int) -> str:
    return "_".join(quantisation.name.lower() for quantisation in quantisations) + f"_x{tile}"


Floats = npt.NDArray[np.floating]


def mul_mat_add_f64(x: Floats, weights: Floats, r: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat_add``: x [n_rows, n_in], weights [n_out, n_in], r [n_rows, n_out]."""
    return np.asarray(r.astype(np.float64) + mul_mat_f64(x, weights))


def mul_mat_swiglu_f64(x: Floats, gate: Floats, up: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat_swiglu``: x [n_rows, n_in]; gate, up [n_out, n_in]."""
    return swiglu_f64(mul_mat_f64(x, gate), mul_mat_f64(x, up))
