"""Sums of products as the host takes them: lane t of a warp decodes and owns column t of every block of 32 weights.

The order of additions is the same for every kernel of products, here and in ``words``. An output is made of 128 partial
sums: partial (t, p) adds weight(b, t) * x(b, t) over the blocks b with (b // 2) % 4 == p, in order, by fma from 0. The
four of a column are added as (s0 + s1) + (s2 + s3), then the 32 columns by a butterfly. It does not depend on how many
rows of x there are, so a token's result is the same bits alone and in any batch.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Any

from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, device_function
from instrumentation.kernel.types import f32, f32_1d, f32_2d, i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.normed import element_of
from refengine.kernels.numerics import warp_sum
from refengine.kernels.quants import format_of


@functools.cache
def totals(quantisation: Any, tile: int, *, normed: bool = False) -> DeviceFunction:
    """Totals of one output for ``tile`` rows of x.

    The function takes a packed matrix, x [n_rows, n_in], norm [1, n_in] and scale as ``normed`` has them, the output
    and the last one that there is, the first row, and ``sums`` (local, float32 [tile]), where each lane finds the
    totals. Rows behind the last one of x count as the last. With one row n_in may be any length, of a matrix whose rows
    are filled up to whole blocks; else whole blocks, and no norm.
    """
    if tile == 1:
        return _one_row(quantisation, normed=normed)
    assert not normed, "a norm on the way is for one row"
    return _rows(quantisation, tile)


@functools.cache
def both_totals(quantisations: tuple[Any, Any], tile: int, *, normed: bool = False) -> DeviceFunction:
    """As ``totals`` of two matrices, one behind the other.

    The function takes both packed matrices, then what the other one takes behind its matrix, with the sums of each.
    """
    first_totals, second_totals = (totals(kind, tile, normed=normed) for kind in quantisations)

    @device_function
    def both_totals(
        codes: u8_2d,
        halves: u16_2d,
        words: u32_2d,
        more_codes: u8_2d,
        more_halves: u16_2d,
        more_words: u32_2d,
        x: f32_2d,
        norm: f32_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        sums: f32_1d,
        more_sums: f32_1d,
    ) -> None:
        first_totals(codes, halves, words, x, norm, scale, out, last_out, first, sums)
        second_totals(more_codes, more_halves, more_words, x, norm, scale, out, last_out, first, more_sums)

    return both_totals


def _one_row(quantisation: Any, *, normed: bool) -> DeviceFunction:
    """For one row: four running sums a lane keep the multiply-adds apart."""
    weight = format_of(quantisation).weight
    element = element_of(normed=normed)
    # Only rows of floats can have another length than a number of blocks.
    ragged = int(format_of(quantisation).block_size == 1)

    @device_function
    def totals(
        codes: u8_2d,
        halves: u16_2d,
        words: u32_2d,
        x: f32_2d,
        norm: f32_2d,
        scale: f32,
        out: i32,
        _last_out: i32,
        first: i32,
        sums: f32_1d,
    ) -> None:
        lane = cuda.threadIdx.x
        row = min(first, x.shape[0] - 1)
        n_blocks = x.shape[1] // 32
        whole = n_blocks // 8 * 8
        parts = cuda.local.array(4, float32)
        for p in (0, 1, 2, 3):
            parts[p] = float32(0.0)
        for g in range(n_blocks // 8):
            for k in (0, 1, 2, 3):
                for odd in (0, 1):
                    b = g * 8 + k * 2 + odd
                    w = weight(codes, halves, words, out, b, lane)
                    parts[k] = cuda.fma(w, element(x, norm, row, b * 32 + lane, scale), parts[k])
        for t in range(whole, n_blocks):
            at = (t >> 1) & 3
            rest = weight(codes, halves, words, out, t, lane)
            parts[at] = cuda.fma(rest, element(x, norm, row, t * 32 + lane, scale), parts[at])
        if ragged > 0 and n_blocks * 32 < x.shape[1]:
            last_at = (n_blocks >> 1) & 3
            i = n_blocks * 32 + lane
            value = element(x, norm, row, i, scale) if i < x.shape[1] else float32(0.0)
            filled = weight(codes, halves, words, out, n_blocks, lane)
            parts[last_at] = cuda.fma(filled, value, parts[last_at])
        sums[0] = warp_sum((parts[0] + parts[1]) + (parts[2] + parts[3]))

    return totals


def _rows(quantisation: Any, tile: int) -> DeviceFunction:
    """For several rows: one partial after the other, so that its sums for all rows stay in registers."""
    weight = format_of(quantisation).weight
    rows = tuple(range(tile))

    @device_function
    def totals(
        codes: u8_2d,
        halves: u16_2d,
        words: u32_2d,
        x: f32_2d,
        _norm: f32_2d,
        _scale: f32,
        out: i32,
        _last_out: i32,
        first: i32,
        sums: f32_1d,
    ) -> None:
        lane = cuda.threadIdx.x
        last = x.shape[0] - 1
        n_blocks = x.shape[1] // 32
        part = cuda.local.array(tile, float32)
        before = cuda.local.array(tile, float32)
        both = cuda.local.array(tile, float32)
        for p in range(4):
            for j in rows:
                part[j] = float32(0.0)
            for k in range((n_blocks >> 3) * 2 + min(max((n_blocks & 7) - 2 * p, 0), 2)):
                b = (k >> 1) * 8 + 2 * p + (k & 1)
                w = weight(codes, halves, words, out, b, lane)
                for j in rows:
                    part[j] = cuda.fma(w, x[min(first + j, last), b * 32 + lane], part[j])
            for j in rows:
                if p % 2 == 0:
                    before[j] = part[j]
                elif p == 1:
                    both[j] = before[j] + part[j]
                else:
                    both[j] = both[j] + (before[j] + part[j])
        for j in rows:
            sums[j] = warp_sum(both[j])

    return totals
