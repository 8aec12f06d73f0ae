"""Which function a call reaches, as far as the source says it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from instrumentation.lint.annotations import Kind, last_name
from instrumentation.lint.facts import Facts, parameter_classes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.lint.facts import Class, Function, FunctionNode, Module

_ENDS = {
    "sys.exit", "os._exit", "os.abort", "exit", "quit", "assert_never", "typing.assert_never", "pytest.fail",
    "pytest.skip", "pytest.exit",
}  # fmt: skip
#: the strictest first, where definitions of one name differ
_STRICT = (Kind.UNION, Kind.PLAIN, Kind.OPTIONAL, Kind.BAG)


class Resolver:
    """Resolves calls inside one function, class body or module."""

    def __init__(
        self, facts: Facts, module: Module, owner: Class | None, function: FunctionNode | None
    ) -> None:
        self.facts = facts
        self.module = module
        self.owner = owner
        self.this = ""
        self._classes: dict[str, str | None] = {}
        if function is not None:
            self._classes = _local_classes(function)
            first = [*function.args.posonlyargs, *function.args.args][:1]
            if owner is not None and first:
                self.this = first[0].arg

    def kind(self, func: ast.expr) -> Kind:
        """What calling ``func`` gives."""
        if isinstance(func, ast.Name):
            return self._kind_of_name(func.id)
        if not isinstance(func, ast.Attribute):
            return Kind.OTHER
        reached = self.methods(func)
        if reached:
            return _strictest(reached)
        if func.attr in self.facts.reserving:
            return Kind.PLAIN
        if self._is_foreign(func.value):
            return Kind.OTHER
        return _strictest(self.facts.functions.get(func.attr, ()))

    def ends(self, func: ast.expr) -> bool:
        """Whether calling ``func`` never returns."""
        name = last_name(func)
        if isinstance(func, ast.Attribute):
            whole = f"{last_name(func.value)}.{name}"
            reached = self.methods(func) or self.facts.functions.get(name, [])
        else:
            whole = name
            reached = self.module.functions.get(name) or self.facts.functions.get(
                self.module.imports.get(name, ""), []
            )
        return whole in _ENDS or (bool(reached) and all(function.no_return for function in reached))

    def methods(self, func: ast.Attribute) -> list[Function]:
        """Definitions that a method call reaches; none when its receiver's class is not known."""
        receiver = func.value
        if isinstance(receiver, ast.Call) and last_name(receiver.func) == "super" and self.owner is not None:
            names: Iterable[str] = self.owner.bases
        else:
            name = self._class_of(receiver)
            names = () if name is None else (name,)
        return next(filter(None, (self.facts.methods(name, func.attr) for name in names)), [])

    def _class_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            if node.id == self.this and self.owner is not None:
                return self.owner.name
            return self._classes.get(node.id)
        if isinstance(node, ast.Attribute):
            if last_name(node.value) == self.this and self.this:
                return self.facts.attribute_class(self.owner, node.attr)
            holder = self._class_of(node.value)
            classes = self.facts.classes.get(holder or "", ())
            found = {self.facts.attribute_class(owner, node.attr) for owner in classes}
            return found.pop() if len(found) == 1 else None
        return self.facts.made_class(node, {})

    def _kind_of_name(self, name: str) -> Kind:
        if name in self.facts.extra:
            return Kind.PLAIN
        if name in self._classes:
            return Kind.OTHER
        if name in self.module.functions:
            return _strictest(self.module.functions[name])
        imported = self.module.imports.get(name)
        if imported is None:
            return Kind.OTHER
        if imported in self.facts.extra:
            return Kind.PLAIN
        return _strictest(self.facts.functions.get(imported, ()))

    def _is_foreign(self, receiver: ast.expr) -> bool:
        """Whether the receiver is a module that was not linted: ``subprocess.run``."""
        stem = self.module.modules.get(last_name(receiver)) if isinstance(receiver, ast.Name) else None
        return stem is not None and all(module.stem != stem for module in self.facts.modules.values())


def _strictest(functions: Iterable[Function]) -> Kind:
    kinds = {function.kind for function in functions}
    return next((kind for kind in _STRICT if kind in kinds), Kind.OTHER)


def _local_classes(function: FunctionNode) -> dict[str, str | None]:
    """Class of each name that is only ever bound to objects of that class."""
    found = parameter_classes(function)
    parameters = set(found)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, "")
    assigned: dict[str, set[str | None]] = {name: set() for name in found}
    plain: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            plain.add(id(node.targets[0]))
            assigned[node.targets[0].id].add(Facts.made_class(node.value, {}))
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in plain:
            assigned[node.id].add(None)
    result: dict[str, str | None] = {}
    for name, classes in assigned.items():
        wanted = classes | ({found[name]} if name in parameters else set())
        result[name] = wanted.pop() if len(wanted) == 1 else None
    return result
