"""Causal grouped-query attention over a paged KV cache, and the store into it.

The cache holds pages of ``PAGE`` positions, keys and values each in an element type of its own: ``kv_types`` says how
they lie. A sequence's pages are named by a table in position order. Attention runs in two stages: each span of
``SPAN`` positions, counted from position 0, is attended to on its own with a running maximum (Milakov and Gimelshein
2018), then the spans are merged in order. So a row's bits depend on neither the batch, nor the cache's length, nor
where its pages lie, and a long context keeps a GPU as busy as a large batch. The partial results grow with the cached
length: [n_tokens, n_head, n_spans, head_dim + 2].
"""

# No "from __future__ import annotations": a kernel's annotations name types that its factory chose.
import functools
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.types import f32, f32_3d, f32_4d, i32_1d, i32_2d
from refengine.kernels.kv_types import KV_TYPES, PAGE, SCALE_BYTES, CacheType
from refengine.kernels.numerics import INFINITY, exp_f32, sigmoid_f32, warp_max, warp_sum

#: positions that one block of the first stage attends to
SPAN = 256
_SPAN_PAGES = SPAN // PAGE
#: head sizes are a multiple of this: a score is the sum of four running sums
HEAD_DIM_UNIT = 4


@functools.cache
def store_kv(type_k: CacheType, type_v: CacheType) -> Kernel:
    """Kernel that writes new keys and values into their cells. Grid: (n_head_kv, n_tokens)."""
    kind_k, kind_v = KV_TYPES[type_k], KV_TYPES[type_v]
    measure_k, encode_k, store_scale_k = kind_k.measure, kind_k.encode, kind_k.store_scale
    measure_v, encode_v, store_scale_v = kind_v.measure, kind_v.encode, kind_v.store_scale
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = kind_k.array, kind_v.array  # noqa: N806 - types

    @kernel(block=32, strict=True)
    def store_kv(k: f32_3d, v: f32_3d, cell: i32_1d, k_cache: Keys, v_cache: Values) -> None:
        """k, v [n_tokens, n_head_kv, head_dim]; cell [n_tokens] = page * PAGE + position % PAGE."""
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        page = cell[token] // PAGE
        slot = cell[token] % PAGE
        n_dim = k.shape[2]
        for b in range((n_dim + 31) // 32):
            i = b * 32 + lane
            inside = min(i, n_dim - 1)
            scale_k = measure_k(k[token, head, inside])
            scale_v = measure_v(v[token, head, inside])
            if i < n_dim:
                k_cache[page, head, i, slot] = encode_k(k[token, head, i], scale_k)
                v_cache[page, head, slot, i] = encode_v(v[token, head, i], scale_v)
            if lane == 0:
                store_scale_k(k_cache, page, head, n_dim + b * SCALE_BYTES, slot, 1, 0, scale_k)
                store_scale_v(v_cache, page, head, slot, n_dim + b * SCALE_BYTES, 0, 1, scale_v)

    store_kv.name = f"store_kv_{type_k}_{type_v}"
    return store_kv


@functools.cache
def _span(  # noqa: C901, PLR0915 - as the function in it
    type_k: CacheType, type_v: CacheType, head_dim: int, *, whole: bool, gated: bool
) -> DeviceFunction:
    """What both kernels do with a span; ``whole``: it is the only one, ``gated``: and ``output_gate`` follows."""
    assert head_dim >= HEAD_DIM_UNIT, head_dim
    assert head_dim % HEAD_DIM_UNIT == 0, head_dim
    kind_k, kind_v = KV_TYPES[type_k], KV_TYPES[type_v]
    assert kind_k.fits(head_dim), (type_k, head_dim)
    assert kind_v.fits(head_dim), (type_v, head_dim)
    decode_k, load_scale_k, block_k = kind_k.decode, kind_k.load_scale, kind_k.scale_block(head_dim)
    decode_v, load_scale_v = kind_v.decode, kind_v.load_scale
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = kind_k.array, kind_v.array  # noqa: N806 - types
    quarters = tuple(range(HEAD_DIM_UNIT))
    columns = tuple(range((head_dim + 31) // 32))
    n_columns = len(columns)
    merges, gates = int(whole), int(gated)

    @device_function
    def span_of(  # noqa: C901, PLR0912 - stages of one pass, which no function can take out: barriers stand between
        q: f32_3d,
        k_cache: Keys,
        v_cache: Values,
        pages: i32_2d,
        sequence: i32_1d,
        position: i32_1d,
        q_gate: f32_3d,
        y: f32_4d,
        scale: f32,
    ) -> None:
        lane = cuda.threadIdx.x
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        span = cuda.blockIdx.z
        kv_head = head // (q.shape[1] // k_cache.shape[1])
        row = sequence[token]
        n_positions = position[token] + 1
        weights = cuda.shared.array(PAGE, float32)
        scores = cuda.local.array(HEAD_DIM_UNIT, float32)
        sums = cuda.local.array(n_columns, float32)
        for c in columns:
            sums[c] = float32(0.0)
        largest = float32(-INFINITY)
        denominator = float32(0.0)
        first_page = span * _SPAN_PAGES
        for number in range(first_page, min(first_page + _SPAN_PAGES, (n_positions + PAGE - 1) // PAGE)):
            page = pages[row, number]
            for n in quarters:
                scores[n] = float32(0.0)
            for b in range(head_dim // block_k):
                scale_k = load_scale_k(k_cache, page, kv_head, head_dim + b * SCALE_BYTES, lane, 1, 0)
                for d in range(b * block_k, (b + 1) * block_k, HEAD_DIM_UNIT):
                    for n in quarters:
                        key = decode_k(k_cache[page, kv_head, d + n, lane], scale_k)
                        scores[n] = cuda.fma(q[token, head, d + n], key, scores[n])
            visible = number * PAGE + lane < n_positions
            # A cell behind the position may hold anything, NaN too: select, never multiply by zero.
            score = (scores[0] + scores[1]) + (scores[2] + scores[3]) if visible else float32(-INFINITY)
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
                    # A column of lanes is a block: all its elements have one scale.
                    scale_v = load_scale_v(v_cache, page, kv_head, j, head_dim + c * SCALE_BYTES, 0, 1)
                    i = c * 32 + lane
                    if i < head_dim:
                        sums[c] = cuda.fma(
                            weights[j], decode_v(v_cache[page, kv_head, j, i], scale_v), sums[c]
                        )
            cuda.syncthreads()
        if merges > 0:
            # As the second stage does it with one span.
            w = exp_f32((largest - largest) * scale)
            total = cuda.fma(denominator, w, float32(0.0))
            for c in columns:
                i = c * 32 + lane
                if i < head_dim:
                    value = cuda.fma(sums[c], w, float32(0.0)) / total
                    if gates > 0:
                        value = value * sigmoid_f32(q_gate[token, head, head_dim + i])
                    y[token, head, 0, i] = value
        elif span * SPAN < n_positions:
            for c in columns:
                i = c * 32 + lane
                if i < head_dim:
                    y[token, head, span, i] = sums[c]
            if lane == 0:
                y[token, head, span, head_dim] = largest
                y[token, head, span, head_dim + 1] = denominator

    return span_of


@functools.cache
def attention(type_k: CacheType, type_v: CacheType, head_dim: int) -> Kernel:
    """First stage, for element types and a head size (a multiple of 4). Grid: (n_head, n_tokens, n_spans)."""
    span_of = _span(type_k, type_v, head_dim, whole=False, gated=False)
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = KV_TYPES[type_k].array, KV_TYPES[type_v].array  # noqa: N806 - types

    @kernel(block=32, strict=True)
    def attention(
        q: f32_3d,
        k_cache: Keys,
        v_cache: Values,
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
        span_of(q, k_cache, v_cache, pages, sequence, position, q, partial, scale)

    attention.name = f"attention_{type_k}_{type_v}_{head_dim}"
    return attention


@functools.cache
def attention_whole(type_k: CacheType, type_v: CacheType, head_dim: int, *, gated: bool = False) -> Kernel:
    """Both stages for rows that see one span, then ``output_gate`` if ``gated``. Grid: (n_head, n_tokens)."""
    span_of = _span(type_k, type_v, head_dim, whole=True, gated=gated)
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = KV_TYPES[type_k].array, KV_TYPES[type_v].array  # noqa: N806 - types

    @kernel(block=32, strict=True)
    def attention_whole(
        q: f32_3d,
        k_cache: Keys,
        v_cache: Values,
        pages: i32_2d,
        sequence: i32_1d,
        position: i32_1d,
        q_gate: f32_3d,
        y: f32_4d,
        scale: f32,
    ) -> None:
        """As ``attention``; every position < ``SPAN``. y [n_tokens, n_head, 1, head_dim].

        q_gate [n_tokens, n_head, 2 head_dim]: the gates are the second halves; not read unless ``gated``.
        """
        span_of(q, k_cache, v_cache, pages, sequence, position, q_gate, y, scale)

    attention_whole.name = f"attention_{'gated' if gated else 'whole'}_{type_k}_{type_v}_{head_dim}"
    return attention_whole


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
