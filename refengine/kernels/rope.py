"""Rotary position embedding (Su et al. 2021) in both pairings, from tables that float64 computed."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Literal

import numpy as np
import numpy.typing as npt
from numba import cuda

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_2d, f32_3d, i32_1d

Pairing = Literal["norm", "neox"]


@functools.cache
def rope(pairing: Pairing) -> Kernel:
    """Kernel for one pairing: ``norm`` turns (x[2i], x[2i+1]), ``neox`` turns (x[i], x[i + n_rot/2])."""
    # First and second element of pair i are i * step and i * step + (distance or half).
    step = 2 if pairing == "norm" else 1
    adjacent = 1 if pairing == "norm" else 0

    @kernel(block=32, strict=True)
    def rope(x: f32_3d, position: i32_1d, cosine: f32_2d, sine: f32_2d, y: f32_3d) -> None:
        """x, y [n_tokens, n_head, head_dim]; tables [n_ctx, n_rot / 2]. Grid: (n_head, n_tokens)."""
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        half = cosine.shape[1]
        p = position[token]
        distance = adjacent if adjacent > 0 else half
        for b in range((half + 31) // 32):
            i = b * 32 + lane
            if i < half:
                x0 = x[token, head, i * step]
                x1 = x[token, head, i * step + distance]
                c = cosine[p, i]
                s = sine[p, i]
                y[token, head, i * step] = cuda.fma(x0, c, -(x1 * s))
                y[token, head, i * step + distance] = cuda.fma(x0, s, x1 * c)
        for b in range((x.shape[2] - 2 * half + 31) // 32):
            j = 2 * half + b * 32 + lane
            if j < x.shape[2]:
                y[token, head, j] = x[token, head, j]

    rope.name = f"rope_{pairing}"
    return rope


def rope_tables(
    n_ctx: int,
    n_rot: int,
    base: float,
    freq_scale: float = 1.0,
    factors: npt.NDArray[np.floating] | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosine and sine [n_ctx, n_rot / 2] of position * freq_scale * base**(-2i / n_rot) / factors[i], in float64."""
    pair = np.arange(n_rot // 2, dtype=np.float64)
    frequency = freq_scale * base ** (-2.0 * pair / n_rot)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    angle = np.arange(n_ctx, dtype=np.float64)[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rope_f64(
    x: npt.NDArray[np.floating],
    position: npt.NDArray[np.integer],
    cosine: npt.NDArray[np.floating],
    sine: npt.NDArray[np.floating],
    pairing: Pairing,
) -> npt.NDArray[np.float64]:
    """Twin of ``rope``: x [n_tokens, n_head, head_dim]."""
    wide = x.astype(np.float64)
    half = cosine.shape[1]
    c = cosine.astype(np.float64)[position][:, None, :]
    s = sine.astype(np.float64)[position][:, None, :]
    first = slice(0, 2 * half, 2) if pairing == "norm" else slice(0, half)
    second = slice(1, 2 * half, 2) if pairing == "norm" else slice(half, 2 * half)
    out = wide.copy()
    out[..., first] = wide[..., first] * c - wide[..., second] * s
    out[..., second] = wide[..., first] * s + wide[..., second] * c
    return out
