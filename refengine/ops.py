"""What each operation of a graph launches: one entry per operation, the same for every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refengine.kernels import ATTENTION_WARPS, DELTA_WARPS, NORM_WARPS, elementwise, gates, hidden
from refengine.kernels.attention import attention, attention_merge, attention_whole, store_kv
from refengine.kernels.elementwise import SPAN
from refengine.kernels.gated_delta import columns_per_block, gated_delta
from refengine.kernels.norm import rms_norm, rms_norm_concat, rms_norm_rows
from refengine.kernels.rope import Pairing, rope
from refengine.kernels.rope_store import rope_store
from refengine.kernels.select import best_of_chunks, best_of_rows
from refengine.kernels.short_conv import ROWS, short_conv, short_conv_gates
from refengine.operands import Call, Operands, Step, ceil_div
from refengine.product_ops import PRODUCT_OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.launch import Argument
    from instrumentation.view import View


def _rms_norm(o: Operands) -> Call:
    row = int(o.settings["row"])
    shape = (o.y.size // row, row)
    x, y = o.tensors["x"].reshape(shape), o.y.reshape(shape)
    arguments: dict[str, Argument] = {
        "x": x,
        "weight": o.vectors["weight"],
        "y": y,
        "eps": float(o.settings["eps"]),
    }
    return Call(rms_norm(NORM_WARPS[o.wide]), x.shape[0], arguments)


def _rms_norm_rows(o: Operands) -> Call:
    rows = o.tensors["rows"]
    arguments: dict[str, Argument] = {
        "x": o.tensors["x"], "rows": rows, "weight": o.vectors["weight"], "y": o.y, "eps": float(o.settings["eps"]),
    }  # fmt: skip
    return Call(rms_norm_rows(NORM_WARPS[o.wide]), rows.shape[0], arguments)


def _rms_norm_concat(o: Operands) -> Call:
    arguments: dict[str, Argument] = {
        "a": o.tensors["a"], "b": o.tensors["b"], "weight_a": o.vectors["a"], "weight_b": o.vectors["b"], "y": o.y,
        "eps": float(o.settings["eps"]),
    }  # fmt: skip
    return Call(rms_norm_concat(NORM_WARPS[o.wide]), (2, o.y.shape[0]), arguments)


def _heads(view: View, n_head: int) -> View:
    """(T, n_head * head_dim) -> (T, n_head, head_dim)."""
    return view.reshape((view.shape[0], n_head, view.shape[1] // n_head))


def _pairing(o: Operands) -> Pairing:
    return "neox" if o.settings["pairing"] == "neox" else "norm"


def _rope(o: Operands) -> Call:
    n_head = int(o.settings["n_head"])
    cosine, sine = o.rotary
    x = _heads(o.tensors["x"], n_head)
    arguments: dict[str, Argument] = {
        "x": x, "position": o.tensors["position"], "cosine": cosine, "sine": sine, "y": _heads(o.y, n_head),
    }  # fmt: skip
    return Call(rope(_pairing(o)), (n_head, x.shape[0]), arguments)


def _store_kv(o: Operands) -> Call:
    assert o.cache is not None
    k_cache, v_cache = o.cache
    n_head_kv = k_cache.shape[1]
    k, v = _heads(o.tensors["k"], n_head_kv), _heads(o.tensors["v"], n_head_kv)
    arguments: dict[str, Argument] = {
        "k": k, "v": v, "cell": o.tensors["cell"], "k_cache": k_cache, "v_cache": v_cache,
    }  # fmt: skip
    return Call(store_kv(*o.cache_types), (n_head_kv, k.shape[0]), arguments)


def _rope_store(o: Operands) -> Call:
    assert o.cache is not None
    k_cache, v_cache = o.cache
    cosine, sine = o.rotary
    n_head, n_head_kv = int(o.settings["n_head"]), k_cache.shape[1]
    q, y = _heads(o.tensors["q"], n_head), _heads(o.y, n_head)
    k, v = _heads(o.tensors["k"], n_head_kv), _heads(o.tensors["v"], n_head_kv)
    # Without norms there are no weights, and any vector will do.
    vectors = o.vectors or {"q": _flat(cosine), "k": _flat(cosine)}
    arguments: dict[str, Argument] = {
        "q": q, "k": k, "v": v, "weight_q": vectors["q"], "weight_k": vectors["k"],
        "position": o.tensors["position"], "cosine": cosine, "sine": sine, "cell": o.tensors["cell"], "y": y,
        "k_cache": k_cache, "v_cache": v_cache, "eps": float(o.settings.get("eps", 0)),
    }  # fmt: skip
    made = rope_store(_pairing(o), *o.cache_types, norms=bool(o.vectors))
    return Call(made, (n_head + n_head_kv, v.shape[0]), arguments)


def _attention(o: Operands) -> Call:
    assert o.cache is not None
    k_cache, v_cache = o.cache
    n_tokens, n_head, n_spans, _ = o.y.shape
    q = _heads(o.tensors["q"], n_head)
    arguments: dict[str, Argument] = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "pages": o.tensors["pages"],
        "sequence": o.tensors["sequence"], "position": o.tensors["position"], "partial": o.y,
        "scale": float(o.settings["scale"]),
    }  # fmt: skip
    made = attention(*o.cache_types, q.shape[2], ATTENTION_WARPS[o.wide])
    return Call(made, (n_head, n_tokens, n_spans), arguments)


def _attention_merge(o: Operands) -> Call:
    partial = o.tensors["spans"]
    n_tokens, n_head = partial.shape[:2]
    out = _heads(o.y, n_head)
    arguments: dict[str, Argument] = {
        "partial": partial, "position": o.tensors["position"], "out": out, "scale": float(o.settings["scale"]),
    }  # fmt: skip
    warps = ceil_div(out.shape[2], 32) if o.wide else 1
    return Call(attention_merge(out.shape[2], warps), (n_head, n_tokens), arguments)


def _attention_whole(o: Operands) -> Call:
    assert o.cache is not None
    k_cache, v_cache = o.cache
    n_head = int(o.settings["n_head"])
    q = _heads(o.tensors["q"], n_head)
    gated = "q_gate" in o.tensors
    gate = _heads(o.tensors["q_gate"], n_head) if gated else q
    arguments: dict[str, Argument] = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "pages": o.tensors["pages"],
        "sequence": o.tensors["sequence"], "position": o.tensors["position"], "q_gate": gate,
        "y": o.y.reshape((*q.shape[:2], 1, q.shape[2])), "scale": float(o.settings["scale"]),
    }  # fmt: skip
    made = attention_whole(*o.cache_types, q.shape[2], ATTENTION_WARPS[o.wide], gated=gated)
    return Call(made, q.shape[1::-1], arguments)


def _flat(view: View) -> View:
    return view.reshape((view.size,))


def _swiglu(o: Operands) -> Call:
    y = _flat(o.y)
    arguments: dict[str, Argument] = {"gate": _flat(o.tensors["gate"]), "up": _flat(o.tensors["up"]), "y": y}
    return Call(elementwise.swiglu, ceil_div(y.size, SPAN), arguments)


def _add(o: Operands) -> Call:
    y = _flat(o.y)
    arguments: dict[str, Argument] = {"a": _flat(o.tensors["a"]), "b": _flat(o.tensors["b"]), "y": y}
    return Call(elementwise.add, ceil_div(y.size, SPAN), arguments)


def _select_rows(o: Operands) -> Call:
    rows = o.tensors["rows"]
    return Call(elementwise.select_rows, rows.shape[0], {"x": o.tensors["x"], "rows": rows, "y": o.y})


def _gather_hidden(o: Operands) -> Call:
    rows, source, chain = o.tensors["rows"], o.buffers["hidden"], o.buffers["chain"]
    assert source.shape[1] == chain.shape[1] == o.y.shape[1], (source, chain, o.y)
    arguments: dict[str, Argument] = {"hidden": source, "chain": chain, "rows": rows, "y": o.y}
    return Call(hidden.gather_hidden, rows.shape[0], arguments)


def _scatter_rows(o: Operands) -> Call:
    x, y = o.tensors["x"], o.buffers["y"]
    assert x.shape[1] == y.shape[1], (x, y)
    return Call(hidden.scatter_rows, x.shape[0], {"x": x, "rows": o.tensors["rows"], "y": y})


def _concat_rows(o: Operands) -> Call:
    return Call(hidden.concat_rows, o.y.shape[0], {"a": o.tensors["a"], "b": o.tensors["b"], "y": o.y})


def _row_parts(view: View, row: int) -> View:
    """(T, n * row) -> (T * n, row)."""
    return view.reshape((view.size // row, row))


def _best_of_chunks(o: Operands) -> Call:
    n_rows, n_lists, k = o.tensors["keys"].shape
    return Call(best_of_chunks(k), (n_lists, n_rows), dict(o.tensors))


def _best_of_rows(o: Operands) -> Call:
    n_rows, _, k = o.tensors["keys"].shape
    return Call(best_of_rows(k), n_rows, dict(o.tensors))


def _short_conv(o: Operands) -> Call:
    assert o.recurrent is not None
    weight, segments = o.vectors["weight"], o.tensors["segments"]
    grid = (ceil_div(o.y.shape[1], 32), segments.shape[0], ceil_div(o.y.shape[0], ROWS))
    arguments: dict[str, Argument] = {
        "x": o.tensors["x"], "weight": weight, "segments": segments, "history": o.recurrent[0], "y": o.y,
    }  # fmt: skip
    return Call(short_conv(weight.shape[1]), grid, arguments)


def _short_conv_gates(o: Operands) -> Call:
    plain = _short_conv(o)
    alpha, weight = o.tensors["alpha"], o.vectors["weight"]
    columns = ceil_div(o.y.shape[1], 32) + ceil_div(alpha.shape[1], 32)
    arguments: dict[str, Argument] = {
        **plain.arguments, "alpha": alpha, "beta": o.tensors["beta"], "dt_bias": o.vectors["dt_bias"],
        "a": o.vectors["a"], "gates": o.tensors["gates"],
    }  # fmt: skip
    _, *rest = plain.grid if isinstance(plain.grid, tuple) else (plain.grid,)
    return Call(short_conv_gates(weight.shape[1]), (columns, *rest), arguments)


def _delta_gates(o: Operands) -> Call:
    alpha = o.tensors["alpha"]
    arguments: dict[str, Argument] = {
        "alpha": alpha, "beta": o.tensors["beta"], "dt_bias": o.vectors["dt_bias"], "a": o.vectors["a"],
        "gates": o.y,
    }  # fmt: skip
    return Call(gates.delta_gates, (ceil_div(alpha.shape[1], 32), alpha.shape[0]), arguments)


def _gated_delta(o: Operands) -> Call:
    assert o.recurrent is not None
    segments, states = o.tensors["segments"], o.recurrent[1]
    size, n_head = int(o.settings["state_size"]), states.shape[2]
    arguments: dict[str, Argument] = {
        "qkv": o.tensors["qkv"], "gates": o.tensors["gates"], "segments": segments, "states": states, "y": o.y,
        "eps": float(o.settings["eps"]),
    }  # fmt: skip
    grid = (size // columns_per_block(size), n_head, segments.shape[0])
    return Call(gated_delta(size, DELTA_WARPS[o.wide]), grid, arguments)


def _gated_norm(o: Operands) -> Call:
    weight = o.vectors["weight"]
    x, z, y = (_row_parts(view, weight.shape[0]) for view in (o.tensors["x"], o.tensors["z"], o.y))
    arguments: dict[str, Argument] = {
        "x": x,
        "weight": weight,
        "z": z,
        "y": y,
        "eps": float(o.settings["eps"]),
    }
    return Call(gates.gated_norm, x.shape[0], arguments)


def _query_norm(o: Operands) -> Call:
    weight = o.vectors["weight"]
    n = weight.shape[0]
    q_gate, q = _row_parts(o.tensors["q_gate"], 2 * n), _row_parts(o.y, n)
    arguments: dict[str, Argument] = {
        "q_gate": q_gate, "weight": weight, "q": q, "eps": float(o.settings["eps"]),
    }  # fmt: skip
    return Call(gates.query_norm, q.shape[0], arguments)


def _output_gate(o: Operands) -> Call:
    n = int(o.settings["head_dim"])
    x, q_gate, y = _row_parts(o.tensors["x"], n), _row_parts(o.tensors["q_gate"], 2 * n), _row_parts(o.y, n)
    return Call(gates.output_gate, x.shape[0], {"x": x, "q_gate": q_gate, "y": y})


OPS: dict[str, Callable[[Operands], Step]] = {
    **PRODUCT_OPS,
    "add": _add,
    "attention": _attention,
    "attention_merge": _attention_merge,
    "attention_whole": _attention_whole,
    "best_of_chunks": _best_of_chunks,
    "best_of_rows": _best_of_rows,
    "concat_rows": _concat_rows,
    "delta_gates": _delta_gates,
    "gated_delta": _gated_delta,
    "gated_norm": _gated_norm,
    "gather_hidden": _gather_hidden,
    "output_gate": _output_gate,
    "query_norm": _query_norm,
    "rms_norm": _rms_norm,
    "rms_norm_concat": _rms_norm_concat,
    "rms_norm_rows": _rms_norm_rows,
    "rope": _rope,
    "rope_store": _rope_store,
    "scatter_rows": _scatter_rows,
    "select_rows": _select_rows,
    "short_conv": _short_conv,
    "short_conv_gates": _short_conv_gates,
    "store_kv": _store_kv,
    "swiglu": _swiglu,
}
