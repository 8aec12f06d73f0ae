"""What lies outside the kernel dialect is refused here, before anything is rewritten, so that lines are the user's.

Only the source decides: whether a branch is uniform, and which types meet, is found later (``regions.py``,
``host_types.py``).
"""

from __future__ import annotations

import ast

from instrumentation.kernel.dialect_expressions import ExpressionChecker, constant, index_count
from instrumentation.kernel.parse import (
    BARRIERS,
    INDEX_ROOTS,
    SHUFFLES,
    LocalArray,
    ParsedFunction,
    number_type,
)

# Statements and expressions of the dialect; everything else is refused by its node's name.
_ALLOWED = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Break, ast.Continue,
    ast.Pass, ast.Expr, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Constant,
    ast.Attribute, ast.Subscript, ast.IfExp, ast.Tuple, ast.expr_context, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop, ast.keyword, ast.Slice,
)  # fmt: skip


def check(parsed: ParsedFunction, ranks: dict[str, int]) -> None:
    """Refuse what lies outside; fills ``ranks``, ``arrays`` and ``inlined`` of ``parsed``."""
    parsed.ranks = dict(ranks)
    _Checker(parsed).check()


def array_declaration(parsed: ParsedFunction, node: ast.stmt) -> ast.Call | None:
    """The call of ``name = cuda.shared.array(...)`` or ``cuda.local.array(...)``, else None."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        name = parsed.cuda_name(node.value.func)
        if name in ("shared.array", "local.array"):
            return node.value
    return None


class _Checker(ExpressionChecker):
    """Statements, declarations and loops of one function."""

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
        if not self.parsed.is_kernel:
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
                saw(node.value, index_count(node.slice))
            elif isinstance(node, ast.Attribute) and node.attr in ("shape", "size"):
                saw(node.value, 0)
            elif isinstance(node, ast.Call):
                if (parsed.cuda_name(node.func) or "").startswith("atomic.") and len(node.args) > 1:
                    saw(node.args[0], index_count(node.args[1]))
                function = parsed.device_function(node)
                if function is not None:
                    inner: ParsedFunction = function.parsed
                    for argument, parameter in zip(node.args, inner.parameters, strict=False):
                        if parameter in inner.ranks:
                            saw(argument, inner.ranks[parameter])

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
        if (
            len(node.targets) != 1
            or not isinstance(target, ast.Name)
            or len(call.args) > 2
            or len(given) != 2
        ):
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
        stores = [
            n
            for n in parsed.walk()
            if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Store)
        ]
        if len(stores) > 1 or target.id in parsed.parameters:
            parsed.refuse(max(n.lineno for n in stores), f"array {target.id!r} is assigned more than once")
        parsed.arrays[target.id] = LocalArray(space, shape, element)

    # --- statements

    def _returns(self, node: ast.stmt, *, last: bool, in_loop: bool) -> None:
        parsed = self.parsed
        if isinstance(node, ast.Return):
            if self.parsed.is_kernel and node.value is not None:
                parsed.refuse(node, "a kernel returns nothing")
            if (self.parsed.is_kernel or parsed.inlined) and in_loop:
                parsed.refuse(node, "return inside a loop: leave by conditions")
            if parsed.inlined and node.value is not None and not last:
                parsed.refuse(
                    node, "a device function that waits or asks for its thread returns at its end only"
                )
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
            self.refuse_collective(node.test, "a loop's condition")
            self.expression(node.test, loops)
            self._block(node.body, loops, unrolled=False)
        elif isinstance(node, ast.If):
            self.expression(node.test, loops)
            self._block(node.body, loops, unrolled=unrolled)
            self._block(node.orelse, loops, unrolled=unrolled)
        elif isinstance(node, ast.Assign):
            self._assign(node, loops)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            self._target(node.target, loops)
            if node.value is not None:
                self.expression(node.value, loops)
        elif isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Call):
                parsed.refuse(node, "a statement without effect")
            if parsed.collective(node.value) == "barrier":
                self.barrier(node.value)
            else:
                self.expression(node.value, loops)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self.expression(node.value, loops)
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
        if self.rank(name) is not None:
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
                self.expression(argument, loops)
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
            self.expression(value, loops)
            return
        for name in target.elts:
            if not isinstance(name, ast.Name):
                parsed.refuse(node, "tuple assignment to something that is not a plain name")
            self._target(name, loops)
        names = len(target.elts)
        if isinstance(value, ast.Call) and parsed.cuda_name(value.func) in ("grid", "gridsize"):
            axes = constant(parsed, value.args[0]) if len(value.args) == 1 and not value.keywords else None
            if axes not in (2, 3) or axes != names:
                parsed.refuse(
                    node, f"{ast.unparse(value)} gives as many numbers as names stand before it, 2 or 3"
                )
        elif isinstance(value, ast.Attribute) and value.attr == "shape" and isinstance(value.value, ast.Name):
            rank = self.rank(value.value.id)
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
            self.expression(node, loops)
        elif not isinstance(node, ast.Name):
            parsed.refuse(node, f"assignment to {type(node).__name__}")
        elif node.id in self.loop_variables:
            reason = "inside its loop" if node.id in loops else "outside its loop: rename one"
            parsed.refuse(node, f"loop variable {node.id!r} is assigned {reason}")
        elif self.rank(node.id) is not None:
            parsed.refuse(node, f"array {node.id!r} is assigned as a whole")
