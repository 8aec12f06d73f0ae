"""Rules about floating point that need types: which bits a kernel computes must not depend on its lowering.

Always: a value that a thread keeps has one float kind (float32 and float64 assigned to one name round differently in
the lowerings). In strict kernels also: no float64 unless a parameter has it (``float32 * 0.5`` is float64), and no
bare ``a * b + c``, which a compiler may or may not contract: write ``cuda.fma``. A product is followed through names,
number types, minus signs, and into and out of device functions.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from numba.core import ir as numba_ir
from numba.core import types as nb
from numba.core.types.misc import unliteral

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel.host_types import Inferred
    from instrumentation.kernel.parse import ParsedFunction

_SUMS = {operator.add, operator.sub, operator.iadd, operator.isub}
_PRODUCTS = {operator.mul, operator.imul}


class TypedFunction:
    """A kernel or device function with its types. ``marks``: line of each generated line, counted from its def."""

    def __init__(self, parsed: ParsedFunction, inferred: Inferred, marks: list[int]) -> None:
        self.parsed = parsed
        self.name = inferred.name
        self.typemap = inferred.typemap
        self.marks = marks
        self.definitions: dict[str, list[Any]] = {}
        self.returned: list[Any] = []
        for block in inferred.ir.blocks.values():
            for statement in block.body:
                if isinstance(statement, numba_ir.Assign):
                    self.definitions.setdefault(statement.target.name, []).append(statement)
                elif isinstance(statement, numba_ir.Return):
                    self.returned.append(statement.value)

    def refuse(self, statement: Any, reason: str) -> None:
        """Refuse at the line of a typed statement."""
        number = statement.loc.line - 1
        mark = self.marks[number] if 0 <= number < len(self.marks) else 0
        self.parsed.refuse(self.parsed.line + mark, reason)

    def kind(self, variable: Any) -> Any:
        """Type of a variable."""
        return unliteral(self.typemap[variable.name])

    def versions(self, name: str) -> Iterator[Any]:
        """Every assignment to a name; Numba numbers them v_x, v_x.1, ..."""
        return (s for s in self.statements() if s.target.name.partition(".")[0] == name)

    def statements(self) -> Iterator[Any]:
        """Every assignment."""
        for statements in self.definitions.values():
            yield from statements

    def callee(self, value: Any) -> Any:
        """What a call expression calls: a type, a helper, a function; None when that is not known."""
        if isinstance(value, numba_ir.Expr) and value.op == "call":
            for statement in self.definitions.get(value.func.name, []):
                if isinstance(statement.value, numba_ir.Global | numba_ir.FreeVar):
                    return statement.value
        return None


def check(functions: list[TypedFunction], lanes: set[str], *, floats: bool) -> None:
    """Raise ``KernelDialectError`` at the first violation. The kernel is the first of ``functions``."""
    kernel = functions[0]
    _one_float_kind(kernel, lanes)
    if not floats:
        return
    wants_double = any(
        nb.float64 in (kind, getattr(kind, "dtype", None))
        for name, kind in kernel.typemap.items()
        if name.startswith("arg.")
    )
    products = _Products(functions)
    for function in functions:
        for statement in function.statements():
            if not wants_double and _makes_double(function, statement):
                function.refuse(
                    statement, "float64 arithmetic in a float32 kernel: convert with float32(...)"
                )
            value = statement.value
            if (
                isinstance(value, numba_ir.Expr)
                and value.op in ("binop", "inplace_binop")
                and value.fn in _SUMS
                and isinstance(function.kind(statement.target), nb.Float)
                and (products.reach(function, value.lhs) or products.reach(function, value.rhs))
            ):
                function.refuse(statement, "a * b + c may be contracted: write cuda.fma(a, b, c)")


def _one_float_kind(kernel: TypedFunction, lanes: set[str]) -> None:
    for name in sorted(lanes):
        kinds = {
            str(kernel.kind(s.value)): s
            for s in kernel.versions(f"v_{name}")
            if isinstance(s.value, numba_ir.Var) and isinstance(kernel.kind(s.value), nb.Float)
        }
        if len(kinds) > 1:
            kernel.refuse(
                list(kinds.values())[-1],
                f"{name.partition('__')[0]!r} is {' and '.join(sorted(kinds))}: convert so that it has one type",
            )


def _makes_double(function: TypedFunction, statement: Any) -> bool:
    """Whether a statement computes in float64. A literal, negated or not, does not: ``float32(-0.5)``."""
    value = statement.value
    if function.kind(statement.target) != nb.float64:
        return False
    if isinstance(value, numba_ir.Var):
        return bool(function.kind(value) != nb.float64)
    return isinstance(value, numba_ir.Expr) and value.op not in ("unary", "getattr")


class _Products:
    """Whether a value may be the unrounded product of a multiplication, followed through every function."""

    def __init__(self, functions: list[TypedFunction]) -> None:
        self.by_name: dict[str, list[TypedFunction]] = {}
        self.calls: dict[str, list[tuple[TypedFunction, Any]]] = {}
        for function in functions:
            self.by_name.setdefault(function.name, []).append(function)
        for function in functions:
            for statement in function.statements():
                callee = function.callee(statement.value)
                if callee is not None and callee.name in self.by_name:
                    self.calls.setdefault(callee.name, []).append((function, statement.value))

    def reach(self, function: TypedFunction, variable: Any) -> bool:
        """Whether a product reaches a variable without a rounding between."""
        seen: set[tuple[int, str]] = set()
        pending = [(function, variable)]
        while pending:
            place, name = pending.pop()
            if (id(place), name.name) in seen:
                continue
            seen.add((id(place), name.name))
            for statement in place.definitions.get(name.name, []):
                value = statement.value
                is_binary = isinstance(value, numba_ir.Expr) and value.op in ("binop", "inplace_binop")
                if is_binary and value.fn in _PRODUCTS and isinstance(place.kind(statement.target), nb.Float):
                    return True
                pending.extend(self._sources(place, statement))
        return False

    def _sources(self, place: TypedFunction, statement: Any) -> Iterator[tuple[TypedFunction, Any]]:
        value = statement.value
        if isinstance(value, numba_ir.Var):
            yield place, value
        elif isinstance(value, numba_ir.Arg):
            for caller, call in self.calls.get(place.name, []):
                yield caller, call.args[value.index]
        elif isinstance(value, numba_ir.Expr) and value.op in ("unary", "cast"):
            yield place, value.value
        elif (callee := place.callee(value)) is not None:
            if callee.name in self.by_name:
                for function in self.by_name[callee.name]:
                    yield from ((function, returned) for returned in function.returned)
                return
            same = bool(value.args) and place.kind(value.args[0]) == place.kind(statement.target)
            if same and (isinstance(callee.value, nb.Type) or callee.name == "abs"):
                yield place, value.args[0]
