"""Statements without a body of their own."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from instrumentation.lint.annotations import Kind, classify, last_name
from instrumentation.lint.conditions import is_none
from instrumentation.lint.expressions import Expressions
from instrumentation.lint.names import key_of
from instrumentation.lint.state import (
    ABSENT,
    FAILED,
    NONE,
    OTHERS,
    SEEN,
    UNCHECKED,
    Bag,
    Res,
    State,
    Values,
    Verdict,
    join,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING_HOLDS = "the result of unwrap() is discarded: nothing holds the memory; keep it to free it"
EXITS = ("falls", "breaks", "continues", "returns", "raises", "unwinds")


@dataclass(slots=True)
class Outcome:
    """States in which a block is left, by how; ``unwinds``: by an exception that it does not raise itself."""

    falls: State | None = None
    breaks: State | None = None
    continues: State | None = None
    returns: State | None = None
    raises: State | None = None
    unwinds: State | None = None

    def add(self, other: Outcome, *, falls: bool = False) -> None:
        """Join the exits of a part of the block; that it falls through is the next part's matter."""
        for name in EXITS[0 if falls else 1 :]:
            setattr(self, name, join(getattr(self, name), getattr(other, name)))


class SimpleStatements(Expressions):
    """Assignments, expression statements, and those that leave a block."""

    #: how many handlers are around the current statement
    handling = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: what the function was seen to give its caller
        self.gives: set[Kind] = set()
        #: unwrapped for the sake of the check, in a statement of its own
        self.only_unwrapped: dict[ast.expr, tuple[int, ...]] = {}

    def simple(self, node: ast.stmt, state: State) -> Outcome:
        """Analyse one statement. ``state`` is of no more use afterwards."""
        handler = self.SIMPLE.get(type(node))
        if handler is not None:
            outcome: Outcome | None = handler(self, node, state)
            if outcome is not None:
                return outcome
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, state)
        return self.leave(state)

    @staticmethod
    def leave(state: State) -> Outcome:
        """Outcome of a statement that falls through, unless something in it ended the program."""
        if state.dead:
            state.dead = False
            return Outcome(raises=state)
        return Outcome(falls=state)

    def returned(self, values: Values, state: State, *, each: bool = False) -> None:
        """Note what the function gives its caller."""
        for value in values:
            if isinstance(value, Bag):
                self.gives.add(Kind.BAG)
            elif isinstance(value, Res):
                if state.condition(value.token) & (UNCHECKED | SEEN | FAILED):
                    self.gives.add(Kind.BAG if each else self.file.tokens[value.token].kind)
                else:
                    self.gives.add(Kind.OTHER)
            elif value != NONE:
                self.gives.add(Kind.OTHER)

    def _expression(self, node: ast.Expr, state: State) -> None:
        value = node.value
        call = value.value if isinstance(value, ast.Await) else value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "unwrap":
            self._discard_unwrapped(call, call.func.value, state)
            return
        values = self.value(value, state)
        for each in sorted(values, key=repr):
            if isinstance(each, Res) and not state.held_elsewhere(each.token, ""):
                if state.condition(each.token) & UNCHECKED:
                    self.lose(each.token, state, "is discarded")
            elif isinstance(each, Bag) and not isinstance(value, ast.Name | ast.Attribute):
                if state.condition(each.token) & (UNCHECKED | SEEN):
                    self.report(
                        value, f"{self.what(each.token)} is discarded; test each `.ok` or call `.unwrap()`"
                    )
            elif isinstance(each, Verdict) and isinstance(
                value, ast.Attribute | ast.UnaryOp | ast.Compare | ast.Call
            ):
                for token in each.tokens:
                    self.report(
                        value, f"whether {self.what(token)} is there is read and thrown away; act on it"
                    )
                self.look(frozenset({each}), state)

    def _discard_unwrapped(self, call: ast.Call, receiver: ast.expr, state: State) -> None:
        named = tokens_of(state.names.get(key_of(receiver), OTHERS))
        taken = {token: self.file.tokens[token].taken for token in named}
        made = len(self.file.tokens)
        known = set(state.conditions)
        self.value(call, state)
        if named:
            # It is unwrapped, but only what uses the name holds the memory.
            self.only_unwrapped.setdefault(call, tuple(named))
            for token, before in taken.items():
                self.file.tokens[token].taken = before
        elif len(self.file.tokens) > made or set(state.conditions) - known:
            self.report(call, NOTHING_HOLDS)

    def _assign(self, node: ast.Assign, state: State) -> None:
        target = node.targets[0]
        if (
            len(node.targets) == 1
            and isinstance(target, ast.Tuple | ast.List)
            and isinstance(node.value, ast.Tuple | ast.List)
            and len(target.elts) == len(node.value.elts)
            and not any(isinstance(part, ast.Starred) for part in [*target.elts, *node.value.elts])
        ):
            # Held under names of their own meanwhile, so that a swap loses nothing.
            for index, part in enumerate(node.value.elts):
                state.names[f"({index})"] = self.value(part, state)
            for index, part in enumerate(target.elts):
                values = state.names[f"({index})"]
                self.assign(part, values, state)
                del state.names[f"({index})"]
            return
        values = self.value(node.value, state)
        for each in node.targets:
            self.assign(each, values, state)

    def _annotated_assign(self, node: ast.AnnAssign, state: State) -> None:
        if node.value is None:
            return
        values = self.value(node.value, state)
        kind = classify(node.annotation, self.file.module.types)
        if kind is Kind.OTHER and not _says_anything(node.annotation):
            for token in tokens_of(values):
                declared = ast.unparse(node.annotation)
                self.take(token, node.value, f"declared to be {declared}", state)
        self.assign(node.target, values, state)

    def _augmented_assign(self, node: ast.AugAssign, state: State) -> None:
        values = self.value(node.value, state)
        key = key_of(node.target)
        self.hand_over(values, node.value, "added to something", state)
        if key:
            bags = frozenset(value for value in values if isinstance(value, Bag))
            self.set_name(key, state.names.get(key, OTHERS) | bags, state)

    def _delete(self, node: ast.Delete, state: State) -> None:
        for target in node.targets:
            if key_of(target):
                self.forget_name(key_of(target), state)
            else:
                self.value(target, state)

    def _assert(self, node: ast.Assert, state: State) -> Outcome | None:
        tested = state.copy()
        _, true, false = self.decide(node.test, tested)
        if node.msg is not None:
            self.value(node.msg, false)
        for token, condition in true.conditions.items():
            if condition != state.condition(token):
                self.file.tokens[token].only_asserted = True
                if state.condition(token) == ABSENT:
                    state.conditions[token] = UNCHECKED
        if isinstance(node.test, ast.Constant) and not node.test.value:
            return Outcome(raises=state)
        return None

    def _return(self, node: ast.Return, state: State) -> Outcome:
        if node.value is not None:
            values = self.value(node.value, state)
            if not is_none(node.value):
                self.returned(values, state)
            self.hand_over_result(values, state)
        return Outcome(raises=state) if state.dead else Outcome(returns=state)

    def _raise(self, node: ast.Raise, state: State) -> Outcome:
        for part in (node.exc, node.cause):
            if part is not None:
                self.look(self.value(part, state), state)
        # In a handler the program fails already; the run-time check reports what is dropped on that way.
        return Outcome(unwinds=state) if self.handling else Outcome(raises=state)

    def _break(self, node: ast.Break, state: State) -> Outcome:  # noqa: ARG002
        return Outcome(breaks=state)

    def _continue(self, node: ast.Continue, state: State) -> Outcome:  # noqa: ARG002
        return Outcome(continues=state)

    SIMPLE: ClassVar[Mapping[type[ast.stmt], Any]] = {
        ast.Expr: _expression,
        ast.Assign: _assign,
        ast.AnnAssign: _annotated_assign,
        ast.AugAssign: _augmented_assign,
        ast.Delete: _delete,
        ast.Assert: _assert,
        ast.Return: _return,
        ast.Raise: _raise,
        ast.Break: _break,
        ast.Continue: _continue,
    }


def _says_anything(annotation: ast.expr) -> bool:
    return last_name(annotation) in {"Any", "object"}
