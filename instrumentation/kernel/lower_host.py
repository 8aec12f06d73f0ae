"""Lowering ``host``: parsed kernel -> Python source that Numba compiles for the CPU.

One function runs blocks ``begin`` to ``end`` of a grid. Each region of the kernel becomes a loop over the block's
threads; what a thread keeps from one region to the next lives in a *lane array* (element t belongs to thread t), so
that LLVM turns the loop into vector code. Array accesses go through ``HostAccess``: the checked lowering replaces
that one class.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod
from typing import Any

from numba.core import types as nb

from instrumentation.kernel.access import AccessSets
from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.parse import NUMBER_TYPES, ParsedFunction
from instrumentation.kernel.regions import Collective, Control, Part, Region, Scalar, Storage, Uniformity, cut

INDENT = "    "
AXES = "xyz"
ATOMIC_NAMES = {"and_": "and", "or_": "or"}


@dataclass(frozen=True)
class HostOptions:
    """How the host function runs a block. Bits of a correct kernel do not depend on any of these."""

    #: threads in descending order: a missing barrier shows
    reverse_lanes: bool = False
    #: shared and local arrays start as 0xFF bytes (NaN): a read before the first write shows
    poison: bool = False


class HostAccess:
    """Source text of array accesses. ``index`` is the row-major element number."""

    def load(self, kind: str, pointer: str, index: str) -> str:
        return f"load_{kind}({pointer}, {index})"

    def store(self, kind: str, pointer: str, index: str, value: str) -> str:
        return f"store_{kind}({pointer}, {index}, {value})"


class _Expressions(ast.NodeTransformer):
    """Rewrites expressions of one function; ``lane`` is the element of lane arrays that stands for this thread."""

    def __init__(self, owner: FunctionEmitter) -> None:
        self.owner = owner

    def text(self, node: ast.expr) -> str:
        import copy  # noqa: PLC0415

        return ast.unparse(ast.fix_missing_locations(self.visit(copy.deepcopy(node))))

    def raw(self, text: str) -> ast.expr:
        return ast.parse(text, mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802
        return self.raw(self.owner.read(node.id))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:  # noqa: N802
        parsed = self.owner.parsed
        cuda = parsed.cuda_name(node)
        if cuda is not None:
            return self.raw(self.owner.index_name(cuda, node))
        if isinstance(node.value, ast.Name) and node.attr == "size":
            return self.raw("(" + " * ".join(self.owner.extents(node.value.id)) + ")")
        value = parsed.resolve(node)
        if isinstance(value, int | float):
            return ast.Constant(value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:  # noqa: N802
        if isinstance(node.value, ast.Attribute):  # x.shape[0]
            assert isinstance(node.value.value, ast.Name)
            axis = node.slice.value if isinstance(node.slice, ast.Constant) else None
            extents = self.owner.extents(node.value.value.id)
            if not isinstance(axis, int) or not -len(extents) <= axis < len(extents):
                self.owner.parsed.refuse(node, f"{ast.unparse(node)}: the axis must be a constant in range")
            return self.raw(extents[axis])
        pointer, kind, index = self.owner.place(node)
        return self.raw(self.owner.access.load(kind, pointer, index))

    def visit_Call(self, node: ast.Call) -> ast.expr:  # noqa: N802
        owner = self.owner
        cuda = owner.parsed.cuda_name(node.func)
        if cuda is not None:
            return self.raw(owner.cuda_call(cuda, node))
        value = owner.parsed.resolve(node.func)
        arguments = ", ".join(owner.argument(a) for a in node.args)
        if value in NUMBER_TYPES:
            return self.raw(f"{NUMBER_TYPES[value]}({arguments})")
        if isinstance(value, Intrinsic):
            owner.module.intrinsics[value.name] = value
            return self.raw(f"{value.name}({arguments})")
        if hasattr(value, "parsed"):
            kinds = tuple(owner.array_kind(a) for a in node.args)
            name = owner.module.device_function(value, kinds)
            return self.raw(f"{name}({arguments})")
        if value is not None and not isinstance(node.func, ast.Name):
            return self.raw(f"math.{value.__name__}({arguments})")
        assert isinstance(node.func, ast.Name)
        name = value.__name__ if value is not None else node.func.id
        return self.raw(f"{'math.' if value is not None else ''}{name}({arguments})")


class FunctionEmitter:
    """What kernels and device functions share: names, indices, expressions, statements of one thread."""

    def __init__(self, module: HostModule, parsed: ParsedFunction, dimensions: dict[str, int]) -> None:
        self.module = module
        self.parsed = parsed
        self.dimensions = dimensions
        self.access = module.access
        self.lines: list[str] = []
        self.depth = 1
        self.expressions = _Expressions(self)

    # --- names

    def read(self, name: str) -> str:
        if name in self.parsed.captured and name not in self.parsed.parameters:
            value = self.parsed.captured[name]
            if isinstance(value, int | float):
                return f"({value!r})"
        return f"v_{name}"

    def write(self, name: str, value: str) -> str:
        return f"v_{name} = {value}"

    def kind(self, name: str) -> str:
        raise NotImplementedError

    def index_name(self, cuda: str, node: ast.AST) -> str:
        self.parsed.refuse(node, f"cuda.{cuda} in a device function: pass it as an argument")

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        if cuda == "fma":
            return f"fma({', '.join(self.argument(a) for a in node.args)})"
        if cuda.startswith("atomic."):
            operation = cuda.removeprefix("atomic.")
            target = node.args[0]
            subscript = ast.Subscript(target, node.args[1], ast.Load())
            pointer, _, index = self.place(ast.copy_location(subscript, node))
            rest = ", ".join(self.expressions.text(a) for a in node.args[2:])
            return f"atomic_{ATOMIC_NAMES.get(operation, operation)}({pointer}, {index}, {rest})"
        self.parsed.refuse(node, f"cuda.{cuda} cannot stand here")

    # --- arrays

    def rank(self, name: str) -> int:
        if name in self.parsed.arrays:
            return len(self.parsed.arrays[name][1])
        return self.dimensions.get(name, 0)

    def extents(self, name: str) -> list[str]:
        if name in self.parsed.arrays:
            return [str(n) for n in self.parsed.arrays[name][1]]
        if not self.rank(name):
            self.parsed.refuse(self.parsed.line, f"{name!r} is used as an array and is a scalar")
        return [f"v_{name}_d{axis}" for axis in range(self.rank(name))]

    def place(self, node: ast.Subscript) -> tuple[str, str, str]:
        """Pointer, alias class and row-major element number that a subscript names."""
        assert isinstance(node.value, ast.Name)
        name = node.value.id
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        extents = self.extents(name)
        if len(indices) != len(extents):
            self.parsed.refuse(
                node, f"{name} has {len(extents)} dimensions and is indexed with {len(indices)}: full rank only"
            )
        texts = [f"({self.expressions.text(i)})" for i in indices]
        number = texts[0]
        for text, extent in zip(texts[1:], extents[1:], strict=True):
            number = f"({number} * {extent} + {text})"
        return f"v_{name}", self.kind(name), self.element(name, number)

    def element(self, _name: str, number: str) -> str:
        return number

    def array_kind(self, node: ast.expr) -> str | None:
        """Alias class when an argument is a whole array, None when it is a value."""
        if isinstance(node, ast.Name) and self.rank(node.id):
            return self.kind(node.id)
        return None

    def argument(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and self.rank(node.id):
            if self.parsed.arrays.get(node.id, ("",))[0] == "local":
                self.parsed.refuse(node, f"local array {node.id!r} as an argument")
            return ", ".join([f"v_{node.id}", *self.extents(node.id)])
        return self.expressions.text(node)

    # --- statements of one thread

    def emit(self, text: str, node: ast.AST | None = None) -> None:
        mark = f"  # line {node.lineno}" if node is not None and hasattr(node, "lineno") else ""
        self.lines.append(INDENT * self.depth + text + mark)

    def block(self, statements: list[ast.stmt]) -> None:
        self.depth += 1
        for statement in statements or [ast.Pass()]:
            self.statement(statement)
        self.depth -= 1

    def statement(self, node: ast.stmt) -> None:  # noqa: C901, PLR0912
        text = self.expressions.text
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self.emit(self.write(target.id, text(node.value)), node)
            else:
                assert isinstance(target, ast.Subscript)
                pointer, kind, index = self.place(target)
                self._refuse_read_only(target, kind)
                self.emit(self.access.store(kind, pointer, index, text(node.value)), node)
        elif isinstance(node, ast.AugAssign):
            target = node.target
            source: ast.expr = (
                ast.Name(target.id, ast.Load())
                if isinstance(target, ast.Name)
                else ast.Subscript(target.value, target.slice, ast.Load())  # type: ignore[union-attr]
            )
            combined = ast.copy_location(ast.BinOp(source, node.op, node.value), node)
            self.statement(ast.copy_location(ast.Assign([target], combined), node))
        elif isinstance(node, ast.Expr):
            self.emit(text(node.value), node)
        elif isinstance(node, ast.If):
            self.emit(f"if {text(node.test)}:", node)
            self.block(node.body)
            if node.orelse:
                self.emit("else:")
                self.block(node.orelse)
        elif isinstance(node, ast.For):
            assert isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Name)
            bounds = ", ".join(text(a) for a in node.iter.args)
            self.emit(f"for v_{node.target.id} in range({bounds}):", node)
            self.block(node.body)
        elif isinstance(node, ast.While):
            self.emit(f"while {text(node.test)}:", node)
            self.block(node.body)
        elif isinstance(node, ast.Return):
            self.emit("return" if node.value is None else f"return {text(node.value)}", node)
        elif isinstance(node, ast.Break | ast.Continue | ast.Pass):
            self.emit(type(node).__name__.lower(), node)
        else:  # the parser lets nothing else through
            self.parsed.refuse(node, f"{type(node).__name__} is outside the kernel dialect")

    def _refuse_read_only(self, target: ast.Subscript, kind: str) -> None:
        assert kind != "ro", f"store to a read-only parameter: {ast.unparse(target)}"


class DeviceFunctionEmitter(FunctionEmitter):
    """A device function becomes a plain Numba function that LLVM inlines."""

    def __init__(
        self, module: HostModule, parsed: ParsedFunction, kinds: tuple[str | None, ...], name: str
    ) -> None:
        ranks = _parameter_ranks(parsed)
        super().__init__(module, parsed, {p: ranks.get(p, 1) for p, k in zip(parsed.parameters, kinds, strict=True) if k})
        self.kinds = dict(zip(parsed.parameters, kinds, strict=True))
        names = []
        for parameter in parsed.parameters:
            names.append(f"v_{parameter}")
            if self.kinds[parameter]:
                names.extend(self.extents(parameter))
        self.lines = [
            '@njit(error_model="numpy", forceinline=True)',
            f"def {name}({', '.join(names)}):",
        ]
        for array, (space, shape, element) in parsed.arrays.items():
            if space != "local":
                parsed.refuse(parsed.line, "shared arrays in a device function: declare them in the kernel")
            self.emit(f"v_{array} = stack_array({element}, {prod(shape)})")
        for statement in parsed.body:
            self.statement(statement)

    def kind(self, name: str) -> str:
        return self.kinds.get(name) or "lane"


def _parameter_ranks(parsed: ParsedFunction) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for statement in parsed.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                ranks[node.value.id] = len(node.slice.elts) if isinstance(node.slice, ast.Tuple) else 1
    return ranks


class KernelEmitter(FunctionEmitter):
    """The body of a kernel: lane loops around regions, plain Python around them.

    With ``types_of_lanes`` None the text is for type inference only: lane loops run once and lane arrays are plain
    names, whose inferred types are then the element types of the lane arrays.
    """

    def __init__(
        self,
        module: HostModule,
        parsed: ParsedFunction,
        access: AccessSets,
        signature: dict[str, Any],
        block: tuple[int, ...],
        types_of_lanes: dict[str, str] | None,
    ) -> None:
        ranks = {n: t.ndim for n, t in signature.items() if isinstance(t, nb.Array)}
        super().__init__(module, parsed, ranks)
        self.access_sets = access
        self.types_of_lanes = types_of_lanes
        self.block_shape = (*block, *(1,) * (3 - len(block)))
        self.threads = prod(block)
        self.uniformity = Uniformity(parsed, access)
        self.parts = cut(parsed, self.uniformity, parsed.body)
        self.storage = Storage(parsed, self.uniformity, self.parts)
        self.in_lane = False

    @property
    def typing(self) -> bool:
        return self.types_of_lanes is None

    def kind(self, name: str) -> str:
        return "lane" if name in self.parsed.arrays else self.access_sets.kind(name)

    def element(self, name: str, number: str) -> str:
        if self.parsed.arrays.get(name, ("",))[0] == "local" and not self.typing:
            return f"({number}) * {self.threads} + _t"
        return number

    def read(self, name: str) -> str:
        if name in self.storage.recomputed:
            return f"({self.expressions.text(self.storage.recomputed[name])})"
        if name in self.storage.lanes and not self.typing:
            return f"load_lane(v_{name}, _t)"
        return super().read(name)

    def write(self, name: str, value: str) -> str:
        if name in self.storage.recomputed:
            return "pass"
        if name in self.storage.lanes and not self.typing:
            return f"store_lane(v_{name}, _t, {value})"
        return super().write(name, value)

    def index_name(self, cuda: str, node: ast.AST) -> str:
        root, _, axis = cuda.partition(".")
        if cuda == "warpsize":
            return "32"
        if cuda == "laneid":
            return "(_t & 31)"
        position = AXES.index(axis) if axis in AXES and axis else -1
        if position < 0:
            self.parsed.refuse(node, f"cuda.{cuda} is outside the kernel dialect")
        if root == "blockDim":
            return str(self.block_shape[position])
        if root == "threadIdx":
            return f"_t{axis}" if self.block_shape[position] > 1 else "0"
        return f"_{'b' if root == 'blockIdx' else 'g'}{axis}"

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        if cuda in ("grid", "gridsize"):
            if not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 1):
                self.parsed.refuse(node, f"cuda.{cuda}(n) with n > 1 is assigned to a tuple of n names")
            return self._grid(cuda, 0)
        if cuda in ("grid_axis", "gridsize_axis"):
            assert isinstance(node.args[0], ast.Constant)
            return self._grid(cuda.removesuffix("_axis"), int(node.args[0].value))  # type: ignore[arg-type]
        return super().cuda_call(cuda, node)

    def _grid(self, cuda: str, position: int) -> str:
        axis, extent = AXES[position], self.block_shape[position]
        if cuda == "gridsize":
            return f"(_g{axis} * {extent})"
        thread = f"_t{axis}" if extent > 1 else "0"
        return f"(_b{axis} * {extent} + {thread})"

    # --- parts

    def run(self) -> list[str]:
        self._declare()
        self.emit_parts(self.parts)
        return self.lines

    def _declare(self) -> None:
        for name, (space, shape, element) in self.parsed.arrays.items():
            size = prod(shape) * (self.threads if space == "local" and not self.typing else 1)
            self.emit(f"v_{name} = stack_array({element}, {size})")
            if self.module.options.poison and not self.typing:
                self.emit(f"poison(v_{name}, {size})")
        for name, element in (self.types_of_lanes or {}).items():
            self.emit(f"v_{name} = stack_array({element}, {self.threads})")

    def emit_parts(self, parts: list[Part]) -> None:
        for part in parts or [Scalar(ast.Pass())]:
            if isinstance(part, Region):
                self._region(part)
            elif isinstance(part, Scalar):
                self.statement(part.statement)
            elif isinstance(part, Collective):
                self._collective(part.statement)
            else:
                self._control(part)

    def _control(self, part: Control) -> None:
        node, text = part.statement, self.expressions.text
        if isinstance(node, ast.For):
            assert isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Name)
            header = f"for v_{node.target.id} in range({', '.join(text(a) for a in node.iter.args)}):"
        else:
            header = f"{'if' if isinstance(node, ast.If) else 'while'} {text(node.test)}:"
        self.emit(header, node)
        for keyword, body in ((None, part.body), ("else:", part.orelse)):
            if keyword and not body:
                continue
            if keyword:
                self.emit(keyword)
            self.depth += 1
            self.emit_parts(body)
            self.depth -= 1

    def _lanes(self) -> int:
        """Open the loops over the block's threads; returns how many levels deeper the body stands."""
        if self.typing:
            self.emit("_t = _tx = _ty = _tz = 0")
            return 0
        reverse = self.module.options.reverse_lanes
        axes = [(a, n) for a, n in zip("zyx", reversed(self.block_shape), strict=True) if n > 1]
        axes = axes or [("x", 1)]
        for axis, extent in axes:
            self.emit(f"for _t{axis} in range({f'{extent - 1}, -1, -1' if reverse else extent}):")
            self.depth += 1
        number = "0"
        for axis, extent in axes:
            number = f"_t{axis}" if number == "0" else f"({number}) * {extent} + _t{axis}"
        self.emit(f"_t = {number}")
        return len(axes)

    def _region(self, part: Region) -> None:
        if all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
               and s.targets[0].id in self.storage.recomputed for s in part.statements):  # fmt: skip
            return
        opened = self._lanes()
        for statement in part.statements:
            self.statement(statement)
        self.depth -= opened

    def _collective(self, node: ast.stmt) -> None:
        assert isinstance(node, ast.Assign | ast.Expr)
        kind = self.parsed.collective(node.value)
        if kind == "barrier":
            return
        assert isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        target, source, offset = node.targets[0], node.value.args[1], node.value.args[2]
        assert isinstance(target, ast.Name) and isinstance(source, ast.Name)
        if self.threads % 32:
            self.parsed.refuse(node, f"a shuffle in blocks of {self.threads} threads: a multiple of 32 is needed")
        if self.typing:
            self.emit(f"v_{target.id} = {self.read(source.id)}", node)
            return
        literal = offset.value if isinstance(offset, ast.Constant) else self.parsed.resolve(offset)
        if kind != "index" and isinstance(literal, int) and source.id in self.storage.lanes:
            self.emit(f"for _w in range({self.threads // 32}):", node)
            self.lines.append(
                INDENT * (self.depth + 1) + f"shuffle_{kind}(v_{target.id}, v_{source.id}, _w, {literal})"
            )
            return
        opened = self._lanes()
        self.emit(f"_o = {self.expressions.text(offset)}", node)
        lane = {
            "index": "_o & 31",
            "xor": "(_t & 31) ^ _o",
            "up": "(_t & 31) - _o if (_t & 31) >= _o else _t & 31",
            "down": "(_t & 31) + _o if (_t & 31) + _o < 32 else _t & 31",
        }[kind or ""]
        self.emit(f"_s = (_t & ~31) + ({lane})")
        value = f"load_lane(v_{source.id}, _s)" if source.id in self.storage.lanes else self.read(source.id)
        self.emit(f"store_lane(v_{target.id}, _t, {value})")
        self.depth -= opened


class HostModule:
    """Source of one generated module: device functions, then the kernel's entry point."""

    def __init__(self, options: HostOptions, access: HostAccess | None = None) -> None:
        self.options = options
        self.access = access or HostAccess()
        self.intrinsics: dict[str, Intrinsic] = {}
        self._device: dict[tuple[int, tuple[str | None, ...]], str] = {}
        self._sources: list[str] = []

    def device_function(self, function: Any, kinds: tuple[str | None, ...]) -> str:
        """Name of the host form of a device function, for arguments of these alias classes; written once."""
        key = (id(function), kinds)
        if key not in self._device:
            suffix = "".join(f"_{k or 'x'}" for k in kinds)
            name = f"d_{function.parsed.name}{suffix}_{len(self._device)}"
            self._device[key] = name
            emitter = DeviceFunctionEmitter(self, function.parsed, kinds, name)
            self._sources.append("\n".join(emitter.lines))
        return self._device[key]

    def source(self, body: list[str]) -> str:
        """Whole text of the module around a function's text."""
        header = [
            "# Generated from a kernel's source. Do not edit: the next change of the kernel writes another file.",
            "import math",
            "from numba import cfunc, njit, types",
            "from numba import boolean, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64",
            "from instrumentation.kernel import intrinsics",
            "from instrumentation.kernel.host_runtime import *",
            "",
            *[f"{name} = intrinsics.{name}.host" for name in self.intrinsics],
            "",
        ]
        return "\n".join(header) + "\n\n".join(["", *self._sources, "\n".join(body), ""])


def entry_lines(signature: dict[str, Any], body: list[str]) -> list[str]:
    """The C-callable function that unpacks the argument block and runs a range of blocks.

    Slots of 8 bytes: grid x, y, z; then each array's address and extents, each scalar.
    """
    lines = ['@cfunc(types.void(types.CPointer(int64), int64, int64), cache=True, error_model="numpy")',
             "def entry(_args, _begin, _end):",
             "    _gx, _gy, _gz = _args[0], _args[1], _args[2]"]  # fmt: skip
    slot = 3
    for name, kind in signature.items():
        if isinstance(kind, nb.Array):
            lines.append(f"    v_{name} = argument_pointer(_args, {slot}, {kind.dtype})")
            for axis in range(kind.ndim):
                lines.append(f"    v_{name}_d{axis} = _args[{slot + 1 + axis}]")
            slot += 1 + kind.ndim
        else:
            lines.append(f"    v_{name} = argument_scalar(_args, {slot}, {kind})")
            slot += 1
    lines += [
        "    for _b in range(_begin, _end):",
        "        _bx = _b % _gx",
        "        _by = _b // _gx % _gy",
        "        _bz = _b // (_gx * _gy)",
        *[INDENT + line for line in body],
    ]
    return lines
