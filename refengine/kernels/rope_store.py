"""Rotate queries, rotate keys into the KV cache, store values: ``rope`` of both and ``store_kv`` in one launch.

With norms it also does what stands before: the RMS norm of each head of queries and keys. An element is computed with
the operations of the separate kernels in their order, so queries and the cache get the same bits.
"""

# No "from __future__ import annotations": a kernel's annotations name types that its factory chose.
import functools
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import Kernel, device_function, kernel
from instrumentation.kernel.types import f32, f32_1d, f32_2d, f32_3d, f32_4d, i32, i32_1d
from refengine.kernels.kv_types import KV_TYPES, PAGE, SCALE_BYTES, CacheType
from refengine.kernels.norm import RUN, rms_norm_f64
from refengine.kernels.numerics import warp_sum
from refengine.kernels.rope import Pairing, rope_f64


@device_function
def _no_scale(_x: f32_3d, _token: i32, _head: i32, _n: i32, _eps: f32, _lane: i32) -> Any:
    return float32(1.0)


@device_function
def _norm_scale(x: f32_3d, token: i32, head: i32, n: i32, eps: f32, lane: i32) -> Any:
    """As ``rms_norm`` has it for the first n elements of a head."""
    total = float32(0.0)
    for run in range((n + 32 * RUN - 1) // (32 * RUN)):
        squares = float32(0.0)
        for u in range(RUN):
            i = (run * RUN + u) * 32 + lane
            v = x[token, head, i] if i < n else float32(0.0)
            squares = cuda.fma(v, v, squares)
        total = total + squares
    mean = warp_sum(total) / float32(n)
    return float32(1.0) / math.sqrt(mean + eps)


@device_function
def _plain(x: f32_3d, _weight: f32_1d, token: i32, head: i32, i: i32, _scale: f32) -> Any:
    return x[token, head, i]


@device_function
def _normed(x: f32_3d, weight: f32_1d, token: i32, head: i32, i: i32, scale: f32) -> Any:
    return x[token, head, i] * scale * weight[i]


@functools.cache
def rope_store(  # noqa: PLR0915 - two kinds of blocks
    pairing: Pairing, type_k: CacheType, type_v: CacheType, *, norms: bool
) -> Kernel:
    """Kernel for one pairing, element types of the cache, norms or none. Grid: (n_head + n_head_kv, n_tokens)."""
    step = 2 if pairing == "norm" else 1
    adjacent = 1 if pairing == "norm" else 0
    scale_of, element = (_norm_scale, _normed) if norms else (_no_scale, _plain)
    kind_k, kind_v = KV_TYPES[type_k], KV_TYPES[type_v]
    measure_k, encode_k, store_scale_k = kind_k.measure, kind_k.encode, kind_k.store_scale
    measure_v, encode_v, store_scale_v = kind_v.measure, kind_v.encode, kind_v.store_scale
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = kind_k.array, kind_v.array  # noqa: N806 - types

    @device_function
    def turned(
        x: f32_3d,
        weight: f32_1d,
        cosine: f32_2d,
        sine: f32_2d,
        token: i32,
        head: i32,
        i: i32,
        p: i32,
        scale: f32,
    ) -> Any:
        """Element i of a head as ``rope`` writes it; a block of keys is measured before any of it is stored."""
        half = cosine.shape[1]
        distance = adjacent if adjacent > 0 else half
        # Behind the pairs nothing is turned: any pair will do.
        live = i < 2 * half
        pair = (i >> 1 if adjacent > 0 else (i - half if i >= half else i)) if live else 0
        first = pair * step
        x0 = element(x, weight, token, head, first, scale)
        x1 = element(x, weight, token, head, first + distance, scale)
        c = cosine[p, pair]
        s = sine[p, pair]
        value = cuda.fma(x0, c, -(x1 * s)) if i == first else cuda.fma(x0, s, x1 * c)
        return value if live else element(x, weight, token, head, i, scale)

    @kernel(block=32, strict=True)
    def rope_store(
        q: f32_3d,
        k: f32_3d,
        v: f32_3d,
        weight_q: f32_1d,
        weight_k: f32_1d,
        position: i32_1d,
        cosine: f32_2d,
        sine: f32_2d,
        cell: i32_1d,
        y: f32_3d,
        k_cache: Keys,
        v_cache: Values,
        eps: f32,
    ) -> None:
        """Takes q [n_tokens, n_head, at least head_dim], y [n_tokens, n_head, head_dim].

        k, v [n_tokens, n_head_kv, head_dim]; weight_q, weight_k [head_dim] and eps of the norms, not read without
        them; tables [n_ctx, n_rot / 2]; cell [n_tokens] = page * PAGE + position % PAGE.
        """
        lane = cuda.threadIdx.x
        token = cuda.blockIdx.y
        p = position[token]
        n_dim = v.shape[2]
        n_head = y.shape[1]
        if cuda.blockIdx.x < n_head:
            q_head = cuda.blockIdx.x
            q_scale = scale_of(q, token, q_head, n_dim, eps, lane)
            half = cosine.shape[1]
            distance = adjacent if adjacent > 0 else half
            for part in range((half + 31) // 32):
                pair = part * 32 + lane
                if pair < half:
                    x0 = element(q, weight_q, token, q_head, pair * step, q_scale)
                    x1 = element(q, weight_q, token, q_head, pair * step + distance, q_scale)
                    c = cosine[p, pair]
                    s = sine[p, pair]
                    y[token, q_head, pair * step] = cuda.fma(x0, c, -(x1 * s))
                    y[token, q_head, pair * step + distance] = cuda.fma(x0, s, x1 * c)
            for rest in range((n_dim - 2 * half + 31) // 32):
                at = 2 * half + rest * 32 + lane
                if at < n_dim:
                    y[token, q_head, at] = element(q, weight_q, token, q_head, at, q_scale)
        else:
            head = cuda.blockIdx.x - n_head
            page = cell[token] // PAGE
            slot = cell[token] % PAGE
            k_scale = scale_of(k, token, head, n_dim, eps, lane)
            for b in range((n_dim + 31) // 32):
                i = b * 32 + lane
                inside = min(i, n_dim - 1)
                key = turned(k, weight_k, cosine, sine, token, head, inside, p, k_scale)
                scale_k = measure_k(key)
                scale_v = measure_v(v[token, head, inside])
                if i < n_dim:
                    k_cache[page, head, i, slot] = encode_k(key, scale_k)
                    v_cache[page, head, slot, i] = encode_v(v[token, head, i], scale_v)
                if lane == 0:
                    store_scale_k(k_cache, page, head, n_dim + b * SCALE_BYTES, slot, 1, 0, scale_k)
                    store_scale_v(v_cache, page, head, slot, n_dim + b * SCALE_BYTES, 0, 1, scale_v)

    rope_store.name = f"rope_store_{pairing}_{type_k}_{type_v}{'_norms' if norms else ''}"
    return rope_store


def norm_rope_f64(
    x: npt.NDArray[np.floating],
    weight: npt.NDArray[np.floating],
    eps: float,
    position: npt.NDArray[np.integer],
    tables: tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]],
    pairing: Pairing,
) -> npt.NDArray[np.float64]:
    """Twin of what ``rope_store`` with norms makes of queries and keys: x [n_tokens, n_head, at least head_dim]."""
    return rope_f64(rms_norm_f64(x[..., : len(weight)], weight, eps), position, *tables, pairing)
