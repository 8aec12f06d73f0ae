"""Lowering ``host``: a kernel's plan -> Python source that Numba compiles for the CPU.

One function runs blocks ``begin`` to ``end`` of a grid. Each region of the kernel becomes a loop over the block's
threads; what a thread keeps from one region to the next lives in a *lane array* (element t belongs to thread t), so
that LLVM turns the loop into vector code.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from numba.core import types as nb

from instrumentation.kernel.host_emit import INDENT, FunctionEmitter, HostAccess
from instrumentation.kernel.origin import origin_of
from instrumentation.kernel.regions import Agreed, Collective, Control, Part, Region, Scalar, barrier_behind

if TYPE_CHECKING:
    from instrumentation.kernel.intrinsics import Intrinsic
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan

AXES = "xyz"
#: who makes a checked access: see ``checked.runtime``. What is uniform is done by the first thread.
_UNIFORM = "(_report, int64(0), _b, int64(0), _now, _since, _table)"
_THREAD = "(_report, int64(0), _b, _t, _now, _since, _table)"
#: alias class and number of axes of an array argument; None for a value
ArgumentShape = tuple[str, int] | None


@dataclass(frozen=True)
class HostOptions:
    """How the host function runs a block. Bits of a correct kernel do not depend on any of these."""

    #: threads in descending order: a missing barrier shows
    reverse_lanes: bool = False
    #: shared and local arrays start as 0xFF bytes (NaN): a read before the first write shows
    poison: bool = False
    #: every access is checked: ``checked.access``
    checked: bool = False


class DeviceFunctionEmitter(FunctionEmitter):
    """A device function becomes a plain Numba function that LLVM inlines."""

    def __init__(
        self, module: HostModule, parsed: ParsedFunction, shapes: tuple[ArgumentShape, ...], name: str
    ) -> None:
        self.shapes = dict(zip(parsed.parameters, shapes, strict=True))
        super().__init__(module, parsed, {p: shape[1] for p, shape in self.shapes.items() if shape})
        names: list[str] = []
        for parameter in parsed.parameters:
            names.append(f"v_{parameter}")
            if self.shapes[parameter]:
                names.extend(self.extents(parameter))
                names.extend([f"s_{parameter}"] if module.options.checked else [])
        names.extend(["_where"] if module.options.checked else [])
        self.lines = [
            "@helper",
            f"def {name}({', '.join(names)}):",
        ]
        for array, declared in parsed.arrays.items():
            assert declared.space == "local", "a device function with shared arrays is inlined"
            self.allocate(array, declared.element, prod(declared.shape))
        self.depth = 0
        self.block(parsed.body)

    def kind(self, name: str) -> str:
        """Alias class of an array: the caller's."""
        shape = self.shapes.get(name)
        return shape[0] if shape else "lane"


class KernelEmitter(FunctionEmitter):
    """The body of a kernel: lane loops around regions, plain Python around them.

    With ``types_of_lanes`` None the text is for type inference only: lane loops run once and lane arrays are plain
    names, whose inferred types are then the element types of the lane arrays.
    """

    def __init__(self, module: HostModule, plan: KernelPlan, types_of_lanes: dict[str, str] | None) -> None:
        ranks = {n: t.ndim for n, t in plan.signature.items() if isinstance(t, nb.Array)}
        super().__init__(module, plan.parsed, ranks)
        self.plan = plan
        self.types_of_lanes = types_of_lanes
        self.block_shape = (*plan.block, *(1,) * (3 - len(plan.block)))
        self.threads = plan.threads
        self.storage = plan.storage
        self.typing = module.typing
        self.where = _UNIFORM
        #: elements of shared arrays that have their records
        self.shared = 0
        assert self.typing == (types_of_lanes is None)

    def kind(self, name: str) -> str:
        """Alias class of an array."""
        return "lane" if name in self.parsed.arrays else self.plan.access.kind(name)

    def spread(self, name: str) -> tuple[str, str] | None:
        """Local arrays of all threads stand interleaved, so that a lane loop reads them side by side."""
        array = self.parsed.arrays.get(name)
        if array is not None and array.space == "local" and not self.typing:
            return str(self.threads), "_t"
        return None

    def read(self, name: str) -> str:
        """Expression of a name's value in this thread."""
        if name in self.storage.recomputed:
            return f"({self.text(self.storage.recomputed[name])})"
        if name in self.storage.lanes and not self.typing:
            return f"load_lane(v_{name}, _t)"
        return super().read(name)

    def write(self, name: str, value: str) -> str | None:
        """Statement that assigns to a name in this thread."""
        if name in self.storage.recomputed:
            return None
        if name in self.storage.lanes and not self.typing:
            return f"store_lane(v_{name}, _t, {value})"
        return super().write(name, value)

    def index_name(self, cuda: str, node: ast.AST) -> str:
        """Text of a thread's or block's index."""
        root, _, axis = cuda.partition(".")
        if cuda == "laneid":
            return "(_t & 31)"
        if not axis:
            return super().index_name(cuda, node)
        extent = self.block_shape[AXES.index(axis)]
        if root == "blockDim":
            return str(extent)
        if root == "threadIdx":
            return f"_t{axis}" if extent > 1 else "0"
        return f"_{'b' if root == 'blockIdx' else 'g'}{axis}"

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        """Text of a ``numba.cuda`` operation."""
        if cuda not in ("grid_axis", "gridsize_axis"):
            return super().cuda_call(cuda, node)
        assert isinstance(node.args[0], ast.Constant)
        position = node.args[0].value
        assert isinstance(position, int)
        axis, extent = AXES[position], self.block_shape[position]
        if cuda == "gridsize_axis":
            return f"(_g{axis} * {extent})"
        return f"(_b{axis} * {extent} + {f'_t{axis}' if extent > 1 else '0'})"

    # --- parts

    def run(self) -> list[str]:
        """Lines of the function's body, one level deep."""
        self._declare()
        self._parts(self.plan.parts)
        return self.lines

    def records(self, name: str) -> str:
        """Address of the records of a shared array."""
        array = self.parsed.arrays[name]
        if array.space != "shared":
            return super().records(name)
        first = self.shared
        self.shared += prod(array.shape)
        return f"shared_records(_table, {first})"

    def _declare(self) -> None:
        for name, array in self.parsed.arrays.items():
            size = prod(array.shape) * (self.threads if array.space == "local" and not self.typing else 1)
            self.allocate(name, array.element, size)
        for name, element in (self.types_of_lanes or {}).items():
            self.emit(f"v_{name} = stack_array({element}, {self.threads})")

    def _parts(self, parts: list[Part]) -> None:
        before = len(self.lines)
        for part in parts:
            if isinstance(part, Region):
                self._region(part)
            elif isinstance(part, Scalar):
                self.statement(part.statement)
            elif isinstance(part, Agreed):
                self._agreed(part.statement)
            elif isinstance(part, Collective):
                self._collective(part.statement)
            else:
                self._control(part)
        if len(self.lines) == before:
            self.emit("pass")

    def _control(self, part: Control) -> None:
        node = part.statement
        if isinstance(node, ast.For):
            assert isinstance(node.target, ast.Name)
            self.emit(f"for v_{node.target.id} in {self.range_of(node)}:", node)
        else:
            self.emit(f"{'if' if isinstance(node, ast.If) else 'while'} {self.text(node.test)}:", node)
        self.depth += 1
        self._parts(part.body)
        self.depth -= 1
        if part.orelse:
            self.emit("else:")
            self.depth += 1
            self._parts(part.orelse)
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
        self.where = _THREAD
        return len(axes)

    def _end_lanes(self, opened: int) -> None:
        self.depth -= opened
        self.where = _UNIFORM

    def _region(self, part: Region) -> None:
        if all(isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name)
               and s.targets[0].id in self.storage.recomputed for s in part.statements):  # fmt: skip
            return
        opened = self._lanes()
        for statement in part.statements:
            self.statement(statement)
        self._end_lanes(opened)

    def _agreed(self, node: ast.Assign) -> None:
        """The block takes the value of the thread that runs first; checked, those of the others are compared."""
        target, own = node.targets[0], node.value
        assert isinstance(target, ast.Name)
        assert isinstance(own, ast.Name)
        reverse = self.module.options.reverse_lanes and not self.typing
        places = [extent - 1 if reverse else 0 for extent in self.block_shape]
        self.emit(f"_tx, _ty, _tz, _t = {', '.join(map(str, [*places, self.threads - 1 if reverse else 0]))}")
        block = self.read(target.id)
        self.emit(f"{block} = {self.read(own.id)}", node)
        origin = origin_of(node)
        site = None
        if origin is not None and not self.typing:
            barrier, wanted = barrier_behind(self.parsed, self.plan.parts, target.id)
            site = self.access.agreement(origin, barrier, wanted)
        if site is None:
            return
        self.emit("_differ = _first = _last = 0")
        self.emit(f"_other = {block}")
        opened = self._lanes()
        value = self.read(own.id)
        self.emit(f"if {value} != {block} and ({value} == {value} or {block} == {block}):")
        self.emit(f"{INDENT}_other = _other if _differ else {value}")
        self.emit(f"{INDENT}_first = _first if _differ else _t")
        self.emit(f"{INDENT}_last = _t")
        self.emit(f"{INDENT}_differ += 1")
        self._end_lanes(opened)
        self.emit("if _differ:")
        self.emit(
            f"{INDENT}diverged({block}, _other, _first, _last, _differ, {self.threads}, {site}, {self.where})"
        )

    def _collective(self, node: ast.stmt) -> None:
        """A barrier is the cut itself; a shuffle moves values between lanes of each warp.

        Offsets count modulo 32, as the hardware's instruction takes five bits of them.
        """
        assert isinstance(node, ast.Assign | ast.Expr)
        kind = self.parsed.collective(node.value)
        if kind == "barrier":
            if self.module.options.checked:
                self.emit("_now += 1", node)
                assert isinstance(node.value, ast.Call)
                if self.parsed.cuda_name(node.value.func) == "syncthreads":
                    self.emit("_since = _now")
            return
        assert isinstance(node, ast.Assign)
        assert isinstance(node.value, ast.Call)
        target, source, offset = node.targets[0], node.value.args[1], node.value.args[2]
        assert isinstance(target, ast.Name)
        assert isinstance(source, ast.Name)
        if self.typing:
            self.emit(f"v_{target.id} = shuffled({self.read(source.id)}, {self.text(offset)})", node)
            return
        from_lanes = source.id in self.storage.lanes
        literal = isinstance(offset, ast.Constant) and isinstance(offset.value, int)
        # Reversed lanes move one by one: a second form of each shuffle, and LLVM 20 breaks on reversed wide vectors.
        if literal and from_lanes and not self.module.options.reverse_lanes:
            assert isinstance(offset, ast.Constant)
            assert isinstance(offset.value, int)
            self.emit(f"for _w in range({self.threads // 32}):")
            self.depth += 1
            self.emit(f"shuffle_{kind}(v_{target.id}, v_{source.id}, _w, {offset.value & 31})", node)
            self.depth -= 1
            return
        opened = self._lanes()
        self.emit(f"_o = ({self.text(offset)}) & 31", node)
        lane = {
            "index": "_o",
            "xor": "(_t & 31) ^ _o",
            "up": "(_t & 31) - _o if (_t & 31) >= _o else _t & 31",
            "down": "(_t & 31) + _o if (_t & 31) + _o < 32 else _t & 31",
        }[kind or ""]
        self.emit(f"_s = (_t & ~31) + ({lane})")
        value = f"load_lane(v_{source.id}, _s)" if from_lanes else self.read(source.id)
        self.emit(f"store_lane(v_{target.id}, _t, {value})", node)
        self._end_lanes(opened)


class HostModule:
    """Source of one generated module: device functions, then the kernel's entry point."""

    def __init__(
        self, options: HostOptions, access: HostAccess | None = None, *, typing: bool = False
    ) -> None:
        self.options = options
        self.access = access or HostAccess()
        self.typing = typing
        self.intrinsics: dict[str, Intrinsic] = {}
        #: device functions by the name of their host form
        self.parsed: dict[str, ParsedFunction] = {}
        self._device: dict[tuple[int, tuple[ArgumentShape, ...]], str] = {}
        self._sources: list[str] = []

    def device_function(self, function: Any, shapes: tuple[ArgumentShape, ...]) -> str:
        """Name of the host form of a device function, for arguments of these shapes; written once."""
        key = (id(function), shapes)
        if key not in self._device:
            name = f"d_{function.parsed.name}_{len(self._device)}"
            self._device[key] = name
            self.parsed[name] = function.parsed
            self._sources.append("\n".join(DeviceFunctionEmitter(self, function.parsed, shapes, name).lines))
        return self._device[key]

    def source(self, body: list[str]) -> str:
        """Whole text of the module around a function's text."""
        header = [
            "# Generated from a kernel's source. Do not edit: the next change of the kernel writes another file.",
            "import math",
            "from numba import boolean, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64",
            "from instrumentation.kernel import intrinsics",
            "from instrumentation.kernel.host_runtime import *",
            "from instrumentation.kernel.checked.block import *" if self.options.checked else "",
            "from instrumentation.kernel.checked.runtime import *" if self.options.checked else "",
            "from instrumentation.kernel.host_types import TypedHelper as helper"
            if self.typing
            else "from instrumentation.kernel.host_pipeline import helper",
            *[f"{name} = intrinsics.{name}.host" for name in self.intrinsics],
            "",
        ]
        return "\n".join(header) + "\n\n".join(["", *self._sources, "\n".join(body), ""])


def entry_lines(signature: dict[str, Any], body: list[str], *, checked: bool = False) -> list[str]:
    """The C-callable function that unpacks the argument block and runs a range of blocks.

    Slots of 8 bytes: grid x, y, z; then each array's address and extents, each scalar. A checked function has more of
    them: the report's address, how far each array's shadow lies from it, 0 where it has none, and the address of the
    tables of ``checked.races``, 0 where races are not looked for.
    """
    lines = ["def entry(_args, _begin, _end):", "    _gx, _gy, _gz = _args[0], _args[1], _args[2]"]
    slot = 3
    for name, kind in signature.items():
        if isinstance(kind, nb.Array):
            lines.append(f"    v_{name} = argument_pointer(_args, {slot}, {kind.dtype})")
            lines += [f"    v_{name}_d{axis} = _args[{slot + 1 + axis}]" for axis in range(kind.ndim)]
            slot += 1 + kind.ndim
        else:
            lines.append(f"    v_{name} = argument_scalar(_args, {slot}, {kind})")
            slot += 1
    if checked:
        lines.append(f"    _report = _args[{slot}]")
        arrays = [name for name, kind in signature.items() if isinstance(kind, nb.Array)]
        lines += [f"    s_{name} = _args[{slot + 1 + i}]" for i, name in enumerate(arrays)]
        lines.append(f"    _table, _now = begin_races(_args[{slot + 1 + len(arrays)}])")
        body = [INDENT + "_now += 1", INDENT + "_since = _now", *body]
    lines += [
        "    for _b in range(_begin, _end):",
        "        _bx = _b % _gx",
        "        _by = _b // _gx % _gy",
        "        _bz = _b // (_gx * _gy)",
        *[INDENT + line for line in body],
    ]
    return [*lines, "    end_races(_table, _now)"] if checked else lines
