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
from instrumentation.kernel.checked_bounds import MOST_FACTOR, Bounds, Root, Sum, View
from instrumentation.kernel.checked_cuda_ptx import with_checks
from instrumentation.kernel.host_emit import FunctionEmitter, HostAccess, Place
from instrumentation.kernel.lower_cuda import compile_function
from instrumentation.kernel.lower_host import AXES, ArgumentShape, HostModule, HostOptions
from instrumentation.kernel.origin import origin_of
from instrumentation.kernel.parse import NUMBER_TYPES
from instrumentation.kernel.plan import MAX_SHARED_BYTES
from instrumentation.kernel.written_out import Known, leaves, names_of_turns

if TYPE_CHECKING:
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan


#: statements of a loop that is written out
MOST_WRITTEN_OUT = 1024
SHARED_ACCESS = 2


#: alias classes beside those of the host: an own element that is known to be there, written before or not
WRITTEN, INSIDE = "written", "inside"
#: accesses of a loop that is written out and for whose sake it is written twice
LEAST_SURE = 8
#: an element of a parameter that is known to be there, and written; what stands before the class of one that is there
KNOWN, SURE = "known", "sure "


def _kind(place: Place) -> tuple[str, str]:
    """How an element is accessed, and its alias class."""
    if place.kind in (WRITTEN, INSIDE):
        return "try", "lane"
    return ("sure", place.kind.removeprefix(SURE)) if place.kind.startswith(SURE) else ("try", place.kind)


class NumberedAccess(HostAccess):
    """Text of checked accesses by the numbers of a table."""

    def __init__(self, table: AccessTable) -> None:
        self._sites = {site: number for number, site in enumerate(table.sites)}
        self._calls = {call: number + 1 for number, call in enumerate(table.calls)}

    def load(self, place: Place) -> str:
        """Expression that reads an element, 0 where there is none."""
        if place.kind == WRITTEN:
            return f"load_own({place.pointer}, {place.element})"
        if place.kind == KNOWN:
            return f"load_known({place.pointer}, {place.element})"
        how, kind = _kind(place)
        return f"{how}_load_{kind}({self._terms(place, 'load')})"

    def store(self, place: Place, value: str) -> str:
        """Statement that writes an element, where there is one."""
        assert place.kind != "ro", f"store to {place.name}, which the access sets call read-only"
        if place.kind in (WRITTEN, INSIDE):
            shadow = place.shadow if place.kind == INSIDE else "0"
            return f"store_own({place.pointer}, {place.element}, {shadow}, {value})"
        how, kind = _kind(place)
        return f"{how}_store_{kind}({self._terms(place, 'store')}, {value})"

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
        #: inside of a loop whose indices are looked at before it
        self.view: View | None = None
        #: whether loops may be written twice
        self.twice = False
        #: ends of names of which each turn of a loop has its own: the compiler takes long for those assigned often
        self._ends: dict[str, str] = {}
        self._n_ends = 0
        self._own_names: dict[int, list[str]] = {}

    def read(self, name: str) -> str:
        """Expression of a name's value."""
        value = self.known.constants.get(name)
        if value is None:
            return super().read(name) + self._ends.get(name, "")
        return str(value) if value >= 0 else f"({value})"

    def write(self, name: str, value: str) -> str | None:
        """Statement that assigns to a name."""
        return f"v_{name}{self._ends.get(name, '')} = {value}"

    def _turn(self, loop: ast.For) -> None:
        """Another turn, or form, of a loop is written."""
        if id(loop) not in self._own_names:
            self._own_names[id(loop)] = names_of_turns(loop, self.parsed)
        self._n_ends += 1
        for name in self._own_names[id(loop)]:
            self._ends[name] = f"_t{self._n_ends}"

    def place(self, name: str, index: ast.expr, node: ast.AST) -> Place:
        """Where an index into an array points, and what is known of that."""
        place = super().place(name, index, node)
        array = self.parsed.arrays.get(name)
        if array is None or array.space != "local":
            return self._sure(place, name, index)
        number = self.known.element(array, index)
        if number is not None:
            written = number in self.known.written.get(name, ())
            return replace(place, kind=WRITTEN if written else INSIDE, element=str(number))
        return replace(place, shadow="0") if self.known.whole(name, array) else place

    def _sure(self, place: Place, name: str, index: ast.expr) -> Place:
        """The place, if its indices can be looked at before the loop around it."""
        view, root = self.view, self._root(name)
        if view is None or root is None or view.conditional:
            return place
        sums = [view.value(each) for each in (index.elts if isinstance(index, ast.Tuple) else [index])]
        known = [each for each in sums if each is not None]
        if len(known) < len(sums):
            return place
        view.bounds.require(root, known)
        if root.name in self.module.known and place.kind == "ro":
            view.bounds.known.add(root.name)
            return replace(place, kind=KNOWN)
        return replace(place, kind=SURE + place.kind)

    def _root(self, name: str) -> Root | None:
        """Where an array comes from, seen from the loop that is written."""
        if self.view is None or self.view.outer is None:
            return self.view.arrays.get(name) if self.view else None
        return Root(name, tuple(self.extents(name)), self.kind(name))

    def text(self, node: ast.expr) -> str:
        """Text of an expression; what may not be evaluated is conditional."""
        if self.view is None or not isinstance(node, ast.IfExp | ast.BoolOp):
            return super().text(node)
        self.view.conditional += 1
        text = super().text(node)
        self.view.conditional -= 1
        return text

    def _call(self, node: ast.Call) -> str:
        function = self.parsed.device_function(node)
        if self.view is None or function is None:
            return super()._call(node)
        given = [
            self._root(each.id)
            if isinstance(each, ast.Name) and self._is_array(each)
            else self.view.value(each)
            for each in node.args
        ]
        view = self.view.called(function.parsed, given)
        name = self.module.seen_function(function, tuple(self._array_shape(a) for a in node.args), view)
        texts = [self._argument(each) for each in node.args]
        return f"{name}({', '.join([*texts, self.access.call(function.parsed, node, self.where) or ''])})"

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
        if isinstance(node, ast.If):
            chosen = self.known.truth(node.test)
            if chosen is not None:
                for inner_statement in node.body if chosen else node.orelse:
                    self.statement(inner_statement)
                return
        turns = self._turns(node)
        if isinstance(node, ast.For) and self.twice and self._written_twice(node, turns):
            return
        if turns is None:
            inner = isinstance(node, ast.If | ast.For | ast.While)
            if isinstance(node, ast.For | ast.While):
                self.known.forget(node)
            if self.view is not None and inner:
                self.view.forget(node)
                self.view.conditional += 1
            super().statement(node)
            if self.view is not None and inner:
                self.view.conditional -= 1
            self._ran(node)
            return
        assert isinstance(node, ast.For)
        self._write_out(node, turns)

    def _write_out(self, node: ast.For, turns: range) -> None:
        assert isinstance(node.target, ast.Name)
        for value in turns:
            self.known.constants[node.target.id] = value
            if self.view is not None:
                self.view.names[node.target.id] = Sum.of({}, value)
            self._turn(node)
            for inner in node.body:
                self.statement(inner)
        self.known.constants.pop(node.target.id, None)
        if self.view is not None:
            self.view.names[node.target.id] = None

    def _written_twice(self, node: ast.For, turns: range | None) -> bool:
        """Write a loop twice, if some of its indices can be looked at before it: for where they are all inside, too."""
        assert isinstance(node.target, ast.Name)
        assert isinstance(node.iter, ast.Call)
        ends = node.iter.args
        step = ends[2].value if len(ends) > 2 and isinstance(ends[2], ast.Constant) else 1
        rises = len(ends) < 3 or (isinstance(ends[2], ast.Constant) and isinstance(step, int) and step > 0)
        simple = not any(self._does_more(n) for end in ends for n in ast.walk(end))
        if not rises or not simple or self.parsed.has_collective(node) or leaves(node.body):
            return False
        changed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        variable = None if turns is not None else f"v_{node.target.id}"
        bounds = Bounds(variable)
        view = View(
            bounds,
            self.parsed,
            lambda name: None if name in changed else self.read(name),
            dict.fromkeys(changed),
        )
        view.arrays = {name: Root(name, tuple(self.extents(name)), self.kind(name)) for name in self.ranks}
        view.names[node.target.id] = Sum(((variable, 1),)) if variable else None
        lines, self.lines = self.lines, []
        before, self.known = self.known, self.known.copy()
        self.view, self.twice = view, False
        self.depth += 1
        self._loop(node, turns)
        self.depth -= 1
        self.view = None
        sure, self.lines, self.known = self.lines, lines, before
        worth = variable is not None or bounds.n_accesses >= LEAST_SURE
        if bounds.ranges and worth:
            first, last = f"_first{len(lines)}", f"_last{len(lines)}"
            if variable:
                self.emit(f"{first} = {self.text(ends[0]) if len(ends) > 1 else '0'}")
                self.emit(f"{last} = {self.text(ends[min(1, len(ends) - 1)])} - 1")
            tests = [*bounds.tests(first, last), *((f"s_{name}", "1") for name in sorted(bounds.known))]
            if variable:
                tests.append((f"({last} - {first})", str(MOST_FACTOR)))
            indices, extents = (", ".join(each) for each in zip(*tests, strict=True))
            self.emit(f"if all_within(({indices},), ({extents},)):")
            self.lines += sure
            self.emit("else:")
            self.depth += 1
            self._loop(node, turns)
            self.depth -= 1
        self.twice = True
        return bool(bounds.ranges) and worth

    def _does_more(self, node: ast.AST) -> bool:
        """Whether an expression is more than arithmetic: written twice, it would be done twice."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Name)
        least = (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
        )
        return isinstance(node, ast.Call) and not least

    def _loop(self, node: ast.For, turns: range | None) -> None:
        """A loop as it is, or written out."""
        if turns is not None:
            self._write_out(node, turns)
            return
        self.known.forget(node)
        self._turn(node)
        assert isinstance(node.target, ast.Name)
        self.emit(f"for v_{node.target.id} in {self.range_of(node)}:", node)
        self.block(node.body)
        self._ran(node)

    def _ran(self, node: ast.stmt) -> None:
        if self.view is not None:
            self.view.ran(node)
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
        self,
        module: CudaModule,
        parsed: ParsedFunction,
        shapes: tuple[ArgumentShape, ...],
        name: str,
        view: View | None = None,
    ) -> None:
        self.shapes = dict(zip(parsed.parameters, shapes, strict=True))
        super().__init__(module, parsed, {p: shape[1] for p, shape in self.shapes.items() if shape})
        self.view = view
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
        self.twice = True

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

    def __init__(
        self, table: AccessTable, block: tuple[int, ...], known: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(HostOptions(checked=True), NumberedAccess(table))
        self.block = block
        #: parameters that are constants, for the most part: where they are not looked up, loops need not do so
        self.known = known
        self._seen: dict[str, str] = {}

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

    def seen_function(self, function: Any, shapes: tuple[ArgumentShape, ...], view: View) -> str:
        """Name of the form of a device function in which a view's indices are not looked at."""
        lines = DeviceFunctionEmitter(self, function.parsed, shapes, "d_", view).lines
        text = "\n".join(lines)
        if text not in self._seen:
            name = f"e_{function.parsed.name}_{len(self._seen)}"
            self._seen[text] = name
            self._sources.append(text.replace("def d_(", f"def {name}(", 1))
        return self._seen[text]

    def source(self, body: list[str]) -> str:
        """Whole text of the module around a kernel's text."""
        return "\n\n".join([*self._sources, "\n".join(body), ""])


def checked_source(
    plan: KernelPlan, table: AccessTable, known: frozenset[str] = frozenset()
) -> tuple[str, CudaModule]:
    """Text of a kernel's checked form and its device functions, and what it uses.

    ``known``: parameters of which the host knows, as a rule, that they are written.
    """
    module = CudaModule(table, plan.block, known)
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


def compile_checked_ptx(
    plan: KernelPlan,
    table: AccessTable,
    compute_capability: tuple[int, int],
    known: frozenset[str] = frozenset(),
) -> str:
    """PTX of a kernel's checked form, as ``checked_source`` says. Raises ``DeviceError`` as ``compile_ptx`` does."""

    def make() -> Any:
        from numba import cuda  # noqa: PLC0415

        from instrumentation.kernel.checked_cuda import RUNTIME  # noqa: PLC0415

        source, module = checked_source(plan, table, known)
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

    signature = checked_signature(plan.signature)
    text = compile_function(plan.parsed.name, make, signature, compute_capability)
    arrays = sum(isinstance(kind, nb.Array) for kind in plan.signature.values())
    return with_checks(text, len(signature.args) - arrays - 1)
