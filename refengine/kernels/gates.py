"""What gates a layer's flow in hybrid models: decay and beta of the delta rule, gated norm, attention's output gate.

Formulas as in Yang et al. 2024 (Gated Delta Networks); per head means that each head's part of a row is on its own.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.intrinsics import f32_bits, f32_from_bits
from instrumentation.kernel.types import f32, f32_1d, f32_2d, f32_3d
from refengine.kernels.norm import RUN
from refengine.kernels.numerics import exp_f32, sigmoid_f32, warp_sum

#: above it softplus(x) is x in float32
SOFTPLUS_LIMIT = 20.0


@device_function
def log1p_f32(u: Any) -> Any:
    """log(1 + u) in float32 for u >= 0, within 2 ulp; NaN stays NaN, infinity does not stay infinity.

    Cephes logf (Moshier) of w = 1 + u rounded, w = 2**e m with sqrt(1/2) <= m < sqrt(2), to which what the rounding
    lost is added (Knuth's exact sum), so that it is right for small u too.
    """
    w = float32(1.0) + u
    part = w - float32(1.0)
    lost = (float32(1.0) - (w - part)) + (u - part)
    bits = f32_bits(w)
    e = (bits - 0x3F3504F3) >> 23
    n = float32(e)
    x = f32_from_bits(bits - (e << 23)) - float32(1.0)
    p = float32(7.0376836292e-2)
    p = cuda.fma(p, x, float32(-1.1514610310e-1))
    p = cuda.fma(p, x, float32(1.1676998740e-1))
    p = cuda.fma(p, x, float32(-1.2420140846e-1))
    p = cuda.fma(p, x, float32(1.4249322787e-1))
    p = cuda.fma(p, x, float32(-1.6668057665e-1))
    p = cuda.fma(p, x, float32(2.0000714765e-1))
    p = cuda.fma(p, x, float32(-2.4999993993e-1))
    p = cuda.fma(p, x, float32(3.3333331174e-1))
    y = cuda.fma(p * x, x * x, lost / w)
    y = cuda.fma(n, float32(-2.12194440e-4), y)
    y = cuda.fma(x * x, float32(-0.5), y)
    return cuda.fma(n, float32(0.693359375), x + y)


@device_function
def softplus_f32(x: Any) -> Any:
    """log(1 + e**x) in float32; x itself above 20."""
    return x if x > float32(SOFTPLUS_LIMIT) else log1p_f32(exp_f32(x))


@device_function
def decay_of(alpha: Any, dt_bias: Any, a: Any) -> Any:
    """How much of a head's matrix stays."""
    return exp_f32(a * softplus_f32(alpha + dt_bias))


@kernel(block=32, strict=True)
def delta_gates(alpha: f32_2d, beta: f32_2d, dt_bias: f32_1d, a: f32_1d, gates: f32_3d) -> None:
    """Decay exp(a * softplus(alpha + dt_bias)) and step sigmoid(beta) of each value head.

    alpha, beta [n_rows, n_head] as projected; dt_bias (``ssm_dt.bias``), a (``ssm_a``, <= 0) [n_head]; gates
    [n_rows, 2, n_head]: decay, then step, as ``gated_delta`` takes them. Grid: (ceil(n_head / 32), n_rows).
    """
    head = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    row = cuda.blockIdx.y
    if head < alpha.shape[1]:
        gates[row, 0, head] = decay_of(alpha[row, head], dt_bias[head], a[head])
        gates[row, 1, head] = sigmoid_f32(beta[row, head])


@kernel(block=32, strict=True)
def gated_norm(x: f32_2d, weight: f32_1d, z: f32_2d, y: f32_2d, eps: f32) -> None:
    """Writes y = x / sqrt(mean(x**2) + eps) * weight * silu(z). One warp per row; a row is one value head.

    x, z, y [n_rows * n_head, n]; weight (``ssm_norm``) [n]. Grid: n_rows * n_head.
    """
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = x.shape[1]
    squares = float32(0.0)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        v = x[row, i] if i < n else float32(0.0)
        squares = cuda.fma(v, v, squares)
    mean = warp_sum(squares) / float32(n)
    scale = float32(1.0) / math.sqrt(mean + eps)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            y[row, i] = x[row, i] * scale * weight[i] * (z[row, i] * sigmoid_f32(z[row, i]))


@kernel(block=32, strict=True)
def query_norm(q_gate: f32_2d, weight: f32_1d, q: f32_2d, eps: f32) -> None:
    """RMS norm of the query in rows [query | gate], as ``rms_norm`` of the query alone. One warp per row.

    q_gate [n_rows * n_head, 2 n]; weight (``attn_q_norm``) [n]; q [n_rows * n_head, n]. Grid: n_rows * n_head.
    """
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = q.shape[1]
    total = float32(0.0)
    for run in range((n + 32 * RUN - 1) // (32 * RUN)):
        squares = float32(0.0)
        for u in range(RUN):
            i = (run * RUN + u) * 32 + lane
            v = q_gate[row, i] if i < n else float32(0.0)
            squares = cuda.fma(v, v, squares)
        total = total + squares
    mean = warp_sum(total) / float32(n)
    scale = float32(1.0) / math.sqrt(mean + eps)
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            q[row, i] = q_gate[row, i] * scale * weight[i]


@kernel(block=32, strict=True)
def output_gate(x: f32_2d, q_gate: f32_2d, y: f32_2d) -> None:
    """Writes y = x * sigmoid(gate), the gates being the second halves of the rows of q_gate.

    x (attention's result), y [n_rows * n_head, n]; q_gate [n_rows * n_head, 2 n]. Grid: n_rows * n_head.
    """
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x
    n = x.shape[1]
    for b in range((n + 31) // 32):
        i = b * 32 + lane
        if i < n:
            y[row, i] = x[row, i] * sigmoid_f32(q_gate[row, n + i])


def delta_gates_f64(
    alpha: npt.NDArray[np.floating],
    beta: npt.NDArray[np.floating],
    dt_bias: npt.NDArray[np.floating],
    a: npt.NDArray[np.floating],
) -> npt.NDArray[np.float64]:
    """Twin of ``delta_gates``: [n_rows, 2, n_head]."""
    wide = alpha.astype(np.float64) + dt_bias.astype(np.float64)
    decay = np.exp(a.astype(np.float64) * np.logaddexp(0.0, wide))
    return np.stack([decay, sigmoid_f64(beta)], axis=1)


def gated_norm_f64(
    x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], z: npt.NDArray[np.floating], eps: float
) -> npt.NDArray[np.float64]:
    """Twin of ``gated_norm``: x, z [..., n], weight [n]."""
    wide, gate = x.astype(np.float64), z.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return np.asarray(wide * scale * weight.astype(np.float64) * gate * sigmoid_f64(z))


def query_norm_f64(
    q_gate: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], eps: float
) -> npt.NDArray[np.float64]:
    """Twin of ``query_norm``: q_gate [..., 2 n], weight [n]."""
    wide = q_gate[..., : len(weight)].astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return np.asarray(wide * scale * weight.astype(np.float64))


def output_gate_f64(x: npt.NDArray[np.floating], q_gate: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Twin of ``output_gate``: x [..., n], q_gate [..., 2 n]."""
    return np.asarray(x.astype(np.float64) * sigmoid_f64(q_gate[..., x.shape[-1] :]))


def sigmoid_f64(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """1 / (1 + e**-x) in float64."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -x.astype(np.float64))))
