"""Statements of a checked kernel for a GPU: loops whose indices are looked at first, short ones written out."""

from __future__ import annotations

import ast
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from numba.core import types as nb

from instrumentation.kernel.checked_bounds import MOST_FACTOR, Bounds, Root, Sum, View
from instrumentation.kernel.checked_states import SharedReads
from instrumentation.kernel.host_emit import FunctionEmitter, Place
from instrumentation.kernel.lower_host import AXES
from instrumentation.kernel.numbered_access import INSIDE, KNOWN, SURE, WRITTEN
from instrumentation.kernel.plan import MAX_SHARED_BYTES
from instrumentation.kernel.written_out import Known, leaves, names_of_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from instrumentation.kernel.lower_checked_cuda import CudaModule
    from instrumentation.kernel.lower_host import ArgumentShape
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan


#: statements of a loop that is written out
MOST_WRITTEN_OUT = 1024
SHARED_ACCESS = 2
#: elements of an own array whose states are bits of one number
MOST_BITS = 64
#: accesses of a loop that is written out and for whose sake it is written twice
LEAST_SURE = 8


class _CudaEmitter(FunctionEmitter):
    """One thread's statements with CUDA's own operations."""

    module: CudaModule

    def __init__(
        self, module: CudaModule, parsed: ParsedFunction, ranks: dict[str, int], moving: frozenset[str]
    ) -> None:
        super().__init__(module, parsed, ranks)
        self.known = Known()
        #: own arrays whose states are bits of one number, as they are accessed at constant places alone
        self._bits = frozenset(
            name
            for name, array in parsed.arrays.items()
            if array.space == "local" and prod(array.shape) <= MOST_BITS and name not in moving
        )
        #: those that are not, as it turned out
        self.moving: set[str] = set()
        #: of each, elements that statements before this one wrote on every way, and the number does not say yet
        self._new: dict[str, int] = {}
        #: inside of a loop whose indices are looked at before it
        self.view: View | None = None
        #: whether loops may be written twice
        self.twice = False
        #: ends of names of which each turn of a loop has its own: the compiler takes long for those assigned often
        self._ends: dict[str, str] = {}
        self._n_ends = 0
        self._own_names: dict[int, list[str]] = {}
        #: extents of shared arrays that have states
        self._shared: dict[str, tuple[int, ...]] = {}

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
            return self._sure(place, name, index, isinstance(getattr(node, "ctx", None), ast.Load))
        number = self.known.element(array, index)
        if number is None or not isinstance(node, ast.Subscript):
            self._moves(name)
            return replace(place, shadow="0") if self.known.whole(name, array) else place
        is_load = isinstance(node.ctx, ast.Load)
        written = number in self.known.written.get(name, ())
        if is_load and not written and name in self._bits and self.view is not None:
            written = self.view.reads_own(name, number)
        shadow = place.shadow
        if name in self._bits:
            shadow = f"own_state({place.shadow}, {number})" if is_load else "0"
        return replace(place, kind=WRITTEN if written else INSIDE, element=str(number), shadow=shadow)

    def _moves(self, name: str) -> None:
        """An own array is accessed at a place that is not known here."""
        if name in self._bits:
            self.moving.add(name)

    def _sure(self, place: Place, name: str, index: ast.expr, is_load: bool) -> Place:
        """The place, if its indices can be looked at before the loop around it."""
        view, root = self.view, self._root(name)
        if view is None or root is None:
            return place
        sums = [view.value(each) for each in (index.elts if isinstance(index, ast.Tuple) else [index])]
        known = [each for each in sums if each is not None]
        if len(known) < len(sums):
            return place
        view.bounds.require(root, known)
        if root.name in self.module.known and place.kind == "ro":
            view.bounds.known.add(root.name)
            return replace(place, kind=KNOWN)
        if is_load and view.shared is not None and view.shared.add(root.name, known):
            return replace(place, kind=WRITTEN)
        return replace(place, kind=SURE + place.kind)

    def _root(self, name: str) -> Root | None:
        """Where an array comes from, seen from the loop that is written."""
        if self.view is None or self.view.outer is None:
            return self.view.arrays.get(name) if self.view else None
        return Root(name, tuple(self.extents(name)), self.kind(name))

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
        names = dict(self.view.names) if self.view is not None else {}
        super().block(statements)
        self.depth += 1
        self._say_new()
        self.depth -= 1
        self.known = before
        if self.view is not None:
            self.view.names = names

    def index_name(self, cuda: str, node: ast.AST) -> str:  # noqa: ARG002 - as the host's
        """Text of ``cuda.threadIdx.x`` and the like."""
        of, _, axis = cuda.partition(".")
        if of == "threadIdx":
            # The compiler does not know how many threads a block has: what an index is below spares it checks.
            extent = (*self.module.block, 1, 1)["xyz".index(axis)]
            return f"below(cuda.{cuda}, {extent})" if extent & (extent - 1) == 0 else f"cuda.{cuda}"
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
        if turns is None and not isinstance(node, ast.Assign | ast.Expr | ast.Pass):
            self._say_new()
        if isinstance(node, ast.For) and self.twice and self._written_twice(node, turns):
            return
        if turns is None:
            if isinstance(node, ast.For | ast.While):
                self.known.forget(node)
            if self.view is not None and isinstance(node, ast.If | ast.For | ast.While):
                self.view.forget(node)
            super().statement(node)
            self._note(node)
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
        self._say_new()
        assert isinstance(node.target, ast.Name)
        assert isinstance(node.iter, ast.Call)
        ends = node.iter.args
        step = ends[2].value if len(ends) > 2 and isinstance(ends[2], ast.Constant) else 1
        rises = len(ends) < 3 or (isinstance(ends[2], ast.Constant) and isinstance(step, int) and step > 0)
        simple = not any(self._does_more(n) for end in ends for n in ast.walk(end))
        if not rises or not simple or self.parsed.has_collective(node) or leaves(node.body):
            return False
        variable = None if turns is not None else f"v_{node.target.id}"
        view, sure = self._seen(node, turns, variable, frozenset(), {})
        assert view.shared is not None
        if view.shared.worth() or view.own:
            view, sure = self._seen(node, turns, variable, view.shared.worth(), view.own)
        bounds, shared = view.bounds, view.shared
        assert shared is not None
        worth = variable is not None or bounds.n_accesses >= LEAST_SURE
        if bounds.ranges and worth:
            first, last = f"_first{len(self.lines)}", f"_last{len(self.lines)}"
            if variable:
                self.emit(f"{first} = {self.text(ends[0]) if len(ends) > 1 else '0'}")
                self.emit(f"{last} = {self.text(ends[min(1, len(ends) - 1)])} - 1")
            tests = [*bounds.tests(first, last), *((f"s_{name}", "1") for name in sorted(bounds.known))]
            if variable:
                tests.append((f"({last} - {first})", str(MOST_FACTOR)))
            indices, extents = (", ".join(each) for each in zip(*tests, strict=True))
            held = [f"all_within(({indices},), ({extents},))", *view.own_tests(), *shared.tests(first, last)]
            self.emit(f"if {' and '.join(held)}:")
            self.lines += sure
            self.emit("else:")
            self.depth += 1
            self._loop(node, turns)
            self.depth -= 1
        self.twice = True
        return bool(bounds.ranges) and worth

    def _seen(
        self,
        node: ast.For,
        turns: range | None,
        variable: str | None,
        written: frozenset[str],
        own: Mapping[str, int],
    ) -> tuple[View, list[str]]:
        """A loop for where its indices are inside, and what that needs.

        ``written``: shared arrays of which all that is read then is written; ``own``: own arrays, with those elements.
        """
        changed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        view = View(
            Bounds(variable),
            self.parsed,
            lambda name: None if name in changed else self.read(name),
            dict.fromkeys(changed),
            shared=SharedReads(variable, self._shared, written),
            own_written=own,
        )
        view.arrays = {name: Root(name, tuple(self.extents(name)), self.kind(name)) for name in self.ranks}
        assert isinstance(node.target, ast.Name)
        view.names[node.target.id] = Sum(((variable, 1),)) if variable else None
        lines, self.lines = self.lines, []
        before, self.known = self.known, self.known.copy()
        self.view, self.twice = view, False
        self.depth += 1
        self._loop(node, turns)
        self.depth -= 1
        self.view = None
        sure, self.lines, self.known = self.lines, lines, before
        return view, sure

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
            self._say_new()
            return
        self.known.forget(node)
        self._turn(node)
        assert isinstance(node.target, ast.Name)
        self.emit(f"for v_{node.target.id} in {self.range_of(node)}:", node)
        self.block(node.body)
        self._ran(node)

    def _note(self, node: ast.stmt) -> None:
        """Say in a number's bits that an own element is written."""
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        name = (
            target.value.id
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
            else ""
        )
        if name not in self._bits or name in self.moving:
            return
        assert isinstance(target, ast.Subscript)
        number = self.known.element(self.parsed.arrays[name], target.slice)
        if number is not None and number not in self.known.written.get(name, ()):
            self._new[name] = self._new.get(name, 0) | 1 << number

    def _say_new(self) -> None:
        """Say what is written, where ways part or meet: the compiler takes long for names that are assigned often."""
        for name, bits in self._new.items():
            self.emit(f"s_{name} = s_{name} | uint64({bits})")
        self._new = {}

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
        ends = [self.known.value(each) for each in node.iter.args]
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
            if name in self._bits:
                self.emit(f"s_{name} = uint64(0)")
            elif array.space == "local":
                self.emit(f"s_{name} = local_array(uint8, {size})")
                self.emit(f"for _i in range({size}):")
                self.emit(f"    forget(s_{name}, _i)")
            elif size <= left:
                left -= size
                shared.append((name, size))
                self._shared[name] = array.shape
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
        moving: frozenset[str],
        view: View | None = None,
    ) -> None:
        self.shapes = dict(zip(parsed.parameters, shapes, strict=True))
        ranks = {p: shape[1] for p, shape in self.shapes.items() if shape}
        super().__init__(module, parsed, ranks, moving)
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

    def __init__(self, module: CudaModule, plan: KernelPlan, moving: frozenset[str]) -> None:
        ranks = {n: t.ndim for n, t in plan.signature.items() if isinstance(t, nb.Array)}
        super().__init__(module, plan.parsed, ranks, moving)
        self.plan = plan
        self.twice = True
        self._write()

    def kind(self, name: str) -> str:
        """Alias class of an array."""
        return "lane" if name in self.parsed.arrays else self.plan.access.kind(name)

    def _write(self) -> None:
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


def settled(write: Callable[[frozenset[str]], _CudaEmitter]) -> list[str]:
    """Lines of a function: written until it is known which own arrays are accessed at constant places alone."""
    moving: frozenset[str] = frozenset()
    while True:
        emitter = write(moving)
        if emitter.moving <= moving:
            return emitter.lines
        moving |= emitter.moving
