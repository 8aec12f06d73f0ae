"""Calls: what reserves, what checks, what takes a reservation over."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from instrumentation.lint.annotations import last_name
from instrumentation.lint.conditions import Conditions, negated
from instrumentation.lint.names import key_of
from instrumentation.lint.state import (
    ABSENT,
    FAILED,
    OTHERS,
    SEEN,
    UNCHECKED,
    Bag,
    Maker,
    Res,
    State,
    Values,
    Verdict,
    tokens_of,
)  # fmt: skip

if TYPE_CHECKING:
    from instrumentation.lint.guards import Guards

#: of ``Reservation``, besides ``ok``, ``error``, ``value`` and ``unwrap``
HARMLESS = {"name", "nbytes", "actor", "made_at", "serial", "drop"}
#: these look at a reservation without asking how it went
_ONLOOKERS = {
    "print",
    "repr",
    "str",
    "format",
    "id",
    "type",
    "hash",
    "len",
    "hasattr",
    "dir",
    "vars",
    "ascii",
    "callable",
}
_LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: containers that take one element
_ADDERS = {"append", "appendleft", "add", "insert", "put"}
#: their result has the elements of their first argument
_SAME_ELEMENTS = {"list", "tuple", "set", "frozenset", "sorted", "reversed", "iter"}


class Calls(Conditions):
    """Calls and attributes."""

    guards: Guards

    def call(self, node: ast.Call, state: State) -> Values:
        """Values of a call."""
        func = node.func
        if isinstance(func, ast.Name) and func.id not in state.names:
            special = self._builtin(func.id, node, state)
            if special is not None:
                return special
        called: Values = frozenset()
        if isinstance(func, ast.Attribute):
            base = self.value(func.value, state)
            if func.attr == "unwrap" and tokens_of(base):
                return self._unwrap(node, base, state)
            called = self.member(base, func, state, called=True)
        else:
            called = self.value(func, state)
        arguments = self._arguments(node, state, hand_over=not _is_logging(func))
        self.may_raise(state)
        if self.resolver.ends(func):
            state.dead = True
        maker = self._maker(node, called)
        if maker is not None:
            return self.create(node, f"the result of {maker.name}()", maker.kind, state)
        return self._stored_in_container(node, arguments, state)

    def _maker(self, node: ast.Call, called: Values) -> Maker | None:
        for value in called:
            if isinstance(value, Maker):
                return value
        kind = self.resolver.kind(node.func)
        return Maker(last_name(node.func), kind) if kind.holds else None

    def maker_of(self, node: ast.expr) -> Maker | None:
        """Maker that ``arena.reserve``, without a call, is."""
        kind = self.resolver.kind(node)
        return Maker(last_name(node), kind) if kind.holds else None

    def _arguments(self, node: ast.Call, state: State, *, hand_over: bool) -> list[Values]:
        given = []
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            values = self.value(argument, state)
            given.append(values)
            if hand_over:
                self.hand_over(values, argument, "passed on", state)
                for token in tokens_of(values):
                    self.checked(token)
            else:
                self.look(values, state)
        if node.args and last_name(node.func) == "partial":
            return [frozenset({maker}) if (maker := self.maker_of(node.args[0])) else given[0], *given[1:]]
        return given

    def _stored_in_container(self, node: ast.Call, arguments: list[Values], state: State) -> Values:
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in _ADDERS and arguments:
            key = key_of(func.value)
            bag = self.bag(arguments, node, state)
            if key and bag != OTHERS:
                state.names[key] = state.names.get(key, OTHERS) | bag
        elif last_name(func) == "partial" and arguments:
            return frozenset(v for v in arguments[0] if isinstance(v, Maker)) or OTHERS
        elif isinstance(func, ast.Attribute) and func.attr in {"values", "copy"}:
            return frozenset(v for v in self.value(func.value, state.copy()) if isinstance(v, Bag)) or OTHERS
        return OTHERS

    def _builtin(self, name: str, node: ast.Call, state: State) -> Values | None:
        count = len(node.args)
        if name == "isinstance" and count == 2:
            return self.is_instance(self.value(node.args[0], state), node.args[1], state)
        if name == "bool" and count == 1:
            return negated(negated(self.value(node.args[0], state)))
        if name in {"all", "any"} and count == 1:
            return self._quantifier(node.args[0], state, universal=name == "all")
        if name in _SAME_ELEMENTS and count == 1:
            values = self.value(node.args[0], state)
            self.elements(values, node.args[0], state)
            return frozenset(value for value in values if isinstance(value, Bag)) or OTHERS
        if name == "getattr" and count >= 2 and isinstance(node.args[1], ast.Constant):
            attribute = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self.value(ast.copy_location(attribute, node), state)
        if name in _ONLOOKERS:
            self._arguments(node, state, hand_over=False)
            self.may_raise(state)
            return OTHERS
        return None

    def _quantifier(self, argument: ast.expr, state: State, *, universal: bool) -> Values:
        """Values of ``all(r.ok for r in rs)``, ``all(rs)``, ``any(not r.ok for r in rs)``."""
        said: Values
        bags: Values
        if isinstance(argument, ast.GeneratorExp | ast.ListComp) and len(argument.generators) == 1:
            generator = argument.generators[0]
            bags = self.value(generator.iter, state.copy())
            said, elements = self.comprehension(argument, [argument.elt], state)
            if generator.ifs:
                said = OTHERS
        else:
            bags = self.value(argument, state)
            elements = self.elements(bags, argument, state)
            said = elements
        judged = {
            token
            for value in said
            if isinstance(value, Verdict) and value.positive is universal
            for token in value.tokens
        }
        if universal:
            judged |= set(tokens_of(said))
        tokens = frozenset(value.token for value in bags if isinstance(value, Bag))
        if tokens and judged:
            return frozenset({Verdict(tokens, universal, exact=False)})
        return OTHERS

    def elements(self, values: Values, node: ast.expr, state: State, role: str = "element") -> Values:
        """What iterating over ``values`` gives."""
        found: Values = frozenset()
        for value in sorted(values, key=repr):
            if isinstance(value, Res):
                self.take(value.token, node, "iterated over as if it were the memory", state)
            elif isinstance(value, Bag):
                found |= self.element(value, node, state, role)
        return found or OTHERS

    def comprehension(self, node: ast.expr, results: list[ast.expr], state: State) -> tuple[Values, Values]:
        """Values of the last result of a comprehension, and the container that it makes."""
        raise NotImplementedError

    def _unwrap(self, node: ast.Call, base: Values, state: State) -> Values:
        self._arguments(node, state, hand_over=True)
        failing = state.copy()
        for token in tokens_of(base):
            self.checked(token)
            condition = state.condition(token)
            info = self.file.tokens[token]
            info.taken = True
            if condition & (UNCHECKED | SEEN | FAILED):
                failing.decide(token, good=False, sure=failing.is_meant(token, base))
                swallowed = self.guards.swallows()
                if swallowed:
                    self.report(
                        node,
                        f"the failure of {info.what} is swallowed by {swallowed}; handle it, or let it through",
                    )
                if condition & ~ABSENT == FAILED and len(base) == 1:
                    state.dead = True
            state.decide(token, good=True, sure=state.is_meant(token, base))
        self.may_raise(failing)
        return OTHERS

    def member(self, base: Values, node: ast.Attribute, state: State, *, called: bool = False) -> Values:
        """Values of an attribute of ``base``."""
        tokens = tokens_of(base)
        self.look(base, state)
        if tokens and node.attr in {"ok", "error"}:
            for token in tokens:
                self.checked(token)
            return self.said(tokens, base, state, positive=node.attr == "ok")
        for token in tokens:
            self._use_of_member(token, node, state, called=called)
        return OTHERS

    def _use_of_member(self, token: int, node: ast.Attribute, state: State, *, called: bool) -> None:
        name = node.attr
        if name == "value":
            self.take(token, node, "used by its `.value`", state)
        elif name == "unwrap" and not called:
            self.hand_over(frozenset({Res(token)}), node, "handed over", state)
        elif name not in HARMLESS and not name.startswith("_"):
            self.take(token, node, f"used as if it were the memory (`.{name}`)", state)

    def attribute_of_class(self, node: ast.Attribute, state: State) -> Values | None:
        """Reservation that another method stored in ``self.r``."""
        this = self.resolver.this
        if not this or last_name(node.value) != this or self.owner is None:
            return None
        kind = self.facts.held(self.owner, node.attr)
        if kind is None:
            return None
        key = f"{this}.{node.attr}"
        token = self.token(
            self.resolver_node(), f"attribute {node.attr}", f"the reservation in `{key}`", kind
        )
        self.file.tokens[token].attribute = node.attr
        self.file.tokens[token].taken = True
        state.conditions[token] = SEEN
        state.names[key] = frozenset({Res(token)})
        return state.names[key]

    def resolver_node(self) -> ast.stmt:
        """Statement that this scope is."""
        raise NotImplementedError


def _is_logging(func: ast.expr) -> bool:
    return isinstance(func, ast.Attribute) and func.attr in _LOGGING
