"""Python text of one thread's statements for the host: what kernels and device functions share.

Every access to an array goes through ``HostAccess``: a checked lowering replaces that one class.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.origin import Origin, origin_of
from instrumentation.kernel.parse import ParsedFunction, number_type
from instrumentation.kernel.plan import line_of

if TYPE_CHECKING:
    from instrumentation.kernel.lower_host import HostModule

INDENT = "    "
_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.And: " and ", ast.Or: " or ", ast.Not: "not ", ast.USub: "-", ast.UAdd: "+", ast.Invert: "~",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """One access to an array, as generated text."""

    #: the array's name in the kernel or device function, and the line counted from its ``def``
    name: str
    line: int
    #: alias class: ``lane`` (this block's own storage), ``ro`` or ``rw``
    kind: str
    pointer: str
    #: index and extent of each axis
    indices: tuple[str, ...]
    extents: tuple[str, ...]
    #: row-major element number
    element: str
    #: elements of one thread lie this far apart, from this one on; None where threads share them
    spread: tuple[str, str] | None = None
    #: for checked accesses: where it stood, its shadow, and who makes it
    origin: Origin | None = None
    #: where the function that declares the array put it: ``shared``, ``local``; empty for a parameter
    space: str = ""
    shadow: str = ""
    where: str = ""


class HostAccess:
    """Source text of array accesses."""

    def load(self, place: Place) -> str:
        """Expression that reads an element."""
        return f"load_{place.kind}({place.pointer}, {place.element})"

    def store(self, place: Place, value: str) -> str:
        """Statement that writes an element."""
        assert place.kind != "ro", f"store to {place.name}, which the access sets call read-only"
        return f"store_{place.kind}({place.pointer}, {place.element}, {value})"

    def atomic(self, operation: str, place: Place, operands: str) -> str:
        """Expression that changes an element and gives what was there before."""
        return f"atomic_{operation}({place.pointer}, {place.element}, {operands})"

    def agreement(self, _value: Origin, _barrier: Origin | None, _wanted: bool | None) -> int | None:
        """Number of a place where a value is promised to be that of all threads; None where they are not compared."""
        return None

    def call(self, _parsed: ParsedFunction, _node: ast.Call, _where: str) -> str | None:
        """Argument of a device function that tells who calls it; None for none."""
        return None


class FunctionEmitter:
    """Names, indices, expressions, and the statements of one thread."""

    #: who makes an access: see ``checked.runtime``
    where = "_where"

    def __init__(self, module: HostModule, parsed: ParsedFunction, ranks: dict[str, int]) -> None:
        self.module = module
        self.parsed = parsed
        self.ranks = ranks
        self.access = module.access
        self.lines: list[str] = []
        self.depth = 1

    # --- names

    def read(self, name: str) -> str:
        """Expression of a name's value in this thread."""
        return f"v_{name}"

    def write(self, name: str, value: str) -> str | None:
        """Statement that assigns to a name in this thread; None when nothing is to be done."""
        return f"v_{name} = {value}"

    def kind(self, name: str) -> str:
        """Alias class of an array."""
        raise NotImplementedError

    def index_name(self, cuda: str, node: ast.AST) -> str:
        """Text of ``cuda.threadIdx.x`` and the like."""
        if cuda != "warpsize":
            self.parsed.refuse(node, f"cuda.{cuda} cannot stand here")
        return "32"

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        """Text of a ``numba.cuda`` operation."""
        if cuda == "fma":
            return f"fma({', '.join(self.text(a) for a in node.args)})"
        if not cuda.startswith("atomic."):
            self.parsed.refuse(node, f"cuda.{cuda} cannot stand here")
        operation = cuda.removeprefix("atomic.").rstrip("_")
        assert isinstance(node.args[0], ast.Name)
        place = self.place(node.args[0].id, node.args[1], node)
        return self.access.atomic(operation, place, ", ".join(self.text(a) for a in node.args[2:]))

    # --- expressions

    def text(self, node: ast.expr) -> str:  # noqa: PLR0911
        """Host text of an expression."""
        if isinstance(node, ast.Name):
            return self.read(node.id)
        if isinstance(node, ast.Constant):
            return _number(node.value)
        if isinstance(node, ast.BinOp):
            return f"({self.text(node.left)} {_OPERATORS[type(node.op)]} {self.text(node.right)})"
        if isinstance(node, ast.UnaryOp):
            return f"({_OPERATORS[type(node.op)]}{self.text(node.operand)})"
        if isinstance(node, ast.BoolOp):
            return f"({_OPERATORS[type(node.op)].join(self.text(v) for v in node.values)})"
        if isinstance(node, ast.Compare):
            pairs = zip(node.ops, node.comparators, strict=True)
            rest = " ".join(f"{_OPERATORS[type(operation)]} {self.text(side)}" for operation, side in pairs)
            return f"({self.text(node.left)} {rest})"
        if isinstance(node, ast.IfExp):
            return f"({self.text(node.body)} if {self.text(node.test)} else {self.text(node.orelse)})"
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Attribute):
            cuda = self.parsed.cuda_name(node)
            if cuda is not None:
                return self.index_name(cuda, node)
            assert isinstance(node.value, ast.Name)
            return f"({' * '.join(self.extents(node.value.id))})"
        assert isinstance(node, ast.Call), ast.dump(node)
        return self._call(node)

    def _subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.value, ast.Attribute):  # x.shape[0]
            assert isinstance(node.value.value, ast.Name)
            assert isinstance(node.slice, ast.Constant)
            extents = self.extents(node.value.value.id)
            axis = node.slice.value
            if not isinstance(axis, int) or axis >= len(extents):
                self.parsed.refuse(node, f"axis {axis!r} of {node.value.value.id}, which has {len(extents)}")
            return extents[axis]
        assert isinstance(node.value, ast.Name)
        return self.access.load(self.place(node.value.id, node.slice, node))

    def _call(self, node: ast.Call) -> str:
        cuda = self.parsed.cuda_name(node.func)
        if cuda is not None:
            return self.cuda_call(cuda, node)
        assert isinstance(node.func, ast.Name)
        value = self.parsed.resolve(node.func)
        if self.parsed.device_function(node) is not None:
            shapes = tuple(self._array_shape(a) for a in node.args)
            name = self.module.device_function(value, shapes)
            given = [self._argument(a) for a in node.args]
            caller = self.access.call(value.parsed, node, self.where)
            return f"{name}({', '.join([*given, caller] if caller else given)})"
        arguments = ", ".join(self.text(a) for a in node.args)
        if isinstance(value, Intrinsic):
            self.module.intrinsics[value.name] = value
            return f"{value.name}({arguments})"
        if value is None:
            return f"{node.func.id}({arguments})"
        return f"{number_type(value) or 'math.' + value.__name__}({arguments})"

    # --- arrays

    def extents(self, name: str) -> list[str]:
        """Text of an array's extents."""
        if name in self.parsed.arrays:
            return [str(n) for n in self.parsed.arrays[name].shape]
        return [f"v_{name}_d{axis}" for axis in range(self.ranks[name])]

    def place(self, name: str, index: ast.expr, node: ast.AST) -> Place:
        """Where an index into an array points."""
        indices = index.elts if isinstance(index, ast.Tuple) else [index]
        extents = self.extents(name)
        if len(indices) != len(extents):
            self.parsed.refuse(
                node,
                f"{name} has {len(extents)} dimensions and is indexed with {len(indices)}: index at full rank",
            )
        texts = tuple(self.text(i) for i in indices)
        number = texts[0]
        for text, extent in zip(texts[1:], extents[1:], strict=True):
            number = f"({number} * {extent} + {text})"
        spread = self.spread(name)
        if spread is not None:
            number = f"({number}) * {spread[0]} + {spread[1]}"
        return Place(
            name,
            line_of(self.parsed, node),
            self.kind(name),
            f"v_{name}",
            texts,
            tuple(extents),
            number,
            spread,
            origin_of(node),
            self.parsed.arrays[name].space if name in self.parsed.arrays else "",
            f"s_{name}",
            self.where,
        )

    def spread(self, _name: str) -> tuple[str, str] | None:
        """How far the elements of one thread lie apart in an array's storage, and its first one."""
        return None

    def allocate(self, name: str, element: str, size: int) -> None:
        """Storage of an array that a function declares."""
        self.emit(f"v_{name} = stack_array({element}, {size})")
        if self.module.options.poison:
            self.emit(f"poison(v_{name}, {size})")
        if self.module.options.checked:
            self.emit(f"s_{name} = (stack_array(uint8, {size}), {self.records(name)})")
            self.emit(f"forget(s_{name}, {size})")

    def records(self, _name: str) -> str:
        """Address of what is kept of each element of an array that a function declares, where threads share it."""
        return "int64(0)"

    def _is_array(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and (node.id in self.ranks or node.id in self.parsed.arrays)

    def _array_shape(self, node: ast.expr) -> tuple[str, int] | None:
        """Alias class and number of axes when an argument is a whole array, None when it is a value."""
        if not self._is_array(node):
            return None
        assert isinstance(node, ast.Name)
        return self.kind(node.id), len(self.extents(node.id))

    def _argument(self, node: ast.expr) -> str:
        if not self._is_array(node):
            return self.text(node)
        assert isinstance(node, ast.Name)
        shadow = [f"s_{node.id}"] if self.module.options.checked else []
        return ", ".join([f"v_{node.id}", *self.extents(node.id), *shadow])

    # --- statements of one thread

    def emit(self, text: str, node: ast.AST | None = None) -> None:
        """Append a line of text; ``node`` tells which line of the source it comes from."""
        mark = f"  # line {line_of(self.parsed, node)}" if node is not None else ""
        self.lines.append(INDENT * self.depth + text + mark)

    def block(self, statements: list[ast.stmt]) -> None:
        """Statements one level deeper."""
        self.depth += 1
        before = len(self.lines)
        for statement in statements:
            self.statement(statement)
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    def range_of(self, node: ast.For) -> str:
        """Text of a loop's ``range``."""
        assert isinstance(node.iter, ast.Call)
        return f"range({', '.join(self.text(a) for a in node.iter.args)})"

    def statement(self, node: ast.stmt) -> None:
        """One statement of one thread."""
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                line = self.write(target.id, self.text(node.value))
            else:
                assert isinstance(target, ast.Subscript)
                assert isinstance(target.value, ast.Name)
                place = self.place(target.value.id, target.slice, target)
                line = self.access.store(place, self.text(node.value))
            if line is not None:
                self.emit(line, node)
        elif isinstance(node, ast.Expr):
            self.emit(self.text(node.value), node)
        elif isinstance(node, ast.If):
            self.emit(f"if {self.text(node.test)}:", node)
            self.block(node.body)
            if node.orelse:
                self.emit("else:")
                self.block(node.orelse)
        elif isinstance(node, ast.For):
            assert isinstance(node.target, ast.Name)
            self.emit(f"for v_{node.target.id} in {self.range_of(node)}:", node)
            self.block(node.body)
        elif isinstance(node, ast.While):
            self.emit(f"while {self.text(node.test)}:", node)
            self.block(node.body)
        elif isinstance(node, ast.Return):
            self.emit("return" if node.value is None else f"return {self.text(node.value)}", node)
        else:
            assert isinstance(node, ast.Break | ast.Continue | ast.Pass), ast.dump(node)
            self.emit(type(node).__name__.lower(), node)


def _number(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else "math.inf" if value > 0 else "(-math.inf)"
    return repr(value) if isinstance(value, bool) or value >= 0 else f"({value!r})"  # type: ignore[operator]
