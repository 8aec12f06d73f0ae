"""Sums of products as a GPU takes them: a lane owns four neighbouring columns, and a warp 8 blocks of weights a step.

Lane L has columns 4 * (L % 8) to 4 * (L % 8) + 3 of the blocks 2p and 2p + 1 of each 8, p = L // 8: one load of 4 code
bytes gives it up to 8 weights, and scales are read once for four. So its four running sums are the partials of those
columns and of p, and the additions that follow are those of ``columns``, in the same order: the bits are the same.

x [n_rows, n_in] is read as pairs, uint64 [n_rows, n_in / 2]; a packed matrix as its format's ``Wide`` says. Loops over
what a lane holds are ranges with constant ends, which the CUDA compiler unrolls.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Any

from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, device_function
from instrumentation.kernel.types import f32, f32_1d, i32, u32_2d, u64_2d
from refengine.kernels.normed import half_of
from refengine.kernels.numerics import FULL
from refengine.kernels.quants import format_of

#: columns that a lane owns
COLUMNS = 4


@device_function
def _total(s0: Any, s1: Any, s2: Any, s3: Any) -> Any:
    """Sum of the four partials of all lanes, the same bits in every lane; s_i is column 4 * (lane % 8) + i.

    Over p (lane bits 3 and 4) a lane sends what it gives up and keeps the rest, so that it ends with one column's sum
    over p: s0, s2, s1, s3 for p = 0 to 3. Then come the columns: xor 16, 8, 4 are lane bits 2, 1, 0; xor 2 and 1 the
    index i, which lane bits 3 and 4 hold.
    """
    lane = cuda.threadIdx.x
    odd = (lane & 8) > 0
    high = (lane & 16) > 0
    kept_0 = s2 if odd else s0
    sent_0 = s0 if odd else s2
    kept_1 = s3 if odd else s1
    sent_1 = s1 if odd else s3
    even_sum = kept_0 + cuda.shfl_xor_sync(FULL, sent_0, 8)
    odd_sum = kept_1 + cuda.shfl_xor_sync(FULL, sent_1, 8)
    kept = odd_sum if high else even_sum
    sent = even_sum if high else odd_sum
    total = kept + cuda.shfl_xor_sync(FULL, sent, 16)
    for offset in (4, 2, 1, 8, 16):
        total = total + cuda.shfl_xor_sync(FULL, total, offset)
    return total


#: lane bits in the order of the additions: those of p, then those of the columns that lanes own
_LANE_BITS = (8, 16, 4, 2, 1)
#: numbers of totals that lanes share out among them
_SHARED = (8, 16, 32)


@functools.cache
def _finish(n: int) -> DeviceFunction:
    """``n`` totals of ``parts`` (local, float32 [4 n]) into ``sums`` (local, float32 [n]), the same in every lane.

    Many totals are shared out: at each addition a lane gives one half of them to another lane and goes on with the
    other half, so that fewer values are exchanged. The additions are those of ``_total``.
    """
    if n not in _SHARED:

        @device_function
        def finish(parts: f32_1d, sums: f32_1d) -> None:
            for m in range(n):
                sums[m] = _total(parts[4 * m], parts[4 * m + 1], parts[4 * m + 2], parts[4 * m + 3])

        return finish
    share = _share(n, _LANE_BITS)
    spread = _spread(n)

    @device_function
    def finish_shared(parts: f32_1d, sums: f32_1d) -> None:
        share(parts, sums)
        spread(parts, sums)

    return finish_shared


def _spread(n: int) -> DeviceFunction:
    """Totals from the lanes that have them: the digits of a total's number are the lane bits that shared it out."""
    high = n.bit_length() - 2
    third, second, first = (max(high - digit, 0) for digit in (2, 3, 4))
    has_second, has_first = int(high >= 3), int(high >= 4)

    @device_function
    def spread(parts: f32_1d, sums: f32_1d) -> None:
        for m in range(n):
            upper = ((m >> high) & 1) * 8 + ((m >> (high - 1)) & 1) * 16 + ((m >> third) & 1) * 4
            lower = ((m >> second) & has_second) * 2 + ((m >> first) & has_first)
            sums[m] = cuda.shfl_sync(FULL, parts[0], upper + lower)

    return spread


def _share(n: int, bits: tuple[int, ...]) -> DeviceFunction:
    """Shares ``n`` totals, and ends with one in ``parts[0]`` of each lane."""
    if n == 1:
        return _exchange(bits)
    halve = _halve(4 * (n // 2), bits[0])
    share_rest = _share(n // 2, bits[1:])

    @device_function
    def share(parts: f32_1d, sums: f32_1d) -> None:
        halve(parts, sums)
        share_rest(parts, sums)

    return share


def _halve(rest: int, offset: int) -> DeviceFunction:
    """Of 2 ``rest`` values a lane keeps one half, and adds what the other lane has of it."""

    @device_function
    def halve(parts: f32_1d, _sums: f32_1d) -> None:
        upper = (cuda.threadIdx.x & offset) > 0
        for k in range(rest):
            # Both are loaded first: a choice between places would keep the array in memory.
            one = parts[k]
            other = parts[rest + k]
            kept = other if upper else one
            sent = one if upper else other
            parts[k] = kept + cuda.shfl_xor_sync(FULL, sent, offset)

    return halve


def _exchange(bits: tuple[int, ...]) -> DeviceFunction:
    """Adds the four partials of one total over the lanes that differ in ``bits``, then each other."""
    if not bits:

        @device_function
        def add_columns(parts: f32_1d, _sums: f32_1d) -> None:
            # As a function that asks for its thread, it is written into its caller, whose array it changes.
            if cuda.threadIdx.x >= 0:
                parts[0] = (parts[0] + parts[2]) + (parts[1] + parts[3])

        return add_columns
    offset = bits[0]
    exchange_rest = _exchange(bits[1:])

    @device_function
    def exchange(parts: f32_1d, sums: f32_1d) -> None:
        for k in range(4):
            parts[k] = parts[k] + cuda.shfl_xor_sync(FULL, parts[k], offset)
        exchange_rest(parts, sums)

    return exchange


#: steps of one row whose loads a lane makes before it adds. A GPU fetches a kernel's code at each launch, and few warps
#: cannot hide that: what is written out more often costs as well
_AHEAD = 2


@functools.cache
def totals(quantisation: Any, tile: int, outputs: int, *, normed: bool = False) -> DeviceFunction:
    """Totals of ``outputs`` neighbouring outputs for ``tile`` rows of x.

    The function takes a packed matrix, x [n_rows, n_in / 2], norm [1, n_in / 2] and scale as ``normed`` has them, the
    first output and the last one that there is, the first row, and ``sums`` (local, float32 [outputs * tile]), where
    each lane finds the totals: row j of output o at o * tile + j. Rows and outputs behind the last count as the last.
    """
    add_block = _add_block(quantisation, tile, outputs, normed=normed)
    ahead = _AHEAD if tile == 1 and outputs <= 2 else 1
    add_steps = _add_steps(add_block, ahead)
    add_rest = _add_rest(add_block, ahead)
    finish = _finish(outputs * tile)
    n_partials = COLUMNS * outputs * tile

    @device_function
    def totals(
        codes: u32_2d,
        halves: u32_2d,
        words: u32_2d,
        x: u64_2d,
        norm: u64_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        sums: f32_1d,
    ) -> None:
        n_steps = x.shape[1] >> 7
        parts = cuda.local.array(n_partials, float32)
        for k in range(n_partials):
            parts[k] = float32(0.0)
        for group in range(n_steps // ahead):
            add_steps(codes, halves, words, x, norm, scale, out, last_out, first, group * ahead, parts)
        add_rest(codes, halves, words, x, norm, scale, out, last_out, first, parts)
        finish(parts, sums)

    return totals


@functools.cache
def both_totals(
    quantisations: tuple[Any, Any], tile: int, outputs: int, *, normed: bool = False
) -> DeviceFunction:
    """As ``totals`` of two matrices of one shape, step by step in turn, so that x is read once for both.

    The function takes both packed matrices, then what the other one takes behind its matrix, with the sums of each.
    """
    add_block, add_other = (_add_block(kind, tile, outputs, normed=normed) for kind in quantisations)
    ahead = _AHEAD if tile == 1 and outputs == 1 else 1
    add_steps, add_rest = _add_steps(add_block, ahead), _add_rest(add_block, ahead)
    add_other_steps, add_other_rest = _add_steps(add_other, ahead), _add_rest(add_other, ahead)
    finish = _finish(outputs * tile)
    n_partials = COLUMNS * outputs * tile

    @device_function
    def both_totals(
        codes: u32_2d,
        halves: u32_2d,
        words: u32_2d,
        more_codes: u32_2d,
        more_halves: u32_2d,
        more_words: u32_2d,
        x: u64_2d,
        norm: u64_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        sums: f32_1d,
        more_sums: f32_1d,
    ) -> None:
        parts = cuda.local.array(n_partials, float32)
        more_parts = cuda.local.array(n_partials, float32)
        for k in range(n_partials):
            parts[k] = float32(0.0)
            more_parts[k] = float32(0.0)
        for group in range((x.shape[1] >> 7) // ahead):
            step = group * ahead
            add_steps(codes, halves, words, x, norm, scale, out, last_out, first, step, parts)
            add_other_steps(
                more_codes, more_halves, more_words, x, norm, scale, out, last_out, first, step, more_parts
            )
        add_rest(codes, halves, words, x, norm, scale, out, last_out, first, parts)
        add_other_rest(more_codes, more_halves, more_words, x, norm, scale, out, last_out, first, more_parts)
        finish(parts, sums)
        finish(more_parts, more_sums)

    return both_totals


@functools.cache
def _add_block(quantisation: Any, tile: int, outputs: int, *, normed: bool) -> DeviceFunction:
    """Adds block ``8 * step + place`` of each output to ``parts`` (local, float32 [outputs * tile * 4])."""
    weight = format_of(quantisation).wide.weight
    half = half_of(normed=normed)
    n_values = COLUMNS * tile

    @device_function
    def add_block(
        codes: u32_2d,
        halves: u32_2d,
        words: u32_2d,
        x: u64_2d,
        norm: u64_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        step: i32,
        place: i32,
        parts: f32_1d,
    ) -> None:
        quad = cuda.threadIdx.x & 7
        last = x.shape[0] - 1
        values = cuda.local.array(n_values, float32)
        for j in range(tile):
            row = min(first + j, last)
            first_at = step * 128 + place * 16 + 2 * quad
            two = x[row, first_at]
            next_two = x[row, first_at + 1]
            values[4 * j] = half(two, norm, first_at, 0, scale)
            values[4 * j + 1] = half(two, norm, first_at, 32, scale)
            values[4 * j + 2] = half(next_two, norm, first_at + 1, 0, scale)
            values[4 * j + 3] = half(next_two, norm, first_at + 1, 32, scale)
        for o in range(outputs):
            of = min(out + o, last_out)
            for i in range(4):
                w = weight(codes, halves, words, of, step, place, quad, i)
                for t in range(tile):
                    at = (o * tile + t) * 4 + i
                    parts[at] = cuda.fma(w, values[4 * t + i], parts[at])

    return add_block


def _add_steps(add_block: DeviceFunction, ahead: int) -> DeviceFunction:
    """A lane's two blocks of each of ``ahead`` steps, a power of two, written out so that loads can come first."""
    if ahead > 1:
        rest = ahead // 2
        add_half = _add_steps(add_block, rest)

        @device_function
        def add_steps(
            codes: u32_2d,
            halves: u32_2d,
            words: u32_2d,
            x: u64_2d,
            norm: u64_2d,
            scale: f32,
            out: i32,
            last_out: i32,
            first: i32,
            step: i32,
            parts: f32_1d,
        ) -> None:
            add_half(codes, halves, words, x, norm, scale, out, last_out, first, step, parts)
            add_half(codes, halves, words, x, norm, scale, out, last_out, first, step + rest, parts)

        return add_steps

    @device_function
    def add_step(
        codes: u32_2d,
        halves: u32_2d,
        words: u32_2d,
        x: u64_2d,
        norm: u64_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        step: i32,
        parts: f32_1d,
    ) -> None:
        part = (cuda.threadIdx.x >> 3) & 3
        add_block(codes, halves, words, x, norm, scale, out, last_out, first, step, 2 * part, parts)
        add_block(codes, halves, words, x, norm, scale, out, last_out, first, step, 2 * part + 1, parts)

    return add_step


def _add_rest(add_block: DeviceFunction, ahead: int) -> DeviceFunction:
    """A lane's blocks behind the steps that are taken ``ahead`` at a time, one by one."""

    @device_function
    def add_rest(
        codes: u32_2d,
        halves: u32_2d,
        words: u32_2d,
        x: u64_2d,
        norm: u64_2d,
        scale: f32,
        out: i32,
        last_out: i32,
        first: i32,
        parts: f32_1d,
    ) -> None:
        part = (cuda.threadIdx.x >> 3) & 3
        n_blocks = x.shape[1] >> 4
        done = n_blocks // (8 * ahead) * ahead
        left = n_blocks - 8 * done
        for k in range((left >> 3) * 2 + min(max((left & 7) - 2 * part, 0), 2)):
            step = done + (k >> 1)
            place = 2 * part + (k & 1)
            add_block(codes, halves, words, x, norm, scale, out, last_out, first, step, place, parts)

    return add_rest
