"""The gated delta rule (Yang et al. 2024), token after token: a matrix that decays, corrects itself and is read.

For each value head, with key, query and value k, q, v of a row, decay a and step b::

    M <- a M;   M <- M + k (b (v - M^T k))^T;   y = M^T q / sqrt(state_size)

k and q are first divided by sqrt(sum of squares + eps). Value head h uses key head h % n_key_head. This order of
operations is the definition: rows are taken one by one, so a row has the same bits however its sequence was cut into
batches, and whatever ran beside it.

The state M is float32 [n_slots, n_planes, n_head, state_size**2]. A matrix is cut into slices of 32 value columns, each
[key index, column]: a lane owns a column, so that sums over keys need no exchange between lanes, and a block owns a
slice, which lies in one piece (``packed_state``). Other GGUF engines store [value index, key index]. Slots, planes
and ``segments`` are those of ``refengine.kernels.short_conv``.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import Kernel, device_function, kernel
from instrumentation.kernel.types import f32, f32_1d, f32_2d, f32_3d, f32_4d, i32, i32_2d
from refengine.kernels.numerics import only_warp, own_warp, warp_sum
from refengine.kernels.short_conv import FIRST_TARGET

#: a sum over keys is the sum of four running sums, so state sizes are a multiple of four
QUARTERS = (0, 1, 2, 3)
STATE_SIZE_UNIT = len(QUARTERS)
#: a block keeps [state_size, 32] floats, in registers of four warps on a GPU
MAX_STATE_SIZE = 256


def columns_per_block(state_size: int) -> int:
    """Columns of a head's matrix that one block takes: the grid of ``gated_delta`` has state_size over this."""
    return math.gcd(state_size, 32)


@device_function
def _in_memory(_rows: f32_1d, _start: i32, qkv: f32_2d, t: i32, first: i32, i: i32) -> Any:
    return qkv[t, first + i]


@device_function
def _in_block(rows: f32_1d, start: i32, _qkv: f32_2d, _t: i32, _first: i32, i: i32) -> Any:
    return rows[start + i]


@functools.cache
def gated_delta(state_size: int, warps: int = 1) -> Kernel:  # noqa: C901, PLR0915 - as the kernel in it
    """Kernel for one state size. Grid: (state_size / columns_per_block(state_size), n_head, n_segments).

    A block's 1 or 4 warps share the four running sums: the bits are the same. With four, each holds its part of the
    matrix in registers, and a row's key and query are fetched, and measured, while rows before are computed.
    """
    assert 0 < state_size <= MAX_STATE_SIZE, state_size
    assert state_size % STATE_SIZE_UNIT == 0, state_size
    assert warps in (1, len(QUARTERS)), warps
    width = columns_per_block(state_size)
    read_scale = 1.0 / math.sqrt(state_size)
    wide = int(warps > 1)
    warp_of, element = (own_warp, _in_block) if wide else (only_warp, _in_memory)
    # Key 4 d + c belongs to running sum c, which belongs to warp c // n_own.
    n_own = len(QUARTERS) // warps
    n_depth = state_size // len(QUARTERS)
    n_mine = n_depth * n_own
    n_threads = 32 * warps
    n_parts = -(-state_size // n_threads) if wide else 1
    n_staged = 2 * state_size if wide else 1
    n_held = n_mine if wide else 1

    @device_function
    def unit_scale(rows: f32_1d, start: i32, qkv: f32_2d, t: i32, first: i32, eps: f32) -> Any:
        """What a key or a query of row t is multiplied by to have length 1."""
        squares = float32(0.0)
        for b in range((state_size + 31) // 32):
            place = b * 32 + cuda.threadIdx.x
            if place < state_size:
                v = element(rows, start, qkv, t, first, place)
                squares = cuda.fma(v, v, squares)
        return float32(1.0) / math.sqrt(warp_sum(squares) + eps)

    @kernel(block=(32, warps), strict=True)
    def gated_delta(  # noqa: C901, PLR0912, PLR0915 - stages of one pass: barriers stand between
        qkv: f32_2d, gates: f32_3d, segments: i32_2d, states: f32_4d, y: f32_2d, eps: f32
    ) -> None:
        """Takes qkv [n_rows, (2 n_key_head + n_head) * state_size], queries, keys, values, as ``short_conv`` makes it.

        gates [n_rows, 2, n_head]: decay, step, as ``delta_gates`` gives them; y [n_rows, n_head * state_size].
        """
        lane = cuda.threadIdx.x
        warp = warp_of()
        thread = warp * 32 + lane
        head = cuda.blockIdx.y
        segment = cuda.blockIdx.z
        # Lanes beyond the width, a power of two, do as those within it do and store nothing.
        at = lane & (width - 1)
        column = cuda.blockIdx.x * width + at
        cell = cuda.blockIdx.x * (state_size * width) + at
        first_key = warp * n_own
        first = segments[segment, 0]
        n_rows = segments[segment, 1]
        slot = segments[segment, 2]
        source = segments[segment, 3]
        n_kept = segments.shape[1] - FIRST_TARGET
        n_key_head = (qkv.shape[1] // state_size - states.shape[2]) // 2
        q0 = (head % n_key_head) * state_size
        k0 = q0 + n_key_head * state_size
        v0 = (2 * n_key_head + head) * state_size
        m = cuda.local.array(n_mine, float32)
        sums = cuda.local.array(n_own, float32)
        # A wide block's keys of this row: between its barriers they would be fetched twice.
        keys = cuda.local.array(n_held, float32)
        ahead_k = cuda.local.array(n_parts, float32)
        ahead_q = cuda.local.array(n_parts, float32)
        # Of a wide block: this row's and the next one's.
        key_rows = cuda.shared.array(n_staged, float32)
        query_rows = cuda.shared.array(n_staged, float32)
        known_parts = cuda.shared.array((4, 32), float32)
        y_parts = cuda.shared.array((4, 32), float32)
        q_scale = float32(0.0)
        k_scale = float32(0.0)
        if n_rows > 0:
            for i in range(n_mine):
                key = 4 * (i // n_own) + first_key + i % n_own
                m[i] = states[slot, source, head, cell + key * width] if source >= 0 else float32(0.0)
            if wide > 0:
                for p in range(n_parts):
                    inside = min(p * n_threads + thread, state_size - 1)
                    if p * n_threads + thread < state_size:
                        key_rows[inside] = qkv[first, k0 + inside]
                        query_rows[inside] = qkv[first, q0 + inside]
                    following = first + min(1, n_rows - 1)
                    ahead_k[p] = qkv[following, k0 + inside]
                    ahead_q[p] = qkv[following, q0 + inside]
                cuda.syncthreads()
                q_scale = unit_scale(query_rows, 0, qkv, first, q0, eps) * float32(read_scale)
                k_scale = unit_scale(key_rows, 0, qkv, first, k0, eps)
        for t in range(n_rows):
            row = first + t
            decay = gates[row, 0, head]
            step = gates[row, 1, head]
            v = qkv[row, v0 + column]
            now = (t & 1) * state_size
            if wide > 0:
                # The next row's place is free: all have passed the last barrier of the row before.
                for p in range(n_parts):
                    if p * n_threads + thread < state_size:
                        key_rows[state_size - now + p * n_threads + thread] = ahead_k[p]
                        query_rows[state_size - now + p * n_threads + thread] = ahead_q[p]
            else:
                q_scale = unit_scale(query_rows, 0, qkv, row, q0, eps) * float32(read_scale)
                k_scale = unit_scale(key_rows, 0, qkv, row, k0, eps)
            for j in range(n_own):
                sums[j] = float32(0.0)
            for d in range(n_depth):
                for j in range(n_own):
                    k = element(key_rows, now, qkv, row, k0, 4 * d + first_key + j)
                    if wide > 0:
                        keys[d] = k
                    sums[j] = cuda.fma(m[d * n_own + j], k, sums[j])
            for j in range(n_own):
                known_parts[first_key + j, lane] = sums[j]
            cuda.syncthreads()
            if wide > 0:
                for p in range(n_parts):
                    inside = min(p * n_threads + thread, state_size - 1)
                    later = first + min(t + 2, n_rows - 1)
                    ahead_k[p] = qkv[later, k0 + inside]
                    ahead_q[p] = qkv[later, q0 + inside]
            # What the decayed matrix knows under this key: the decay and the key's scale are factors of the sum.
            known = (
                (known_parts[0, lane] + known_parts[1, lane]) + (known_parts[2, lane] + known_parts[3, lane])
            ) * k_scale
            gain = step * cuda.fma(-decay, known, v) * k_scale
            for j in range(n_own):
                sums[j] = float32(0.0)
            for d in range(n_depth):
                for j in range(n_own):
                    k = keys[d] if wide > 0 else element(key_rows, now, qkv, row, k0, 4 * d + first_key + j)
                    q = element(query_rows, now, qkv, row, q0, 4 * d + first_key + j)
                    new = cuda.fma(gain, k, decay * m[d * n_own + j])
                    m[d * n_own + j] = new
                    sums[j] = cuda.fma(new, q, sums[j])
            for j in range(n_own):
                y_parts[first_key + j, lane] = sums[j]
            own_scale = q_scale
            if wide > 0:
                # The next row's, while the sums above are under way.
                q_scale = unit_scale(query_rows, state_size - now, qkv, row, q0, eps) * float32(read_scale)
                k_scale = unit_scale(key_rows, state_size - now, qkv, row, k0, eps)
            # Of the next row's barriers one stands between any of these loads and the next stores to the same array.
            cuda.syncthreads()
            if lane < width and warp == 0:
                y[row, head * state_size + column] = (
                    (y_parts[0, lane] + y_parts[1, lane]) + (y_parts[2, lane] + y_parts[3, lane])
                ) * own_scale
            back = n_rows - 1 - t
            plane = segments[segment, FIRST_TARGET + back] if back < n_kept else -1
            if plane >= 0:
                for i in range(n_mine):
                    if lane < width:
                        key = 4 * (i // n_own) + first_key + i % n_own
                        states[slot, plane, head, cell + key * width] = m[i]

    gated_delta.name = f"gated_delta_{state_size}" + (f"_w{warps}" if wide else "")
    return gated_delta


def packed_state(m: npt.NDArray[np.floating]) -> npt.NDArray[np.float32]:
    """Matrices [..., key index, value index] as the kernel's state holds them: float32 [..., state_size**2]."""
    size = m.shape[-1]
    width = columns_per_block(size)
    slices = m.reshape(*m.shape[:-1], size // width, width).swapaxes(-3, -2)  # (..., slice, key, column)
    return np.ascontiguousarray(slices, np.float32).reshape(*m.shape[:-2], size * size)


def gated_delta_f64(
    qkv: npt.NDArray[np.floating],
    gates: npt.NDArray[np.floating],
    old: npt.NDArray[np.floating],
    eps: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Twin of ``gated_delta`` for one sequence, from state ``old`` [n_head, state_size, state_size].

    Returns y [n_rows, n_head * state_size] and the state after each row [n_rows, n_head, state_size, state_size].
    """
    n_rows, n_head, size = len(qkv), old.shape[0], old.shape[1]
    heads = qkv.astype(np.float64).reshape(n_rows, qkv.shape[1] // size, size)
    n_key_head = (heads.shape[1] - n_head) // 2
    key_head = np.arange(n_head) % n_key_head
    unit = heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + eps)
    q, k, v = unit[:, key_head], unit[:, n_key_head + key_head], heads[:, 2 * n_key_head :]
    m = old.astype(np.float64)
    y, states = np.empty((n_rows, n_head, size)), np.empty((n_rows, *m.shape))
    for t in range(n_rows):
        decay, step = gates[t].astype(np.float64)
        m = decay[:, None, None] * m
        delta = step[:, None] * (v[t] - np.einsum("hij,hi->hj", m, k[t]))
        m = m + k[t][:, :, None] * delta[:, None, :]
        y[t] = np.einsum("hij,hi->hj", m, q[t]) / np.sqrt(size)
        states[t] = m
    return y.reshape(n_rows, n_head * size), states
