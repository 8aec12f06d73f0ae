"""The gated delta rule (Yang et al. 2024), token after token: a matrix that decays, corrects itself and is read.

For each value head, with key, query and value k, q, v of a row, decay a and step b::

    M <- a M;   M <- M + k (b (v - M^T k))^T;   y = M^T q / sqrt(state_size)

k and q are first divided by sqrt(sum of squares + eps). Value head h uses key head h % n_key_head. This order of
operations is the definition: rows are taken one by one, so a row has the same bits however its sequence was cut into
batches, and whatever ran beside it.

The state M is float32 [n_slots, n_planes, n_head, state_size**2], each matrix [key index, value index] with the value
index contiguous: a lane owns a column, so that sums over keys need no exchange between lanes and a warp reads side by
side. (Other GGUF engines store the transpose.) Slots, planes and ``segments`` are those of
``refengine.kernels.short_conv``.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
import math

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32, f32_2d, f32_3d, f32_4d, i32_2d
from refengine.kernels.numerics import warp_sum

#: state sizes are a multiple of this: a sum over keys is the sum of four running sums
STATE_SIZE_UNIT = 4
#: a block keeps [state_size, 32] floats in shared memory, of which a GPU gives 48 KiB
MAX_STATE_SIZE = 256


def columns_per_block(state_size: int) -> int:
    """Columns of a head's matrix that one block takes: the grid of ``gated_delta`` has state_size over this."""
    return math.gcd(state_size, 32)


@functools.cache
def gated_delta(state_size: int) -> Kernel:
    """Kernel for one state size. Grid: (state_size / columns_per_block(state_size), n_head, n_segments)."""
    assert 0 < state_size <= MAX_STATE_SIZE, state_size
    assert state_size % STATE_SIZE_UNIT == 0, state_size
    width = columns_per_block(state_size)
    quarters = state_size // 4
    read_scale = 1.0 / math.sqrt(state_size)

    @kernel(block=32, strict=True)
    def gated_delta(
        qkv: f32_2d, gates: f32_3d, segments: i32_2d, states: f32_4d, y: f32_2d, eps: f32
    ) -> None:
        """qkv [n_rows, (2 n_key_head + n_head) state_size], queries, keys, values; y [n_rows, n_head * state_size].

        gates [n_rows, 2, n_head]: decay, step.
        """
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.y
        segment = cuda.blockIdx.z
        column = cuda.blockIdx.x * width + lane
        first = segments[segment, 0]
        n_rows = segments[segment, 1]
        slot = segments[segment, 2]
        source = segments[segment, 3]
        n_planes = states.shape[1]
        n_key_head = (qkv.shape[1] // state_size - states.shape[2]) // 2
        q0 = (head % n_key_head) * state_size
        k0 = q0 + n_key_head * state_size
        v0 = (2 * n_key_head + head) * state_size
        # Lanes beyond the width compute on zeros and store nothing.
        live = lane < width
        m = cuda.shared.array((state_size, 32), float32)
        if n_rows > 0:
            if source >= 0:
                for i in range(state_size):
                    m[i, lane] = (
                        states[slot, source, head, i * state_size + column] if live else float32(0.0)
                    )
            else:
                for i in range(state_size):
                    m[i, lane] = float32(0.0)
        for t in range(n_rows):
            row = first + t
            decay = gates[row, 0, head]
            step = gates[row, 1, head]
            q_squares = float32(0.0)
            k_squares = float32(0.0)
            for b in range((state_size + 31) // 32):
                at = b * 32 + lane
                if at < state_size:
                    q_squares = cuda.fma(qkv[row, q0 + at], qkv[row, q0 + at], q_squares)
                    k_squares = cuda.fma(qkv[row, k0 + at], qkv[row, k0 + at], k_squares)
            q_scale = float32(read_scale) / math.sqrt(warp_sum(q_squares) + eps)
            k_scale = float32(1.0) / math.sqrt(warp_sum(k_squares) + eps)
            s0 = float32(0.0)
            s1 = float32(0.0)
            s2 = float32(0.0)
            s3 = float32(0.0)
            for d in range(quarters):
                s0 = cuda.fma(m[4 * d, lane], qkv[row, k0 + 4 * d], s0)
                s1 = cuda.fma(m[4 * d + 1, lane], qkv[row, k0 + 4 * d + 1], s1)
                s2 = cuda.fma(m[4 * d + 2, lane], qkv[row, k0 + 4 * d + 2], s2)
                s3 = cuda.fma(m[4 * d + 3, lane], qkv[row, k0 + 4 * d + 3], s3)
            v = qkv[row, v0 + column] if live else float32(0.0)
            # What the decayed matrix knows under this key: the decay and the key's scale are factors of the sum.
            known = ((s0 + s1) + (s2 + s3)) * k_scale
            gain = step * cuda.fma(-decay, known, v) * k_scale
            s0 = float32(0.0)
            s1 = float32(0.0)
            s2 = float32(0.0)
            s3 = float32(0.0)
            for d in range(quarters):
                m0 = cuda.fma(gain, qkv[row, k0 + 4 * d], decay * m[4 * d, lane])
                m1 = cuda.fma(gain, qkv[row, k0 + 4 * d + 1], decay * m[4 * d + 1, lane])
                m2 = cuda.fma(gain, qkv[row, k0 + 4 * d + 2], decay * m[4 * d + 2, lane])
                m3 = cuda.fma(gain, qkv[row, k0 + 4 * d + 3], decay * m[4 * d + 3, lane])
                m[4 * d, lane] = m0
                m[4 * d + 1, lane] = m1
                m[4 * d + 2, lane] = m2
                m[4 * d + 3, lane] = m3
                s0 = cuda.fma(m0, qkv[row, q0 + 4 * d], s0)
                s1 = cuda.fma(m1, qkv[row, q0 + 4 * d + 1], s1)
                s2 = cuda.fma(m2, qkv[row, q0 + 4 * d + 2], s2)
                s3 = cuda.fma(m3, qkv[row, q0 + 4 * d + 3], s3)
            if live:
                y[row, head * state_size + column] = ((s0 + s1) + (s2 + s3)) * q_scale
            plane = n_rows - 1 - t
            if plane < n_planes:
                for i in range(state_size):
                    if live:
                        states[slot, plane, head, i * state_size + column] = m[i, lane]

    gated_delta.name = f"gated_delta_{state_size}"
    return gated_delta


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
    heads = qkv.astype(np.float64).reshape(n_rows, -1, size)
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
    return y.reshape(n_rows, -1), states
