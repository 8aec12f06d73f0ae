"""Rows that products take: as they are, or with their RMS norm made on the way, with the bits of ``rms_norm``.

A warp that makes products of a row computes the row's scale itself. On a GPU that takes less time than a launch of its
own for the norm, where there is one row; for several rows it does not.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import math
from typing import Any

from numba import cuda, float32, int32

from instrumentation.kernel import DeviceFunction, device_function
from instrumentation.kernel.intrinsics import f32_from_bits
from instrumentation.kernel.types import f32, f32_2d, i32, u64, u64_2d
from refengine.kernels.norm import RUN
from refengine.kernels.numerics import warp_sum


@device_function
def _no_scale(_x: f32_2d, _row: i32, _eps: f32) -> Any:
    return float32(1.0)


@device_function
def _scale_of_row(x: f32_2d, row: i32, eps: f32) -> Any:
    """1 / sqrt(mean(x**2) + eps) of a row."""
    lane = cuda.threadIdx.x
    n = x.shape[1]
    total = float32(0.0)
    for run in range((n + 32 * RUN - 1) // (32 * RUN)):
        squares = float32(0.0)
        for u in range(RUN):
            i = (run * RUN + u) * 32 + lane
            v = x[row, i] if i < n else float32(0.0)
            squares = cuda.fma(v, v, squares)
        total = total + squares
    mean = warp_sum(total) / float32(n)
    return float32(1.0) / math.sqrt(mean + eps)


@device_function
def _scale_of_pairs(x: u64_2d, row: i32, eps: f32) -> Any:
    """As ``_scale_of_row`` for a row of whole blocks: each lane takes its half of a pair."""
    lane = cuda.threadIdx.x
    n_blocks = x.shape[1] >> 4
    half = (lane & 1) * 32
    total = float32(0.0)
    for run in range((n_blocks + RUN - 1) // RUN):
        squares = float32(0.0)
        for u in range(RUN):
            b = run * RUN + u
            # Behind the end the last block is read, and counts as zeros: a load under a condition would wait for it.
            v = f32_from_bits(int32(x[row, min(b, n_blocks - 1) * 16 + (lane >> 1)] >> half))
            v = v if b < n_blocks else float32(0.0)
            squares = cuda.fma(v, v, squares)
        total = total + squares
    mean = warp_sum(total) / float32(n_blocks * 32)
    return float32(1.0) / math.sqrt(mean + eps)


@device_function
def _plain(x: f32_2d, _norm: f32_2d, row: i32, i: i32, _scale: f32) -> Any:
    return x[row, i]


@device_function
def _normed(x: f32_2d, norm: f32_2d, row: i32, i: i32, scale: f32) -> Any:
    return x[row, i] * scale * norm[0, i]


@device_function
def _plain_half(two: u64, _norm: u64_2d, _at: i32, shift: i32, _scale: f32) -> Any:
    return f32_from_bits(int32(two >> shift))


@device_function
def _normed_half(two: u64, norm: u64_2d, at: i32, shift: i32, scale: f32) -> Any:
    return f32_from_bits(int32(two >> shift)) * scale * f32_from_bits(int32(norm[0, at] >> shift))


def scale_of(*, pairs: bool, normed: bool) -> DeviceFunction:
    """Scale of a row of x: of x, row, eps. Without a norm it is 1, and eps does not matter."""
    if not normed:
        return _no_scale
    return _scale_of_pairs if pairs else _scale_of_row


def element_of(*, normed: bool) -> DeviceFunction:
    """Element i of a row: of x [n_rows, n_in], norm [1, n_in], row, i, scale. Without a norm x may stand for it."""
    return _normed if normed else _plain


def half_of(*, normed: bool) -> DeviceFunction:
    """Element of two that were loaded from place ``at`` of a row: of both, norm [1, n_in / 2], at, shift, scale."""
    return _normed_half if normed else _plain_half
