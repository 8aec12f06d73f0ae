"""Short causal convolution of each channel over time, with SiLU: y[t] = silu(sum_k weight[k] x[t - (n_taps - 1) + k]).

A batch is rows of several sequences; a *segment* is the rows of one, consecutive and in order. ``segments`` is int32
[n_segments, segment_columns(n_rs_seq)]: first row, number of rows, slot of the sequence's state, the plane its state
is read from (-1: none yet, zeros), then for s = 0 to n_rs_seq the plane that the state s rows before the segment's
end is written to (-1: it is not written). States that the segment has no rows for, s >= n_rows, are never written; a
segment of no rows does nothing. Slots differ. A state may be written over the one that was read: it is read whole
before. ``gated_delta`` takes the same table, which ``refengine.memory.recurrent_state`` makes.

What a sequence remembers is its last n_taps - 1 columns before the convolution: float32 [n_slots, n_planes, n_taps - 1,
n_channels]. Channels are contiguous, since each lane takes one.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.types import f32_1d, f32_2d, f32_3d, f32_4d, i32_2d
from refengine.kernels.gates import decay_of, sigmoid_f64
from refengine.kernels.numerics import sigmoid_f32

#: first of the columns of ``segments`` that say where states are written
FIRST_TARGET = 4
#: rows of a segment that one block takes
ROWS = 32


def segment_columns(n_rs_seq: int) -> int:
    """Columns of ``segments`` when the states of the last ``n_rs_seq`` tokens are kept beside the last one."""
    return FIRST_TARGET + n_rs_seq + 1


@functools.cache
def _convolution(n_taps: int) -> DeviceFunction:  # noqa: C901 - as the function in it
    """What a block does with its 32 channels of ``ROWS`` rows of a segment."""
    assert 2 <= n_taps <= ROWS, n_taps
    n_old = n_taps - 1
    taps = tuple(range(n_taps))
    old_taps = tuple(range(n_old))

    @device_function
    def convolve(x: f32_2d, weight: f32_2d, segments: i32_2d, history: f32_4d, y: f32_2d) -> None:
        channel = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        segment = cuda.blockIdx.y
        first = segments[segment, 0]
        n_rows = segments[segment, 1]
        slot = segments[segment, 2]
        source = segments[segment, 3]
        begin = cuda.blockIdx.z * ROWS
        live = channel < x.shape[1]
        # A state may be written over the one that is read: the block that reads it keeps it, and writes.
        old = cuda.local.array(n_old, float32)
        w = cuda.local.array(n_taps, float32)
        window = cuda.local.array(n_taps, float32)
        if begin < n_rows:
            for k in taps:
                w[k] = weight[channel, k] if live else float32(0.0)
            for k in old_taps:
                old[k] = float32(0.0)
                if begin > 0:
                    old[k] = x[first + begin - n_old + k, channel] if live else float32(0.0)
                elif source >= 0 and live:
                    old[k] = history[slot, source, k, channel]
                window[k + 1] = old[k]
        for t in range(begin, min(begin + ROWS, n_rows)):
            for k in old_taps:
                window[k] = window[k + 1]
            window[n_old] = x[first + t, channel] if live else float32(0.0)
            total = w[0] * window[0]
            for k in old_taps:
                total = cuda.fma(w[k + 1], window[k + 1], total)
            if live:
                y[first + t, channel] = total * sigmoid_f32(total)
        for back in range(min(n_rows, segments.shape[1] - FIRST_TARGET) if begin == 0 else 0):
            plane = segments[segment, FIRST_TARGET + back]
            for k in old_taps:
                # Row of x, of which the n_old before the first are the old state.
                at = n_rows - back + k - n_old
                if plane >= 0 and live:
                    if at < 0:
                        history[slot, plane, k, channel] = old[at + n_old]
                    else:
                        history[slot, plane, k, channel] = x[first + at, channel]

    return convolve


@functools.cache
def short_conv(n_taps: int) -> Kernel:
    """Kernel for one number of taps (at least 2). Grid: (ceil(n_channels / 32), n_segments, ceil(n_rows / ROWS))."""
    convolve = _convolution(n_taps)

    @kernel(block=32, strict=True)
    def short_conv(x: f32_2d, weight: f32_2d, segments: i32_2d, history: f32_4d, y: f32_2d) -> None:
        """x, y [n_rows, n_channels]; weight [n_channels, n_taps] (the last tap is the row's own)."""
        convolve(x, weight, segments, history, y)

    short_conv.name = f"short_conv_{n_taps}"
    return short_conv


@functools.cache
def short_conv_gates(n_taps: int) -> Kernel:
    """As ``short_conv`` and, for the same rows, ``delta_gates``.

    Grid: (ceil(n_channels / 32) + ceil(n_head / 32), n_segments, ceil(n_rows / ROWS)).
    """
    convolve = _convolution(n_taps)

    @kernel(block=32, strict=True)
    def short_conv_gates(
        x: f32_2d,
        weight: f32_2d,
        alpha: f32_2d,
        beta: f32_2d,
        dt_bias: f32_1d,
        a: f32_1d,
        segments: i32_2d,
        history: f32_4d,
        y: f32_2d,
        gates: f32_3d,
    ) -> None:
        """Shapes as of both; every row must be in a segment."""
        n_blocks = (x.shape[1] + 31) // 32
        if cuda.blockIdx.x < n_blocks:
            convolve(x, weight, segments, history, y)
        else:
            head = (cuda.blockIdx.x - n_blocks) * 32 + cuda.threadIdx.x
            begin = cuda.blockIdx.z * ROWS
            for t in range(begin, min(begin + ROWS, segments[cuda.blockIdx.y, 1])):
                row = segments[cuda.blockIdx.y, 0] + t
                if head < alpha.shape[1]:
                    gates[row, 0, head] = decay_of(alpha[row, head], dt_bias[head], a[head])
                    gates[row, 1, head] = sigmoid_f32(beta[row, head])

    short_conv_gates.name = f"short_conv_gates_{n_taps}"
    return short_conv_gates


def short_conv_f64(
    x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], old: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Twin of ``short_conv`` for one sequence: x [n_rows, n_channels], old state [n_taps - 1, n_channels].

    Returns y [n_rows, n_channels] and the state after each row [n_rows, n_taps - 1, n_channels].
    """
    wide = np.concatenate([old, x]).astype(np.float64)
    n_taps = weight.shape[1]
    windows = np.stack([wide[t : t + n_taps] for t in range(len(x))])  # (n_rows, n_taps, n_channels)
    total = np.einsum("tkc,ck->tc", windows, weight.astype(np.float64))
    return total * sigmoid_f64(total), windows[:, 1:]
