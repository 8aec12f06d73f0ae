"""What is known of a thread's own arrays while its statements are written in order: constant indices, written elements.

An access whose index is a constant inside the array, of an element that was written on every way to it, needs no check.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from instrumentation.kernel.parse import LocalArray, ParsedFunction

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_DIVISIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_MOST_SHIFTED = 32
#: what an int64 is less than
_MOST = 1 << 63


@dataclass
class Known:
    """At one point of a function: names that are constants, and elements of own arrays that were written."""

    constants: dict[str, int] = field(default_factory=dict)
    written: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> Known:
        """An independent copy."""
        return Known(dict(self.constants), {name: set(found) for name, found in self.written.items()})

    def value(self, node: ast.expr) -> int | None:
        """The integer that an expression is; None when it is not known, or wraps around or is unsigned on a device."""
        value = self._whole_number(node)
        return value if value is not None and -_MOST <= value < _MOST else None

    def _whole_number(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int) and not isinstance(node.value, bool) else None
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            if left is None or right is None:
                return None
            kind = type(node.op)
            if kind in _DIVISIONS:
                return _DIVISIONS[kind](left, right) if right > 0 and left >= 0 else None
            if kind in (ast.LShift, ast.RShift) and not 0 <= right < _MOST_SHIFTED:
                return None
            return _OPERATIONS[kind](left, right) if kind in _OPERATIONS else None
        return None

    def truth(self, node: ast.expr) -> bool | None:
        """What a comparison of constants comes to; None for all else."""
        if not isinstance(node, ast.Compare) or len(node.ops) > 1 or type(node.ops[0]) not in _COMPARISONS:
            return None
        left, right = self.value(node.left), self.value(node.comparators[0])
        return None if left is None or right is None else _COMPARISONS[type(node.ops[0])](left, right)

    def element(self, array: LocalArray, index: ast.expr) -> int | None:
        """Row-major number of the element at an index; None when that is not known, or not inside."""
        indices = index.elts if isinstance(index, ast.Tuple) else [index]
        number = 0
        for each, extent in zip(indices, array.shape, strict=False):
            value = self.value(each)
            if value is None or not 0 <= value < extent:
                return None
            number = number * extent + value
        return number if len(indices) == len(array.shape) else None

    def whole(self, name: str, array: LocalArray) -> bool:
        """Whether every element was written."""
        return len(self.written.get(name, ())) == prod(array.shape)

    def assigned(self, node: ast.Assign, arrays: dict[str, LocalArray]) -> None:
        """A statement was run."""
        target = node.targets[0]
        if isinstance(target, ast.Name):
            value = self.value(node.value)
            if value is None:
                self.constants.pop(target.id, None)
            else:
                self.constants[target.id] = value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            name = target.value.id
            if name in arrays and arrays[name].space == "local":
                number = self.element(arrays[name], target.slice)
                if number is not None:
                    self.written.setdefault(name, set()).add(number)

    def forget(self, node: ast.AST) -> None:
        """What a statement assigns may be something else now."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                self.constants.pop(inner.id, None)

    def looped(self, node: ast.For, arrays: dict[str, LocalArray]) -> None:
        """A loop over all elements of an array that writes each was run."""
        ends = node.iter.args if isinstance(node.iter, ast.Call) else []
        if len(ends) != 1 or leaves(node.body):
            return
        for inner in node.body:
            target = inner.targets[0] if isinstance(inner, ast.Assign) else None
            if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
                continue
            array = arrays.get(target.value.id)
            if array is None or array.space != "local" or len(array.shape) != 1:
                continue
            at = target.slice
            if isinstance(at, ast.Name) and isinstance(node.target, ast.Name) and at.id == node.target.id:
                extent = array.shape[0]
                if self.value(ends[0]) == extent:
                    self.written[target.value.id] = set(range(extent))


def leaves(statements: list[ast.stmt]) -> bool:
    """Whether a ``break`` or ``continue`` of the loop around them stands among statements."""
    for node in statements:
        if isinstance(node, ast.Break | ast.Continue):
            return True
        if isinstance(node, ast.If) and (leaves(node.body) or leaves(node.orelse)):
            return True
    return False


def names_of_turns(loop: ast.For, parsed: ParsedFunction) -> list[str]:
    """Names that each turn of a loop assigns before it reads them, and that nobody reads behind the loop."""
    inside = list(ast.walk(loop))
    read = Counter(_read(inside))
    everywhere = Counter(_read(parsed.walk()))
    targets = {n.target.id for n in inside if isinstance(n, ast.For) and isinstance(n.target, ast.Name)}
    found: list[str] = []
    # The loop's ends are read once, before its first turn.
    seen = set(_read(ast.walk(loop.iter)))
    for statement in loop.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        used = set(_read(ast.walk(statement)))
        if isinstance(target, ast.Name) and target.id not in seen | used | targets:
            found += [target.id] if read[target.id] == everywhere[target.id] else []
        seen |= used | {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
    return found


def _read(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
