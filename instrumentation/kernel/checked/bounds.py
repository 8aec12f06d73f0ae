"""Which indices of a loop can be looked at before it: those that are sums of what stays, and of its variable.

Such a sum is largest and smallest in the first and the last turn. If both are inside, so are those between, and the
loop need not look. Quotients and remainders of such a sum by a number, shifts and bits of it too, are between ends that
follow from the sum's, as long as that is never negative. What a loop's statements say is followed through names and
device functions; whatever is not known to be such a sum stays checked where it stands.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from instrumentation.kernel.checked.constants import ConstantReads
from instrumentation.kernel.checked.signs import is_signed, signed_names
from instrumentation.kernel.checked.states import SharedReads
from instrumentation.kernel.checked.sums import Capped, Part, Sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from instrumentation.kernel.parse import ParsedFunction

#: what every index is inside of that is not negative
_NO_EXTENT = str((1 << 63) - 1)
_Key = TypeVar("_Key")
_BITWISE = {ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}
_DIVISIONS = {ast.FloorDiv: "//", ast.Mod: "%"}


@dataclass(frozen=True)
class Root:
    """An array of the function around the loop: its name, the text of its extents, its alias class."""

    name: str
    extents: tuple[str, ...]
    kind: str


@dataclass
class Bounds:
    """What is to be looked at before one loop."""

    #: text of the loop's variable; None where the loop is written out
    variable: str | None
    #: of each array, axis and sum of terms: the smallest and the largest constant
    ranges: dict[tuple[Root, int, tuple[tuple[str | Part, int], ...]], tuple[int, int]] = field(
        default_factory=dict
    )
    #: of each sum that must not be negative: the smallest and the largest constant
    positive: dict[tuple[tuple[str | Part, int], ...], tuple[int, int]] = field(default_factory=dict)
    #: arrays of which nothing needs to be looked up, if the host says so
    known: set[str] = field(default_factory=set)
    #: of terms that are as they say only where other sums are not negative: those
    guards: dict[str, tuple[Sum, ...]] = field(default_factory=dict)
    n_accesses: int = 0

    def require(self, root: Root, indices: list[Sum | Capped]) -> None:
        """An access of each turn, whose indices these are."""
        self.n_accesses += 1
        for axis, index in enumerate(indices):
            each = index.cap if isinstance(index, Capped) else index
            if isinstance(index, Capped):
                self._not_negative(index.value)
            for part in each.parts():
                self._not_negative(part.of)
            for guard in self.guarding(each):
                self._not_negative(guard)
            _widen(self.ranges, (root, axis, each.factors), each.constant)

    def _not_negative(self, value: Sum) -> None:
        for each in (value, *(part.of for part in value.parts()), *self.guarding(value)):
            _widen(self.positive, each.factors, each.constant)

    def guarding(self, value: Sum) -> Iterator[Sum]:
        """Sums that must not be negative for a sum's terms to be as they say."""
        for each in (value, *(part.of for part in value.parts())):
            for term, _ in each.factors:
                yield from self.guards.get(term, ()) if isinstance(term, str) else ()

    def tests(self, first: str, last: str) -> list[tuple[str, str]]:
        """Indices and extents: if all are inside, so are those of all turns, from ``first`` to ``last``."""
        ends = {} if self.variable is None else {self.variable: (first, last)}
        found: dict[tuple[str, str], None] = {}
        for (root, axis, factors), (low, high) in self.ranges.items():
            for constant, largest in ((low, False), (high, True)):
                found[Sum(factors, constant).end(ends, largest=largest), root.extents[axis]] = None
        for factors, constants in self.positive.items():
            # The upper one is negative where it wraps around.
            for constant, largest in zip(constants, (False, True), strict=True):
                found[Sum(factors, constant).end(ends, largest=largest), _NO_EXTENT] = None
        return list(found)


@dataclass
class View:
    """What is known inside of a loop, in the function around it or in one that it calls."""

    bounds: Bounds
    parsed: ParsedFunction
    #: text of a name of the function around the loop that its statements do not change; None in a function it calls
    outer: Callable[[str], str | None] | None
    #: names that are sums, and those that are known not to be
    names: dict[str, Sum | Capped | None] = field(default_factory=dict)
    #: arrays that a called function was given
    arrays: dict[str, Root] = field(default_factory=dict)
    #: what is read of arrays that the kernel only reads, and of shared arrays
    constants: ConstantReads = field(default_factory=ConstantReads)
    shared: SharedReads = field(default_factory=SharedReads)
    #: elements, as bits, that are read of own arrays and may be unwritten; and those that are known to be written
    own: dict[str, int] = field(default_factory=dict)
    own_written: Mapping[str, int] = field(default_factory=dict)
    #: names that are surely signed, and arrays of such numbers
    signs: frozenset[str] = frozenset()

    def value(self, node: ast.expr) -> Sum | Capped | None:
        """The sum that an expression is, or a capped one."""
        if isinstance(node, ast.Constant):
            value = node.value
            return Sum.of({}, value) if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(node, ast.Name):
            if node.id in self.names or self.outer is None:
                return self.names.get(node.id)
            text = self.outer(node.id)
            if text is None:
                return None
            return _sum_of(text if node.id in self.signs or text.isdigit() else f"int64({text})")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._sum(node.operand)
            return None if operand is None else operand.times(-1)
        if isinstance(node, ast.BinOp):
            return self._of_two(node)
        if isinstance(node, ast.Attribute):
            cuda = self.parsed.cuda_name(node) or ""
            axis = cuda.partition(".")[0] in ("threadIdx", "blockIdx", "blockDim", "gridDim")
            return Sum(((f"cuda.{cuda}", 1),)) if axis else None
        if isinstance(node, ast.Subscript):
            return self._extent(node)
        return self._extreme(node) if isinstance(node, ast.Call) else None

    def _of_two(self, node: ast.BinOp) -> Sum | None:
        left, right = self._sum(node.left), self._sum(node.right)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Add | ast.Sub):
            return left.plus(right, 1 if isinstance(node.op, ast.Add) else -1)
        if isinstance(node.op, ast.LShift) and not right.factors and 0 <= right.constant < 31:
            return left.times(1 << right.constant)
        if isinstance(node.op, ast.Mult):
            for one, other in ((left, right), (right, left)):
                if not one.factors:
                    return other.times(one.constant)
        symbol = _BITWISE.get(type(node.op)) or ("*" if isinstance(node.op, ast.Mult) else None)
        if type(node.op) in _DIVISIONS and not right.factors and right.constant > 0:
            symbol = _DIVISIONS[type(node.op)]
        if isinstance(node.op, ast.RShift) and (right.factors or not 0 <= right.constant < 63):
            symbol = None
        if symbol is None:
            return None
        term = self._term(f"({left.text()} {symbol} {right.text()})", left, right)
        if term is not None:
            guarded = symbol == ">>" and not self.signed(node.left)
            self._guard(term, (left,) if guarded else (), left, right)
        return term or _part(left, symbol, right)

    def signed(self, node: ast.expr) -> bool:
        """Whether an expression is surely signed."""
        return is_signed(self.parsed, node, self.signs)

    def _guard(self, term: Sum, guards: tuple[Sum, ...], *parts: Sum) -> None:
        """Say what must not be negative for a new term of these parts to be as it says."""
        ((text, _),) = term.factors
        assert isinstance(text, str)
        found = [*self.bounds.guards.get(text, ()), *guards]
        for part in parts:
            found += self.bounds.guarding(part)
        if found:
            self.bounds.guards[text] = tuple(dict.fromkeys(found))

    def _term(self, text: str, *parts: Sum) -> Sum | None:
        """What stays as it is in all turns, as one term."""
        variable = self.bounds.variable
        if variable is not None and any(part.depends_on(variable) for part in parts):
            return None
        return Sum(((text, 1),))

    def _sum(self, node: ast.expr) -> Sum | None:
        value = self.value(node)
        return value if isinstance(value, Sum) else None

    def _extreme(self, node: ast.Call) -> Sum | Capped | None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in ("min", "max") or self.parsed.resolve(node.func) not in (None, min, max):
            return None
        parts = [self._sum(each) for each in node.args]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        term = self._term(f"{name}({', '.join(part.text() for part in known)})", *known)
        if term is None and name == "min" and len(known) == 2:
            value, cap = known if self._term("", known[1]) is not None else reversed(known)
            if self._term("", cap) is not None:
                return Capped(value, cap)
        if term is not None:
            exact = any(self.signed(each) for each in node.args)
            self._guard(term, () if exact else tuple(known), *known)
        return term

    def _extent(self, node: ast.Subscript) -> Sum | None:
        """``x.shape[0]``."""
        if not isinstance(node.value, ast.Attribute) or not isinstance(node.slice, ast.Constant):
            return None
        array = node.value.value
        root = self.arrays.get(array.id) if isinstance(array, ast.Name) else None
        axis = node.slice.value
        if root is None or not isinstance(axis, int) or axis >= len(root.extents):
            return None
        return _sum_of(root.extents[axis])

    def reads_own(self, name: str, number: int) -> bool:
        """An element of an own array is read: whether it is known to be written. Of a called function's no more is."""
        if self.outer is None:
            return False
        self.own[name] = self.own.get(name, 0) | 1 << number
        return bool(self.own_written.get(name, 0) >> number & 1)

    def own_tests(self) -> list[str]:
        """Expressions that hold where all that is read of own arrays is written."""
        return [f"(s_{name} & uint64({bits})) == uint64({bits})" for name, bits in self.own_written.items()]

    # --- statements

    def again(self) -> View:
        """The same, before any of its statements was written."""
        return replace(self, names=dict(self.names))

    def called(self, node: ast.Call, parsed: ParsedFunction, given: list[Sum | Capped | Root | None]) -> View:
        """What is known inside of a function that is called with these."""
        pairs = list(zip(parsed.parameters, given, strict=True))
        signed = (n for n, each in zip(parsed.parameters, node.args, strict=True) if self.signed(each))
        names = {name: each for name, each in pairs if not isinstance(each, Root)}
        arrays = {name: each for name, each in pairs if isinstance(each, Root)}
        signs = signed_names(parsed, signed)
        return View(self.bounds, parsed, None, names, arrays, self.constants, self.shared, signs=signs)

    def ran(self, node: ast.stmt) -> None:
        """A statement was written."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            self.names[node.targets[0].id] = self.value(node.value)
        elif isinstance(node, ast.If | ast.For | ast.While):
            self.forget(node)

    def forget(self, node: ast.AST) -> None:
        """What a statement assigns is not known."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self.names[inner.id] = None


def _sum_of(text: str) -> Sum | None:
    return Sum.of({}, int(text)) if text.isdigit() else Sum(((text, 1),))


def _widen(ranges: dict[_Key, tuple[int, int]], key: _Key, value: int) -> None:
    low, high = ranges.get(key, (value, value))
    ranges[key] = (min(low, value), max(high, value))


def _part(left: Sum, symbol: str, right: Sum) -> Sum | None:
    """A part of a sum that differs from turn to turn."""
    if symbol == "&" and right.factors:
        left, right = right, left
    part = None if right.factors else Part.made(left, symbol, right.constant)
    return None if part is None else Sum.of({part: 1}, 0)
