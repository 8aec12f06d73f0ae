"""Mixture of experts (Shazeer et al. 2017): which experts a row goes to, their products, and the weighted sum.

A row's router logits choose its n_used best experts. The matrices of all experts lie one under the other, as one
matrix of n_expert * n_out rows. A row's result does not depend on which rows ran beside it, or on which experts those
chose.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32, int32

from instrumentation.kernel import Kernel, device_function, kernel
from instrumentation.kernel.types import f32_2d, f32_3d, i32, i32_2d, u8_2d, u16_2d, u32_2d
from refengine.kernels.elementwise import SPAN
from refengine.kernels.gates import sigmoid_f64
from refengine.kernels.mul_mat import both_totals_of, checked_resident, reading, suffix, totals_of
from refengine.kernels.numerics import FULL, INFINITY, exp_f32, sigmoid_f32, warp_max, warp_sum

#: chosen probabilities are divided by their sum, or by this where the sum is smaller
SMALLEST_SUM = 2.0**-14


@kernel(block=32, strict=True)
def route(logits: f32_2d, index: i32_2d, weight: f32_2d) -> None:
    """The best experts of each row and their parts of the softmax over all, made to sum to 1.

    logits [n_rows, n_expert]; index, weight [n_rows, n_used], best first, of equal ones the lower index. Grid:
    n_rows. A row with NaN gives NaN weights, and indices that are within bounds all the same.
    """
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = logits.shape[1]
    largest = float32(-INFINITY)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            largest = max(largest, logits[row, i])
    largest = warp_max(largest)
    sum_exp = float32(0.0)
    for b in range((n + 31) // 32):
        j = b * 32 + lane
        if j < n:
            sum_exp += exp_f32(logits[row, j] - largest)
    sum_exp = warp_sum(sum_exp)
    total = float32(0.0)
    last_value = float32(INFINITY)
    last_index = int32(-1)
    for place in range(index.shape[1]):
        best = float32(-INFINITY)
        best_index = int32(n)
        for b in range((n + 31) // 32):
            at = b * 32 + lane
            if at < n:
                v = logits[row, at]
                after = v < last_value or (v == last_value and at > last_index)
                if after and (v > best or (v == best and at < best_index)):
                    best = v
                    best_index = int32(at)
        for offset in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(FULL, best, offset)
            other_index = cuda.shfl_xor_sync(FULL, best_index, offset)
            if other > best or (other == best and other_index < best_index):
                best = other
                best_index = other_index
        last_value = best
        last_index = best_index
        p = exp_f32(best - largest) / sum_exp
        total += p
        if lane == 0:
            index[row, place] = min(best_index, int32(n - 1))
            weight[row, place] = p
    for place in range(index.shape[1]):
        if lane == 0:
            # Not max(): NaN stays.
            divisor = float32(SMALLEST_SUM) if total < float32(SMALLEST_SUM) else total  # noqa: FURB136
            weight[row, place] = weight[row, place] / divisor


@functools.cache
def mul_mat_experts(quantisation: GGMLQuantizationType, outputs: int | None = None) -> Kernel:
    """Products of rows with the matrices of their experts. Grid: (n_out, n_used, n_rows).

    With ``outputs`` as ``mul_mat`` has it: (ceil(n_out / outputs), n_used, n_rows), for rows of whole blocks.
    """
    totals = totals_of(quantisation, 1, outputs)
    width = outputs or 1
    columns = tuple(range(width))

    @kernel(
        block=32,
        strict=True,
        checked_resident=checked_resident(1, outputs, 1),
        constants=("codes", "halves", "words"),
    )
    @reading(outputs, codes=quantisation)
    def mul_mat_experts(
        codes: u8_2d, halves: u16_2d, words: u32_2d, index: i32_2d, x: f32_2d, y: f32_3d
    ) -> None:
        """Writes y[r, u] = W[index[r, u]] x[r, u]. index [n_rows, n_used], y [n_rows, n_used, n_out].

        x [n_rows, n_in], the same for all experts of a row, or [n_rows * n_used, n_in]; weights [n_expert * n_out,
        n_in] as packed by ``refengine.kernels.quants``, rows filled up with zeros to a multiple of 32 weights. The
        bits are those of ``mul_mat``.
        """
        lane = cuda.threadIdx.x
        out = cuda.blockIdx.x * width
        used = cuda.blockIdx.y
        row = cuda.blockIdx.z
        n_parts = x.shape[0] // index.shape[0]
        at = row * n_parts + min(used, n_parts - 1)
        first_out = index[row, used] * y.shape[2]
        sums = cuda.local.array(width, float32)
        totals(
            codes, halves, words, x, x, float32(1.0), first_out + out, first_out + y.shape[2] - 1, at, sums
        )
        for o in columns:
            if lane == 0 and out + o < y.shape[2]:
                y[row, used, out + o] = sums[o]

    mul_mat_experts.name = f"mul_mat_experts_{suffix((quantisation,), 1, outputs)}"
    return mul_mat_experts


@functools.cache
def experts_swiglu(
    quantisations: tuple[GGMLQuantizationType, GGMLQuantizationType], outputs: int | None = None
) -> Kernel:
    """As two ``mul_mat_experts``, gate and up, then ``swiglu`` of both. Grid as of ``mul_mat_experts``."""
    totals = both_totals_of(quantisations, 1, outputs)
    width = outputs or 1
    columns = tuple(range(width))

    @kernel(
        block=32,
        strict=True,
        checked_resident=checked_resident(1, outputs, 2),
        constants=tuple(f"{of}_{part}" for of in ("gate", "up") for part in ("codes", "halves", "words")),
    )
    @reading(outputs, gate_codes=quantisations[0], up_codes=quantisations[1])
    def experts_swiglu(
        gate_codes: u8_2d,
        gate_halves: u16_2d,
        gate_words: u32_2d,
        up_codes: u8_2d,
        up_halves: u16_2d,
        up_words: u32_2d,
        index: i32_2d,
        x: f32_2d,
        y: f32_3d,
    ) -> None:
        """Shapes as of ``mul_mat_experts``."""
        lane = cuda.threadIdx.x
        out = cuda.blockIdx.x * width
        used = cuda.blockIdx.y
        row = cuda.blockIdx.z
        n_parts = x.shape[0] // index.shape[0]
        at = row * n_parts + min(used, n_parts - 1)
        first_out = index[row, used] * y.shape[2]
        last_out = first_out + y.shape[2] - 1
        gates = cuda.local.array(width, float32)
        ups = cuda.local.array(width, float32)
        totals(
            gate_codes, gate_halves, gate_words, up_codes, up_halves, up_words, x, x, float32(1.0),
            first_out + out, last_out, at, gates, ups,
        )  # fmt: skip
        # Lane o takes output o, so that one evaluation of the sigmoid serves them all.
        gate = float32(0.0)
        up = float32(0.0)
        for o in columns:
            gate = gates[o] if lane == o else gate
            up = ups[o] if lane == o else up
        if lane < width and out + lane < y.shape[2]:
            y[row, used, out + lane] = gate * sigmoid_f32(gate) * up

    experts_swiglu.name = f"experts_swiglu_{suffix(quantisations, 1, outputs)}"
    return experts_swiglu


@device_function
def _combined(x: f32_3d, weight: f32_2d, shared: f32_2d, gate: f32_2d, row: i32, i: i32) -> Any:
    """Element i of a row of the weighted sum."""
    total = float32(0.0)
    for used in range(x.shape[1]):
        total = cuda.fma(weight[row, used], x[row, used, i], total)
    return cuda.fma(sigmoid_f32(gate[row, 0]), shared[row, i], total)


@kernel(block=32, strict=True)
def combine_experts(x: f32_3d, weight: f32_2d, shared: f32_2d, gate: f32_2d, y: f32_2d) -> None:
    """Writes y = sum_u weight[u] x[u] + sigmoid(gate) shared, in this order.

    x [n_rows, n_used, n]; weight [n_rows, n_used]; shared (the shared expert's result), y [n_rows, n]; gate
    [n_rows, 1]. Grid: (ceil(n / SPAN), n_rows).
    """
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * SPAN
    row = cuda.blockIdx.y
    n = y.shape[1]
    for b in range(SPAN // 32):
        i = first + b * 32 + lane
        if i < n:
            y[row, i] = _combined(x, weight, shared, gate, row, i)


@kernel(block=32, strict=True)
def combine_experts_add(
    x: f32_3d, weight: f32_2d, shared: f32_2d, gate: f32_2d, r: f32_2d, y: f32_2d
) -> None:
    """As ``combine_experts``, then ``add``: y = r + the weighted sum; r [n_rows, n]."""
    lane = cuda.threadIdx.x
    first = cuda.blockIdx.x * SPAN
    row = cuda.blockIdx.y
    n = y.shape[1]
    for b in range(SPAN // 32):
        i = first + b * 32 + lane
        if i < n:
            total = _combined(x, weight, shared, gate, row, i)
            y[row, i] = r[row, i] + total


def route_f64(
    logits: npt.NDArray[np.floating], n_used: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Twin of ``route`` for rows without NaN and n_used <= n_expert."""
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    index = np.argsort(-wide, axis=1, kind="stable")[:, :n_used]
    chosen = np.take_along_axis(p, index, axis=1)
    return index.astype(np.int32), chosen / np.maximum(chosen.sum(axis=1, keepdims=True), SMALLEST_SUM)


def mul_mat_experts_f64(
    x: npt.NDArray[np.floating], weights: npt.NDArray[np.floating], index: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Twin of ``mul_mat_experts``: x [n_rows, 1 or n_used, n_in], weights [n_expert, n_out, n_in]."""
    wide = np.broadcast_to(x.astype(np.float64), (*index.shape, x.shape[2]))
    return np.asarray(np.einsum("ruoi,rui->ruo", weights.astype(np.float64)[index], wide))


def combine_experts_f64(
    x: npt.NDArray[np.floating],
    weight: npt.NDArray[np.floating],
    shared: npt.NDArray[np.floating],
    gate: npt.NDArray[np.floating],
) -> npt.NDArray[np.float64]:
    """Twin of ``combine_experts``."""
    routed = np.einsum("ruo,ru->ro", x.astype(np.float64), weight.astype(np.float64))
    return np.asarray(routed + sigmoid_f64(gate) * shared.astype(np.float64))
