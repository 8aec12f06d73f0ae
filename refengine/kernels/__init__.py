"""The engine's kernels: one file per family, each kernel beside its float64 NumPy twin (``*_f64``)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from instrumentation.kernel import Kernel
    from refengine.kernels.kv_types import CacheType
    from refengine.kernels.rope import Pairing

#: head sizes that the exhaustive list of kernels covers; attention is specialised per head size
HEAD_DIMS = (16, 64, 80, 128, 256)
#: the same for states of the delta rule, and for taps of the short convolution
STATE_SIZES = (16, 64, 128)
CONV_TAPS = (4,)
#: the same for types of keys and of values: each type once as either
CACHE_PAIRS: tuple[tuple[CacheType, CacheType], ...] = (
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "q8_0"),
    ("q8_0", "bf16"),
)
#: what the joined kernels of attention are listed for beside types of the cache: pairing, norms; and one head size
ROPE_STORES: tuple[tuple[Pairing, bool], ...] = (
    ("norm", False),
    ("neox", True),
    ("norm", True),
    ("neox", False),
)
WHOLE_HEAD_DIM = 64
#: warps of a block in the two forms of attention and of the delta rule: with one, and with as many as share its work
ATTENTION_WARPS = (1, 8)
#: and of a norm
NORM_WARPS = (1, 8)
DELTA_WARPS = (1, 4)
#: where attention's wide form is listed for every head size; elsewhere for one
WIDE_PAIR: tuple[CacheType, CacheType] = ("f16", "f16")
#: how many matrices of the list of formats go together, so that kernels of several products name each format once
PRODUCT_GROUPS = (2, 3, 4, 2, 4)
#: forms of products: rows of x of a block, and outputs of a warp, None for the host's form
PRODUCT_FORMS = ((1, None), (4, None), (1, 4), (8, 2))
JOINED_FORMS = ((1, None), (4, None), (1, 2))
#: outputs of a warp of the other kernels of products, and the formats for which those are listed in that form
WIDE = 2
WIDE_SAMPLE = ("F16", "Q4_1", "Q4_K")
#: formats of the products that are listed with a norm on the way; gate and up for two of them
NORMED_GROUPS = (("F16", "Q4_1"), ("Q4_1", "Q4_K", "F16"), ("Q4_K", "F16", "Q4_1", "Q4_K"))


def grouped(formats: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """The formats in groups of ``PRODUCT_GROUPS``."""
    rest = iter(formats)
    return (tuple(itertools.islice(rest, n)) for n in PRODUCT_GROUPS)


def in_pairs(formats: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The formats in pairs: the first with itself, then each with the next; one that is left over, with the first."""
    first, *rest = formats
    return itertools.zip_longest((first, *rest[::2]), (first, *rest[1::2]), fillvalue=first)


def attention_forms(pair: tuple[CacheType, CacheType], head_dims: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Head sizes and warps that attention is listed for with a pair of types that ``head_dims`` fit."""
    narrow, wide = ATTENTION_WARPS
    for head_dim in head_dims:
        yield head_dim, narrow
        if pair == WIDE_PAIR or head_dim == WHOLE_HEAD_DIM:
            yield head_dim, wide


def merge_forms() -> Iterator[tuple[int, int]]:
    """Head sizes and warps that the merge of spans is listed for."""
    for head_dim in HEAD_DIMS:
        yield from ((head_dim, warps) for warps in sorted({1, -(-head_dim // 32)}))


def all_kernels() -> Iterator[Kernel]:
    """Every kernel in every specialisation that models use, for tests that must leave none out."""
    from refengine.kernels import elementwise, experts, gates, hidden, norm, select  # noqa: PLC0415
    from refengine.kernels.attention import (  # noqa: PLC0415
        attention,
        attention_merge,
        attention_whole,
        store_kv,
    )
    from refengine.kernels.gated_delta import gated_delta  # noqa: PLC0415
    from refengine.kernels.kv_types import KV_TYPES  # noqa: PLC0415
    from refengine.kernels.mul_mat import TILE, expand, get_rows, mul_mat  # noqa: PLC0415
    from refengine.kernels.products import mul_mat_add, mul_mat_swiglu, mul_mats  # noqa: PLC0415
    from refengine.kernels.quants import FORMATS  # noqa: PLC0415
    from refengine.kernels.rope import rope  # noqa: PLC0415
    from refengine.kernels.rope_store import rope_store  # noqa: PLC0415
    from refengine.kernels.short_conv import short_conv, short_conv_gates  # noqa: PLC0415

    for warps in NORM_WARPS:
        yield from (norm.rms_norm(warps), norm.rms_norm_rows(warps), norm.rms_norm_concat(warps))
    yield from (elementwise.swiglu, elementwise.add, elementwise.select_rows)
    yield from (made(k) for k in select.CANDIDATES for made in (select.best_of_chunks, select.best_of_rows))
    yield from (hidden.gather_hidden, hidden.scatter_rows, hidden.concat_rows)
    yield from (rope("norm"), rope("neox"))
    yield from (gates.delta_gates, gates.gated_norm, gates.query_norm, gates.output_gate)
    yield from (experts.route, experts.combine_experts, experts.combine_experts_add)
    yield from (made(n_taps) for n_taps in CONV_TAPS for made in (short_conv, short_conv_gates))
    yield from (gated_delta(state_size, warps) for state_size in STATE_SIZES for warps in DELTA_WARPS)
    for quantisation in FORMATS:
        yield from (get_rows(quantisation), expand(quantisation))
        yield from (mul_mat(quantisation, *form) for form in PRODUCT_FORMS)
        for outputs in (None, WIDE) if quantisation.name in WIDE_SAMPLE else (None,):
            yield experts.mul_mat_experts(quantisation, outputs)
            yield mul_mat_add(quantisation, TILE, outputs)
    yield from (
        experts.experts_swiglu(pair, outputs) for pair in in_pairs(FORMATS) for outputs in (None, WIDE)
    )
    for form in JOINED_FORMS:
        yield from (mul_mats(group, *form) for group in grouped(FORMATS))
        yield from (mul_mat_swiglu(pair, *form) for pair in in_pairs(FORMATS))
    by_name = {quantisation.name: quantisation for quantisation in FORMATS}
    for names in NORMED_GROUPS:
        group = tuple(by_name[name] for name in names)
        yield mul_mats(group, 1, WIDE, normed=True)
        if len(group) == 2:
            yield mul_mat_swiglu(group, 1, WIDE, normed=True)
    for type_k, type_v in CACHE_PAIRS:
        yield store_kv(type_k, type_v)
        fits = [n for n in HEAD_DIMS if KV_TYPES[type_k].fits(n) and KV_TYPES[type_v].fits(n)]
        yield from (attention(type_k, type_v, *form) for form in attention_forms((type_k, type_v), fits))
        for warps, gated in itertools.product(ATTENTION_WARPS, (False, True)):
            yield attention_whole(type_k, type_v, WHOLE_HEAD_DIM, warps, gated=gated)
    yield from (attention_merge(*form) for form in merge_forms())
    for pair, (pairing, norms) in zip(CACHE_PAIRS, ROPE_STORES, strict=True):
        yield rope_store(pairing, *pair, norms=norms)
