"""Scopes: functions, class bodies and modules, and what holds where they end."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.lint.annotations import Kind, classify
from instrumentation.lint.expressions import free_names
from instrumentation.lint.flow import Flow
from instrumentation.lint.resolve import Resolver
from instrumentation.lint.simple import NOTHING_HOLDS
from instrumentation.lint.sources import identifiers
from instrumentation.lint.state import (
    ABSENT,
    FAILED,
    OTHERS,
    SEEN,
    UNCHECKED,
    Maker,
    State,
    Values,
    merged,
    tokens_of,
)

if TYPE_CHECKING:
    from instrumentation.lint.facts import Class, FunctionNode
    from instrumentation.lint.names import FileContext

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(slots=True)
class Later:
    """A function that runs after its module has."""

    node: FunctionNode
    owner: Class | None


class Scope(Flow):
    """Analysis of one scope."""

    def __init__(
        self,
        file: FileContext,
        node: ast.Module | ast.ClassDef | FunctionNode,
        owner: Class | None,
        *,
        later: list[Later] | None = None,
    ) -> None:
        function = node if isinstance(node, _FUNCTIONS) else None
        outer = frozenset[str]()
        if function is not None:
            declared = (child for child in ast.walk(function) if isinstance(child, ast.Global | ast.Nonlocal))
            outer = frozenset(name for child in declared for name in child.names)
        resolver = Resolver(file.facts, file.module, owner, function)
        title = "the module" if isinstance(node, ast.Module) else f"`{node.name}`"
        super().__init__(file, resolver, title, owner, outer)
        self.scope = node
        #: scopes that run after the module has; None inside functions, whose own run where they are made
        self.later = later

    def run(self, start: State) -> State:
        """Analyse the scope; what is known where it ends without an exception."""
        outcome = self.block(self.scope.body, start)
        if isinstance(self.scope, ast.Module):
            outcome.falls = self._run_later(merged(outcome.falls))
        for state in (outcome.falls, outcome.returns, outcome.raises):
            for token in () if state is None else state.unchecked():
                if not isinstance(self.scope, ast.ClassDef):
                    self.lose(token, state or start, f"can leave {self.title} without a check")
        for node, tokens in self.only_unwrapped.items():
            if not any(self.file.tokens[token].taken for token in tokens):
                self.report(node, NOTHING_HOLDS)
        end = merged(outcome.falls, outcome.returns)
        self._infer(end)
        return end

    def _infer(self, end: State) -> None:
        function = self.facts.by_node.get(self.scope)
        if function is not None:
            held = self.gives - {Kind.OTHER}
            if Kind.UNION in held or (held - {Kind.BAG} and Kind.OTHER in self.gives):
                self.facts.infer(function, Kind.UNION)
            elif held:
                self.facts.infer(function, held.pop())
        this = self.resolver.this
        for name, values in end.names.items() if this and self.owner is not None else ():
            owner, dot, attribute = name.partition(".")
            unknown = [t for t in tokens_of(values) if end.condition(t) & (UNCHECKED | SEEN | FAILED)]
            if owner == this and dot and attribute.isidentifier() and unknown and self.owner is not None:
                self.facts.hold(self.owner, attribute, self.file.tokens[unknown[0]].kind)

    def _run_later(self, state: State) -> State:
        for scope in self.later or ():
            self.capture(free_names(scope.node), state)
        for scope in self.later or ():
            self._run_function(scope.node, scope.owner, state)
        return state

    def _run_function(self, node: FunctionNode, owner: Class | None, around: State) -> None:
        held = {name for name, values in around.names.items() if values != OTHERS}
        if _is_stub(node) or not (self.file.interesting | held).intersection(identifiers(node)):
            return
        start = State()
        for name, values in around.names.items():
            start.names[name] = values
        start.conditions = dict(around.conditions)
        for token in start.unchecked():
            # The duty to look at it stays outside.
            start.see(token)
        inner = Scope(self.file, node, owner)
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in [*every, arguments.vararg, arguments.kwarg]:
            if argument is not None:
                starred = argument in {arguments.vararg, arguments.kwarg}
                start.names[argument.arg] = inner.parameter(argument, start, starred=starred)
        inner.run(start)

    def parameter(self, argument: ast.arg, state: State, *, starred: bool) -> Values:
        """Values of a parameter: one annotated as a reservation brings the duty to look."""
        kind = classify(argument.annotation, self.file.module.types)
        if kind not in {Kind.PLAIN, Kind.OPTIONAL, Kind.UNION, Kind.BAG}:
            return OTHERS
        what = f"the reservation that `{argument.arg}` is"
        return self.create(argument, what, Kind.BAG if starred else kind, state)

    def resolver_node(self) -> ast.stmt:
        """Statement that this scope is."""
        assert isinstance(self.scope, ast.stmt)
        return self.scope

    def define_function(self, node: FunctionNode, state: State) -> None:
        """Analyse a nested function, now or later."""
        for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.hand_over(self.value(part, state), part, "passed on", state)
        if self.later is not None:
            self.set_name(node.name, OTHERS, state)
            self.later.append(Later(node, self.owner))
            return
        made = self.facts.by_node[node].kind
        self.set_name(node.name, frozenset({Maker(node.name, made)}) if made.holds else OTHERS, state)
        owner = self.owner if isinstance(self.scope, ast.ClassDef) else None
        self.close_over(node, lambda around: self._run_function(node, owner, around), state)

    def define_class(self, node: ast.ClassDef, state: State) -> None:
        """Analyse a class."""
        for part in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            self.value(part, state)
        owner = self.facts.class_by_node.get(node)
        inner = Scope(self.file, node, owner, later=self.later)
        inner.closures = self.closures
        inside = inner.run(state.copy())
        for key, values in inside.names.items():
            for token in tokens_of(values):
                if (
                    state.condition(token) == ABSENT
                    and owner is not None
                    and inside.condition(token) & (UNCHECKED | SEEN)
                ):
                    # What a class body binds is an attribute, for its methods to check.
                    self.file.tokens[token].attribute = key
                    self.file.stored[token] = key
                    self.facts.hold(owner, key, self.file.tokens[token].kind)
        self.set_name(node.name, OTHERS, state)


def _is_stub(node: FunctionNode) -> bool:
    """Whether a body is a docstring or ``...``: a protocol, an overload, an abstract method."""
    return all(
        isinstance(statement, ast.Pass | ast.Raise)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in node.body
    )
