"""Rules about floating point that need types: which bits a kernel computes must not depend on its lowering.

Always: a value that a thread keeps has one float kind (float32 and float64 assigned to one name round differently in
the lowerings). In strict kernels also: no float64 unless a parameter has it (``float32 * 0.5`` is float64), and no
bare ``a * b + c``, which a compiler may or may not contract: write ``cuda.fma``.
"""

from __future__ import annotations

import operator
from typing import Any

from numba.core import ir as numba_ir
from numba.core import types as nb

from instrumentation.kernel.parse import ParsedFunction

_SUMS = {operator.add, operator.sub, operator.iadd, operator.isub}
_PRODUCTS = {operator.mul, operator.imul}


def check(
    parsed: ParsedFunction, ir: Any, typemap: dict[str, Any], lines: list[int], lanes: set[str], *, floats: bool
) -> None:
    """Raise ``KernelDialectError`` at the first violation. ``lines``: kernel line of each generated line."""
    definitions: dict[str, list[Any]] = {}
    for block in ir.blocks.values():
        for statement in block.find_insts(numba_ir.Assign):
            definitions.setdefault(statement.target.name, []).append(statement)

    def line(statement: Any) -> int:
        number = statement.loc.line - 1
        return (lines[number] if 0 <= number < len(lines) else 0) or parsed.line

    for name in lanes:
        kinds = {
            str(nb.unliteral(typemap[s.value.name])): s
            for s in definitions.get(f"v_{name}", [])
            if isinstance(s.value, numba_ir.Var) and isinstance(typemap[s.value.name], nb.Float)
        }
        if len(kinds) > 1:
            parsed.refuse(
                line(list(kinds.values())[-1]),
                f"{name!r} is {' and '.join(sorted(kinds))}: convert so that it has one type",
            )
    if not floats:
        return
    wants_double = any(
        nb.float64 in (kind, getattr(kind, "dtype", None))
        for name, kind in typemap.items()
        if name.startswith("arg.")
    )
    for statements in definitions.values():
        for statement in statements:
            kind = typemap.get(statement.target.name)
            # A constant, negated or not, that float32(...) takes is no arithmetic.
            computed = isinstance(statement.value, numba_ir.Expr) and statement.value.op != "unary"
            if computed and kind == nb.float64 and not wants_double:
                parsed.refuse(line(statement), "float64 arithmetic in a float32 kernel: convert with float32(...)")
            value = statement.value
            if (
                isinstance(value, numba_ir.Expr)
                and value.op in ("binop", "inplace_binop")
                and value.fn in _SUMS
                and isinstance(kind, nb.Float)
                and (_is_product(definitions, value.lhs) or _is_product(definitions, value.rhs))
            ):
                parsed.refuse(line(statement), "a * b + c may be contracted: write cuda.fma(a, b, c)")


def _is_product(definitions: dict[str, list[Any]], variable: Any, depth: int = 8) -> bool:
    for statement in definitions.get(variable.name, []):
        value = statement.value
        if isinstance(value, numba_ir.Var) and depth and _is_product(definitions, value, depth - 1):
            return True
        if (
            isinstance(value, numba_ir.Expr)
            and value.op in ("binop", "inplace_binop")
            and value.fn in _PRODUCTS
        ):
            return True
    return False
