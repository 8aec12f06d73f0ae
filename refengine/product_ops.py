"""Operations that multiply with weight matrices, in the form that the device runs, and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from refengine.kernels import experts
from refengine.kernels.elementwise import SPAN
from refengine.kernels.mul_mat import TILE, WIDE_OUTPUTS, WIDE_TILE, get_rows, mul_mat
from refengine.kernels.products import mul_mat_add, mul_mat_swiglu, mul_mats
from refengine.kernels.quants.layout import LANES
from refengine.operands import Call, Operands, Step, ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.launch import Argument
    from instrumentation.view import View
    from refengine.weights import Matrix


def _get_rows(o: Operands) -> Call:
    matrix, rows = o.matrices["weight"], o.tensors["rows"]
    return Call(get_rows(matrix.type), rows.shape[0], {**matrix.arguments, "rows": rows, "y": o.y})


@dataclass(frozen=True)
class _Form:
    """Form of a product, which changes no bit: rows of x that a block takes, and outputs; None: the host's form."""

    tile: int
    outputs: int | None

    def grid(self, n_rows: int, *n_outs: int) -> tuple[int, int]:
        """Blocks for matrices of so many rows."""
        return sum(ceil_div(n_out, self.outputs or 1) for n_out in n_outs), ceil_div(n_rows, self.tile)

    def x(self, x: View) -> View:
        """Rows [n_rows, n_in] as the form's kernels take them."""
        if self.outputs is None:
            return x
        shape = (x.shape[0], x.shape[1] // 2)
        return x.buffer.view(np.uint64, shape, offset=x.offset, name=x.name, bits="f32")

    def norm(self, o: Operands, x: View) -> dict[str, Argument]:
        """The norm in front of products of x; where there is none, what may stand for it."""
        if "norm" not in o.vectors:
            return {"norm": self.x(x), "eps": 0.0}
        weight = o.vectors["norm"]
        return {"norm": self.x(weight.reshape((1, weight.size))), "eps": float(o.settings["eps"])}

    def arrays(self, matrix: Matrix) -> dict[str, Argument]:
        """The three array arguments of a matrix."""
        return matrix.arguments if self.outputs is None else matrix.wide_arguments


def _form(o: Operands, n_rows: int, n_out: int) -> _Form:
    """The form in which the device runs a product: enough warps for its processors, then outputs that share x."""
    if not o.wide:
        return _Form(1 if n_rows == 1 else TILE, None)
    if n_rows > 1:
        return _Form(TILE, 2) if n_rows <= TILE else _Form(WIDE_TILE, 2)
    return _Form(1, next(outputs for least, outputs in WIDE_OUTPUTS if n_out >= least))


def _mul_mat(o: Operands) -> Call:
    matrix, x = o.matrices["weight"], o.tensors["x"]
    form = _form(o, x.shape[0], matrix.n_out)
    arguments: dict[str, Argument] = {**form.arrays(matrix), "x": form.x(x), "y": o.y}
    return Call(mul_mat(matrix.type, form.tile, form.outputs), form.grid(x.shape[0], matrix.n_out), arguments)


def _mul_mat_add(o: Operands) -> Call:
    matrix, x = o.matrices["weight"], o.tensors["x"]
    form = _form(o, x.shape[0], matrix.n_out)
    arguments: dict[str, Argument] = {
        **form.arrays(matrix), "x": form.x(x), "r": o.tensors["r"], "y": o.y,
    }  # fmt: skip
    made = mul_mat_add(matrix.type, form.tile, form.outputs)
    return Call(made, form.grid(x.shape[0], matrix.n_out), arguments)


def _parted(o: Operands, form: _Form) -> dict[str, Argument]:
    """The array arguments of several matrices, each behind its role."""
    return {
        f"{role}_{name}": view
        for role, matrix in o.matrices.items()
        for name, view in form.arrays(matrix).items()
    }


def _mul_mat_swiglu(o: Operands) -> Call:
    gate, up, x = o.matrices["gate"], o.matrices["up"], o.tensors["x"]
    form = _form(o, x.shape[0], gate.n_out)
    if form.outputs is not None:
        # A warp makes gate and up of each output together.
        form = _Form(form.tile, max(1, form.outputs // 2))
    arguments: dict[str, Argument] = {"x": form.x(x), **form.norm(o, x), "y": o.y, **_parted(o, form)}
    made = mul_mat_swiglu((gate.type, up.type), form.tile, form.outputs, normed="norm" in o.vectors)
    return Call(made, form.grid(x.shape[0], gate.n_out), arguments)


def _mul_mats(o: Operands) -> Call:
    matrices, x = list(o.matrices.values()), o.tensors["x"]
    n_outs = [matrix.n_out for matrix in matrices]
    form = _form(o, x.shape[0], sum(n_outs))
    arguments: dict[str, Argument] = {"x": form.x(x), **form.norm(o, x), "y_0": o.y}
    for i, matrix in enumerate(matrices):
        arguments |= {f"{name}_{i}": view for name, view in form.arrays(matrix).items()}
    arguments |= {role: view for role, view in o.tensors.items() if role != "x"}
    types = tuple(matrix.type for matrix in matrices)
    made = mul_mats(types, form.tile, form.outputs, normed="norm" in o.vectors)
    return Call(made, form.grid(x.shape[0], *n_outs), arguments)


def _route(o: Operands) -> Call:
    logits = o.tensors["logits"]
    arguments: dict[str, Argument] = {"logits": logits, "index": o.tensors["index"], "weight": o.y}
    return Call(experts.route, logits.shape[0], arguments)


def _expert_form(o: Operands, n_in: int, n_out: int) -> _Form:
    """As ``_form`` for rows one by one; those that are no whole blocks go the host's way on every device."""
    return _Form(1, None) if n_in % LANES else _form(o, 1, n_out)


def _mul_mat_experts(o: Operands) -> Call:
    matrix, x, index = o.matrices["weight"], o.tensors["x"], o.tensors["index"]
    n_rows, n_used, n_out = o.y.shape
    # One row for all experts of a row, or one for each.
    x = x.reshape((x.size // x.shape[-1], x.shape[-1]))
    form = _expert_form(o, x.shape[1], n_rows * n_used * n_out)
    arguments: dict[str, Argument] = {**form.arrays(matrix), "index": index, "x": form.x(x), "y": o.y}
    made = experts.mul_mat_experts(matrix.type, form.outputs)
    return Call(made, (form.grid(1, n_out)[0], n_used, n_rows), arguments)


def _experts_swiglu(o: Operands) -> Call:
    gate, up, x = o.matrices["gate"], o.matrices["up"], o.tensors["x"]
    n_rows, n_used, n_out = o.y.shape
    form = _expert_form(o, x.shape[1], n_rows * n_used * n_out)
    arguments: dict[str, Argument] = {
        "index": o.tensors["index"], "x": form.x(x), "y": o.y, **_parted(o, form),
    }  # fmt: skip
    made = experts.experts_swiglu((gate.type, up.type), form.outputs)
    return Call(made, (form.grid(1, n_out)[0], n_used, n_rows), arguments)


def _combine_experts_add(o: Operands) -> Call:
    plain = _combine_experts(o)
    return Call(experts.combine_experts_add, plain.grid, {**plain.arguments, "r": o.tensors["r"]})


def _combine_experts(o: Operands) -> Call:
    arguments: dict[str, Argument] = {
        "x": o.tensors["x"], "weight": o.tensors["weight"], "shared": o.tensors["shared"],
        "gate": o.tensors["gate"], "y": o.y,
    }  # fmt: skip
    return Call(experts.combine_experts, (ceil_div(o.y.shape[1], SPAN), o.y.shape[0]), arguments)


def _gemm(o: Operands) -> Step:
    assert o.library is not None, "a graph of a library's products, and no library"
    return o.library.product(o.matrices["weight"], o.tensors["x"], o.y)


PRODUCT_OPS: dict[str, Callable[[Operands], Step]] = {
    "combine_experts": _combine_experts,
    "combine_experts_add": _combine_experts_add,
    "experts_swiglu": _experts_swiglu,
    "gemm": _gemm,
    "get_rows": _get_rows,
    "mul_mat": _mul_mat,
    "mul_mat_add": _mul_mat_add,
    "mul_mat_experts": _mul_mat_experts,
    "mul_mat_swiglu": _mul_mat_swiglu,
    "mul_mats": _mul_mats,
    "route": _route,
}
