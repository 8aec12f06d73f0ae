"""Whose states need not be looked up: of parameters that may be read unwritten, and of shared arrays before a loop.

What a block wrote to its shared memory stays written. So where all that a loop reads of a shared array is written
before the loop, its turns need not look: a look at a range of states costs an eighth of a look at each.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from instrumentation.kernel.checked.sums import Sum
from instrumentation.kernel.origin import origin_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from instrumentation.kernel.checked.sums import Capped, Part
    from instrumentation.kernel.parse import ParsedFunction

#: states that are looked at together
WORD = 8
#: a range is looked at where it has fewer words than this for each load
_WORDS_A_LOAD = 0.5


def allowed_reads(parsed: ParsedFunction, names: Iterable[str]) -> frozenset[str]:
    """Arrays of a function of which every load says that what it reads may be unwritten: only a free is wrong there."""
    return frozenset(name for name in names if _allows(parsed, name))


def _allows(parsed: ParsedFunction, name: str) -> bool:
    for node in parsed.walk():
        origin = origin_of(node) if isinstance(node, ast.Subscript | ast.Call) else None
        said = origin is not None and origin.may_be_unwritten
        if isinstance(node, ast.Subscript) and _is(node.value, name) and not said:
            return False
        given = (
            [i for i, each in enumerate(node.args) if _is(each, name)] if isinstance(node, ast.Call) else []
        )
        if not given or said:
            continue
        function = parsed.device_function(node)
        if function is None or not all(
            _allows(function.parsed, function.parsed.parameters[i]) for i in given
        ):
            return False
    return True


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


Factors: TypeAlias = "tuple[tuple[str | Part, int], ...]"


@dataclass
class _Range:
    low: int
    high: int
    loads: int = 1


@dataclass
class SharedReads:
    """What one loop reads of shared arrays, by number of the element."""

    #: text of the loop's variable; None where the loop is written out
    variable: str | None = None
    #: extents of the arrays that have states
    extents: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: those of which all that is read is written
    written: frozenset[str] = frozenset()
    ranges: dict[tuple[str, Factors], _Range] = field(default_factory=dict)

    def add(self, name: str, indices: Iterable[Sum | Capped]) -> bool:
        """A load of each turn: whether it is known to be of what is written."""
        if name not in self.extents:
            return False
        number: Sum | None = Sum()
        for index, extent in zip(indices, self.extents[name], strict=True):
            above = number.times(extent) if number is not None else None
            number = above.plus(index) if above is not None and isinstance(index, Sum) else None
        if number is None:
            return False
        found = self.ranges.setdefault((name, number.factors), _Range(number.constant, number.constant, 0))
        found.low, found.high = min(found.low, number.constant), max(found.high, number.constant)
        found.loads += 1
        return name in self.written

    def worth(self) -> frozenset[str]:
        """Arrays whose ranges are looked at with less than the loads' own states."""
        dear = {name for (name, factors), found in self.ranges.items() if not self._is_worth(factors, found)}
        return frozenset(name for name, _ in self.ranges) - dear

    def _is_worth(self, factors: Factors, found: _Range) -> bool:
        a_turn = found.high - found.low + 1
        if self.variable is not None:
            others = [term for term, _ in factors if term != self.variable]
            if any(Sum(((term, 1),)).depends_on(self.variable) for term in others):
                return False
            a_turn = max(abs(dict(factors).get(self.variable, 0)), 1)
        return a_turn <= found.loads * WORD * _WORDS_A_LOAD

    def tests(self, first: str, last: str) -> list[str]:
        """Expressions that hold where all that is read of the arrays that are ``written`` is so."""
        texts = []
        ends = {} if self.variable is None else {self.variable: (first, last)}
        for (name, factors), found in self.ranges.items():
            if name not in self.written:
                continue
            low = Sum(factors, found.low).end(ends, largest=False)
            high = Sum(factors, found.high).end(ends, largest=True)
            # Of a range whose length is known, the compiler can look at all words at a time.
            words = (found.high - found.low + WORD - 1) // WORD + 1 if self.variable is None else 0
            texts.append(f"all_written(s_{name}, {low}, {high}, {words})")
        return texts
