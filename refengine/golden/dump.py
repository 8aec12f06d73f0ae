"""Tensors as ``llama-eval-callback`` prints them, so that two logs can be diffed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from refengine.golden.tap import matches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from refengine.golden.case import Recording, Step

#: elements, rows and so on that are shown at each end of a dimension
EDGE = 3
_INDENT = "    "
_MIN_DIMS = 4
#: operation -> what that engine calls it
_OPS = {
    "mul_mat": "MUL_MAT", "mul_mat_experts": "MUL_MAT_ID", "rms_norm": "MUL", "query_norm": "MUL",
    "add": "ADD", "get_rows": "GET_ROWS", "select_rows": "GET_ROWS", "swiglu": "SWIGLU", "rope": "ROPE",
    "attention_merge": "FLASH_ATTN_EXT", "short_conv": "UNARY", "gated_delta": "GATED_DELTA_NET",
    "concat_rows": "CONCAT", "output_gate": "MUL",
}  # fmt: skip
_TYPES = {"<f4": "f32", "<i4": "i32"}
Array = npt.NDArray[Any]


def dump(recording: Recording, patterns: Sequence[str] = ("*",)) -> Iterator[str]:
    """Lines of all tensors whose names match, in execution order."""
    steps = {step.name: step for step in recording.steps}
    for name, array in recording.tensors.items():
        if matches(name, patterns):
            yield _header(name, array, steps.get(name))
            yield from _body(array)


def _header(name: str, array: Array, step: Step | None) -> str:
    op = "NONE" if step is None else _OPS.get(step.op, step.op.upper())
    sources = [] if step is None else [f"{source}{{{_ne(shape)}}}" for source, shape in step.sources[:2]]
    if op == "MUL":
        sources.reverse()  # there the weight of a norm comes second
    first, second = (*sources, "", "")[:2]
    kind = _TYPES[array.dtype.str]
    # The brace behind the second source has no partner there either.
    return f"common_debug_cb_eval: {name:>24s} = ({kind}) {op:>10s}({first}, {second}}}) = {{{_ne(array.shape)}}}"


def _ne(shape: tuple[int, ...]) -> str:
    """Numbers of elements, the contiguous dimension first, four at least."""
    return ", ".join(map(str, (*reversed(shape), *(1,) * (_MIN_DIMS - len(shape)))))


def _body(array: Array) -> Iterator[str]:
    shaped = array.reshape((1,) * (_MIN_DIMS - array.ndim) + array.shape)
    shaped = shaped.reshape(-1, *shaped.shape[-3:])
    total = _sum(array)
    for cube in shaped:
        yield f"{_INDENT}["
        yield from _edges(cube, 2)
        yield f"{_INDENT}]"
        yield f"{_INDENT}sum = {total:f}"


def _edges(block: Array, depth: int) -> Iterator[str]:
    """The first and last parts of a block; parts of a block of two dimensions are lines."""
    indent = _INDENT * depth
    for i in _shown(len(block)):
        if i is None:
            yield f"{indent}..., "
        elif block.ndim > 2:
            yield f"{indent}["
            yield from _edges(block[i], depth + 1)
            yield f"{indent}],"
        else:
            yield f"{indent}[{_row(block[i])}  ],"


def _row(row: Array) -> str:
    shown = list(_shown(len(row)))
    parts = []
    for place, i in enumerate(shown):
        if i is None:
            parts.append("   ..., ")
        else:
            parts.append(f"{float(row[i]):12.4f}" + (", " if place < len(shown) - 1 else ""))
    return "".join(parts)


def _shown(n: int) -> Iterator[int | None]:
    """Places that are shown, and None for those left out."""
    if n <= 2 * EDGE:
        yield from range(n)
        return
    yield from range(EDGE)
    yield None
    yield from range(n - EDGE, n)


def _sum(array: Array) -> float:
    """Sum of all elements in memory order in float32, one after another."""
    flat = np.ascontiguousarray(array).reshape(-1).astype(np.float32)
    with np.errstate(all="ignore"):
        return float(np.cumsum(flat, dtype=np.float32)[-1]) if flat.size else 0.0
