"""Checks of expressions, calls and names: the part of the dialect that every statement needs."""

from __future__ import annotations

import ast
import builtins
import operator
import types as python_types
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.kernel.divergence import refuse_divergence
from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.parse import (
    BARRIERS,
    BUILTINS,
    SHUFFLES,
    ParsedFunction,
    is_math_function,
    number_type,
)
from instrumentation.kernel.tree import walk

if TYPE_CHECKING:
    from collections.abc import Callable

ATOMICS = {"add": 3, "sub": 3, "min": 3, "max": 3, "and_": 3, "or_": 3, "xor": 3, "exch": 3, "cas": 4}
FULL_MASKS = (0xFFFFFFFF, -1)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_CONSTANT_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


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
    return (
        value.item() if isinstance(value, np.generic) else value if isinstance(value, int | float) else None
    )


def index_count(node: ast.expr) -> int:
    """Number of axes that an index names."""
    return len(node.elts) if isinstance(node, ast.Tuple) else 1


class ExpressionChecker:
    """Refuses expressions outside the dialect. ``loops``: the loop variables that may be read where one stands."""

    def __init__(self, parsed: ParsedFunction) -> None:
        self.parsed = parsed
        self.assigned: set[str] = set(parsed.parameters)
        self.loop_variables: set[str] = set()

    def rank(self, name: str) -> int | None:
        """Axes of an array (0: not known); None when the name is no array."""
        if name in self.parsed.arrays:
            return len(self.parsed.arrays[name].shape)
        return self.parsed.ranks.get(name)

    def expression(self, node: ast.expr, loops: frozenset[str]) -> None:
        """Check an expression and everything in it."""
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
            parsed.refuse(
                node, "slices: index at full rank" if isinstance(node, ast.Slice) else "a tuple as a value"
            )
        elif isinstance(node, ast.Compare):
            if not all(isinstance(op, _COMPARISONS) for op in node.ops):
                parsed.refuse(node, "comparisons are ==, !=, <, <=, >, >=")
            if len(node.ops) > 1:
                self.refuse_collective(node, "a chained comparison")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            parsed.refuse(node, "the operator @")
        elif isinstance(node, ast.IfExp | ast.BoolOp):
            self.refuse_collective(node, "an expression that is not always evaluated")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expression(child, loops)

    def refuse_collective(self, node: ast.expr, place: str) -> None:
        """Refuse a collective where it would not always run."""
        for inner in walk(node):
            function = self.parsed.device_function(inner)
            if self.parsed.collective(inner) or (function is not None and function.parsed.inlined):
                self.parsed.refuse(inner, f"a collective in {place}: make it a statement of its own")

    def _name(self, node: ast.Name, loops: frozenset[str]) -> None:
        parsed, name = self.parsed, node.id
        if self.rank(name) is not None:
            parsed.refuse(node, f"array {name!r} is used as a value: index it, no aliases")
        if name in self.loop_variables and name not in loops:
            parsed.refuse(node, f"{name!r} is read outside the loop that counts with it")
        if name in self.assigned:
            return
        if name in parsed.captured:
            value = parsed.captured[name]
            if not isinstance(value, int | float | np.number | np.bool_):
                parsed.refuse(
                    node,
                    f"captured name {name!r} is a {type(value).__name__}: only int and float constants are values",
                )
            self._number(node, value)
        elif name in BUILTINS:
            parsed.refuse(node, f"function {name!r} is used as a value")
        else:
            what = (
                "is a Python builtin outside the kernel dialect"
                if hasattr(builtins, name)
                else "is not defined"
            )
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
            if self.rank(node.value.id) is None or node.attr != "size":
                parsed.refuse(node, f"{text}: of an array only .size, .shape[constant] and its elements")
        else:
            value = parsed.resolve(node)
            if not isinstance(value, int | float | np.number | np.bool_):
                parsed.refuse(node, f"{text} is not a number")
            self._number(node, value)

    def _subscript(self, node: ast.Subscript, loops: frozenset[str]) -> None:
        parsed, holder = self.parsed, node.value
        if (
            isinstance(holder, ast.Attribute)
            and holder.attr == "shape"
            and isinstance(holder.value, ast.Name)
        ):
            rank, axis = self.rank(holder.value.id), constant(parsed, node.slice)
            if rank is None or not isinstance(axis, int) or not 0 <= axis < (rank or 8):
                parsed.refuse(
                    node, f"{ast.unparse(node)}: the axis of an array's shape is a constant within its rank"
                )
            return
        if not isinstance(holder, ast.Name):
            parsed.refuse(node, "only a plain array name can be indexed")
        rank = self.rank(holder.id)
        if rank is None:
            parsed.refuse(node, f"{holder.id!r} is indexed and is not an array")
        self._index(node, holder.id, rank, node.slice, loops)

    def _index(self, node: ast.AST, name: str, rank: int, index: ast.expr, loops: frozenset[str]) -> None:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        for part in parts:
            self.expression(part, loops)
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
            self.expression(argument, loops)

    def _device_call(self, node: ast.Call, callee: ParsedFunction, loops: frozenset[str]) -> None:
        parsed = self.parsed
        if len(node.args) != len(callee.parameters):
            parsed.refuse(
                node, f"{callee.name} takes {len(callee.parameters)} arguments, not {len(node.args)}"
            )
        for argument, parameter in zip(node.args, callee.parameters, strict=True):
            rank = self.rank(argument.id) if isinstance(argument, ast.Name) else None
            wanted = callee.ranks.get(parameter)
            if rank is None:
                if wanted is not None:
                    parsed.refuse(
                        node, f"{callee.name} wants an array for {parameter!r}: give one by its plain name"
                    )
                self.expression(argument, loops)
                continue
            assert isinstance(argument, ast.Name)
            if wanted is None:
                parsed.refuse(
                    node, f"{callee.name} wants a number for {parameter!r}, and {argument.id!r} is an array"
                )
            if rank and wanted and rank != wanted:
                parsed.refuse(
                    node,
                    f"{callee.name} wants {wanted} dimensions for {parameter!r}, {argument.id!r} has {rank}",
                )
            array = parsed.arrays.get(argument.id)
            if array is not None and array.space == "local" and not callee.inlined:
                parsed.refuse(node, f"local array {argument.id!r} as an argument: pass its elements")

    def barrier(self, node: ast.Call) -> None:
        """Check a statement that is a barrier."""
        name = self.parsed.cuda_name(node.func)
        mask = [constant(self.parsed, a) for a in node.args]
        if node.keywords or len(mask) > (name == "syncwarp") or any(m not in FULL_MASKS for m in mask):
            reason = f"cuda.{name} waits for all threads: no arguments"
            if name == "syncwarp" and len(mask) == 1:
                refuse_divergence(self.parsed, node, reason)
            self.parsed.refuse(node, reason)

    def _cuda_call(self, node: ast.Call, name: str, loops: frozenset[str]) -> None:
        parsed, values = self.parsed, node.args
        if name in BARRIERS:
            parsed.refuse(node, "a barrier is a statement of its own")
        elif name in SHUFFLES:
            if len(values) != 3:
                parsed.refuse(
                    node, "a shuffle takes a mask, a value and an offset, over the whole warp (no width)"
                )
            if constant(parsed, values[0]) not in FULL_MASKS:
                refuse_divergence(parsed, node, "shuffles use the full mask 0xFFFFFFFF")
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
            if not isinstance(target, ast.Name) or self.rank(target.id) is None:
                parsed.refuse(node, "an atomic's target is a plain array name")
            self._index(node, target.id, self.rank(target.id) or 0, values[1], loops)
            values = values[2:]
        else:
            parsed.refuse(node, f"cuda.{name} is outside the kernel dialect")
        for argument in values:
            self.expression(argument, loops)
