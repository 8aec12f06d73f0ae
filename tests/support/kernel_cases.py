"""One case of each kernel of the engine with random inputs, poisoned outputs and its float64 twin's answer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from kv_cells import empty_caches, fill, fitting, held

from refengine.kernels import (
    ATTENTION_WARPS,
    CACHE_PAIRS,
    DELTA_WARPS,
    HEAD_DIMS,
    JOINED_FORMS,
    NORM_WARPS,
    NORMED_GROUPS,
    PRODUCT_FORMS,
    ROPE_STORES,
    STATE_SIZES,
    WHOLE_HEAD_DIM,
    WIDE,
    WIDE_SAMPLE,
    attention_forms,
    elementwise,
    experts,
    gates,
    grouped,
    hidden,
    in_pairs,
    merge_forms,
    norm,
    select,
)
from refengine.kernels.attention import (
    SPAN,
    attention,
    attention_f64,
    attention_merge,
    attention_whole,
    store_kv,
)
from refengine.kernels.gated_delta import columns_per_block, gated_delta, gated_delta_f64, packed_state
from refengine.kernels.kv_types import PAGE
from refengine.kernels.mul_mat import TILE, expand, get_rows, mul_mat, mul_mat_f64
from refengine.kernels.products import (
    mul_mat_add,
    mul_mat_add_f64,
    mul_mat_swiglu,
    mul_mat_swiglu_f64,
    mul_mats,
)
from refengine.kernels.quants import FORMATS
from refengine.kernels.quants.layout import Packed
from refengine.kernels.rope import rope, rope_f64, rope_tables
from refengine.kernels.rope_store import norm_rope_f64, rope_store
from refengine.kernels.short_conv import short_conv, short_conv_f64, short_conv_gates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel import Kernel
    from refengine.kernels.kv_types import CacheType
    from refengine.kernels.rope import Pairing


@dataclass
class Case:
    """A launch and what it must give. ``expected``: output parameter -> twin's value."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    expected: dict[str, Any]


def nmse(seen: Any, wanted: Any) -> float:
    """Sum of squared differences over sum of squares, in float64; NaN when anything is NaN."""
    wide = np.asarray(wanted, np.float64)
    return float(np.sum((np.asarray(seen, np.float64) - wide) ** 2) / max(np.sum(wide**2), 1e-300))


def distance(seen: Any, wanted: Any) -> float:
    """NMSE over what was to be written; infinite when integers differ or something else was written too."""
    wanted = np.asarray(wanted)
    if np.issubdtype(wanted.dtype, np.integer):
        return 0.0 if np.array_equal(seen, wanted) else np.inf
    untouched = np.isnan(wanted)
    error = nmse(seen[~untouched], wanted[~untouched])
    return error if np.isfinite(error) and np.isnan(seen[untouched]).all() else np.inf


def poisoned(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Array whose every byte is 0xFF: NaN as floats, -1 as signed integers."""
    out = np.empty(shape, dtype)
    out.view(np.uint8)[...] = 0xFF
    return out


def random_blocks(rng: np.random.Generator, quantisation: Any, n_out: int, n_in: int) -> Any:
    """Raw bytes of a matrix whose values are finite and of ordinary size."""
    if quantisation == gguf.GGMLQuantizationType.F32:
        return rng.standard_normal(n_out * n_in).astype(np.float32).view(np.uint8)
    if quantisation == gguf.GGMLQuantizationType.F16:
        return rng.standard_normal(n_out * n_in).astype(np.float16).view(np.uint8)
    if quantisation == gguf.GGMLQuantizationType.BF16:
        wide = rng.standard_normal(n_out * n_in).astype(np.float32)
        return np.ascontiguousarray((wide.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    form = FORMATS[quantisation]
    blocks = rng.integers(0, 256, (n_out * n_in // form.block_size, form.block_bytes), dtype=np.uint8)
    typed = blocks.reshape(-1).view(form.block)
    for field, (kind, _) in ((n, form.block.fields[n][:2]) for n in form.block.names or ()):
        if kind.base == np.float16 or field in ("d", "dmin", "m"):
            scale = rng.uniform(0.01, 0.03, typed[field].shape).astype(np.float16)
            typed[field] = scale.view(kind.base) if kind.base != np.float16 else scale
    return blocks.reshape(-1)


def packed(quantisation: Any, raw: Any, n_out: int, n_in: int) -> dict[str, Any]:
    """The three arrays that kernels take."""
    form = FORMATS[quantisation]
    shapes = form.packed_shapes(n_out, n_in)
    arrays = Packed(
        poisoned(shapes.codes, np.uint8),
        poisoned(shapes.halves, np.uint16),
        poisoned(shapes.words, np.uint32),
    )
    form.repack(raw, n_out, n_in, arrays)
    return {"codes": arrays.codes, "halves": arrays.halves, "words": arrays.words}


def wide_matrix(quantisation: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """A packed matrix as kernels for lanes of four columns take it: the same bytes in larger elements."""
    dtypes = FORMATS[quantisation].wide.dtypes
    return {
        name: array if array.dtype == dtypes[name] else array.view(dtypes[name])
        for name, array in arrays.items()
    }


def cases(seed: int = 0) -> Iterator[Case]:
    """Every family; matrices 96 x 1024, attention over 300 positions of scattered pages."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    x, w = normal(5, 576), normal(576)
    gate, up = 6 * normal(1500), normal(1500)
    span = -(-1500 // elementwise.SPAN)
    yield Case(
        elementwise.swiglu, (span,), {"gate": gate, "up": up, "y": poisoned(gate.shape)},
        {"y": elementwise.swiglu_f64(gate, up)},
    )  # fmt: skip
    yield Case(
        elementwise.add, (span,), {"a": gate, "b": up, "y": poisoned(gate.shape)},
        {"y": elementwise.add_f64(gate, up)},
    )  # fmt: skip
    rows = np.array([4, 0, 4], np.int32)
    yield Case(elementwise.select_rows, (3,), {"x": x, "rows": rows, "y": poisoned((3, 576))}, {"y": x[rows]})
    other, other_w = normal(5, 70), normal(70)
    both = [norm.rms_norm_f64(x, w, 1e-5), norm.rms_norm_f64(other, other_w, 1e-5)]
    for warps in NORM_WARPS:
        yield Case(
            norm.rms_norm(warps), (5,), {"x": x, "weight": w, "y": poisoned(x.shape), "eps": 1e-5},
            {"y": norm.rms_norm_f64(x, w, 1e-5)},
        )  # fmt: skip
        yield Case(
            norm.rms_norm_rows(warps), (3,),
            {"x": x, "rows": rows, "weight": w, "y": poisoned((3, 576)), "eps": 1e-5},
            {"y": norm.rms_norm_f64(x[rows], w, 1e-5)},
        )  # fmt: skip
        yield Case(
            norm.rms_norm_concat(warps), (2, 5),
            {"a": x, "b": other, "weight_a": w, "weight_b": other_w, "y": poisoned((5, 646)), "eps": 1e-5},
            {"y": np.concatenate(both, axis=1)},
        )  # fmt: skip
    yield from _select_cases(rng)
    cosine, sine = rope_tables(512, 48, 10000.0)
    position = rng.integers(0, 512, 7).astype(np.int32)
    heads = normal(7, 3, 64)
    for pairing in ("norm", "neox"):
        yield Case(
            rope(pairing), (3, 7),
            {"x": heads, "position": position, "cosine": cosine, "sine": sine, "y": poisoned(heads.shape)},
            {"y": rope_f64(heads, position, cosine, sine, pairing)},
        )  # fmt: skip
    yield from _hidden_cases(rng)
    yield from _gate_cases(rng)
    yield from _recurrent_cases(rng)
    for quantisation in FORMATS:
        yield from _matrix_cases(rng, quantisation)
    yield from _joined_product_cases(rng)
    for pair in CACHE_PAIRS:
        for head_dim in fitting(pair, HEAD_DIMS):
            yield from _attention_cases(rng, pair, head_dim)
        yield from _attention_whole_cases(rng, pair)
    for pair, (pairing, norms) in zip(CACHE_PAIRS, ROPE_STORES, strict=True):
        yield _rope_store_case(pair, pairing, norms=norms)


def _select_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Rows of three chunks with equal logits, zeros of both signs and what is not finite."""
    x = rng.standard_normal((3, 5000)).astype(np.float32).round(2)
    x[0, 4999], x[1, 77], x[1, 4000], x[2, 1:9:2] = np.inf, np.nan, -np.inf, -0.0
    for k in select.CANDIDATES:
        keys, bad = select.best_of_chunks_f64(x, k)
        yield Case(
            select.best_of_chunks(k), (keys.shape[1], 3),
            {"x": x, "keys": poisoned(keys.shape, np.int64), "bad": poisoned(bad.shape, np.int32)},
            {"keys": keys, "bad": bad},
        )  # fmt: skip
        yield Case(
            select.best_of_rows(k), (3,),
            {"x": x, "keys": keys, "bad": bad, "best": poisoned((3, 2 * k + 1), np.int32)},
            {"best": select.packed_f64(x, k)},
        )  # fmt: skip


def _hidden_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every kind of row; a width that is no multiple of a warp's."""
    table, chain, x = (rng.standard_normal((rows, 70)).astype(np.float32) for rows in (4, 3, 5))
    rows = np.array([3, -1, -2, 0, -4], np.int32)
    yield Case(
        hidden.gather_hidden, (5,),
        {"hidden": table, "chain": chain, "rows": rows, "y": poisoned((5, 70))},
        {"y": hidden.gather_hidden_f64(table, chain, rows)},
    )  # fmt: skip
    rows = np.array([3, -1, 0, -7, 1], np.int32)
    y = poisoned((6, 70))
    yield Case(
        hidden.scatter_rows, (5,), {"x": x, "rows": rows, "y": y}, {"y": hidden.scatter_rows_f64(x, rows, y)}
    )
    b = rng.standard_normal((5, 33)).astype(np.float32)
    yield Case(
        hidden.concat_rows, (5,), {"a": x, "b": b, "y": poisoned((5, 103))},
        {"y": hidden.concat_rows_f64(x, b)},
    )  # fmt: skip


def _gate_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Gates of hybrid models, and the mixture of experts around its products."""

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    alpha, beta, dt_bias, a = 3 * normal(5, 40), normal(5, 40), normal(40), -np.exp(normal(40))
    yield Case(
        gates.delta_gates, (2, 5),
        {"alpha": alpha, "beta": beta, "dt_bias": dt_bias, "a": a, "gates": poisoned((5, 2, 40))},
        {"gates": gates.delta_gates_f64(alpha, beta, dt_bias, a)},
    )  # fmt: skip
    x, z, q_gate, weight = normal(7, 80), normal(7, 80), normal(7, 160), normal(80)
    eps = float(np.float32(1e-6))
    yield Case(
        gates.gated_norm, (7,), {"x": x, "weight": weight, "z": z, "y": poisoned(x.shape), "eps": eps},
        {"y": gates.gated_norm_f64(x, weight, z, eps)},
    )  # fmt: skip
    yield Case(
        gates.query_norm, (7,), {"q_gate": q_gate, "weight": weight, "q": poisoned(x.shape), "eps": eps},
        {"q": gates.query_norm_f64(q_gate, weight, eps)},
    )  # fmt: skip
    yield Case(
        gates.output_gate, (7,), {"x": x, "q_gate": q_gate, "y": poisoned(x.shape)},
        {"y": gates.output_gate_f64(x, q_gate)},
    )  # fmt: skip
    logits = normal(4, 70)
    index, weights = experts.route_f64(logits, 6)
    yield Case(
        experts.route, (4,),
        {"logits": logits, "index": poisoned((4, 6), np.int32), "weight": poisoned((4, 6))},
        {"index": index, "weight": weights},
    )  # fmt: skip
    parts, shared, gate, narrow = normal(4, 6, 700), normal(4, 700), normal(4, 1), weights.astype(np.float32)
    yield Case(
        experts.combine_experts, (-(-700 // elementwise.SPAN), 4),
        {"x": parts, "weight": narrow, "shared": shared, "gate": gate, "y": poisoned((4, 700))},
        {"y": experts.combine_experts_f64(parts, narrow, shared, gate)},
    )  # fmt: skip
    r = normal(4, 700)
    yield Case(
        experts.combine_experts_add, (-(-700 // elementwise.SPAN), 4),
        {"x": parts, "weight": narrow, "shared": shared, "gate": gate, "r": r, "y": poisoned((4, 700))},
        {"y": r + experts.combine_experts_f64(parts, narrow, shared, gate)},
    )  # fmt: skip


def _recurrent_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Two sequences in one batch, the second over the plane that it reads, and a segment of no rows; two planes."""
    segments = np.array([[0, 1, 2, -1, 1, 0], [1, 4, 0, 1, 0, 1], [0, 0, 1, -1, 0, 1]], np.int32)
    parts = ((slice(0, 1), 2, [1]), (slice(1, 5), 0, [0, 1]))
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 70), (70, 4)))
    history, y = poisoned((3, 2, 3, 70)), np.empty((5, 70))
    history[0, 1] = rng.standard_normal((3, 70))
    wanted = history.astype(np.float64)
    for (part, slot, targets), old in zip(parts, (np.zeros((3, 70)), history[0, 1]), strict=True):
        y[part], after = short_conv_f64(x[part], weight, old)
        wanted[slot, targets] = after[:-3:-1]
    yield Case(
        short_conv(4), (3, 3, 1),
        {"x": x, "weight": weight, "segments": segments, "history": history, "y": poisoned(x.shape)},
        {"y": y, "history": wanted},
    )  # fmt: skip
    alpha, beta = (rng.standard_normal((5, 40)).astype(np.float32) for _ in range(2))
    dt_bias, a = rng.standard_normal(40).astype(np.float32), -rng.uniform(0.1, 2, 40).astype(np.float32)
    yield Case(
        short_conv_gates(4), (3 + 2, 3, 1),
        {
            "x": x, "weight": weight, "alpha": alpha, "beta": beta, "dt_bias": dt_bias, "a": a, "segments": segments,
            "history": history, "y": poisoned(x.shape), "gates": poisoned((5, 2, 40)),
        },
        {"y": y, "history": wanted, "gates": gates.delta_gates_f64(alpha, beta, dt_bias, a)},
    )  # fmt: skip
    n_key, n_head, eps = 2, 4, float(np.float32(1e-6))
    for size in STATE_SIZES:
        qkv = rng.standard_normal((5, (2 * n_key + n_head) * size)).astype(np.float32)
        pair = rng.uniform(0.2, 1, (5, 2, n_head)).astype(np.float32)
        states, y = poisoned((3, 2, n_head, size * size)), np.empty((5, n_head * size))
        old = rng.standard_normal((n_head, size, size)).astype(np.float32)
        states[0, 1] = packed_state(old)
        wanted = states.astype(np.float64)
        for (part, slot, targets), begin in zip(parts, (np.zeros_like(old), old), strict=True):
            y[part], after = gated_delta_f64(qkv[part], pair[part], begin, eps)
            wanted[slot, targets] = packed_state(after[:-3:-1])
        for warps in DELTA_WARPS:
            yield Case(
                gated_delta(size, warps), (size // columns_per_block(size), n_head, 3),
                {
                    "qkv": qkv, "gates": pair, "segments": segments, "states": states,
                    "y": poisoned((5, n_head * size)), "eps": eps,
                },
                {"y": y, "states": wanted},
            )  # fmt: skip


def _matrix(rng: np.random.Generator, quantisation: Any, n_out: int, n_in: int) -> tuple[dict[str, Any], Any]:
    """A random matrix as kernels take it, and its values [n_out, n_in]."""
    raw = random_blocks(rng, quantisation, n_out, n_in)
    typed = raw if quantisation != gguf.GGMLQuantizationType.F32 else raw.view(np.float32)
    dense = gguf.quants.dequantize(typed, quantisation).reshape(n_out, n_in)
    return packed(quantisation, raw, n_out, n_in), dense


def _behind(role: str, arrays: dict[str, Any]) -> dict[str, Any]:
    return {f"{role}_{name}": array for name, array in arrays.items()}


def _in_form(
    outputs: int | None, kind: Any, weights: dict[str, Any], x: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A matrix and x as kernels of either form of products take them."""
    if outputs is None:
        return weights, {"x": x}
    return wide_matrix(kind, weights), {"x": x.view(np.uint64)}


def _joined_product_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Matrices of several formats and heights."""
    n_in = 512
    x = rng.standard_normal((6, n_in)).astype(np.float32)
    index = np.array([[2, 0], [1, 2]], np.int32)  # 30 rows are 3 experts of 10
    for pair, outputs in itertools.product(in_pairs(FORMATS), (None, WIDE)):
        (gate, gates_dense), (up, ups_dense) = (_matrix(rng, kind, 30, n_in) for kind in pair)
        parts = x[:2] / 16
        products = (
            experts.mul_mat_experts_f64(parts[:, None], dense.reshape(3, 10, n_in), index)
            for dense in (gates_dense, ups_dense)
        )
        gate, rows = _in_form(outputs, pair[0], gate, parts)
        up, _ = _in_form(outputs, pair[1], up, parts)
        yield Case(
            experts.experts_swiglu(pair, outputs), (-(-10 // (outputs or 1)), 2, 2),
            {**_behind("gate", gate), **_behind("up", up), **rows, "index": index, "y": poisoned((2, 2, 10))},
            {"y": elementwise.swiglu_f64(*products)},
        )  # fmt: skip
    for form in JOINED_FORMS:
        for group in grouped(FORMATS):
            yield _products_case(rng, group, form, x)
        for pair in in_pairs(FORMATS):
            yield _swiglu_case(rng, pair, form, x / 16)
    weight = rng.standard_normal(n_in).astype(np.float32)
    for names in NORMED_GROUPS:
        group = tuple(gguf.GGMLQuantizationType[name] for name in names)
        yield _products_case(rng, group, (1, WIDE), x[:1], weight)
        if len(group) == 2:
            yield _swiglu_case(rng, group, (1, WIDE), x[:1], weight / 16)


Form = tuple[int, int | None]


def _rows_of(x: Any, norm_weight: Any, outputs: int | None) -> tuple[dict[str, Any], Any]:
    """Arguments for x with a norm or none, and what is multiplied."""
    given = {"x": x, "norm": np.full_like(x, np.nan) if norm_weight is None else norm_weight[None]}
    if outputs is not None:
        given = {name: array.view(np.uint64) for name, array in given.items()}
    return {**given, "eps": 1e-5}, x if norm_weight is None else norm.rms_norm_f64(x, norm_weight, 1e-5)


def _products_case(
    rng: np.random.Generator, group: tuple[Any, ...], form: Form, x: Any, norm_weight: Any = None
) -> Case:
    tile, outputs = form
    arguments, rows = _rows_of(x, norm_weight, outputs)
    expected = {}
    for i, quantisation in enumerate(group):
        weights, dense = _matrix(rng, quantisation, 5 + 9 * i, x.shape[1])
        weights, _ = _in_form(outputs, quantisation, weights, x)
        arguments |= {f"{name}_{i}": array for name, array in weights.items()}
        arguments[f"y_{i}"] = poisoned((len(x), len(dense)))
        expected[f"y_{i}"] = mul_mat_f64(rows, dense)
    grid = (sum(-(-y.shape[1] // (outputs or 1)) for y in expected.values()), -(-len(x) // tile))
    kernel = mul_mats(group, tile, outputs, normed=norm_weight is not None)
    return Case(kernel, grid, arguments, expected)


def _swiglu_case(
    rng: np.random.Generator, pair: tuple[Any, ...], form: Form, x: Any, norm_weight: Any = None
) -> Case:
    tile, outputs = form
    (gate, gates_dense), (up, ups_dense) = (_matrix(rng, kind, 30, x.shape[1]) for kind in pair)
    gate, _ = _in_form(outputs, pair[0], gate, x)
    up, _ = _in_form(outputs, pair[1], up, x)
    arguments, rows = _rows_of(x, norm_weight, outputs)
    return Case(
        mul_mat_swiglu(pair, tile, outputs, normed=norm_weight is not None),
        (-(-30 // (outputs or 1)), -(-len(x) // tile)),
        {"y": poisoned((len(x), 30)), **arguments, **_behind("gate", gate), **_behind("up", up)},
        {"y": mul_mat_swiglu_f64(rows, gates_dense, ups_dense)},
    )


def _matrix_cases(rng: np.random.Generator, quantisation: Any) -> Iterator[Case]:
    n_out, n_in = 97, 1024
    weights, dense = _matrix(rng, quantisation, n_out, n_in)
    x = rng.standard_normal((6, n_in)).astype(np.float32)
    wanted = x.astype(np.float64) @ dense.astype(np.float64).T
    for tile, outputs in PRODUCT_FORMS:
        arrays, rows = _in_form(outputs, quantisation, weights, x)
        yield Case(
            mul_mat(quantisation, tile, outputs), (-(-n_out // (outputs or 1)), -(-6 // tile)),
            {**arrays, **rows, "y": poisoned((6, n_out))},
            {"y": wanted},
        )  # fmt: skip
    r = rng.standard_normal((6, n_out)).astype(np.float32)
    index = np.array([[2, 0], [1, 2]], np.int32)  # the first 96 rows are 3 experts of 32
    parts = rng.standard_normal((2, 2, n_in)).astype(np.float32)
    for outputs in (None, WIDE) if quantisation.name in WIDE_SAMPLE else (None,):
        arrays, rows = _in_form(outputs, quantisation, weights, x)
        yield Case(
            mul_mat_add(quantisation, TILE, outputs), (-(-n_out // (outputs or 1)), 2),
            {**arrays, **rows, "r": r, "y": poisoned((6, n_out))},
            {"y": mul_mat_add_f64(x, dense, r)},
        )  # fmt: skip
        _, rows = _in_form(outputs, quantisation, weights, parts.reshape(4, n_in))
        yield Case(
            experts.mul_mat_experts(quantisation, outputs), (32 // (outputs or 1), 2, 2),
            {**arrays, **rows, "index": index, "y": poisoned((2, 2, 32))},
            {"y": experts.mul_mat_experts_f64(parts, dense[:96].reshape(3, 32, n_in), index)},
        )  # fmt: skip
    chosen = rng.integers(0, n_out, 9).astype(np.int32)
    yield Case(
        get_rows(quantisation), (9,), {**weights, "rows": chosen, "y": poisoned((9, n_in))},
        {"y": dense[chosen]},
    )  # fmt: skip
    yield Case(expand(quantisation), (n_out,), {**weights, "y": poisoned((n_out, n_in))}, {"y": dense})


def _attention_cases(
    rng: np.random.Generator, pair: tuple[CacheType, CacheType], head_dim: int
) -> Iterator[Case]:
    n_positions, n_head, n_head_kv = 300, 6, 2
    keys, values = rng.standard_normal((2, n_positions, n_head_kv, head_dim)).astype(np.float32)
    n_pages = -(-n_positions // PAGE)
    pages = rng.permutation(n_pages + 3)[:n_pages].astype(np.int32)
    at = np.arange(n_positions)
    cell = (pages[at // PAGE] * PAGE + at % PAGE).astype(np.int32)
    k_cache, v_cache = empty_caches(pair, n_pages + 3, n_head_kv, head_dim, rng)
    for cache in (k_cache, v_cache):
        cache.view(np.uint8)[...] = 0xFF
    stored_k, stored_v = k_cache.copy(), v_cache.copy()
    fill(pair[0], stored_k, cell, keys, "k")
    fill(pair[1], stored_v, cell, values, "v")
    yield Case(
        store_kv(*pair), (n_head_kv, n_positions),
        {"k": keys, "v": values, "cell": cell, "k_cache": k_cache, "v_cache": v_cache},
        {"k_cache": stored_k, "v_cache": stored_v},
    )  # fmt: skip
    keys, values = held(pair[0], keys), held(pair[1], values)
    position = np.array([0, 31, 32, 150, n_positions - 1], np.int32)
    q = rng.standard_normal((5, n_head, head_dim)).astype(np.float32)
    scale = 1 / np.sqrt(head_dim)
    n_spans = -(-n_positions // SPAN)
    partial, wanted = (
        poisoned((5, n_head, n_spans, head_dim + 2)),
        poisoned((5, n_head, n_spans, head_dim + 2)),
    )
    for t, p in enumerate(position):
        for s in range(p // SPAN + 1):
            wanted[t, :, s] = span_f64(
                q[t], keys[s * SPAN : p + 1][:SPAN], values[s * SPAN : p + 1][:SPAN], scale
            )
    for form in attention_forms(pair, [head_dim]):
        yield Case(
            attention(*pair, *form), (n_head, 5, n_spans),
            {
                "q": q, "k_cache": stored_k, "v_cache": stored_v, "pages": pages[None, :].copy(),
                "sequence": np.zeros(5, np.int32), "position": position, "partial": partial, "scale": scale,
            },
            {"partial": wanted},
        )  # fmt: skip
    for form in merge_forms() if pair == ("f32", "f32") else ():
        if form[0] == head_dim:
            yield Case(
                attention_merge(*form), (n_head, 5),
                {"partial": wanted, "position": position, "out": poisoned(q.shape), "scale": scale},
                {"out": attention_f64(q, keys, values, position, scale)},
            )  # fmt: skip


def _attention_whole_cases(rng: np.random.Generator, pair: tuple[CacheType, CacheType]) -> Iterator[Case]:
    """Rows of one span, at its ends and between."""
    n_head, n_head_kv, head_dim = 6, 2, WHOLE_HEAD_DIM
    keys, values = rng.standard_normal((2, SPAN, n_head_kv, head_dim)).astype(np.float32)
    pages = rng.permutation(SPAN // PAGE).astype(np.int32)
    at = np.arange(SPAN)
    cell = (pages[at // PAGE] * PAGE + at % PAGE).astype(np.int32)
    k_cache, v_cache = empty_caches(pair, len(pages), n_head_kv, head_dim, rng)
    fill(pair[0], k_cache, cell, keys, "k")
    fill(pair[1], v_cache, cell, values, "v")
    position = np.array([0, 31, 32, 150, SPAN - 1], np.int32)
    q = rng.standard_normal((5, n_head, head_dim)).astype(np.float32)
    q_gate = rng.standard_normal((5, n_head, 2 * head_dim)).astype(np.float32)
    scale = 1 / np.sqrt(head_dim)
    attended = attention_f64(q, held(pair[0], keys), held(pair[1], values), position, scale)
    for warps, gated in itertools.product(ATTENTION_WARPS, (False, True)):
        wanted = gates.output_gate_f64(attended, q_gate) if gated else attended
        yield Case(
            attention_whole(*pair, head_dim, warps, gated=gated), (n_head, 5),
            {
                "q": q, "k_cache": k_cache, "v_cache": v_cache, "pages": pages[None, :].copy(),
                "sequence": np.zeros(5, np.int32), "position": position, "q_gate": q_gate,
                "y": poisoned((5, n_head, 1, head_dim)), "scale": scale,
            },
            {"y": wanted[:, :, None]},
        )  # fmt: skip


def _rope_store_case(pair: tuple[CacheType, CacheType], pairing: Pairing, *, norms: bool) -> Case:
    """Some dimensions are not turned; with norms the query's gate lies behind it.

    Stored halves and codes are those of the twin as long as no key lies where float32 and float64 round apart, which
    these numbers, always the same, do not.
    """
    rng = np.random.default_rng(5)
    n_tokens, n_head, n_head_kv, head_dim = 9, 4, 2, 64
    eps = float(np.float32(1e-6))
    tables = rope_tables(16, 48, 10000.0)
    position = rng.integers(0, 16, n_tokens).astype(np.int32)
    q = rng.standard_normal((n_tokens, n_head, head_dim * (2 if norms else 1))).astype(np.float32)
    k, v = rng.standard_normal((2, n_tokens, n_head_kv, head_dim)).astype(np.float32)
    weight_q, weight_k = rng.standard_normal((2, head_dim)).astype(np.float32)
    cell = rng.permutation(3 * PAGE)[:n_tokens].astype(np.int32)
    k_cache, v_cache = empty_caches(pair, 3, n_head_kv, head_dim, rng)
    for cache in (k_cache, v_cache):
        cache.view(np.uint8)[...] = 0xFF

    def turned(x: Any, weight: Any) -> Any:
        if norms:
            return norm_rope_f64(x, weight, eps, position, tables, pairing)
        return rope_f64(x, position, *tables, pairing)

    wanted_k, wanted_v = k_cache.copy(), v_cache.copy()
    fill(pair[0], wanted_k, cell, turned(k, weight_k).astype(np.float32), "k")
    fill(pair[1], wanted_v, cell, v, "v")
    return Case(
        rope_store(pairing, *pair, norms=norms), (n_head + n_head_kv, n_tokens),
        {
            "q": q, "k": k, "v": v, "weight_q": weight_q, "weight_k": weight_k, "position": position,
            "cosine": tables[0], "sine": tables[1], "cell": cell, "y": poisoned((n_tokens, n_head, head_dim)),
            "k_cache": k_cache, "v_cache": v_cache, "eps": eps,
        },
        {"y": turned(q, weight_q), "k_cache": wanted_k, "v_cache": wanted_v},
    )  # fmt: skip


def span_f64(q: Any, keys: Any, values: Any, scale: float) -> Any:
    """One span's weighted sum, largest score and sum of weights: float64 [n_head, head_dim + 2]."""
    group = q.shape[0] // keys.shape[1]
    out = np.empty((q.shape[0], q.shape[1] + 2))
    for h in range(q.shape[0]):
        score = keys[:, h // group].astype(np.float64) @ q[h].astype(np.float64)
        weight = np.exp((score - score.max()) * scale)
        out[h, :-2] = weight @ values[:, h // group].astype(np.float64)
        out[h, -2:] = score.max(), weight.sum()
    return out
