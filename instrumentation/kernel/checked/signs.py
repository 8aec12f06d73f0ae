"""Which whole numbers of a kernel are surely signed: what is not is shifted and compared otherwise where it is large.

A sum that is looked at before a loop is computed as int64: so is an expression that has a signed number in it.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from instrumentation.kernel.parse import number_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.kernel.parse import ParsedFunction


def signed_names(parsed: ParsedFunction, given: Iterable[str]) -> frozenset[str]:
    """Names of a function that are only ever signed, and arrays of such numbers; ``given``: those among parameters."""
    known = frozenset(given)
    sources: dict[str, list[ast.expr]] = {}
    for node in parsed.walk():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            sources.setdefault(node.targets[0].id, []).append(node.value)
        elif (
            isinstance(node, ast.For)
            and isinstance(node.target, ast.Name)
            and isinstance(node.iter, ast.Call)
        ):
            sources.setdefault(node.target.id, []).extend(node.iter.args)
    arrays = {name for name, array in parsed.arrays.items() if array.element.startswith("int")}
    found = {*known, *arrays, *sources} - (set(parsed.parameters) - known)
    while True:
        names = frozenset(found)
        found -= {n for n, values in sources.items() if not all(is_signed(parsed, v, names) for v in values)}
        if found == names:
            return names


def is_signed(parsed: ParsedFunction, node: ast.expr, names: frozenset[str]) -> bool:  # noqa: PLR0911
    """Whether an expression is surely signed, if these names are."""

    def signed(each: ast.expr) -> bool:
        return is_signed(parsed, each, names)

    if isinstance(node, ast.Constant):
        return isinstance(node.value, int) and node.value < 1 << 63
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.UnaryOp):
        return signed(node.operand)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.LShift | ast.RShift):
            return signed(node.left)
        # Of a signed and an unsigned number, the result is signed.
        return signed(node.left) or signed(node.right)
    if isinstance(node, ast.IfExp):
        return signed(node.body) and signed(node.orelse)
    if isinstance(node, ast.Subscript):
        return not isinstance(node.value, ast.Name) or node.value.id in names
    if isinstance(node, ast.Call):
        if parsed.cuda_name(node.func) is not None:
            return False
        function = parsed.resolve(node.func)
        if (
            isinstance(node.func, ast.Name)
            and node.func.id in ("min", "max")
            and function in (None, min, max)
        ):
            return all(signed(each) for each in node.args)
        return (number_type(function) or "").startswith("int")
    return isinstance(node, ast.Attribute)
