"""Causal grouped-query attention over a paged KV cache, and the store into it.

The cache holds pages of ``PAGE`` positions: keys as [n_pages, n_head_kv, head_dim, PAGE], so that the lanes of a warp
take one position each and read side by side, values as [n_pages, n_head_kv, PAGE, head_dim]. A sequence's pages are
named by a table in position order. Attention runs in two stages: each span of ``SPAN`` positions, counted from position
0, is attended to on its own with a running maximum (Milakov and Gimelshein 2018), then the spans are merged in order.
So a row's bits depend on neither the batch, nor the cache's length, nor where its pages lie, and a long context
keeps a GPU as busy as a large batch. The partial results grow with the cached length:
[n_tokens, n_head, n_spans, head_dim + 2].
"""

# No "from __future__ import annotations": a kernel's annotations name types that its factory chose.
import functools
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import Kernel, device_function, kernel
from instrumentation.kernel.intrinsics import f16_to_f32, f32_to_f16
from instrumentation.kernel.types import f32, f32_3d, f32_4d, i32_1d, i32_2d, u16_4d
from refengine.kernels.numerics import INFINITY, exp_f32, warp_max, warp_sum

PAGE = 32
#: positions that one block of the first stage attends to
SPAN = 256
_SPAN_PAGES = SPAN // PAGE
#: head sizes are a multiple of this: a score is the sum of four running sums
HEAD_DIM_UNIT = 4
CacheType = Literal["f32", "f16"]


@device_function
def _same(x: Any) -> Any:
    return x


_ELEMENTS = {"f32": (f32_4d, _same, _same), "f16": (u16_4d, f16_to_f32, f32_to_f16)}
#: NumPy type of a cache's elements
CACHE_DTYPES: dict[CacheType, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.uint16),
}


@functools.cache
def store_kv(cache_type: CacheType) -> Kernel:
    """Kernel that writes new keys and values into their cells. Grid: (n_head_kv, n_tokens)."""
    encode: Any = _ELEMENTS[cache_type][2]
    if TYPE_CHECKING:
        Cache: TypeAlias = f32_4d
    else:
        Cache = _ELEMENTS[cache_type][0]  # noqa: N806 - a type

    @kernel(block=32, strict=True)
    def store_kv(k: f32_3d, v: f32_3d, cell: i32_1d, k_cache: Cache, v_cache: Cache) -> None:
        """k, v [n_tokens, n_head_kv, head_dim]; cell [n_tokens] = page * PAGE + position % PAGE."""
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        page = cell[token] // PAGE
        slot = cell[token] % PAGE
        n_dim = k.shape[2]
        for b in range((n_dim + 31) // 32):
            i = b * 32 + lane
            if i < n_dim:
                k_cache[page, head, i, slot] = encode(k[token, head, i])
                v_cache[page, head, slot, i] = encode(v[token, head, i])

    store_kv.name = f"store_kv_{cache_type}"
    return store_kv


@functools.cache
def attention(cache_type: CacheType, head_dim: int) -> Kernel:
    """First stage, for one element type and head size (a multiple of 4). Grid: (n_head, n_tokens, n_spans)."""
    assert head_dim >= HEAD_DIM_UNIT, head_dim
    assert head_dim % HEAD_DIM_UNIT == 0, head_dim
    decode: Any = _ELEMENTS[cache_type][1]
    if TYPE_CHECKING:
        Cache: TypeAlias = f32_4d
    else:
        Cache = _ELEMENTS[cache_type][0]  # noqa: N806 - a type
    columns = tuple(range((head_dim + 31) // 32))
    n_columns = len(columns)

    @kernel(block=32, strict=True)
    def attention(
        q: f32_3d,
        k_cache: Cache,
        v_cache: Cache,
        pages: i32_2d,
        sequence: i32_1d,
        position: i32_1d,
        partial: f32_4d,
        scale: f32,
    ) -> None:
        """Weighted sums of one span's values, then its largest score and its sum of weights.

        q [n_tokens, n_head, head_dim]; pages [n_sequences, most pages]; sequence, position [n_tokens]; partial
        [n_tokens, n_head, n_spans, head_dim + 2], of which spans behind the position are not written.
        """
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        span = cuda.blockIdx.z
        kv_head = head // (q.shape[1] // k_cache.shape[1])
        row = sequence[token]
        n_positions = position[token] + 1
        weights = cuda.shared.array(PAGE, float32)
        sums = cuda.local.array(n_columns, float32)
        for c in columns:
            sums[c] = float32(0.0)
        largest = float32(-INFINITY)
        denominator = float32(0.0)
        first_page = span * _SPAN_PAGES
        for number in range(first_page, min(first_page + _SPAN_PAGES, (n_positions + PAGE - 1) // PAGE)):
            page = pages[row, number]
            s0 = float32(0.0)
            s1 = float32(0.0)
            s2 = float32(0.0)
            s3 = float32(0.0)
            for d in range(head_dim // 4):
                s0 = cuda.fma(q[token, head, 4 * d], decode(k_cache[page, kv_head, 4 * d, lane]), s0)
                s1 = cuda.fma(q[token, head, 4 * d + 1], decode(k_cache[page, kv_head, 4 * d + 1, lane]), s1)
                s2 = cuda.fma(q[token, head, 4 * d + 2], decode(k_cache[page, kv_head, 4 * d + 2, lane]), s2)
                s3 = cuda.fma(q[token, head, 4 * d + 3], decode(k_cache[page, kv_head, 4 * d + 3, lane]), s3)
            visible = number * PAGE + lane < n_positions
            # A cell behind the position may hold anything, NaN too: select, never multiply by zero.
            score = (s0 + s1) + (s2 + s3) if visible else float32(-INFINITY)
            new_largest = max(largest, warp_max(score))
            # Scaled after the difference: score * scale - largest could be contracted to one rounding.
            w = exp_f32((score - new_largest) * scale) if visible else float32(0.0)
            rescale = exp_f32((largest - new_largest) * scale)
            weights[lane] = w
            denominator = cuda.fma(denominator, rescale, warp_sum(w))
            largest = new_largest
            cuda.syncthreads()
            for c in columns:
                sums[c] = sums[c] * rescale
            for j in range(min(PAGE, n_positions - number * PAGE)):
                for c in columns:
                    i = c * 32 + lane
                    if i < head_dim:
                        sums[c] = cuda.fma(weights[j], decode(v_cache[page, kv_head, j, i]), sums[c])
            cuda.syncthreads()
        if span * SPAN < n_positions:
            for c in columns:
                i = c * 32 + lane
                if i < head_dim:
                    partial[token, head, span, i] = sums[c]
            if lane == 0:
                partial[token, head, span, head_dim] = largest
                partial[token, head, span, head_dim + 1] = denominator

    attention.name = f"attention_{cache_type}_{head_dim}"
    return attention


@functools.cache
def attention_merge(head_dim: int) -> Kernel:
    """Second stage: the spans of a row in order, for one head size. Grid: (n_head, n_tokens)."""
    columns = tuple(range((head_dim + 31) // 32))
    n_columns = len(columns)

    @kernel(block=32, strict=True)
    def attention_merge(partial: f32_4d, position: i32_1d, out: f32_3d, scale: f32) -> None:
        """Partial [n_tokens, n_head, n_spans, head_dim + 2] of the first stage; out [n_tokens, n_head, head_dim]."""
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        n_spans = position[token] // SPAN + 1
        sums = cuda.local.array(n_columns, float32)
        for c in columns:
            sums[c] = float32(0.0)
        largest = partial[token, head, 0, head_dim]
        for span in range(1, n_spans):
            largest = max(largest, partial[token, head, span, head_dim])
        denominator = float32(0.0)
        for span in range(n_spans):
            w = exp_f32((partial[token, head, span, head_dim] - largest) * scale)
            denominator = cuda.fma(partial[token, head, span, head_dim + 1], w, denominator)
            for c in columns:
                i = c * 32 + lane
                if i < head_dim:
                    sums[c] = cuda.fma(partial[token, head, span, i], w, sums[c])
        for c in columns:
            i = c * 32 + lane
            if i < head_dim:
                out[token, head, i] = sums[c] / denominator

    attention_merge.name = f"attention_merge_{head_dim}"
    return attention_merge


def attention_f64(
    q: npt.NDArray[np.floating],
    keys: npt.NDArray[np.floating],
    values: npt.NDArray[np.floating],
    position: npt.NDArray[np.integer],
    scale: float,
) -> npt.NDArray[np.float64]:
    """Twin of both stages for one sequence: q [n_tokens, n_head, d]; keys, values [n_positions, n_head_kv, d]."""
    q, keys, values = (a.astype(np.float64) for a in (q, keys, values))
    group = q.shape[1] // keys.shape[1]
    out = np.empty(q.shape, np.float64)
    for t, p in enumerate(position):
        for h in range(q.shape[1]):
            score = keys[: p + 1, h // group] @ q[t, h] * scale
            weight = np.exp(score - score.max())
            out[t, h] = weight @ values[: p + 1, h // group] / weight.sum()
    return out
