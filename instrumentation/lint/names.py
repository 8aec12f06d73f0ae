"""Names, what they hold, and the reports on reservations that get lost."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instrumentation.lint.annotations import Kind
from instrumentation.lint.report import UNCHECKED as CODE
from instrumentation.lint.report import Report
from instrumentation.lint.state import (
    ABSENT,
    FAILED,
    GOOD,
    NONE,
    OTHERS,
    SEEN,
    UNCHECKED,
    Bag,
    Res,
    State,
    Values,
    Verdict,
    merged,
    tokens_of,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from instrumentation.lint.facts import Class, Facts, Module
    from instrumentation.lint.resolve import Resolver
    from instrumentation.lint.sources import Source

Located = ast.expr | ast.stmt | ast.arg | ast.pattern


@dataclass(slots=True)
class Token:
    """A place that makes a reservation, or hands one to this scope."""

    node: Located
    what: str
    kind: Kind
    attribute: str = ""
    only_asserted: bool = False
    #: whether anything takes its value or takes it over
    taken: bool = False


@dataclass(slots=True)
class FileContext:
    """What the scopes of one file share."""

    source: Source
    facts: Facts
    module: Module
    #: identifiers without which a function has nothing to do with reservations
    interesting: frozenset[str]
    tokens: list[Token] = field(default_factory=list)
    index: dict[tuple[int, str], int] = field(default_factory=dict)
    #: at most one message for each node
    found: dict[Located, str] = field(default_factory=dict)
    #: reservations that were stored in an attribute of a class, by token
    stored: dict[int, str] = field(default_factory=dict)

    def reports(self) -> list[Report]:
        """Reports of the file that no comment suppresses."""
        result = []
        for node, text in self.found.items():
            reason = self.source.suppression(node)
            if not reason:
                message = text if reason is None else f"{text} (give a reason after `# lint: reserve-ok`)"
                column = self.source.column(node)
                result.append(Report(self.source.path, node.lineno, column, CODE, message))
        return result


class Names:
    """Bindings of one scope: a function, a class body or a module."""

    def __init__(
        self, file: FileContext, resolver: Resolver, title: str, owner: Class | None, outer: frozenset[str]
    ) -> None:
        self.file = file
        self.facts = file.facts
        self.resolver = resolver
        self.title = title
        self.owner = owner
        #: names declared global or nonlocal
        self.outer = outer
        #: join of the states in which something may raise, since the current statement began
        self.unwinding: State | None = None
        #: nested functions, with the names that they read and what analyses them
        self.closures: dict[ast.AST, tuple[frozenset[str], Callable[[State], None]]] = {}

    def report(self, node: Located, message: str) -> None:
        """Report a place, unless it was reported."""
        self.file.found.setdefault(node, message)

    def token(self, node: Located, role: str, what: str, kind: Kind = Kind.PLAIN) -> int:
        """Token of a place; the same at each visit."""
        index = self.file.index
        key = (id(node), role)
        if key not in index:
            index[key] = len(self.file.tokens)
            self.file.tokens.append(Token(node, what, kind))
        return index[key]

    def what(self, token: int) -> str:
        """``the result of reserve()``."""
        return self.file.tokens[token].what

    def create(self, node: Located, what: str, kind: Kind, state: State) -> Values:
        """Values of a call that reserves. What an earlier turn of a loop made gets a token of its own."""
        if kind is Kind.BAG:
            bag = self.token(node, "bag", what, kind)
            state.conditions[bag] = SEEN
            return frozenset({Bag(bag)})
        token = self.token(node, "made", what, kind)
        before = state.condition(token)
        state.renew(token)
        if before != ABSENT:
            if state.held_elsewhere(token, ""):
                previous = self.token(node, "previous", what, kind)
                state.conditions[previous] = state.conditions.get(previous, 0) | before
                for name, values in state.names.items():
                    if Res(token) in values:
                        state.names[name] = values - {Res(token)} | {Res(previous)}
            elif before & UNCHECKED:
                self.lose(token, state, "is lost in the next turn of its loop")
        state.conditions[token] = UNCHECKED
        return frozenset({Res(token), NONE} if kind is Kind.OPTIONAL else {Res(token)})

    def may_raise(self, state: State) -> None:
        """Note that an exception may leave the current statement in ``state``."""
        held = state.copy()
        for token in held.unchecked():
            # What no name holds yet was not made, or is part of the statement that fails.
            if not held.held_elsewhere(token, ""):
                held.conditions[token] = ABSENT
        self.unwinding = merged(self.unwinding, held)

    def lose(self, token: int, state: State, how: str) -> None:
        """Report a reservation that nobody can check any more."""
        info = self.file.tokens[token]
        hint = "; an assert is not a check: python -O removes it" if info.only_asserted else ""
        self.report(info.node, f"{info.what} {how}; test `.ok` or call `.unwrap()`{hint}")
        state.see(token)

    def take(self, token: int, node: Located, use: str, state: State) -> None:
        """Report a use that needs a successful reservation, unless it is known to be one."""
        condition = state.condition(token)
        info = self.file.tokens[token]
        info.taken = True
        if condition & (UNCHECKED | SEEN | FAILED):
            if condition & ~ABSENT == FAILED:
                why = "where it is known to have failed"
            elif info.only_asserted:
                why = "after nothing but an assert, which python -O removes"
            else:
                why = "without a check on every path to here"
            cure = "isinstance or `.ok`" if info.kind is Kind.UNION else "`.ok`, or call `.unwrap()`"
            self.report(node, f"{info.what} is {use} {why}; test {cure}")
            state.conditions[token] = (condition & ABSENT) | GOOD

    def hand_over(self, values: Values, node: Located, use: str, state: State) -> None:
        """Pass values on: the duty to look goes with them."""
        for token in tokens_of(values):
            if self.file.tokens[token].kind is Kind.UNION:
                self.take(token, node, use, state)
        self.discharge(values, state)

    def discharge(self, values: Values, state: State) -> None:
        """End this scope's duty to look."""
        for token in tokens_of(values):
            self.file.tokens[token].taken = True
            state.see(token, sure=state.is_meant(token, values))
        self.look(values, state)

    def look(self, values: Values, state: State) -> None:
        """Use outcomes otherwise than as a condition: looked at, though nothing follows here."""
        for value in values:
            if isinstance(value, Verdict):
                for token in value.tokens:
                    state.see(token, sure=value.exact and len(values) == 1)
                    self.checked(token)

    def checked(self, token: int) -> None:
        """Note a check, for the attribute that the reservation may come from."""
        attribute = self.file.tokens[token].attribute
        if attribute:
            self.facts.checked_attributes.add(attribute)

    def element(self, bag: Bag, node: Located, state: State, role: str = "element") -> Values:
        """An element of a container, under a token of its own."""
        token = self.token(node, role, f"an element of {self.what(bag.token)}")
        state.renew(token)
        state.conditions[token] = state.condition(bag.token) & ~ABSENT or SEEN
        return frozenset({Res(token)})

    def bag(self, values: Iterable[Values], node: Located, state: State) -> Values:
        """A container of ``values``, which were handed over to it."""
        condition = 0
        for value in (value for each in values for value in each):
            if isinstance(value, Res | Bag):
                condition |= state.condition(value.token)
        if not condition:
            return OTHERS
        token = self.token(node, "bag", "the container of reservations", Kind.BAG)
        state.conditions[token] = condition & ~ABSENT or ABSENT
        return frozenset({Bag(token)})

    def set_name(self, key: str, values: Values, state: State, *, local: bool = True) -> None:
        """Bind ``r``, ``self.r`` or ``rs[0]``; report what it held, if nobody looked at it."""
        before = state.names.get(key, OTHERS)
        for token in tokens_of(before):
            stays = Res(token) in values and (len(values) == 1 or values == before)
            if not stays and not state.held_elsewhere(token, key):
                if state.condition(token) & UNCHECKED:
                    self.lose(token, state, f"can be overwritten in `{key}` before a check")
                if Res(token) not in values:
                    # What no name has any more must not speak for what this path binds instead.
                    state.conditions[token] = ABSENT
        for name in [name for name in state.names if not name.isidentifier() and key in parts(name)]:
            del state.names[name]
        if key in self.outer or not local:
            self.discharge(values, state)
        state.names[key] = values

    def forget_name(self, key: str, state: State) -> None:
        """Unbind a name."""
        for token in tokens_of(state.names.get(key, OTHERS)):
            if state.condition(token) & UNCHECKED and not state.held_elsewhere(token, key):
                self.lose(token, state, f"can be deleted with `{key}` before a check")
        state.names.pop(key, None)


def parts(key: str) -> set[str]:
    """Keys that ``key`` depends on: ``a``, ``a.b`` and ``i`` for ``a.b[i]``."""
    prefixes = {key[: match.start()] for match in re.finditer(r"[.\[]", key)}
    return prefixes | set(re.findall(r"\[([^\W\d]\w*)\]", key))


def key_of(node: ast.expr) -> str:
    """``r``, ``self.r``, ``rs[0]``, ``rs[i]``; blank for what is no such place."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.NamedExpr):
        return node.target.id
    if isinstance(node, ast.Attribute):
        base = key_of(node.value)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.Name):
        base = key_of(node.value)
        index = node.slice.id if isinstance(node.slice, ast.Name) else repr(node.slice.value)
        return base and f"{base}[{index}]"
    return ""
