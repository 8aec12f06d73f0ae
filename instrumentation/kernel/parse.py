"""Kernel source -> ``ParsedFunction``: the one front end of every lowering.

Reads a function's source once, checks that it lies inside the kernel dialect (docs/kernel-dialect.md), resolves
each captured name, and brings the body into a normal form: helpers that hold collectives are inlined, loops over
literal tuples are unrolled, each shuffle is an assignment of its own, an early return wraps what follows it.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
import types as python_types
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numba.core import types as nb

from instrumentation.errors import KernelDialectError
from instrumentation.kernel.intrinsics import Intrinsic

SHUFFLES = {"shfl_xor_sync": "xor", "shfl_up_sync": "up", "shfl_down_sync": "down", "shfl_sync": "index"}
BARRIERS = {"syncthreads", "syncwarp"}
ATOMICS = {"add", "sub", "min", "max", "and_", "or_", "xor", "exch", "cas"}
INDEX_ROOTS = {"threadIdx", "blockIdx", "blockDim", "gridDim"}
BUILTINS = {"range", "min", "max", "abs", "int", "float", "bool", "round"}
NUMBER_TYPES: dict[Any, str] = {
    getattr(np, name): name
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
    )
} | {
    getattr(nb, name): name
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "boolean",
    )
}  # fmt: skip
# Statements and expressions of the dialect; everything else is refused by its node's name.
ALLOWED = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Break, ast.Continue,
    ast.Pass, ast.Expr, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Constant,
    ast.Attribute, ast.Subscript, ast.IfExp, ast.Tuple, ast.expr_context, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop,
)  # fmt: skip


@dataclass
class ParsedFunction:
    """A kernel or device function in normal form."""

    name: str
    file: str
    line: int
    parameters: list[str]
    body: list[ast.stmt]
    captured: dict[str, Any]
    source: str
    #: local and shared arrays: name -> (kind, shape, element type name)
    arrays: dict[str, tuple[str, tuple[int, ...], str]] = field(default_factory=dict)
    #: lines that carry a ``# lanes: outside`` comment
    lanes_outside: frozenset[int] = frozenset()

    def refuse(self, node: ast.AST | int, reason: str) -> NoReturn:
        """Raise the one error that says where and why the dialect ends."""
        line = node if isinstance(node, int) else getattr(node, "lineno", self.line)
        raise KernelDialectError(f"{self.file}:{line}: {self.name}: {reason}")

    def resolve(self, node: ast.expr) -> Any:
        """Python value that a dotted captured name stands for, or None when it is a local or a parameter."""
        if isinstance(node, ast.Name):
            return self.captured.get(node.id)
        if isinstance(node, ast.Attribute):
            parent = self.resolve(node.value)
            if isinstance(parent, python_types.ModuleType) or isinstance(parent, type):
                return getattr(parent, node.attr, None)
        return None

    def cuda_name(self, node: ast.expr) -> str | None:
        """``"threadIdx.x"`` for ``cuda.threadIdx.x``; None when the name does not start at numba.cuda."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        root = self.captured.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(root, python_types.ModuleType) and root.__name__ == "numba.cuda":
            return ".".join(reversed(path))
        return None

    def collective(self, node: ast.AST) -> str | None:
        """``"barrier"``, ``"xor"``, ``"up"``, ``"down"``, ``"index"`` for a call of a collective, else None."""
        if not isinstance(node, ast.Call):
            return None
        name = self.cuda_name(node.func)
        if name in BARRIERS:
            return "barrier"
        return SHUFFLES.get(name or "")

    def has_collective(self, node: ast.AST | list[ast.stmt]) -> bool:
        """Whether a barrier or shuffle stands anywhere inside."""
        nodes = node if isinstance(node, list) else [node]
        return any(self.collective(inner) for root in nodes for inner in ast.walk(root))


def parse_function(function: Any, device_functions: tuple[type, ...]) -> ParsedFunction:
    """Parse, check and normalise. ``device_functions``: the classes whose instances a kernel may call."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise KernelDialectError(
            f"{function.__qualname__}: no source file: kernels must stand in a real file ({error})"
        ) from error
    source = textwrap.dedent("".join(lines))
    tree = ast.parse(source)
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    file = inspect.getsourcefile(function) or "?"
    if not isinstance(definition, ast.FunctionDef):
        raise KernelDialectError(f"{file}:{first}: {function.__qualname__}: a kernel is a plain def")
    body = definition.body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    arguments = definition.args
    parsed = ParsedFunction(
        name=definition.name,
        file=file,
        line=definition.lineno,
        parameters=[a.arg for a in arguments.args],
        body=body,
        captured=_captured(function),
        source=source,
        lanes_outside=frozenset(
            first + i for i, text in enumerate(lines) if "lanes: outside" in text.partition("#")[2]
        ),
    )
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
        parsed.refuse(definition, "only plain positional parameters, without defaults")
    _Checker(parsed, device_functions).check()
    _Normaliser(parsed, device_functions).run()
    return parsed


def _captured(function: Any) -> dict[str, Any]:
    code = function.__code__
    names = dict(function.__globals__)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        names[name] = cell.cell_contents
    used = set(code.co_names) | set(code.co_freevars)
    return {name: names[name] for name in used if name in names}


class _Checker(ast.NodeVisitor):
    """Refuses what lies outside the dialect, before anything is rewritten, so that lines are the user's."""

    def __init__(self, parsed: ParsedFunction, device_functions: tuple[type, ...]) -> None:
        self.parsed = parsed
        self.device_functions = device_functions
        self.assigned = set(parsed.parameters)

    def check(self) -> None:
        for statement in self.parsed.body:
            for node in ast.walk(statement):
                if not isinstance(node, ALLOWED):
                    self.parsed.refuse(node, f"{type(node).__name__} is outside the kernel dialect")
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.assigned.add(node.id)
        for statement in self.parsed.body:
            self.visit(statement)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        if node.id in self.assigned or node.id in BUILTINS:
            return
        if node.id not in self.parsed.captured:
            self.parsed.refuse(node, f"name {node.id!r} is not defined")
        value = self.parsed.captured[node.id]
        known = (int, float, bool, np.generic, python_types.ModuleType, Intrinsic, *self.device_functions)
        if not isinstance(value, known) and value not in NUMBER_TYPES:
            self.parsed.refuse(
                node,
                f"captured name {node.id!r} is a {type(value).__name__}: only int and float constants, modules, "
                "number types, intrinsics and device functions can be captured",
            )

    def visit_Constant(self, node: ast.Constant) -> None:  # noqa: N802
        if not isinstance(node.value, int | float | bool):
            self.parsed.refuse(node, f"constant {node.value!r}: only numbers")

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        if len(node.targets) != 1:
            self.parsed.refuse(node, "chained assignment")
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            call = node.value
            is_grid = isinstance(call, ast.Call) and self.parsed.cuda_name(call.func) in ("grid", "gridsize")
            is_shape = isinstance(call, ast.Attribute) and call.attr == "shape"
            if not (is_grid or is_shape):
                self.parsed.refuse(node, "tuple assignment other than from cuda.grid(n) or an array's shape")
            if not all(isinstance(name, ast.Name) for name in target.elts):
                self.parsed.refuse(node, "tuple assignment to something that is not a plain name")
        elif not isinstance(target, ast.Name | ast.Subscript):
            self.parsed.refuse(node, f"assignment to {type(target).__name__}")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        if not isinstance(node.target, ast.Name | ast.Subscript):
            self.parsed.refuse(node, f"assignment to {type(node.target).__name__}")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:  # noqa: N802
        if node.orelse:
            self.parsed.refuse(node, "for-else")
        if not isinstance(node.target, ast.Name):
            self.parsed.refuse(node, "a loop variable is one plain name")
        is_range = (
            isinstance(node.iter, ast.Call)
            and isinstance(node.iter.func, ast.Name)
            and node.iter.func.id == "range"
            and not node.iter.keywords
        )
        if not is_range and not isinstance(node.iter, ast.Tuple):
            self.parsed.refuse(node, "a loop runs over range(...) or over a tuple of constants")
        if any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == node.target.id
               for s in node.body for n in ast.walk(s)):  # fmt: skip
            self.parsed.refuse(node, f"loop variable {node.target.id!r} is assigned inside its loop")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:  # noqa: N802
        if node.orelse:
            self.parsed.refuse(node, "while-else")
        if self.parsed.has_collective(node.test):
            self.parsed.refuse(node, "a collective in a loop's condition: make it a statement of its own")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:  # noqa: N802
        is_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
        if not is_shape and not isinstance(node.value, ast.Name):
            self.parsed.refuse(node, "only a plain array name can be indexed")
        if any(isinstance(part, ast.Slice) for part in ast.walk(node.slice)):
            self.parsed.refuse(node, "slices: index at full rank")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802, C901, PLR0912
        parsed = self.parsed
        if node.keywords:
            parsed.refuse(node, "keyword arguments in a call")
        name = parsed.cuda_name(node.func)
        if name is not None:
            self._check_cuda_call(node, name)
        elif isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            if node.func.id in self.assigned:
                parsed.refuse(node, f"{node.func.id!r} is both a function and a variable")
        else:
            value = parsed.resolve(node.func)
            known = isinstance(value, (Intrinsic, *self.device_functions)) or value in NUMBER_TYPES
            is_math = getattr(math, getattr(value, "__name__", ""), None) is value and value is not None
            if not known and not is_math:
                parsed.refuse(
                    node,
                    f"call of {ast.unparse(node.func)}: only device functions, intrinsics, math functions, number "
                    "types and numba.cuda operations can be called",
                )
        self.generic_visit(node)

    def _check_cuda_call(self, node: ast.Call, name: str) -> None:
        parsed = self.parsed
        if name in BARRIERS | set(SHUFFLES) | {"fma", "grid", "gridsize", "shared.array", "local.array"}:
            pass
        elif name.startswith("atomic.") and name.removeprefix("atomic.") in ATOMICS:
            if not isinstance(node.args[0], ast.Name):
                parsed.refuse(node, "an atomic's target is a plain array name")
        else:
            parsed.refuse(node, f"cuda.{name} is outside the kernel dialect")
        if name in SHUFFLES:
            mask = node.args[0]
            value = mask.value if isinstance(mask, ast.Constant) else parsed.resolve(mask)
            if value not in (0xFFFFFFFF, -1):
                parsed.refuse(node, "shuffles use the full mask 0xFFFFFFFF")

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        parsed = self.parsed
        name = parsed.cuda_name(node)
        if name is not None:
            root = name.split(".")[0]
            if root not in INDEX_ROOTS | {"shared", "local", "atomic", "laneid", "warpsize"} | BARRIERS | set(
                SHUFFLES
            ) | {"fma", "grid", "gridsize"}:
                parsed.refuse(node, f"cuda.{name} is outside the kernel dialect")
            return
        if isinstance(node.value, ast.Name) and node.value.id in self.assigned:
            if node.attr not in ("shape", "size"):
                parsed.refuse(node, f"attribute .{node.attr}: of an array only .shape and .size")
            return
        if parsed.resolve(node) is None:
            parsed.refuse(node, f"{ast.unparse(node)} is not known")

    def visit_Return(self, node: ast.Return) -> None:  # noqa: N802
        if node.value is not None:
            self.generic_visit(node)


class _Normaliser:
    """Rewrites a checked body into the normal form."""

    def __init__(self, parsed: ParsedFunction, device_functions: tuple[type, ...]) -> None:
        self.parsed = parsed
        self.device_functions = device_functions
        self.counter = 0

    def run(self) -> None:
        parsed = self.parsed
        parsed.body = self.block(parsed.body)
        parsed.body = self._early_returns(parsed.body)
        self._check_names()
        ast.fix_missing_locations(ast.Module(body=parsed.body, type_ignores=[]))

    def _check_names(self) -> None:
        """A loop's variable was renamed inside its loop: a name that nobody stores was read outside."""
        nodes = [n for s in self.parsed.body for n in ast.walk(s) if isinstance(n, ast.Name)]
        known = {n.id for n in nodes if isinstance(n.ctx, ast.Store)} | set(self.parsed.captured) | BUILTINS
        known |= set(self.parsed.parameters) | set(self.parsed.arrays)
        for node in nodes:
            if node.id not in known:
                self.parsed.refuse(node, f"{node.id!r} is read outside the loop or branch that defines it")

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            out.extend(self.statement(statement))
        return out

    def statement(self, node: ast.stmt) -> list[ast.stmt]:  # noqa: C901, PLR0911
        if isinstance(node, ast.AnnAssign):
            if node.value is None:
                return []
            return self.statement(ast.copy_location(ast.Assign([node.target], node.value), node))
        if isinstance(node, ast.For):
            if isinstance(node.iter, ast.Tuple):
                return self._unroll(node)
            # One name used for two loops, one uniform and one not, must not share a storage class.
            assert isinstance(node.target, ast.Name)
            renamed = self.fresh(node.target.id)
            replace = _Substitute({node.target.id: ast.Name(renamed, ast.Load())})
            node.target = ast.copy_location(ast.Name(renamed, ast.Store()), node.target)
            node.body = self.block([replace.visit(s) for s in node.body])
            return [node]
        if isinstance(node, ast.While):
            node.body = self.block(node.body)
            return [node]
        if isinstance(node, ast.If):
            before = self._hoist(node, ["test"])
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return [*before, node]
        if isinstance(node, ast.Assign):
            if isinstance(node.targets[0], ast.Tuple):
                return self._untuple(node)
            if self._is_array_declaration(node):
                return []
        if isinstance(node, ast.Expr) and self.parsed.collective(node.value):
            return [node]
        return [*self._hoist(node, ["value"]), node] if hasattr(node, "value") else [node]

    def _unroll(self, node: ast.For) -> list[ast.stmt]:
        assert isinstance(node.iter, ast.Tuple) and isinstance(node.target, ast.Name)
        out: list[ast.stmt] = []
        for element in node.iter.elts:
            value = element.value if isinstance(element, ast.Constant) else self.parsed.resolve(element)
            if not isinstance(value, int | float):
                self.parsed.refuse(node, "a loop over a tuple wants constants in it")
            replace = _Substitute({node.target.id: ast.Constant(value)})
            if any(isinstance(n, ast.Break | ast.Continue) for s in node.body for n in ast.walk(s)):
                self.parsed.refuse(node, "break or continue in a loop over a tuple, which is unrolled")
            out.extend(self.block([replace.visit(copy.deepcopy(s)) for s in node.body]))
        return out

    def _untuple(self, node: ast.Assign) -> list[ast.stmt]:
        target = node.targets[0]
        assert isinstance(target, ast.Tuple)
        out: list[ast.stmt] = []
        for axis, name in enumerate(target.elts):
            if isinstance(node.value, ast.Attribute):
                value: ast.expr = ast.Subscript(node.value, ast.Constant(axis), ast.Load())
            else:
                assert isinstance(node.value, ast.Call)
                cuda = node.value.func
                assert isinstance(cuda, ast.Attribute)
                value = ast.Call(
                    ast.Attribute(cuda.value, f"{cuda.attr}_axis", ast.Load()), [ast.Constant(axis)], []
                )
            out.append(ast.copy_location(ast.Assign([name], value), node))
        return out

    def _is_array_declaration(self, node: ast.Assign) -> bool:
        parsed, call, target = self.parsed, node.value, node.targets[0]
        if not isinstance(call, ast.Call):
            return False
        name = parsed.cuda_name(call.func)
        if name not in ("shared.array", "local.array"):
            return False
        if not isinstance(target, ast.Name) or len(call.args) != 2:
            parsed.refuse(node, f"cuda.{name}(shape, dtype) is assigned to a plain name")
        shape_nodes = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
        shape = tuple(self.constant(part) for part in shape_nodes)
        element = NUMBER_TYPES.get(parsed.resolve(call.args[1]))
        if any(not isinstance(n, int) or n <= 0 for n in shape):
            parsed.refuse(node, f"cuda.{name}: the shape must be positive compile-time constants")
        if element is None:
            parsed.refuse(node, f"cuda.{name}: {ast.unparse(call.args[1])} is not a number type")
        if target.id in parsed.arrays or target.id in parsed.parameters:
            parsed.refuse(node, f"array {target.id!r} is declared twice")
        parsed.arrays[target.id] = (name.split(".")[0], shape, element)
        return True

    def constant(self, node: ast.expr) -> Any:
        """Value of a compile-time constant expression, or None."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.BinOp):
            left, right = self.constant(node.left), self.constant(node.right)
            if left is None or right is None:
                return None
            return eval(  # noqa: S307
                compile(ast.Expression(ast.fix_missing_locations(
                    ast.copy_location(ast.BinOp(ast.Constant(left), node.op, ast.Constant(right)), node)
                )), "<constant>", "eval"), {"__builtins__": {}})  # fmt: skip
        value = self.parsed.resolve(node)
        return value if isinstance(value, int | float) else None

    def _hoist(self, node: ast.stmt, fields: list[str]) -> list[ast.stmt]:
        """Take shuffles and inlined helpers out of an expression, in evaluation order."""
        before: list[ast.stmt] = []
        for name in fields:
            value = getattr(node, name)
            if value is not None:
                setattr(node, name, _Hoister(self, before).visit(value))
        return before

    def fresh(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}__{self.counter}"

    def inline(self, call: ast.Call, helper: ParsedFunction) -> tuple[list[ast.stmt], ast.expr | None]:
        """Body of ``helper`` with its names made fresh and its arguments bound, and the value it returns."""
        before: list[ast.stmt] = []
        names: dict[str, ast.expr] = {}
        if len(call.args) != len(helper.parameters):
            self.parsed.refuse(call, f"{helper.name} takes {len(helper.parameters)} arguments, not {len(call.args)}")
        for parameter, argument in zip(helper.parameters, call.args, strict=True):
            is_array = isinstance(argument, ast.Name) and (
                argument.id in self.parsed.arrays or helper_indexes(helper, parameter)
            )
            if is_array or isinstance(argument, ast.Constant):
                names[parameter] = argument
                continue
            bound = self.fresh(parameter)
            before.append(ast.copy_location(ast.Assign([ast.Name(bound, ast.Store())], argument), call))
            names[parameter] = ast.Name(bound, ast.Load())
        stored = {n.id for s in helper.body for n in ast.walk(s)
                  if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}  # fmt: skip
        if stored & set(helper.parameters):
            self.parsed.refuse(call, f"{helper.name} holds a collective and assigns to its own parameter")
        names |= {name: ast.Name(self.fresh(name), ast.Load()) for name in stored}
        for name, array in helper.arrays.items():
            renamed = self.fresh(name)
            names[name] = ast.Name(renamed, ast.Load())
            self.parsed.arrays[renamed] = array
        for name, value in helper.captured.items():
            if self.parsed.captured.setdefault(name, value) is not value:
                alias = self.fresh(name)
                self.parsed.captured[alias] = value
                names[name] = ast.Name(alias, ast.Load())
        body = [_Substitute(names).visit(copy.deepcopy(s)) for s in helper.body]
        result: ast.expr | None = None
        if body and isinstance(body[-1], ast.Return):
            result = body.pop().value
        for statement in body:
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Return):
                    self.parsed.refuse(call, f"{helper.name} holds a collective and returns before its end")
                if hasattr(inner, "lineno"):
                    inner.lineno = call.lineno
        return [*before, *body], result

    def _early_returns(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """``if c: a; return`` followed by more becomes ``if c: a`` / ``else: more``; the last return goes."""
        for i, node in enumerate(statements):
            if isinstance(node, ast.Return) and node.value is None:
                return statements[:i]
            if (
                isinstance(node, ast.If)
                and isinstance(node.body[-1], ast.Return)
                and node.body[-1].value is None
                and not node.orelse
            ):
                rest = self._early_returns(statements[i + 1 :])
                first = self._early_returns(node.body[:-1])
                test: ast.expr = node.test
                if not first:
                    test, first, rest = ast.UnaryOp(ast.Not(), test), rest or [ast.Pass()], []
                wrapped = ast.copy_location(ast.If(test, first, rest), node)
                return [*statements[:i], ast.fix_missing_locations(wrapped)]
        return statements


def helper_indexes(helper: ParsedFunction, parameter: str) -> bool:
    """Whether a helper uses a parameter as an array."""
    for statement in helper.body:
        for node in ast.walk(statement):
            holder = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
            if isinstance(holder, ast.Name) and holder.id == parameter:
                return True
            if isinstance(node, ast.Call) and (helper.cuda_name(node.func) or "").startswith("atomic."):
                target = node.args[0]
                if isinstance(target, ast.Name) and target.id == parameter:
                    return True
    return False


class _Substitute(ast.NodeTransformer):
    """Replace names by expressions; a stored name can only become another name."""

    def __init__(self, names: dict[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802
        replacement = self.names.get(node.id)
        if replacement is None:
            return node
        new = copy.deepcopy(replacement)
        if isinstance(new, ast.Name):
            new.ctx = node.ctx
        return ast.copy_location(new, node)


class _Hoister(ast.NodeTransformer):
    """Moves collectives out of an expression into statements before it."""

    def __init__(self, normaliser: _Normaliser, before: list[ast.stmt]) -> None:
        self.normaliser = normaliser
        self.before = before

    def _refuse_conditional(self, node: ast.AST) -> ast.AST:
        parsed = self.normaliser.parsed
        helpers = any(isinstance(n, ast.Call) and self._helper(n) for n in ast.walk(node))
        if parsed.has_collective(node) or helpers:
            parsed.refuse(node, "a collective in an expression that is not always evaluated")
        return self.generic_visit(node)

    visit_IfExp = _refuse_conditional  # noqa: N815
    visit_BoolOp = _refuse_conditional  # noqa: N815

    def _helper(self, node: ast.Call) -> ParsedFunction | None:
        value = self.normaliser.parsed.resolve(node.func)
        if isinstance(value, self.normaliser.device_functions) and value.parsed.has_collective(value.parsed.body):
            parsed: ParsedFunction = value.parsed
            return parsed
        return None

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802
        self.generic_visit(node)
        helper = self._helper(node)
        if helper is not None:
            body, result = self.normaliser.inline(node, helper)
            self.before.extend(body)
            if result is None:
                return ast.copy_location(ast.Constant(0), node)
            return ast.copy_location(result, node)
        if self.normaliser.parsed.collective(node):
            if self.normaliser.parsed.collective(node) == "barrier":
                self.normaliser.parsed.refuse(node, "a barrier is a statement of its own")
            self._check_shuffle(node)
            if not isinstance(node.args[1], ast.Name):
                moved = self.normaliser.fresh("moved")
                assign = ast.Assign([ast.Name(moved, ast.Store())], node.args[1])
                self.before.append(ast.copy_location(assign, node))
                node.args[1] = ast.copy_location(ast.Name(moved, ast.Load()), node)
            name = self.normaliser.fresh("shuffled")
            self.before.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node), node))
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        return node

    def _check_shuffle(self, node: ast.Call) -> None:
        if len(node.args) == 4 and self.normaliser.constant(node.args[3]) != 32:
            self.normaliser.parsed.refuse(node, "shuffles over a part of a warp: the width is 32")
        if len(node.args) not in (3, 4):
            self.normaliser.parsed.refuse(node, "a shuffle takes a mask, a value and an offset")
