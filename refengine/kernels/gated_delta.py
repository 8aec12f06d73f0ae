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
from instrumentation.kernel.types import f32, f32_2d, f32_3d, f32_4d, i32_2d
from refengine.kernels.numerics import warp_sum
from refengine.kernels.short_conv import FIRST_TARGET

#: a sum over keys is the sum of four running sums, so state sizes are a multiple of four
QUARTERS = (0, 1, 2, 3)
STATE_SIZE_UNIT = len(QUARTERS)
#: a block keeps [state_size, 32] floats in shared memory, of which a GPU gives 48 KiB
MAX_STATE_SIZE = 256


def columns_per_block(state_size: int) -> int:
    """Columns of a head's matrix that one block takes: the grid of ``gated_delta`` has state_size over this."""
    return math.gcd(state_size, 32)


@device_function
def _inverse_length(x: Any, row: Any, first: Any, n: Any, lane: Any, eps: Any) -> Any:
    """1 / sqrt(sum of squares + eps) of elements ``first`` to ``first + n - 1`` of a row."""
    squares = float32(0.0)
    for b in range((n + 31) // 32):
        at = b * 32 + lane
        if at < n:
            squares = cuda.fma(x[row, first + at], x[row, first + at], squares)
    return float32(1.0) / math.sqrt(warp_sum(squares) + eps)


@functools.cache
def gated_delta(state_size: int) -> Kernel:
    """Kernel for one state size. Grid: (state_size / columns_per_block(state_size), n_head, n_segments)."""
    assert 0 < state_size <= MAX_STATE_SIZE, state_size
    assert state_size % STATE_SIZE_UNIT == 0, state_size
    width = columns_per_block(state_size)
    read_scale = 1.0 / math.sqrt(state_size)

    @kernel(block=32, strict=True)
    def gated_delta(
        qkv: f32_2d, gates: f32_3d, segments: i32_2d, states: f32_4d, y: f32_2d, eps: f32
    ) -> None:
        """Takes qkv [n_rows, (2 n_key_head + n_head) * state_size], queries, keys, values, as ``short_conv`` makes it.

        gates [n_rows, 2, n_head]: decay, step, as ``delta_gates`` gives them; y [n_rows, n_head * state_size].
        """
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.y
        segment = cuda.blockIdx.z
        column = cuda.blockIdx.x * width + lane
        cell = cuda.blockIdx.x * (state_size * width) + lane
        first = segments[segment, 0]
        n_rows = segments[segment, 1]
        slot = segments[segment, 2]
        source = segments[segment, 3]
        n_kept = segments.shape[1] - FIRST_TARGET
        n_key_head = (qkv.shape[1] // state_size - states.shape[2]) // 2
        q0 = (head % n_key_head) * state_size
        k0 = q0 + n_key_head * state_size
        v0 = (2 * n_key_head + head) * state_size
        # Lanes beyond the width compute on zeros and store nothing.
        live = lane < width
        m = cuda.shared.array((state_size, 32), float32)
        sums = cuda.local.array(4, float32)
        if n_rows > 0:
            for i in range(state_size):
                old = source >= 0 and live
                m[i, lane] = states[slot, source, head, cell + i * width] if old else float32(0.0)
        for t in range(n_rows):
            row = first + t
            decay = gates[row, 0, head]
            step = gates[row, 1, head]
            q_scale = _inverse_length(qkv, row, q0, state_size, lane, eps) * float32(read_scale)
            k_scale = _inverse_length(qkv, row, k0, state_size, lane, eps)
            for c in QUARTERS:
                sums[c] = float32(0.0)
            for d in range(state_size // 4):
                for c in QUARTERS:
                    sums[c] = cuda.fma(m[4 * d + c, lane], qkv[row, k0 + 4 * d + c], sums[c])
            # What the decayed matrix knows under this key: the decay and the key's scale are factors of the sum.
            known = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * k_scale
            v = qkv[row, v0 + column] if live else float32(0.0)
            gain = step * cuda.fma(-decay, known, v) * k_scale
            for c in QUARTERS:
                sums[c] = float32(0.0)
            for d in range(state_size // 4):
                for c in QUARTERS:
                    new = cuda.fma(gain, qkv[row, k0 + 4 * d + c], decay * m[4 * d + c, lane])
                    m[4 * d + c, lane] = new
                    sums[c] = cuda.fma(new, qkv[row, q0 + 4 * d + c], sums[c])
            if live:
                y[row, head * state_size + column] = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * q_scale
            back = n_rows - 1 - t
            plane = segments[segment, FIRST_TARGET + back] if back < n_kept else -1
            if plane >= 0 and live:
                for i in range(state_size):
                    states[slot, plane, head, cell + i * width] = m[i, lane]

    gated_delta.name = f"gated_delta_{state_size}"
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
