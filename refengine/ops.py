"""What each operation of a graph launches: one entry per operation, the same for every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from refengine.kernels import elementwise
from refengine.kernels.attention import CacheType, attention, attention_merge, store_kv
from refengine.kernels.elementwise import SPAN
from refengine.kernels.mul_mat import TILE, get_rows, mul_mat
from refengine.kernels.norm import rms_norm
from refengine.kernels.rope import Pairing, rope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from instrumentation.devices.launch import Argument
    from instrumentation.kernel import Kernel
    from instrumentation.view import View
    from refengine.graph import Setting
    from refengine.weights import Matrix


@dataclass(frozen=True)
class Operands:
    """Everything that a node names, resolved to memory."""

    tensors: Mapping[str, View]
    output: View | None
    vectors: Mapping[str, View]
    matrices: Mapping[str, Matrix]
    settings: Mapping[str, Setting]
    #: keys and values of the node's layer
    cache: tuple[View, View] | None
    cache_type: CacheType
    #: cosine and sine tables
    rotary: tuple[View, View]

    @property
    def y(self) -> View:
        """The output of a node that has one."""
        assert self.output is not None
        return self.output


@dataclass(frozen=True)
class Call:
    """A kernel with its grid and arguments."""

    kernel: Kernel
    grid: int | tuple[int, ...]
    arguments: dict[str, Argument]


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit)


def _get_rows(o: Operands) -> Call:
    matrix, rows = o.matrices["weight"], o.tensors["rows"]
    return Call(get_rows(matrix.type), rows.shape[0], {**matrix.arguments, "rows": rows, "y": o.y})


def _mul_mat(o: Operands) -> Call:
    matrix, x = o.matrices["weight"], o.tensors["x"]
    tile = 1 if x.shape[0] == 1 else TILE
    grid = (matrix.n_out, _ceil(x.shape[0], tile))
    return Call(mul_mat(matrix.type, tile), grid, {**matrix.arguments, "x": x, "y": o.y})


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
    return Call(rms_norm, x.shape[0], arguments)


def _heads(view: View, n_head: int) -> View:
    """(T, n_head * head_dim) -> (T, n_head, head_dim)."""
    return view.reshape((view.shape[0], n_head, view.shape[1] // n_head))


def _rope(o: Operands) -> Call:
    n_head = int(o.settings["n_head"])
    pairing: Pairing = "neox" if o.settings["pairing"] == "neox" else "norm"
    cosine, sine = o.rotary
    x = _heads(o.tensors["x"], n_head)
    arguments: dict[str, Argument] = {
        "x": x, "position": o.tensors["position"], "cosine": cosine, "sine": sine, "y": _heads(o.y, n_head),
    }  # fmt: skip
    return Call(rope(pairing), (n_head, x.shape[0]), arguments)


def _store_kv(o: Operands) -> Call:
    assert o.cache is not None
    k_cache, v_cache = o.cache
    n_head_kv = k_cache.shape[1]
    k, v = _heads(o.tensors["k"], n_head_kv), _heads(o.tensors["v"], n_head_kv)
    arguments: dict[str, Argument] = {
        "k": k, "v": v, "cell": o.tensors["cell"], "k_cache": k_cache, "v_cache": v_cache,
    }  # fmt: skip
    return Call(store_kv(o.cache_type), (n_head_kv, k.shape[0]), arguments)


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
    return Call(attention(o.cache_type, q.shape[2]), (n_head, n_tokens, n_spans), arguments)


def _attention_merge(o: Operands) -> Call:
    partial = o.tensors["spans"]
    n_tokens, n_head = partial.shape[:2]
    out = _heads(o.y, n_head)
    arguments: dict[str, Argument] = {
        "partial": partial, "position": o.tensors["position"], "out": out, "scale": float(o.settings["scale"]),
    }  # fmt: skip
    return Call(attention_merge(out.shape[2]), (n_head, n_tokens), arguments)


def _flat(view: View) -> View:
    return view.reshape((view.size,))


def _swiglu(o: Operands) -> Call:
    y = _flat(o.y)
    arguments: dict[str, Argument] = {"gate": _flat(o.tensors["gate"]), "up": _flat(o.tensors["up"]), "y": y}
    return Call(elementwise.swiglu, _ceil(y.size, SPAN), arguments)


def _add(o: Operands) -> Call:
    y = _flat(o.y)
    arguments: dict[str, Argument] = {"a": _flat(o.tensors["a"]), "b": _flat(o.tensors["b"]), "y": y}
    return Call(elementwise.add, _ceil(y.size, SPAN), arguments)


def _select_rows(o: Operands) -> Call:
    rows = o.tensors["rows"]
    return Call(elementwise.select_rows, rows.shape[0], {"x": o.tensors["x"], "rows": rows, "y": o.y})


OPS: dict[str, Callable[[Operands], Call]] = {
    "add": _add,
    "attention": _attention,
    "attention_merge": _attention_merge,
    "get_rows": _get_rows,
    "mul_mat": _mul_mat,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "select_rows": _select_rows,
    "store_kv": _store_kv,
    "swiglu": _swiglu,
}
