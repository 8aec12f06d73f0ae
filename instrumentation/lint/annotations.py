"""What a type annotation says about reservations."""

from __future__ import annotations

import ast
import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TRANSPARENT = {"Annotated", "Final", "ClassVar", "Awaitable", "Required", "NotRequired"}
_CONTAINERS = {
    "list", "tuple", "set", "frozenset", "dict", "deque", "List", "Tuple", "Set", "FrozenSet", "Dict", "Deque",
    "Sequence", "MutableSequence", "Iterable", "Iterator", "Collection", "Mapping", "MutableMapping", "Generator",
    "AsyncIterator", "AsyncIterable", "AsyncGenerator", "OrderedDict", "defaultdict",
}  # fmt: skip


class Kind(enum.Enum):
    """What a value is."""

    UNKNOWN = "not annotated"
    OTHER = "no reservation"
    PLAIN = "a reservation"
    OPTIONAL = "a reservation or None"
    UNION = "a reservation or what was reserved"
    BAG = "a container of reservations"

    @property
    def holds(self) -> bool:
        """Whether a reservation may be in it."""
        return self not in {Kind.UNKNOWN, Kind.OTHER}


def last_name(node: ast.AST | None) -> str:
    """``c`` of ``a.b.c``; blank when it is no such thing."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def classify(node: ast.expr | None, names: Mapping[str, Kind]) -> Kind:
    """Kind of an annotation, where ``names`` are the types known to be reservations, and aliases of them."""
    if node is None:
        return Kind.UNKNOWN
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parsed = parse_text(node.value)
        return Kind.OTHER if parsed is None else classify(parsed, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(_members(node), names)
    if isinstance(node, ast.Subscript):
        return _subscript(node, names)
    return names.get(last_name(node), Kind.OTHER)


def parse_text(text: str) -> ast.expr | None:
    """Expression that a text annotation holds."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _members(node: ast.expr) -> list[ast.expr]:
    found, rest = [], [node]
    while rest:
        member = rest.pop()
        if isinstance(member, ast.BinOp) and isinstance(member.op, ast.BitOr):
            rest += [member.left, member.right]
        else:
            found.append(member)
    return found


def _subscript(node: ast.Subscript, names: Mapping[str, Kind]) -> Kind:
    base = last_name(node.value)
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if base in names:
        return names[base]
    if base == "Union":
        return _union(arguments, names)
    if base == "Optional":
        return _union([*arguments, ast.Constant(None)], names)
    if base in _TRANSPARENT:
        return classify(arguments[0], names) if arguments else Kind.OTHER
    if base == "Coroutine":
        return classify(arguments[-1], names) if arguments else Kind.OTHER
    if base in _CONTAINERS and any(classify(argument, names).holds for argument in arguments):
        return Kind.BAG
    return Kind.OTHER


def _union(members: Sequence[ast.expr], names: Mapping[str, Kind]) -> Kind:
    nones = [member for member in members if isinstance(member, ast.Constant) and member.value is None]
    kinds = {classify(member, names) for member in members if member not in nones}
    held = kinds & {Kind.PLAIN, Kind.OPTIONAL, Kind.UNION}
    if not held:
        return Kind.BAG if Kind.BAG in kinds else Kind.OTHER
    if kinds - {Kind.PLAIN, Kind.OPTIONAL}:
        return Kind.UNION
    return Kind.OPTIONAL if nones or Kind.OPTIONAL in kinds else Kind.PLAIN
