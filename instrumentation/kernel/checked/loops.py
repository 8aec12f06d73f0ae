"""Loops of a checked kernel for a GPU: those whose indices are looked at first, and short ones that are written out."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from instrumentation.kernel.checked.bounds import Bounds, Root, View
from instrumentation.kernel.checked.constants import ConstantReads
from instrumentation.kernel.checked.numbered_access import KNOWN, SURE, WRITTEN
from instrumentation.kernel.checked.own import OwnArrays
from instrumentation.kernel.checked.states import SharedReads
from instrumentation.kernel.checked.sums import MOST_FACTOR, Sum
from instrumentation.kernel.written_out import leaves, names_of_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instrumentation.kernel.checked.lower_cuda import CudaModule
    from instrumentation.kernel.host_emit import Place
    from instrumentation.kernel.parse import ParsedFunction

#: statements of a loop that is written out
MOST_WRITTEN_OUT = 1024
SHARED_ACCESS = 2
#: of larger numbers, Python would compute products that do not wrap around
MOST_LITERAL = 1 << 10
#: accesses of a loop that is written out and for whose sake it is written twice, and the most statements of such a loop
LEAST_SURE, MOST_TWICE = 8, 400


@dataclass(frozen=True)
class Beforehand:
    """What is looked at before a loop beside its indices."""

    #: whether states of what the kernel only reads are
    looked: bool = False
    #: shared arrays of which all that is read then is written
    shared: frozenset[str] = frozenset()
    #: elements, as bits, of own arrays that then are
    own: Mapping[str, int] = field(default_factory=dict)


class LoopEmitter(OwnArrays):
    """One thread's statements; a loop may stand there twice, or each turn of it."""

    def __init__(
        self, module: CudaModule, parsed: ParsedFunction, ranks: dict[str, int], moving: frozenset[str]
    ) -> None:
        super().__init__(module, parsed, ranks, moving)
        #: whether loops may be written twice
        self.twice = False
        #: ends of names of which each turn of a loop has its own: the compiler takes long for those assigned often
        self._ends: dict[str, str] = {}
        self._n_ends = 0
        self._own_names: dict[int, list[str]] = {}
        #: names that are surely signed, and arrays of such numbers
        self.signs: frozenset[str] = frozenset()
        #: extents of shared arrays that have states
        self.shared: dict[str, tuple[int, ...]] = {}

    def read(self, name: str) -> str:
        """Expression of a name's value."""
        value = self.known.constants.get(name)
        if value is None:
            return super().read(name) + self._ends.get(name, "")
        if abs(value) >= MOST_LITERAL:
            return f"int64({value})"
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
        if name in self.parsed.arrays and self.parsed.arrays[name].space == "local":
            return place
        return self._sure(place, name, index, isinstance(getattr(node, "ctx", None), ast.Load))

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
        if place.origin is None or not place.origin.may_be_unwritten:
            if place.kind == "ro" and view.constants.add(root, known):
                return replace(place, kind=KNOWN)
            if is_load and view.shared.add(root.name, known):
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
        view = self.view.called(node, function.parsed, given)
        name = self.module.seen_function(function, tuple(self._array_shape(a) for a in node.args), view)
        texts = [self._argument(each) for each in node.args]
        return f"{name}({', '.join([*texts, self.access.call(function.parsed, node, self.where) or ''])})"

    def block(self, statements: list[ast.stmt]) -> None:
        """Statements one level deeper: what is learnt there holds there."""
        before, self.known = self.known, self.known.copy()
        names = dict(self.view.names) if self.view is not None else {}
        super().block(statements)
        self.depth += 1
        self.say_new()
        self.depth -= 1
        self.known = before
        if self.view is not None:
            self.view.names = names

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
            self.say_new()
        if isinstance(node, ast.For) and self.twice and self._written_twice(node, turns):
            return
        if turns is None:
            if isinstance(node, ast.For | ast.While):
                self.known.forget(node)
            if self.view is not None and isinstance(node, ast.If | ast.For | ast.While):
                self.view.forget(node)
            super().statement(node)
            self.note(node)
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
        self.say_new()
        assert isinstance(node.target, ast.Name)
        assert isinstance(node.iter, ast.Call)
        ends = node.iter.args
        step = ends[2].value if len(ends) > 2 and isinstance(ends[2], ast.Constant) else 1
        rises = len(ends) < 3 or (isinstance(ends[2], ast.Constant) and isinstance(step, int) and step > 0)
        simple = not any(self._does_more(n) for end in ends for n in ast.walk(end))
        if not rises or not simple or self.parsed.has_collective(node) or leaves(node.body):
            return False
        if turns is not None and len(turns) * self._size(node.body) > MOST_TWICE:
            return False
        variable = None if turns is not None else f"v_{node.target.id}"
        view, sure = self._seen(node, turns, variable, Beforehand())
        beforehand = Beforehand(
            looked=variable is not None and view.constants.worth, shared=view.shared.worth(), own=view.own
        )
        if beforehand != Beforehand():
            view, sure = self._seen(node, turns, variable, beforehand)
        bounds = view.bounds
        worth = variable is not None or bounds.n_accesses >= LEAST_SURE
        if bounds.ranges and worth:
            number = len(self.lines)
            first, last = f"_first{number}", f"_last{number}"
            if variable:
                self.emit(f"{first} = {self.text(ends[0]) if len(ends) > 1 else '0'}")
                self.emit(f"{last} = {self.text(ends[min(1, len(ends) - 1)])} - 1")
            tests = [*bounds.tests(first, last), *((f"s_{name}", "1") for name in sorted(bounds.known))]
            if variable:
                tests.append((f"({last} - {first})", str(MOST_FACTOR)))
            indices, extents = (", ".join(each) for each in zip(*tests, strict=True))
            inside = f"all_within(({indices},), ({extents},))"
            inside = " and ".join([inside, *view.own_tests(), *view.shared.tests(first, last)])
            if beforehand.looked:
                self.emit(f"_sure{number} = {inside}")
                inside = f"_sure{number}"
                for line in view.constants.lines(inside, f"for {variable} in {self.range_of(node)}:"):
                    self.emit(line)
            self.emit(f"if {inside}:")
            self.lines += sure
            self.emit("else:")
            self.depth += 1
            self._loop(node, turns)
            self.depth -= 1
        self.twice = True
        return bool(bounds.ranges) and worth

    def _seen(
        self, node: ast.For, turns: range | None, variable: str | None, beforehand: Beforehand
    ) -> tuple[View, list[str]]:
        """A loop for where its indices are inside, and what that needs."""
        changed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        view = View(
            Bounds(variable),
            self.parsed,
            lambda name: None if name in changed else self.read(name),
            dict.fromkeys(changed),
            constants=ConstantReads(looked=beforehand.looked),
            shared=SharedReads(variable, self.shared, beforehand.shared),
            own_written=beforehand.own,
            signs=self.signs,
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
            self.say_new()
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
