"""Causal grouped-query attention over a paged KV cache, and the store into it.

The cache holds pages of ``PAGE`` positions, keys and values each in an element type of its own: ``kv_types`` says how
they lie. A sequence's pages are named by a table in position order. Attention runs in two stages: each span of
``SPAN`` positions, counted from position 0, is attended to on its own, then the spans are merged in order. A span is
done alike: each of its pages is attended to on its own (its largest score, weights, their sum, the weighted sum of
values), then the pages are merged in order. Merging rescales by the difference of largest scores (Milakov and
Gimelshein 2018). So a row's bits depend on neither the batch, nor the cache's length, nor where its pages lie, nor how
many warps share the pages, and a long context keeps a GPU as busy as a large batch. The partial results grow with the
cached length: [n_tokens, n_head, n_spans, head_dim + 2].
"""

# No "from __future__ import annotations": a kernel's annotations name types that its factory chose.
import functools
import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.types import f32, f32_3d, f32_4d, i32_1d, i32_2d
from refengine.kernels.kv_types import KV_TYPES, PAGE, SCALE_BYTES, CacheType
from refengine.kernels.numerics import (
    INFINITY,
    exp_f32,
    only_warp,
    own_warp,
    sigmoid_f32,
    warp_max,
    warp_sum,
)

#: positions that one block of the first stage attends to
SPAN = 256
_SPAN_PAGES = SPAN // PAGE
#: head sizes are a multiple of this: a score is the sum of four running sums
HEAD_DIM_UNIT = 4
#: a block keeps the sums of a span's pages in shared memory, of which a GPU gives 48 KiB
MAX_HEAD_DIM = 1024
#: warps that can share the pages of a span
WARPS = (1, 2, 4, 8)
#: elements of the cache that a lane of a wide block fetches before it uses the first
_LOADS = 64
_LOWEST = float(np.finfo(np.float32).min)


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
    type_k: CacheType, type_v: CacheType, head_dim: int, warps: int, *, whole: bool, gated: bool
) -> DeviceFunction:
    """What both kernels do with a span; ``whole``: it is the only one, ``gated``: and ``output_gate`` follows."""
    assert HEAD_DIM_UNIT <= head_dim <= MAX_HEAD_DIM, head_dim
    assert head_dim % HEAD_DIM_UNIT == 0, head_dim
    assert warps in WARPS, warps
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
    n_columns = -(-head_dim // 32)
    ragged = int(head_dim % 32 != 0)
    columns, quarters = tuple(range(n_columns)), tuple(range(HEAD_DIM_UNIT))
    n_merged = -(-n_columns // warps)
    ragged_merged = int(head_dim % (32 * warps) != 0)
    merges, gates = int(whole), int(gated)
    # Dimensions of a key, and positions of values, that a wide block fetches before it uses the first: CUDA unrolls
    # loops of constant length whose bodies are short, and then nothing stands between the loads.
    wide = int(warps > 1)
    n_keys = math.gcd(block_k, _LOADS)
    n_values = min(PAGE, 1 << (_LOADS // n_columns).bit_length() - 1)
    n_fetched = max(n_keys, n_values * n_columns) if wide else 1
    n_query = head_dim if wide else 1
    warp_of = own_warp if wide else only_warp

    @device_function
    def span_of(  # noqa: C901, PLR0912, PLR0915 - stages of one pass, which no function can take out: barriers stand between
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
        warp = warp_of()
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        span = cuda.blockIdx.z
        kv_head = head // (q.shape[1] // k_cache.shape[1])
        row = sequence[token]
        n_positions = position[token] + 1
        first_page = span * _SPAN_PAGES
        n_pages = min(_SPAN_PAGES, (n_positions + PAGE - 1) // PAGE - first_page)
        weights = cuda.shared.array((warps, PAGE), float32)
        page_sums = cuda.shared.array((_SPAN_PAGES, head_dim), float32)
        page_largest = cuda.shared.array((_SPAN_PAGES, 32), float32)
        page_denominator = cuda.shared.array((_SPAN_PAGES, 32), float32)
        scores = cuda.local.array(HEAD_DIM_UNIT, float32)
        sums = cuda.local.array(n_columns, float32)
        fetched = cuda.local.array(n_fetched, float32)
        query = cuda.shared.array(n_query, float32)
        if wide > 0:
            for c in range(n_merged):
                i = (c * warps + warp) * 32 + lane
                if i < head_dim:
                    query[i] = q[token, head, i]
            cuda.syncthreads()
        for turn in range((n_pages + warps - 1) // warps):
            # The last turn may have fewer pages than warps: the rest do as if none of the last page were visible.
            number = turn * warps + warp
            page = pages[row, first_page + min(number, n_pages - 1)]
            n_visible = min(PAGE, n_positions - (first_page + number) * PAGE)
            for n in range(HEAD_DIM_UNIT):
                scores[n] = float32(0.0)
            if wide > 0:
                for b in range(head_dim // n_keys if n_visible > 0 else 0):
                    first = b * n_keys
                    scale_at = head_dim + first // block_k * SCALE_BYTES
                    scale_k = load_scale_k(k_cache, page, kv_head, scale_at, lane, 1, 0)  # unwritten: allowed
                    for u in range(n_keys):
                        stored = k_cache[page, kv_head, first + u, lane]  # unwritten: allowed
                        fetched[u] = decode_k(stored, scale_k)
                    for u in range(n_keys // HEAD_DIM_UNIT):
                        for n in range(HEAD_DIM_UNIT):
                            at = u * HEAD_DIM_UNIT + n
                            scores[n] = cuda.fma(query[first + at], fetched[at], scores[n])
            else:
                for b in range(head_dim // block_k):
                    scale_at = head_dim + b * SCALE_BYTES
                    scale_k = load_scale_k(k_cache, page, kv_head, scale_at, lane, 1, 0)  # unwritten: allowed
                    for u in range(block_k // HEAD_DIM_UNIT):
                        for n in quarters:
                            d = b * block_k + u * HEAD_DIM_UNIT + n
                            stored = k_cache[page, kv_head, d, lane]  # unwritten: allowed
                            key = decode_k(stored, scale_k)
                            scores[n] = cuda.fma(q[token, head, d], key, scores[n])
            # A cell behind the position may hold anything, NaN too: select, never multiply by zero.
            score = (
                (scores[0] + scores[1]) + (scores[2] + scores[3]) if lane < n_visible else float32(-INFINITY)
            )
            # A number even where no score is, so that differences are no NaN.
            highest = max(float32(_LOWEST), warp_max(score))
            # Scaled after the difference: score * scale - highest could be contracted to one rounding.
            weight = exp_f32((score - highest) * scale) if lane < n_visible else float32(0.0)
            weights[warp, lane] = weight
            page_total = warp_sum(weight)
            for c in range(n_columns):
                sums[c] = float32(0.0)
            cuda.syncwarp()
            # A column of lanes is a block: all its elements have one scale.
            if wide > 0:
                for b in range((n_visible + n_values - 1) // n_values):
                    for e in range(n_values):
                        inside = min(b * n_values + e, n_visible - 1)
                        for c in range(n_columns):
                            scale_at = head_dim + c * SCALE_BYTES
                            scale_v = load_scale_v(v_cache, page, kv_head, inside, scale_at, 0, 1)
                            i = min(c * 32 + lane, head_dim - 1)
                            fetched[e * n_columns + c] = decode_v(v_cache[page, kv_head, inside, i], scale_v)
                    for e in range(n_values):
                        j = b * n_values + e
                        for c in range(n_columns):
                            more = cuda.fma(weights[warp, j], fetched[e * n_columns + c], sums[c])
                            sums[c] = more if j < n_visible else sums[c]
            else:
                for place in range(n_visible):
                    for c in columns:
                        scale_at = head_dim + c * SCALE_BYTES
                        scale_v = load_scale_v(v_cache, page, kv_head, place, scale_at, 0, 1)
                        i = c * 32 + lane
                        if ragged < 1 or i < head_dim:
                            value = decode_v(v_cache[page, kv_head, place, i], scale_v)
                            sums[c] = cuda.fma(weights[warp, place], value, sums[c])
            for c in range(n_columns):
                i = c * 32 + lane
                if ragged < 1 or i < head_dim:
                    page_sums[number, i] = sums[c]
            page_largest[number, lane] = highest
            page_denominator[number, lane] = page_total
            cuda.syncwarp()
        cuda.syncthreads()
        # A block behind the row's end has no page: what it reads comes to nothing.
        largest = page_largest[0, lane]  # unwritten: allowed
        for p in range(1, n_pages):
            largest = max(largest, page_largest[p, lane])
        denominator = float32(0.0)
        for c in range(n_merged):
            sums[c] = float32(0.0)
        for p in range(n_pages):
            w = exp_f32((page_largest[p, lane] - largest) * scale)
            denominator = cuda.fma(page_denominator[p, lane], w, denominator)
            for c in range(n_merged):
                i = (c * warps + warp) * 32 + lane
                if ragged_merged < 1 or i < head_dim:
                    sums[c] = cuda.fma(page_sums[p, i], w, sums[c])
        if merges > 0:
            # As the second stage does it with one span.
            one = exp_f32((largest - largest) * scale)
            total = cuda.fma(denominator, one, float32(0.0))
            for c in range(n_merged):
                i = (c * warps + warp) * 32 + lane
                if ragged_merged < 1 or i < head_dim:
                    value = cuda.fma(sums[c], one, float32(0.0)) / total
                    if gates > 0:
                        value = value * sigmoid_f32(q_gate[token, head, head_dim + i])
                    y[token, head, 0, i] = value
        elif n_pages > 0:
            for c in range(n_merged):
                i = (c * warps + warp) * 32 + lane
                if ragged_merged < 1 or i < head_dim:
                    y[token, head, span, i] = sums[c]
            if warp == 0 and lane == 0:
                y[token, head, span, head_dim] = largest
                y[token, head, span, head_dim + 1] = denominator

    return span_of


@functools.cache
def attention(type_k: CacheType, type_v: CacheType, head_dim: int, warps: int = 1) -> Kernel:
    """First stage, for element types and a head size (a multiple of 4). Grid: (n_head, n_tokens, n_spans).

    As many warps as ``WARPS`` names share the pages of a span; the bits do not depend on how many.
    """
    span_of = _span(type_k, type_v, head_dim, warps, whole=False, gated=False)
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = KV_TYPES[type_k].array, KV_TYPES[type_v].array  # noqa: N806 - types

    @kernel(block=(32, warps), strict=True)
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

    attention.name = f"attention_{type_k}_{type_v}_{head_dim}{_suffix(warps)}"
    return attention


@functools.cache
def attention_whole(
    type_k: CacheType, type_v: CacheType, head_dim: int, warps: int = 1, *, gated: bool = False
) -> Kernel:
    """Both stages for rows that see one span, then ``output_gate`` if ``gated``. Grid: (n_head, n_tokens)."""
    span_of = _span(type_k, type_v, head_dim, warps, whole=True, gated=gated)
    if TYPE_CHECKING:
        Keys: TypeAlias = f32_4d
        Values: TypeAlias = f32_4d
    else:
        Keys, Values = KV_TYPES[type_k].array, KV_TYPES[type_v].array  # noqa: N806 - types

    @kernel(block=(32, warps), strict=True)
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

    stages = "gated" if gated else "whole"
    attention_whole.name = f"attention_{stages}_{type_k}_{type_v}_{head_dim}{_suffix(warps)}"
    return attention_whole


@functools.cache
def attention_merge(head_dim: int, warps: int = 1) -> Kernel:
    """Second stage: the spans of a row in order, for one head size. Grid: (n_head, n_tokens).

    The columns are shared by 1 to ceil(head_dim / 32) warps.
    """
    n_columns = -(-head_dim // 32)
    assert 1 <= warps <= n_columns, (warps, head_dim)
    n_merged = -(-n_columns // warps)
    ragged = int(head_dim % (32 * warps) != 0)
    warp_of = own_warp if warps > 1 else only_warp

    @kernel(block=(32, warps), strict=True)
    def attention_merge(partial: f32_4d, position: i32_1d, out: f32_3d, scale: f32) -> None:
        """Partial [n_tokens, n_head, n_spans, head_dim + 2] of the first stage; out [n_tokens, n_head, head_dim]."""
        lane = cuda.threadIdx.x
        warp = warp_of()
        head = cuda.blockIdx.x
        token = cuda.blockIdx.y
        n_spans = position[token] // SPAN + 1
        sums = cuda.local.array(n_merged, float32)
        for c in range(n_merged):
            sums[c] = float32(0.0)
        largest = partial[token, head, 0, head_dim]
        for span in range(1, n_spans):
            largest = max(largest, partial[token, head, span, head_dim])
        denominator = float32(0.0)
        for span in range(n_spans):
            w = exp_f32((partial[token, head, span, head_dim] - largest) * scale)
            denominator = cuda.fma(partial[token, head, span, head_dim + 1], w, denominator)
            for c in range(n_merged):
                i = (c * warps + warp) * 32 + lane
                if ragged < 1 or i < head_dim:
                    sums[c] = cuda.fma(partial[token, head, span, i], w, sums[c])
        for c in range(n_merged):
            i = (c * warps + warp) * 32 + lane
            if ragged < 1 or i < head_dim:
                out[token, head, i] = sums[c] / denominator

    attention_merge.name = f"attention_merge_{head_dim}{_suffix(warps)}"
    return attention_merge


def _suffix(warps: int) -> str:
    return f"_w{warps}" if warps > 1 else ""


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
