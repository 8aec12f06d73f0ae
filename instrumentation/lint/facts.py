"""First pass over all files: who makes reservations, and which class a receiver is of."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from instrumentation.lint.annotations import Kind, classify, last_name, parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from instrumentation.lint.sources import Source

#: methods of ``Allocator`` and ``Arena``
RESERVING = ("reserve", "reserve_all", "reserve_arena", "reserve_overlay")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(slots=True)
class Function:
    """A function of the linted files."""

    name: str
    declared: Kind
    no_return: bool
    #: what its body was seen to return
    inferred: Kind = Kind.OTHER

    @property
    def kind(self) -> Kind:
        """What a call gives."""
        return self.declared if self.declared.holds else self.inferred


@dataclass(slots=True)
class Class:
    """A class of the linted files."""

    name: str
    bases: tuple[str, ...]
    methods: dict[str, list[Function]] = field(default_factory=dict)
    #: class of each attribute; None where assignments disagree or are not understood
    attributes: dict[str, str | None] = field(default_factory=dict)
    #: attributes that hold reservations whose outcome a method cannot know
    reservations: dict[str, Kind] = field(default_factory=dict)


@dataclass(slots=True)
class Module:
    """Names of one file."""

    stem: str
    types: dict[str, Kind] = field(default_factory=dict)
    functions: dict[str, list[Function]] = field(default_factory=dict)
    #: name here -> name there
    imports: dict[str, str] = field(default_factory=dict)
    #: name here -> last part of the imported module
    modules: dict[str, str] = field(default_factory=dict)


class Facts:
    """What is known of all files. Grows while they are analysed, until nothing new is found."""

    def __init__(self, sources: Iterable[Source], reserving: Iterable[str] = ()) -> None:
        self.extra = frozenset(reserving)
        self.reserving = frozenset(RESERVING) | self.extra
        self.types: dict[str, Kind] = {"Reservation": Kind.PLAIN}
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, list[Class]] = {}
        self.functions: dict[str, list[Function]] = {}
        self.by_node: dict[ast.AST, Function] = {}
        self.class_by_node: dict[ast.ClassDef, Class] = {}
        #: attributes on which a check was seen
        self.checked_attributes: set[str] = set()
        self.changed = False
        files = list(sources)
        # An alias may be used in a file before the one that makes it.
        for _ in range(2):
            for source in files:
                self._collect_types(source)
        for source in files:
            self._collect(source)

    @property
    def of_interest(self) -> frozenset[str]:
        """Identifiers without which source has nothing to do with reservations."""
        made = {name for name, functions in self.functions.items() if any(f.kind.holds for f in functions)}
        held = {name for classes in self.classes.values() for owner in classes for name in owner.reservations}
        return self.reserving | made | held | self.types.keys()

    def infer(self, function: Function, kind: Kind) -> None:
        """Note what a body returns."""
        kinds = {kind, function.inferred} - {Kind.OTHER}
        wanted = kind if len(kinds) == 1 else Kind.UNION
        if not function.declared.holds and function.inferred is not wanted:
            function.inferred = wanted
            self.changed = True

    def hold(self, owner: Class, attribute: str, kind: Kind) -> None:
        """Note that an attribute holds a reservation whose outcome its readers cannot know."""
        if attribute not in owner.reservations:
            owner.reservations[attribute] = kind
            self.changed = True

    def held(self, owner: Class | None, attribute: str) -> Kind | None:
        """Kind of the reservation in an attribute of a class or its bases."""
        found = (c.reservations[attribute] for c in self._lineage(owner) if attribute in c.reservations)
        return next(found, None)

    def attribute_class(self, owner: Class | None, attribute: str) -> str | None:
        """Class of what an attribute holds."""
        found = (c.attributes[attribute] for c in self._lineage(owner) if attribute in c.attributes)
        return next(found, None)

    def methods(self, class_name: str, method: str) -> list[Function]:
        """Definitions that a method call on an object of a class may reach; none when that is not known."""
        found: list[Function] = []
        for owner in self.classes.get(class_name, ()):
            nearest = next((c.methods[method] for c in self._lineage(owner) if method in c.methods), None)
            if nearest is None:
                return []
            found += nearest
        return found

    def _lineage(self, owner: Class | None) -> Iterator[Class]:
        waiting = [] if owner is None else [owner]
        seen: set[int] = set()
        while waiting:
            current = waiting.pop(0)
            if id(current) not in seen:
                seen.add(id(current))
                yield current
                for base in current.bases:
                    waiting += self.classes.get(base, ())

    def _collect_types(self, source: Source) -> None:
        module = self.modules.setdefault(source.path, Module(PurePath(source.path).stem))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = alias.name
                    if alias.name in self.types:
                        module.types[alias.asname or alias.name] = self.types[alias.name]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    module.modules[name] = alias.name.rpartition(".")[2]
        names = self.types | module.types
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                if any(classify(base, names) is Kind.PLAIN for base in node.bases):
                    self.types[node.name] = Kind.PLAIN
            elif isinstance(node, ast.Assign | ast.AnnAssign) or type(node).__name__ == "TypeAlias":
                self._collect_alias(node, names)

    def _collect_alias(self, node: ast.AST, names: dict[str, Kind]) -> None:
        value = getattr(node, "value", None)
        targets = getattr(node, "targets", None) or [
            getattr(node, "target", None) or getattr(node, "name", None)
        ]
        if not isinstance(value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute):
            return
        kind = classify(value, names)
        if kind.holds and isinstance(targets[0], ast.Name):
            self.types.setdefault(targets[0].id, kind)

    def _collect(self, source: Source) -> None:
        module = self.modules[source.path]
        module.types = {**self.types, **module.types}
        self.checked_attributes.update(_checked_attributes(source.tree))
        waiting: list[tuple[ast.AST, Class | None, bool]] = [(source.tree, None, False)]
        while waiting:
            parent, owner, nested = waiting.pop()
            for node in ast.iter_child_nodes(parent):
                if isinstance(node, ast.ClassDef):
                    waiting.append((node, self._collect_class(node, module), nested))
                elif isinstance(node, _FUNCTIONS):
                    self._collect_function(node, owner, module, nested=nested)
                    waiting.append((node, None, True))
                else:
                    waiting.append((node, owner, nested))

    def _collect_function(
        self, node: FunctionNode, owner: Class | None, module: Module, *, nested: bool
    ) -> None:
        no_return = last_name(_unquoted(node.returns)) in {"NoReturn", "Never"}
        function = Function(node.name, classify(node.returns, module.types), no_return)
        self.by_node[node] = function
        if owner is not None:
            owner.methods.setdefault(node.name, []).append(function)
        elif not nested:
            module.functions.setdefault(node.name, []).append(function)
        if owner is not None or not nested:
            # What is nested in a function is found where its name is bound.
            self.functions.setdefault(node.name, []).append(function)

    def _collect_class(self, node: ast.ClassDef, module: Module) -> Class:
        owner = Class(node.name, tuple(filter(None, (last_name(_generic(base)) for base in node.bases))))
        self.classes.setdefault(node.name, []).append(owner)
        self.class_by_node[node] = owner
        for child in node.body:
            if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
                self._collect_attribute(owner, child.target.id, annotated_class(child.annotation))
                kind = classify(child.annotation, module.types)
                if kind in {Kind.PLAIN, Kind.OPTIONAL, Kind.UNION}:
                    owner.reservations[child.target.id] = kind
            elif isinstance(child, _FUNCTIONS):
                self._collect_attributes(owner, child)
        return owner

    def _collect_attributes(self, owner: Class, method: FunctionNode) -> None:
        parameters = parameter_classes(method)
        for node in ast.walk(method):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and last_name(target.value) == "self":
                    annotated = annotated_class(node.annotation) if isinstance(node, ast.AnnAssign) else None
                    found = annotated or self.made_class(node.value, parameters)
                    self._collect_attribute(owner, target.attr, found)

    @staticmethod
    def _collect_attribute(owner: Class, attribute: str, found: str | None) -> None:
        known = owner.attributes.setdefault(attribute, found)
        if known != found:
            owner.attributes[attribute] = None

    @staticmethod
    def made_class(value: ast.expr | None, names: dict[str, str | None]) -> str | None:
        """Class of ``K(...)``, or of a name in ``names``."""
        if isinstance(value, ast.Call):
            return last_name(value.func) or None
        return names.get(value.id) if isinstance(value, ast.Name) else None


def parameter_classes(function: FunctionNode) -> dict[str, str | None]:
    """Classes that a signature gives its parameters."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg: annotated_class(argument.annotation) for argument in every}


def annotated_class(annotation: ast.expr | None) -> str | None:
    """``K`` of the annotations ``K``, ``m.K``, ``"K"`` and ``K | None``."""
    node = _unquoted(annotation)
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value is None:
        node = node.left
    return last_name(_generic(node)) or None


def _unquoted(node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return parse_text(node.value)
    return node


def _generic(node: ast.expr | None) -> ast.expr | None:
    return node.value if isinstance(node, ast.Subscript) else node


def _checked_attributes(tree: ast.AST) -> Iterator[str]:
    """``r`` of ``x.r.ok``, ``x.r.unwrap()`` and ``if x.r``."""
    for node in ast.walk(tree):
        tested: list[ast.expr] = []
        if isinstance(node, ast.Attribute) and node.attr in {"ok", "error", "unwrap"}:
            tested = [node.value]
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            tested = [node.test]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tested = [node.operand]
        elif isinstance(node, ast.BoolOp):
            tested = node.values
        yield from (place.attr for place in tested if isinstance(place, ast.Attribute))
