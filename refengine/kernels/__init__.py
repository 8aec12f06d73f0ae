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
#: how many matrices of the list of formats go together, so that kernels of several products name each format once
PRODUCT_GROUPS = (2, 3, 4, 2, 4)


def grouped(formats: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """The formats in groups of ``PRODUCT_GROUPS``."""
    rest = iter(formats)
    return (tuple(itertools.islice(rest, n)) for n in PRODUCT_GROUPS)


def in_pairs(formats: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The formats in pairs: the first with itself, then each with the next."""
    first, *rest = formats
    return zip((first, *rest[::2]), (first, *rest[1::2]), strict=True)


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
    from refengine.kernels.mul_mat import TILE, get_rows, mul_mat  # noqa: PLC0415
    from refengine.kernels.products import mul_mat_add, mul_mat_swiglu, mul_mats  # noqa: PLC0415
    from refengine.kernels.quants import FORMATS  # noqa: PLC0415
    from refengine.kernels.rope import rope  # noqa: PLC0415
    from refengine.kernels.rope_store import rope_store  # noqa: PLC0415
    from refengine.kernels.short_conv import short_conv, short_conv_gates  # noqa: PLC0415

    yield from (norm.rms_norm, norm.rms_norm_rows, norm.rms_norm_concat)
    yield from (elementwise.swiglu, elementwise.add, elementwise.select_rows, select.top_k)
    yield from (hidden.gather_hidden, hidden.scatter_rows, hidden.concat_rows)
    yield from (rope("norm"), rope("neox"))
    yield from (gates.delta_gates, gates.gated_norm, gates.query_norm, gates.output_gate)
    yield from (experts.route, experts.combine_experts, experts.combine_experts_add)
    yield from (made(n_taps) for n_taps in CONV_TAPS for made in (short_conv, short_conv_gates))
    yield from (gated_delta(state_size) for state_size in STATE_SIZES)
    for quantisation in FORMATS:
        yield get_rows(quantisation)
        yield experts.mul_mat_experts(quantisation)
        yield from (mul_mat(quantisation, tile) for tile in (1, TILE))
        yield mul_mat_add(quantisation, TILE)
    yield from (experts.experts_swiglu(pair) for pair in in_pairs(FORMATS))
    for tile in (1, TILE):
        yield from (mul_mats(group, tile) for group in grouped(FORMATS))
        yield from (mul_mat_swiglu(pair, tile) for pair in in_pairs(FORMATS))
    for type_k, type_v in CACHE_PAIRS:
        yield store_kv(type_k, type_v)
        fits = [n for n in HEAD_DIMS if KV_TYPES[type_k].fits(n) and KV_TYPES[type_v].fits(n)]
        yield from (attention(type_k, type_v, head_dim) for head_dim in fits)
        yield from (attention_whole(type_k, type_v, WHOLE_HEAD_DIM, gated=gated) for gated in (False, True))
    yield from (attention_merge(head_dim) for head_dim in HEAD_DIMS)
    for pair, (pairing, norms) in zip(CACHE_PAIRS, ROPE_STORES, strict=True):
        yield rope_store(pairing, *pair, norms=norms)
