"""Lowering ``checked`` for a GPU: a kernel's normal form -> Python source of one thread, in which accesses are checked.

Statements stay what they are, so that Numba gives them the types, and NVVM the bits, of the plain kernel. Sites and
calls have the numbers of the kernel's access table, which both devices' reports are read with.
"""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from numba.core import types as nb

from instrumentation.kernel.checked_access import MAX_CALLS, AccessTable, CallSite, Site
from instrumentation.kernel.host_emit import FunctionEmitter, HostAccess, Place
from instrumentation.kernel.lower_cuda import compile_function
from instrumentation.kernel.lower_host import AXES, ArgumentShape, HostModule, HostOptions
from instrumentation.kernel.origin import origin_of
from instrumentation.kernel.parse import NUMBER_TYPES
from instrumentation.kernel.plan import MAX_SHARED_BYTES
from instrumentation.kernel.written_out import Known, leaves

if TYPE_CHECKING:
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan


#: statements of a loop that is written out
MOST_WRITTEN_OUT = 512
SHARED_ACCESS = 8


#: alias classes beside those of the host: an own element that is known to be there, written before or not
WRITTEN, INSIDE = "written", "inside"


def _kind(place: Place) -> str:
    return "lane" if place.kind in (WRITTEN, INSIDE) else place.kind


class NumberedAccess(HostAccess):
    """Text of checked accesses by the numbers of a table."""

    def __init__(self, table: AccessTable) -> None:
        self._sites = {site: number for number, site in enumerate(table.sites)}
        self._calls = {call: number + 1 for number, call in enumerate(table.calls)}

    def load(self, place: Place) -> str:
        """Expression that reads an element, 0 where there is none."""
        if place.kind == WRITTEN:
            return f"load_own({place.pointer}, {place.element})"
        return f"try_load_{_kind(place)}({self._terms(place, 'load')})"

    def store(self, place: Place, value: str) -> str:
        """Statement that writes an element, where there is one."""
        assert place.kind != "ro", f"store to {place.name}, which the access sets call read-only"
        if place.kind in (WRITTEN, INSIDE):
            shadow = place.shadow if place.kind == INSIDE else "0"
            return f"store_own({place.pointer}, {place.element}, {shadow}, {value})"
        return f"try_store_{_kind(place)}({self._terms(place, 'store')}, {value})"

    def atomic(self, operation: str, place: Place, operands: str) -> str:
        """Expression that changes an element and gives what was there before; 0 where there is none."""
        return f"try_atomic_{operation}({self._terms(place, f'atomic {operation}')}, {operands})"

    def call(self, parsed: ParsedFunction, node: ast.Call, where: str) -> str:
        """The caller's own chain of calls with this one behind it."""
        origin = origin_of(node)
        assert origin is not None, ast.dump(node)
        pairs = zip(parsed.parameters, node.args, strict=True)
        arrays = tuple((name, each.id) for name, each in pairs if isinstance(each, ast.Name))
        number = self._calls[CallSite(origin, arrays)]
        return f"called({_said(where, origin)}, {number if number <= MAX_CALLS else 0})"

    def _terms(self, place: Place, how: str) -> str:
        assert place.origin is not None, place
        number = self._sites[Site(place.origin, place.name, place.space, how)]
        indices, extents = (f"({', '.join(texts)},)" for texts in (place.indices, place.extents))
        return ", ".join(
            (place.pointer, indices, extents, place.shadow, str(number), _said(place.where, place.origin))
        )


def _said(where: str, origin: Any) -> str:
    return f"unwritten_allowed({where})" if origin.may_be_unwritten else where


class _CudaEmitter(FunctionEmitter):
    """One thread's statements with CUDA's own operations."""

    module: CudaModule

    def __init__(self, module: CudaModule, parsed: ParsedFunction, ranks: dict[str, int]) -> None:
        super().__init__(module, parsed, ranks)
        self.known = Known()

    def read(self, name: str) -> str:
        """Expression of a name's value."""
        value = self.known.constants.get(name)
        if value is None:
            return super().read(name)
        return str(value) if value >= 0 else f"({value})"

    def place(self, name: str, index: ast.expr, node: ast.AST) -> Place:
        """Where an index into an array points, and what is known of that."""
        place = super().place(name, index, node)
        array = self.parsed.arrays.get(name)
        if array is None or array.space != "local":
            return place
        number = self.known.element(array, index)
        if number is not None:
            written = number in self.known.written.get(name, ())
            return replace(place, kind=WRITTEN if written else INSIDE, element=str(number))
        return replace(place, shadow="0") if self.known.whole(name, array) else place

    def block(self, statements: list[ast.stmt]) -> None:
        """Statements one level deeper: what is learnt there holds there."""
        before, self.known = self.known, self.known.copy()
        super().block(statements)
        self.known = before

    def index_name(self, cuda: str, node: ast.AST) -> str:  # noqa: ARG002 - as the host's
        """Text of ``cuda.threadIdx.x`` and the like."""
        return f"cuda.{cuda}"

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        """Text of a ``numba.cuda`` operation."""
        if cuda.startswith("atomic."):
            return super().cuda_call(cuda, node)
        if cuda in ("grid_axis", "gridsize_axis"):
            assert isinstance(node.args[0], ast.Constant)
            axis = AXES[int(node.args[0].value)]  # type: ignore[arg-type]
            extent = f"int64(cuda.blockDim.{axis})"
            if cuda == "gridsize_axis":
                return f"(int64(cuda.gridDim.{axis}) * {extent})"
            return f"(int64(cuda.blockIdx.{axis}) * {extent} + int64(cuda.threadIdx.{axis}))"
        return f"cuda.{cuda}({', '.join(self.text(each) for each in node.args)})"

    def statement(self, node: ast.stmt) -> None:
        """One statement of one thread; a loop over what a thread keeps is written out.

        The compiler does so in the plain kernel, and keeps such arrays in registers; with the checks it would not.
        """
        turns = self._turns(node)
        if turns is None:
            if isinstance(node, ast.For | ast.While):
                self.known.forget(node)
            super().statement(node)
            self._ran(node)
            return
        assert isinstance(node, ast.For)
        assert isinstance(node.target, ast.Name)
        for value in turns:
            self.known.constants[node.target.id] = value
            for inner in node.body:
                self.statement(inner)
        self.known.constants.pop(node.target.id, None)

    def _ran(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            self.known.assigned(node, self.parsed.arrays)
        elif isinstance(node, ast.If | ast.For | ast.While):
            self.known.forget(node)
            if isinstance(node, ast.For):
                self.known.looped(node, self.parsed.arrays)

    def _turns(self, node: ast.stmt) -> range | None:
        """Values of the variable of a loop that is to be written out; None for others, and for what is no loop."""
        if not isinstance(node, ast.For):
            return None
        assert isinstance(node.iter, ast.Call)
        ends = [each.value if isinstance(each, ast.Constant) else None for each in node.iter.args]
        if not all(isinstance(end, int) for end in ends) or not self._uses_own(node) or leaves(node.body):
            return None
        turns = range(*ends)  # type: ignore[arg-type]
        return turns if len(turns) * self._size(node.body) <= MOST_WRITTEN_OUT else None

    def _size(self, statements: list[ast.stmt]) -> int:
        """Statements once loops are written out; an access of memory that others share counts as several."""
        size = 0
        for node in statements:
            inner = [*getattr(node, "body", []), *getattr(node, "orelse", [])]
            turns = self._turns(node)
            size += 1 + (len(turns) if turns is not None else 1) * self._size(inner)
            if not inner:
                size += SHARED_ACCESS * sum(self._is_shared_access(each) for each in ast.walk(node))
        return size

    def _is_shared_access(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Name) and not self.is_own(node.value.id)
        return self.parsed.device_function(node) is not None

    def _uses_own(self, loop: ast.For) -> bool:
        names = {n.id for n in ast.walk(loop) if isinstance(n, ast.Name)}
        return any(self.is_own(name) for name in names)

    def is_own(self, name: str) -> bool:
        """Whether a name is an array of one thread, or may be."""
        return name in self.parsed.arrays and self.parsed.arrays[name].space == "local"

    def declare(self) -> None:
        """Storage of the arrays that the function declares, and their shadows."""
        shared: list[tuple[str, int]] = []
        left = MAX_SHARED_BYTES - sum(a.nbytes for a in self.parsed.arrays.values() if a.space == "shared")
        for name, array in self.parsed.arrays.items():
            size = prod(array.shape)
            self.emit(f"v_{name} = {array.space}_array({array.element}, {size})")
            if array.space == "local":
                self.emit(f"s_{name} = local_array(uint8, {size})")
                self.emit(f"for _i in range({size}):")
                self.emit(f"    forget(s_{name}, _i)")
            elif size <= left:
                left -= size
                shared.append((name, size))
                self.emit(f"s_{name} = shared_array(uint8, {size})")
            else:
                self.emit(f"s_{name} = 0")
        if shared:
            x, y, z = (*self.module.block, 1, 1)[:3]
            self.emit(f"_t = cuda.threadIdx.x + {x} * (cuda.threadIdx.y + {y} * cuda.threadIdx.z)")
            for name, size in shared:
                self.emit(f"for _i in range(_t, {size}, {x * y * z}):")
                self.emit(f"    forget(s_{name}, _i)")
            self.emit("cuda.syncthreads()")


class DeviceFunctionEmitter(_CudaEmitter):
    """A device function, which NVVM inlines."""

    def __init__(
        self, module: CudaModule, parsed: ParsedFunction, shapes: tuple[ArgumentShape, ...], name: str
    ) -> None:
        self.shapes = dict(zip(parsed.parameters, shapes, strict=True))
        super().__init__(module, parsed, {p: shape[1] for p, shape in self.shapes.items() if shape})
        names: list[str] = []
        for parameter in parsed.parameters:
            names.append(f"v_{parameter}")
            if self.shapes[parameter]:
                names += [*self.extents(parameter), f"s_{parameter}"]
        self.lines = ["@helper", f"def {name}({', '.join([*names, '_where'])}):"]
        self.declare()
        self.depth = 0
        self.block(parsed.body)

    def kind(self, name: str) -> str:
        """Alias class of an array: the caller's."""
        shape = self.shapes.get(name)
        return shape[0] if shape else "lane"

    def is_own(self, name: str) -> bool:
        """Whether a name is an array of one thread, or may be."""
        shape = self.shapes.get(name)
        return super().is_own(name) or (shape is not None and shape[0] == "lane")


class KernelEmitter(_CudaEmitter):
    """The body of a kernel."""

    def __init__(self, module: CudaModule, plan: KernelPlan) -> None:
        ranks = {n: t.ndim for n, t in plan.signature.items() if isinstance(t, nb.Array)}
        super().__init__(module, plan.parsed, ranks)
        self.plan = plan

    def kind(self, name: str) -> str:
        """Alias class of an array."""
        return "lane" if name in self.parsed.arrays else self.plan.access.kind(name)

    def run(self) -> list[str]:
        """Lines of the kernel's function."""
        names: list[str] = []
        bound: list[str] = []
        for name, kind in self.plan.signature.items():
            if isinstance(kind, nb.Array):
                names += [f"a_{name}", *self.extents(name)]
                bound.append(f"    v_{name} = global_array(a_{name}, {kind.dtype})")
            else:
                names.append(f"v_{name}")
        shadows = [f"s_{name}" for name in self.ranks]
        head = f"def {self.parsed.name}({', '.join([*names, '_report', *shadows])}):"
        self.lines = [head, *bound, "    _where = (_report, int64(0))"]
        self.declare()
        self.depth = 0
        self.block(self.parsed.body)
        return self.lines


class CudaModule(HostModule):
    """Source of one generated module: device functions, then the kernel."""

    def __init__(self, table: AccessTable, block: tuple[int, ...]) -> None:
        super().__init__(HostOptions(checked=True), NumberedAccess(table))
        self.block = block

    def device_function(self, function: Any, shapes: tuple[ArgumentShape, ...]) -> str:
        """Name of the checked form of a device function, for arguments of these shapes; written once."""
        key = (id(function), shapes)
        if key not in self._device:
            name = f"d_{function.parsed.name}_{len(self._device)}"
            self._device[key] = name
            # What it calls is written first.
            lines = DeviceFunctionEmitter(self, function.parsed, shapes, name).lines
            self._sources.append("\n".join(lines))
        return self._device[key]

    def source(self, body: list[str]) -> str:
        """Whole text of the module around a kernel's text."""
        return "\n\n".join([*self._sources, "\n".join(body), ""])


def checked_source(plan: KernelPlan, table: AccessTable) -> tuple[str, CudaModule]:
    """Text of a kernel's checked form and its device functions, and what it uses."""
    module = CudaModule(table, plan.block)
    return module.source(KernelEmitter(module, plan).run()), module


def checked_signature(signature: dict[str, Any]) -> Any:
    """``void(...)`` signature of a checked kernel.

    Each array's address and extents, each scalar; then the address of the report, and how far each array's shadow lies
    from it, 0 where it has none: what ``entry_lines`` has for the host.
    """
    kinds: list[Any] = []
    arrays = 0
    for kind in signature.values():
        if isinstance(kind, nb.Array):
            kinds += [nb.int64] * (1 + kind.ndim)
            arrays += 1
        else:
            kinds.append(kind)
    return nb.void(*kinds, *[nb.int64] * (1 + arrays))


def compile_checked_ptx(plan: KernelPlan, table: AccessTable, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel's checked form. Raises ``DeviceError`` as ``compile_ptx`` does."""

    def make() -> Any:
        from numba import cuda  # noqa: PLC0415

        from instrumentation.kernel.checked_cuda import RUNTIME  # noqa: PLC0415

        source, module = checked_source(plan, table)
        namespace: dict[str, Any] = {
            "__name__": "refengine_checked_kernel",
            "cuda": cuda,
            "math": math,
            "helper": cuda.jit(device=True, forceinline=True),
            **{name: getattr(nb, name) for name in set(NUMBER_TYPES.values())},
            **RUNTIME,
            **{name: value.cuda for name, value in module.intrinsics.items()},
        }
        exec(compile(source, f"<checked {plan.parsed.name}>", "exec"), namespace)  # noqa: S102
        return namespace[plan.parsed.name]

    return compile_function(plan.parsed.name, make, checked_signature(plan.signature), compute_capability)
