"""Products with what would be a launch of its own before or behind them: the bits are those of the separate kernels.

Kernels of several products are made for the quantisation of each, so that matrices of different ones go together.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32, f32_2d, u8_2d, u16_2d, u32_2d
from refengine.kernels.elementwise import swiglu_f64
from refengine.kernels.mul_mat import (
    both_totals_of,
    launched,
    mul_mat_f64,
    product,
    reading,
    suffix,
    totals_of,
)
from refengine.kernels.normed import scale_of
from refengine.kernels.numerics import sigmoid_f32

#: products of one x that one launch can hold
MAX_PRODUCTS = 4
Quantisations: TypeAlias = tuple[GGMLQuantizationType, ...]


@functools.cache
def mul_mat_add(quantisation: GGMLQuantizationType, tile: int, outputs: int | None = None) -> Kernel:
    """As ``mul_mat``, then ``add``: y = r + x W^T. Grid as of ``mul_mat``."""
    totals = totals_of(quantisation, tile, outputs)
    width = outputs or 1
    rows, columns = tuple(range(tile)), tuple(range(width))
    n_sums = tile * width
    one = int(n_sums == 1)

    @kernel(**launched(tile, outputs, ("codes",)))
    @reading(outputs, codes=quantisation)
    def mul_mat_add(codes: u8_2d, halves: u16_2d, words: u32_2d, x: f32_2d, r: f32_2d, y: f32_2d) -> None:
        """Takes x [n_rows, n_in]; r, y [n_rows, n_out]."""
        lane = cuda.threadIdx.x
        out = cuda.blockIdx.x * width
        first = cuda.blockIdx.y * tile
        sums = cuda.local.array(n_sums, float32)
        # One row's is loaded before the products, which it need not wait for; more would take registers.
        old = float32(0.0)
        if one > 0:
            old = r[first, min(out, y.shape[1] - 1)]
        totals(codes, halves, words, x, x, float32(1.0), out, y.shape[1] - 1, first, sums)
        for o in columns:
            for j in rows:
                if lane == 0 and out + o < y.shape[1] and first + j < y.shape[0]:
                    residual = old if one > 0 else r[first + j, out + o]
                    y[first + j, out + o] = residual + sums[o * tile + j]

    mul_mat_add.name = f"mul_mat_add_{suffix((quantisation,), tile, outputs)}"
    return mul_mat_add


@functools.cache
def mul_mat_swiglu(
    quantisations: tuple[GGMLQuantizationType, GGMLQuantizationType],
    tile: int,
    outputs: int | None = None,
    *,
    normed: bool = False,
) -> Kernel:
    """As two ``mul_mat``, then ``swiglu`` of both. Grid as of ``mul_mat``; ``outputs * tile`` is 32 at most.

    ``normed``: as ``rms_norm`` of one row, then they.

    On the host a sigmoid for each block's few results costs more than a launch for all results does.
    """
    totals = both_totals_of(quantisations, tile, outputs, normed=normed)
    scale_of_x = scale_of(pairs=outputs is not None, normed=normed)
    width = outputs or 1
    n_sums = tile * width
    assert n_sums <= 32, (tile, outputs)
    places = tuple(range(n_sums))

    @kernel(**launched(tile, outputs, ("gate_codes", "up_codes")))
    @reading(outputs, gate_codes=quantisations[0], up_codes=quantisations[1])
    def mul_mat_swiglu(
        gate_codes: u8_2d,
        gate_halves: u16_2d,
        gate_words: u32_2d,
        up_codes: u8_2d,
        up_halves: u16_2d,
        up_words: u32_2d,
        x: f32_2d,
        norm: f32_2d,
        y: f32_2d,
        eps: f32,
    ) -> None:
        """Writes y = gate * sigmoid(gate) * up of the products of x [n_rows, n_in]; y [n_rows, n_out].

        norm [1, n_in] and eps are not read unless ``normed``.
        """
        lane = cuda.threadIdx.x
        out = cuda.blockIdx.x * width
        first = cuda.blockIdx.y * tile
        scale = scale_of_x(x, first, eps)
        gates = cuda.local.array(n_sums, float32)
        ups = cuda.local.array(n_sums, float32)
        totals(
            gate_codes, gate_halves, gate_words, up_codes, up_halves, up_words, x, norm, scale, out,
            y.shape[1] - 1, first, gates, ups,
        )  # fmt: skip
        # Lane k takes total k, so that one evaluation of the sigmoid serves them all.
        gate = float32(0.0)
        up = float32(0.0)
        for k in places:
            gate = gates[k] if lane == k else gate
            up = ups[k] if lane == k else up
        row = first + lane % tile
        of = out + lane // tile
        if lane < n_sums and row < y.shape[0] and of < y.shape[1]:
            y[row, of] = gate * sigmoid_f32(gate) * up

    mul_mat_swiglu.name = f"mul_mat_swiglu_{suffix(quantisations, tile, outputs, normed=normed)}"
    return mul_mat_swiglu


def mul_mats(
    quantisations: Quantisations, tile: int, outputs: int | None = None, *, normed: bool = False
) -> Kernel:
    """As a ``mul_mat`` for each of 2 to ``MAX_PRODUCTS`` matrices, of one x. Grid: (sum of n_out, ceil(n_rows / tile)).

    With ``outputs``: (sum of ceil(n_out / outputs), ...). ``normed``: as ``rms_norm`` of one row, then they.
    Parameters: codes_i, halves_i, words_i of each matrix; x [n_rows, n_in]; norm [1, n_in] and eps, not read unless
    ``normed``; y_i [n_rows, n_out of the matrix].
    """
    return _MUL_MATS[len(quantisations)](quantisations, tile, outputs, normed=normed)


@functools.cache
def _mul_mat_2(quantisations: Quantisations, tile: int, outputs: int | None, *, normed: bool) -> Kernel:
    column_0, column_1 = (
        product(quantisation, tile, outputs, normed=normed) for quantisation in quantisations
    )

    scale_of_x = scale_of(pairs=outputs is not None, normed=normed)
    width = outputs or 1

    @kernel(**_launched(quantisations, tile, outputs))
    @reading(outputs, codes_0=quantisations[0], codes_1=quantisations[1])
    def mul_mat_2(
        codes_0: u8_2d,
        halves_0: u16_2d,
        words_0: u32_2d,
        codes_1: u8_2d,
        halves_1: u16_2d,
        words_1: u32_2d,
        x: f32_2d,
        norm: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
        eps: f32,
    ) -> None:
        block = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        scale = scale_of_x(x, first, eps)
        end_0 = (y_0.shape[1] + width - 1) // width
        if block < end_0:
            column_0(codes_0, halves_0, words_0, x, norm, scale, y_0, block * width, first)
        else:
            column_1(codes_1, halves_1, words_1, x, norm, scale, y_1, (block - end_0) * width, first)

    mul_mat_2.name = f"mul_mat_2_{suffix(quantisations, tile, outputs, normed=normed)}"
    return mul_mat_2


@functools.cache
def _mul_mat_3(quantisations: Quantisations, tile: int, outputs: int | None, *, normed: bool) -> Kernel:
    column_0, column_1, column_2 = (
        product(quantisation, tile, outputs, normed=normed) for quantisation in quantisations
    )

    scale_of_x = scale_of(pairs=outputs is not None, normed=normed)
    width = outputs or 1

    @kernel(**_launched(quantisations, tile, outputs))
    @reading(outputs, codes_0=quantisations[0], codes_1=quantisations[1], codes_2=quantisations[2])
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
        norm: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
        y_2: f32_2d,
        eps: f32,
    ) -> None:
        block = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        scale = scale_of_x(x, first, eps)
        end_0 = (y_0.shape[1] + width - 1) // width
        end_1 = end_0 + (y_1.shape[1] + width - 1) // width
        if block < end_0:
            column_0(codes_0, halves_0, words_0, x, norm, scale, y_0, block * width, first)
        elif block < end_1:
            column_1(codes_1, halves_1, words_1, x, norm, scale, y_1, (block - end_0) * width, first)
        else:
            column_2(codes_2, halves_2, words_2, x, norm, scale, y_2, (block - end_1) * width, first)

    mul_mat_3.name = f"mul_mat_3_{suffix(quantisations, tile, outputs, normed=normed)}"
    return mul_mat_3


@functools.cache
def _mul_mat_4(quantisations: Quantisations, tile: int, outputs: int | None, *, normed: bool) -> Kernel:
    column_0, column_1, column_2, column_3 = (
        product(quantisation, tile, outputs, normed=normed) for quantisation in quantisations
    )

    scale_of_x = scale_of(pairs=outputs is not None, normed=normed)
    width = outputs or 1

    @kernel(**_launched(quantisations, tile, outputs))
    @reading(
        outputs,
        codes_0=quantisations[0],
        codes_1=quantisations[1],
        codes_2=quantisations[2],
        codes_3=quantisations[3],
    )
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
        norm: f32_2d,
        y_0: f32_2d,
        y_1: f32_2d,
        y_2: f32_2d,
        y_3: f32_2d,
        eps: f32,
    ) -> None:
        block = cuda.blockIdx.x
        first = cuda.blockIdx.y * tile
        scale = scale_of_x(x, first, eps)
        end_0 = (y_0.shape[1] + width - 1) // width
        end_1 = end_0 + (y_1.shape[1] + width - 1) // width
        end_2 = end_1 + (y_2.shape[1] + width - 1) // width
        if block < end_0:
            column_0(codes_0, halves_0, words_0, x, norm, scale, y_0, block * width, first)
        elif block < end_1:
            column_1(codes_1, halves_1, words_1, x, norm, scale, y_1, (block - end_0) * width, first)
        elif block < end_2:
            column_2(codes_2, halves_2, words_2, x, norm, scale, y_2, (block - end_1) * width, first)
        else:
            column_3(codes_3, halves_3, words_3, x, norm, scale, y_3, (block - end_2) * width, first)

    mul_mat_4.name = f"mul_mat_4_{suffix(quantisations, tile, outputs, normed=normed)}"
    return mul_mat_4


def _launched(quantisations: Quantisations, tile: int, outputs: int | None) -> dict[str, Any]:
    return launched(tile, outputs, *((f"codes_{i}",) for i in range(len(quantisations))))


_MUL_MATS = {2: _mul_mat_2, 3: _mul_mat_3, MAX_PRODUCTS: _mul_mat_4}


Floats = npt.NDArray[np.floating]


def mul_mat_add_f64(x: Floats, weights: Floats, r: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat_add``: x [n_rows, n_in], weights [n_out, n_in], r [n_rows, n_out]."""
    return np.asarray(r.astype(np.float64) + mul_mat_f64(x, weights))


def mul_mat_swiglu_f64(x: Floats, gate: Floats, up: Floats) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat_swiglu``: x [n_rows, n_in]; gate, up [n_out, n_in]."""
    return swiglu_f64(mul_mat_f64(x, gate), mul_mat_f64(x, up))
