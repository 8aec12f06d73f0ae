"""Products with a weight matrix in its file's quantisation: y = x W^T, and row lookup in such a matrix.

The weights are decoded in registers; they never stand in memory as floats. There are two forms with the same bits:
``columns`` for the host, ``words`` for a GPU.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, RowsAhead, device_function, kernel
from instrumentation.kernel.types import f32, f32_2d, i32, i32_1d, u8_2d, u16_2d, u32_2d, u64_2d
from refengine.kernels import columns, words
from refengine.kernels.quants import format_of

#: rows of x that one block takes when there are more than one: each decoded weight serves them all
TILE = 4
#: rows of x that one warp takes at most on a GPU
WIDE_TILE = 8
#: blocks of so many rows that a multiprocessor shall hold at a time
WIDE_RESIDENT = 16
#: the same of checked forms: a quarter of a multiprocessor's registers serves 3 warps of 168, or 4 of 128, and without
#: a limit the assembler takes some more than either
CHECKED_RESIDENT, FEW_CHECKED_RESIDENT = 16, 12
#: outputs that a warp makes of one row on a GPU, for so many outputs at least: they share x, but leave fewer warps
WIDE_OUTPUTS = ((16384, 4), (4096, 2), (1, 1))
Function = TypeVar("Function", bound=Callable[..., None])


def totals_of(quantisation: Any, tile: int, outputs: int | None, *, normed: bool = False) -> DeviceFunction:
    """The sums of products that a kernel is made of: ``columns.totals``, or ``words.totals`` of ``outputs``."""
    if outputs is None:
        return columns.totals(quantisation, tile, normed=normed)
    return words.totals(quantisation, tile, outputs, normed=normed)


def both_totals_of(
    quantisations: tuple[Any, Any], tile: int, outputs: int | None, *, normed: bool = False
) -> DeviceFunction:
    """The same for two matrices of one shape and one x."""
    if outputs is None:
        return columns.both_totals(quantisations, tile, normed=normed)
    return words.both_totals(quantisations, tile, outputs, normed=normed)


def reading(outputs: int | None, **formats: Any) -> Callable[[Function], Function]:
    """Decorator that gives a kernel's parameters the element types of its form.

    They are written as those of ``columns``. With ``outputs`` the matrices, whose quantisations ``formats`` gives by
    their parameters' names (``codes_0=...`` stands for halves_0 and words_0 too), are wide, and x and norm are pairs.
    """

    def change(function: Function) -> Function:
        if outputs is not None:
            pairs = {"x", "norm"} & function.__annotations__.keys()
            function.__annotations__.update(dict.fromkeys(pairs, u64_2d))
            for codes, quantisation in formats.items():
                for array, kind in format_of(quantisation).wide.arrays.items():
                    function.__annotations__[codes.replace("codes", array)] = kind
        return function

    return change


def rows_ahead(outputs: int | None, *groups: tuple[str, ...]) -> RowsAhead | None:
    """Matrices of which blocks take ``outputs`` rows each, one after the other; a group's go together.

    ``groups``: names of the matrices' codes, which stand for halves and words too. None for the host's form.
    """
    if outputs is None or outputs & (outputs - 1):
        return None
    arrays = ("codes", "halves", "words")
    return RowsAhead(
        outputs,
        tuple(
            tuple(codes.replace("codes", array) for codes in group for array in arrays) for group in groups
        ),
    )


def launched(tile: int, outputs: int | None, *groups: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of ``kernel`` for a kernel of products; ``groups`` as of ``rows_ahead``."""
    # With many rows a warp's sums take most of the registers that it can have, and 8 warps hide no load.
    resident = WIDE_RESIDENT if outputs is not None and tile >= WIDE_TILE else None
    together = max(len(group) for group in groups)
    return {
        "block": 32,
        "strict": True,
        "ahead": rows_ahead(outputs, *groups),
        "resident": resident,
        "checked_resident": checked_resident(tile, outputs, together),
    }


def checked_resident(tile: int, outputs: int | None, together: int) -> int | None:
    """Blocks that a multiprocessor shall hold of a checked product; ``together``: matrices that are taken in turn."""
    if outputs is None:
        return None
    return CHECKED_RESIDENT if tile * together == 1 else FEW_CHECKED_RESIDENT


@functools.cache
def product(
    quantisation: GGMLQuantizationType, tile: int, outputs: int | None = None, *, normed: bool = False
) -> DeviceFunction:
    """Writes y = x W^T for a tile of rows and one output, or ``outputs`` of them; ``normed``: of x normed."""
    totals = totals_of(quantisation, tile, outputs, normed=normed)
    rows, columns_of = tuple(range(tile)), tuple(range(outputs or 1))
    n_sums = tile * len(columns_of)

    @device_function
    def product(
        codes: u8_2d,
        halves: u16_2d,
        words: u32_2d,
        x: f32_2d,
        norm: f32_2d,
        scale: f32,
        y: f32_2d,
        out: i32,
        first: i32,
    ) -> None:
        """Takes x [n_rows, n_in], y [n_rows, n_out]: outputs from ``out`` and rows from ``first`` on are one warp's."""
        lane = cuda.threadIdx.x
        sums = cuda.local.array(n_sums, float32)
        totals(codes, halves, words, x, norm, scale, out, y.shape[1] - 1, first, sums)
        for o in columns_of:
            for j in rows:
                if lane == 0 and out + o < y.shape[1] and first + j < y.shape[0]:
                    y[first + j, out + o] = sums[o * tile + j]

    return product


@functools.cache
def mul_mat(quantisation: GGMLQuantizationType, tile: int, outputs: int | None = None) -> Kernel:
    """Kernel for one quantisation and ``tile`` rows of x per block; grid (n_out, ceil(n_rows / tile)).

    With ``outputs`` a block makes so many outputs as ``words`` describes: grid (ceil(n_out / outputs), ...).
    """
    column = product(quantisation, tile, outputs)
    width = outputs or 1

    @kernel(**launched(tile, outputs, ("codes",)))
    @reading(outputs, codes=quantisation)
    def mul_mat(codes: u8_2d, halves: u16_2d, words: u32_2d, x: f32_2d, y: f32_2d) -> None:
        """Takes x [n_rows, n_in], y [n_rows, n_out], weights as packed by ``refengine.kernels.quants``."""
        column(codes, halves, words, x, x, float32(1.0), y, cuda.blockIdx.x * width, cuda.blockIdx.y * tile)

    return _renamed(mul_mat, f"mul_mat_{suffix((quantisation,), tile, outputs)}")


def suffix(
    quantisations: tuple[GGMLQuantizationType, ...], tile: int, outputs: int | None, *, normed: bool = False
) -> str:
    """End of the name of a kernel of products."""
    names = "_".join(quantisation.name.lower() for quantisation in quantisations)
    form = "" if outputs is None else f"_wide{outputs}"
    return f"{names}_x{tile}{form}{'_normed' if normed else ''}"


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


@functools.cache
def expand(quantisation: GGMLQuantizationType) -> Kernel:
    """Kernel that writes a weight matrix as floats, for a library that knows no quantisation. Grid: n_out."""
    weight = format_of(quantisation).weight

    @kernel(block=32, strict=True)
    def expand(codes: u8_2d, halves: u16_2d, words: u32_2d, y: f32_2d) -> None:
        """Takes y [n_out, n_in]."""
        lane = cuda.threadIdx.x
        row = cuda.blockIdx.x
        for b in range(y.shape[1] // 32):
            y[row, b * 32 + lane] = weight(codes, halves, words, row, b, lane)

    return _renamed(expand, f"expand_{quantisation.name.lower()}")


def _renamed(made: Kernel, name: str) -> Kernel:
    made.name = name
    return made


def mul_mat_f64(x: npt.NDArray[np.floating], weights: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat``: x [n_rows, n_in], weights [n_out, n_in] as ``gguf.quants.dequantize`` gives them."""
    return np.asarray(x.astype(np.float64) @ weights.astype(np.float64).T)


def get_rows_f64(weights: npt.NDArray[np.floating], rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Twin of ``get_rows``."""
    return np.asarray(weights.astype(np.float64)[rows])
