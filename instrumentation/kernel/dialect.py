"""What lies outside the kernel dialect is refused here, before anything is rewritten, so that lines are the user's.

Only the source decides: whether a branch is uniform, and which types meet, is found later (``regions.py``,
``host_types.py``).
"""

from __future__ import annotations

import ast
import builtins
import operator
import types as python_types
from collections.abc import Callable
from typing import Any

import numpy as np

from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.parse import (
    BARRIERS,
    BUILTINS,
    INDEX_ROOTS,
    SHUFFLES,
    LocalArray,
    ParsedFunction,
    is_math_function,
    number_type,
)

ATOMICS = {"add": 3, "sub": 3, "min": 3, "max": 3, "and_": 3, "or_": 3, "xor": 3, "exch": 3, "cas": 4}
FULL_MASKS = (0xFFFFFFFF, -1)
# Statements and expressions of the dialect; everything else is refused by its node's name.
_ALLOWED = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Break, ast.Continue,
    ast.Pass, ast.Expr, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Constant,
    ast.Attribute, ast.Subscript, ast.IfExp, ast.Tuple, ast.expr_context, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop, ast.keyword, ast.Slice,
)  # fmt: skip
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CONSTANT_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def check(parsed: ParsedFunction, ranks: dict[str, int]) -> None:
    """Refuse what lies outside; fills ``ranks``, ``arrays`` and ``inlined`` of ``parsed``."""
    parsed.ranks = dict(ranks)
    _Checker(parsed).check()


def constant(parsed: ParsedFunction, node: ast.expr) -> Any:
    """Value of a compile-time constant expression, or None."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = constant(parsed, node.operand)
        return -value if isinstance(value, int | float) else None
    if isinstance(node, ast.BinOp):
        left, right = constant(parsed, node.left), constant(parsed, node.right)
        apply = _CONSTANT_OPERATORS.get(type(node.op))
        if apply is None or not isinstance(left, int) or not isinstance(right, int):
            return None
        return apply(left, right) if right or apply not in (operator.floordiv, operator.mod) else None
    value = parsed.resolve(node)
    return value.item() if isinstance(value, np.generic) else value if isinstance(value, int | float) else None


def array_declaration(parsed: ParsedFunction, node: ast.stmt) -> ast.Call | None:
    """The call of ``name = cuda.shared.array(...)`` or ``cuda.local.array(...)``, else None."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        name = parsed.cuda_name(node.value.func)
        if name in ("shared.array", "local.array"):
            return node.value
    return None


class _Checker:
    def __init__(self, parsed: ParsedFunction) -> None:
        self.parsed = parsed
        self.is_kernel = parsed.is_kernel
        self.assigned: set[str] = set(parsed.parameters)
        self.loop_variables: set[str] = set()

    def check(self) -> None:
        parsed = self.parsed
        for node in parsed.walk():
            if not isinstance(node, _ALLOWED):
                parsed.refuse(node, f"{type(node).__name__} is outside the kernel dialect")
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.assigned.add(node.id)
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                self.loop_variables.add(node.target.id)
            if isinstance(node, ast.stmt) and (call := array_declaration(parsed, node)) is not None:
                self._declare(node, call)
        if not self.is_kernel:
            self._infer_ranks()
            parsed.inlined = any(self._needs_inlining(node) for node in parsed.walk())
        for name in sorted(self.loop_variables & set(parsed.parameters)):
            parsed.refuse(parsed.line, f"parameter {name!r} is also a loop variable: rename one")
        for position, statement in enumerate(parsed.body):
            self._returns(statement, last=position == len(parsed.body) - 1, in_loop=False)
        self._block(parsed.body, frozenset(), unrolled=False)

    def _needs_inlining(self, node: ast.AST) -> bool:
        parsed = self.parsed
        if isinstance(node, ast.Attribute):
            root = (parsed.cuda_name(node) or "").partition(".")[0]
            return root in INDEX_ROOTS | BARRIERS | set(SHUFFLES) | {"shared"}
        function = parsed.device_function(node)
        return function is not None and bool(function.parsed.inlined)

    def _infer_ranks(self) -> None:
        parsed = self.parsed

        def saw(node: ast.expr, rank: int) -> None:
            if not isinstance(node, ast.Name) or node.id not in parsed.parameters:
                return
            known = parsed.ranks.get(node.id, 0)
            if known and rank and known != rank:
                parsed.refuse(node, f"{node.id!r} is used with {known} and with {rank} dimensions")
            parsed.ranks[node.id] = known or rank

        for node in parsed.walk():
            if isinstance(node, ast.Subscript):
                saw(node.value, _indices(node.slice))
            elif isinstance(node, ast.Attribute) and node.attr in ("shape", "size"):
                saw(node.value, 0)
            elif isinstance(node, ast.Call):
                if (parsed.cuda_name(node.func) or "").startswith("atomic.") and len(node.args) > 1:
                    saw(node.args[0], _indices(node.args[1]))
                function = parsed.device_function(node)
                if function is not None:
                    inner: ParsedFunction = function.parsed
                    for argument, parameter in zip(node.args, inner.parameters, strict=False):
                        if parameter in inner.ranks:
                            saw(argument, inner.ranks[parameter])

    def _rank(self, name: str) -> int | None:
        """Axes of an array (0: not known); None when the name is no array."""
        if name in self.parsed.arrays:
            return len(self.parsed.arrays[name].shape)
        return self.parsed.ranks.get(name)

    def _declare(self, node: ast.stmt, call: ast.Call) -> None:
        parsed = self.parsed
        assert isinstance(node, ast.Assign)
        space = (parsed.cuda_name(call.func) or "").partition(".")[0]
        target = node.targets[0]
        given: dict[str, ast.expr] = dict(zip(("shape", "dtype"), call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg not in ("shape", "dtype") or keyword.arg in given:
                parsed.refuse(node, f"cuda.{space}.array: keyword {keyword.arg!r}")
            given[keyword.arg] = keyword.value
        if len(node.targets) != 1 or not isinstance(target, ast.Name) or len(call.args) > 2 or len(given) != 2:
            parsed.refuse(node, f"cuda.{space}.array(shape, dtype) is assigned to a plain name")
        parts = given["shape"].elts if isinstance(given["shape"], ast.Tuple) else [given["shape"]]
        shape = tuple(constant(parsed, part) for part in parts)
        if shape == (0,) and space == "shared":
            parsed.refuse(node, "dynamic shared memory: give the array a compile-time shape")
        if not shape or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape):
            parsed.refuse(node, f"cuda.{space}.array: the shape must be positive compile-time constants")
        element = number_type(parsed.resolve(given["dtype"]))
        if element is None:
            parsed.refuse(node, f"cuda.{space}.array: {ast.unparse(given['dtype'])} is not a number type")
        stores = sum(
            isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Store) for n in parsed.walk()
        )
        if stores > 1 or target.id in parsed.parameters:
            parsed.refuse(node, f"array {target.id!r} is assigned more than once")
        parsed.arrays[target.id] = LocalArray(space, shape, element)

    # --- statements

    def _returns(self, node: ast.stmt, *, last: bool, in_loop: bool) -> None:
        parsed = self.parsed
        if isinstance(node, ast.Return):
            if self.is_kernel and node.value is not None:
                parsed.refuse(node, "a kernel returns nothing")
            if (self.is_kernel or parsed.inlined) and in_loop:
                parsed.refuse(node, "return inside a loop: leave by conditions")
            if parsed.inlined and node.value is not None and not last:
                parsed.refuse(node, "a device function that waits or asks for its thread returns at its end only")
        for name in ("body", "orelse"):
            for inner in getattr(node, name, []):
                self._returns(inner, last=False, in_loop=in_loop or isinstance(node, ast.For | ast.While))

    def _block(self, statements: list[ast.stmt], loops: frozenset[str], *, unrolled: bool) -> None:
        for statement in statements:
            self._statement(statement, loops, unrolled=unrolled)

    def _statement(self, node: ast.stmt, loops: frozenset[str], *, unrolled: bool) -> None:
        parsed = self.parsed
        if isinstance(node, ast.For):
            self._for(node, loops)
        elif isinstance(node, ast.While):
            if node.orelse:
                parsed.refuse(node, "while-else")
            self._refuse_collective(node.test, "a loop's condition")
            self._expression(node.test, loops)
            self._block(node.body, loops, unrolled=False)
        elif isinstance(node, ast.If):
            self._expression(node.test, loops)
            self._block(node.body, loops, unrolled=unrolled)
            self._block(node.orelse, loops, unrolled=unrolled)
        elif isinstance(node, ast.Assign):
            self._assign(node, loops)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            self._target(node.target, loops)
            if node.value is not None:
                self._expression(node.value, loops)
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Call):
                parsed.refuse(node, "a statement without effect")
            if parsed.collective(node.value) == "barrier":
                self._barrier(node.value)
            else:
                self._expression(node.value, loops)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self._expression(node.value, loops)
        elif isinstance(node, ast.Break | ast.Continue) and unrolled:
            parsed.refuse(node, "break or continue in a loop over a tuple, which is unrolled")

    def _for(self, node: ast.For, loops: frozenset[str]) -> None:
        parsed, call = self.parsed, node.iter
        if node.orelse:
            parsed.refuse(node, "for-else")
        if not isinstance(node.target, ast.Name):
            parsed.refuse(node, "a loop variable is one plain name")
        name = node.target.id
        if name in loops:
            parsed.refuse(node, f"loop variable {name!r} is assigned inside its loop")
        if self._rank(name) is not None:
            parsed.refuse(node, f"loop variable {name!r} is an array")
        if isinstance(call, ast.Tuple):
            for element in call.elts:
                if not isinstance(constant(parsed, element), int | float):
                    parsed.refuse(node, "a loop over a tuple wants constants in it")
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
            if call.keywords or not 1 <= len(call.args) <= 3 or "range" in self.assigned:
                parsed.refuse(node, "range takes one to three numbers")
            if len(call.args) == 3 and constant(parsed, call.args[2]) == 0:
                parsed.refuse(node, "range with step 0")
            for argument in call.args:
                self._expression(argument, loops)
        else:
            parsed.refuse(node, "a loop runs over range(...) or over a tuple of constants")
        self._block(node.body, loops | {name}, unrolled=isinstance(call, ast.Tuple))

    def _assign(self, node: ast.Assign, loops: frozenset[str]) -> None:
        parsed, target, value = self.parsed, node.targets[0], node.value
        if len(node.targets) != 1:
            parsed.refuse(node, "chained assignment")
        if array_declaration(parsed, node) is not None:
            return
        if not isinstance(target, ast.Tuple):
            self._target(target, loops)
            self._expression(value, loops)
            return
        for name in target.elts:
            if not isinstance(name, ast.Name):
                parsed.refuse(node, "tuple assignment to something that is not a plain name")
            self._target(name, loops)
        names = len(target.elts)
        if isinstance(value, ast.Call) and parsed.cuda_name(value.func) in ("grid", "gridsize"):
            axes = constant(parsed, value.args[0]) if len(value.args) == 1 and not value.keywords else None
            if axes not in (2, 3) or axes != names:
                parsed.refuse(node, f"{ast.unparse(value)} gives as many numbers as names stand before it, 2 or 3")
        elif isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name):
            rank = self._rank(value.value.id)
            if rank is None or rank not in (0, names):
                parsed.refuse(node, f"{ast.unparse(value)} has {rank or 'no'} axes, not {names}")
            if not rank:
                parsed.ranks[value.value.id] = names
        else:
            parsed.refuse(node, "tuple assignment other than from cuda.grid(n) or an array's shape")

    def _target(self, node: ast.expr, loops: frozenset[str]) -> None:
        parsed = self.parsed
        if isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Attribute):
                parsed.refuse(node, f"assignment to {ast.unparse(node)}")
            self._expression(node, loops)
        elif not isinstance(node, ast.Name):
            parsed.refuse(node, f"assignment to {type(node).__name__}")
        elif node.id in self.loop_variables:
            reason = "inside its loop" if node.id in loops else "outside its loop: rename one"
            parsed.refuse(node, f"loop variable {node.id!r} is assigned {reason}")
        elif self._rank(node.id) is not None:
            parsed.refuse(node, f"array {node.id!r} is assigned as a whole")

    # --- expressions

    def _expression(self, node: ast.expr, loops: frozenset[str]) -> None:  # noqa: C901, PLR0912
        parsed = self.parsed
        if isinstance(node, ast.Name):
            self._name(node, loops)
            return
        if isinstance(node, ast.Constant):
            self._number(node, node.value)
        elif isinstance(node, ast.Attribute):
            self._attribute(node)
            return
        elif isinstance(node, ast.Subscript):
            self._subscript(node, loops)
            return
        elif isinstance(node, ast.Call):
            self._call(node, loops)
            return
        elif isinstance(node, ast.Tuple | ast.Slice):
            parsed.refuse(node, "slices: index at full rank" if isinstance(node, ast.Slice) else "a tuple as a value")
        elif isinstance(node, ast.Compare):
            if not all(isinstance(op, _COMPARISONS) for op in node.ops):
                parsed.refuse(node, "comparisons are ==, !=, <, <=, >, >=")
            if len(node.ops) > 1:
                self._refuse_collective(node, "a chained comparison")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            parsed.refuse(node, "the operator @")
        elif isinstance(node, ast.IfExp | ast.BoolOp):
            self._refuse_collective(node, "an expression that is not always evaluated")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, loops)

    def _refuse_collective(self, node: ast.expr, place: str) -> None:
        for inner in ast.walk(node):
            function = self.parsed.device_function(inner)
            if self.parsed.collective(inner) or (function is not None and function.parsed.inlined):
                self.parsed.refuse(inner, f"a collective in {place}: make it a statement of its own")

    def _name(self, node: ast.Name, loops: frozenset[str]) -> None:
        parsed, name = self.parsed, node.id
        if self._rank(name) is not None:
            parsed.refuse(node, f"array {name!r} is used as a value: index it, no aliases")
        if name in self.loop_variables and name not in loops:
            parsed.refuse(node, f"{name!r} is read outside the loop that counts with it")
        if name in self.assigned:
            return
        if name in parsed.captured:
            value = parsed.captured[name]
            if not isinstance(value, int | float | np.number | np.bool_):
                parsed.refuse(
                    node, f"captured name {name!r} is a {type(value).__name__}: only int and float constants are values"
                )
            self._number(node, value)
        elif name in BUILTINS:
            parsed.refuse(node, f"function {name!r} is used as a value")
        else:
            what = "is a Python builtin outside the kernel dialect" if hasattr(builtins, name) else "is not defined"
            parsed.refuse(node, f"name {name!r} {what}")

    def _number(self, node: ast.expr, value: Any) -> None:
        if not isinstance(value, int | float | np.number | np.bool_):
            self.parsed.refuse(node, f"constant {value!r}: only numbers")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            self.parsed.refuse(node, f"constant {value} needs more than 64 bits")

    def _attribute(self, node: ast.Attribute) -> None:
        parsed, text = self.parsed, ast.unparse(node)
        name = parsed.cuda_name(node)
        if name is not None:
            root, _, axis = name.partition(".")
            indexed = root in ("threadIdx", "blockIdx", "blockDim", "gridDim") and axis in ("x", "y", "z")
            if not indexed and name not in ("laneid", "warpsize"):
                parsed.refuse(node, f"cuda.{name} is outside the kernel dialect")
        elif isinstance(node.value, ast.Name) and node.value.id in self.assigned:
            if self._rank(node.value.id) is None or node.attr != "size":
                parsed.refuse(node, f"{text}: of an array only .size, .shape[constant] and its elements")
        else:
            value = parsed.resolve(node)
            if not isinstance(value, int | float | np.number | np.bool_):
                parsed.refuse(node, f"{text} is not a number")
            self._number(node, value)

    def _subscript(self, node: ast.Subscript, loops: frozenset[str]) -> None:
        parsed, holder = self.parsed, node.value
        if isinstance(holder, ast.Attribute) and holder.attr == "shape" and isinstance(holder.value, ast.Name):
            rank, axis = self._rank(holder.value.id), constant(parsed, node.slice)
            if rank is None or not isinstance(axis, int) or not 0 <= axis < (rank or 8):
                parsed.refuse(node, f"{ast.unparse(node)}: the axis of an array's shape is a constant within its rank")
            return
        if not isinstance(holder, ast.Name):
            parsed.refuse(node, "only a plain array name can be indexed")
        rank = self._rank(holder.id)
        if rank is None:
            parsed.refuse(node, f"{holder.id!r} is indexed and is not an array")
        self._index(node, holder.id, rank, node.slice, loops)

    def _index(self, node: ast.AST, name: str, rank: int, index: ast.expr, loops: frozenset[str]) -> None:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        for part in parts:
            self._expression(part, loops)
            value = constant(self.parsed, part)
            if isinstance(value, int | float) and (value < 0 or not isinstance(value, int)):
                self.parsed.refuse(node, f"index {value} of {name}: indices are whole numbers from 0")
        if rank and len(parts) != rank:
            self.parsed.refuse(
                node, f"{name} has {rank} dimensions and is indexed with {len(parts)}: index at full rank"
            )

    def _call(self, node: ast.Call, loops: frozenset[str]) -> None:
        parsed, text = self.parsed, ast.unparse(node.func)
        name = parsed.cuda_name(node.func)
        if name in ("shared.array", "local.array"):
            parsed.refuse(node, f"cuda.{name}(shape, dtype) is assigned to a plain name")
        if node.keywords:
            parsed.refuse(node, "keyword arguments in a call")
        if name is not None:
            self._cuda_call(node, name, loops)
            return
        function = parsed.device_function(node)
        if function is not None:
            self._device_call(node, function.parsed, loops)
            return
        if isinstance(node.func, ast.Name) and node.func.id in self.assigned:
            parsed.refuse(node, f"{node.func.id!r} is a variable and is called")
        value = parsed.resolve(node.func)
        if value is None and text in BUILTINS:
            if text == "range":
                parsed.refuse(node, "range outside a for statement")
        elif value is None and isinstance(node.func, ast.Name) and node.func.id not in parsed.captured:
            self._name(node.func, loops)
        elif isinstance(value, python_types.ModuleType) or not (
            isinstance(value, Intrinsic) or number_type(value) or is_math_function(value)
        ):
            parsed.refuse(
                node,
                f"call of {text}: only device functions, intrinsics, math functions, number types and numba.cuda "
                "operations can be called",
            )
        for argument in node.args:
            self._expression(argument, loops)

    def _device_call(self, node: ast.Call, callee: ParsedFunction, loops: frozenset[str]) -> None:
        parsed = self.parsed
        if len(node.args) != len(callee.parameters):
            parsed.refuse(node, f"{callee.name} takes {len(callee.parameters)} arguments, not {len(node.args)}")
        for argument, parameter in zip(node.args, callee.parameters, strict=True):
            rank = self._rank(argument.id) if isinstance(argument, ast.Name) else None
            wanted = callee.ranks.get(parameter)
            if rank is None:
                if wanted is not None:
                    parsed.refuse(node, f"{callee.name} wants an array for {parameter!r}: give {ast.unparse(argument)}[...]'s"
                                        " array by its name")  # fmt: skip
                self._expression(argument, loops)
                continue
            assert isinstance(argument, ast.Name)
            if wanted is None:
                parsed.refuse(node, f"{callee.name} wants a number for {parameter!r}, and {argument.id!r} is an array")
            if rank and wanted and rank != wanted:
                parsed.refuse(node, f"{callee.name} wants {wanted} dimensions for {parameter!r}, {argument.id!r} has {rank}")
            array = parsed.arrays.get(argument.id)
            if array is not None and array.space == "local" and not callee.inlined:
                parsed.refuse(node, f"local array {argument.id!r} as an argument: pass its elements")

    def _barrier(self, node: ast.Call) -> None:
        name = self.parsed.cuda_name(node.func)
        mask = [constant(self.parsed, a) for a in node.args]
        if node.keywords or len(mask) > (name == "syncwarp") or any(m not in FULL_MASKS for m in mask):
            self.parsed.refuse(node, f"cuda.{name} waits for all threads: no arguments")

    def _cuda_call(self, node: ast.Call, name: str, loops: frozenset[str]) -> None:
        parsed, values = self.parsed, node.args
        if name in BARRIERS:
            parsed.refuse(node, "a barrier is a statement of its own")
        elif name in SHUFFLES:
            if len(values) != 3:
                parsed.refuse(node, "a shuffle takes a mask, a value and an offset, over the whole warp (no width)")
            if constant(parsed, values[0]) not in FULL_MASKS:
                parsed.refuse(node, "shuffles use the full mask 0xFFFFFFFF")
        elif name in ("grid", "gridsize"):
            if len(values) != 1 or constant(parsed, values[0]) != 1:
                parsed.refuse(node, f"cuda.{name}(n) with n > 1 is assigned to a tuple of n names")
        elif name == "fma":
            if len(values) != 3:
                parsed.refuse(node, "cuda.fma(a, b, c) takes three numbers")
        elif name.startswith("atomic.") and name.removeprefix("atomic.") in ATOMICS:
            wanted = ATOMICS[name.removeprefix("atomic.")]
            target = values[0] if values else None
            if len(values) != wanted:
                parsed.refuse(node, f"cuda.{name} takes {wanted} arguments: array, index, values")
            if not isinstance(target, ast.Name) or self._rank(target.id) is None:
                parsed.refuse(node, "an atomic's target is a plain array name")
            self._index(node, target.id, self._rank(target.id) or 0, values[1], loops)
            values = values[2:]
        else:
            parsed.refuse(node, f"cuda.{name} is outside the kernel dialect")
        for argument in values:
            self._expression(argument, loops)


def _indices(node: ast.expr) -> int:
    return len(node.elts) if isinstance(node, ast.Tuple) else 1


__all__ = ["ATOMICS", "array_declaration", "check", "constant"]
