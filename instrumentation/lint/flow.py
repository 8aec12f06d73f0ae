"""Statements with bodies: branches, loops, handlers, matching."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, ClassVar

from instrumentation.lint.guards import Guards
from instrumentation.lint.names import key_of
from instrumentation.lint.simple import EXITS, Outcome, SimpleStatements
from instrumentation.lint.state import ABSENT, OTHERS, SEEN, State, join, merged, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from instrumentation.lint.facts import FunctionNode


class Flow(SimpleStatements):
    """The walk over every path through a block."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.guards = Guards()
        self._known: dict[tuple[object, ...], Outcome] = {}

    def define_function(self, node: FunctionNode, state: State) -> None:
        """Analyse a nested function, now or later."""
        raise NotImplementedError

    def define_class(self, node: ast.ClassDef, state: State) -> None:
        """Analyse a class."""
        raise NotImplementedError

    def block(self, body: Sequence[ast.stmt], state: State) -> Outcome:
        """Analyse statements in sequence."""
        result = Outcome()
        for statement in body:
            if state.dead:
                break
            part = self.statement(statement, state)
            result.add(part)
            state = merged(part.falls)
        result.falls = join(state)
        return result

    def statement(self, node: ast.stmt, state: State) -> Outcome:
        """Analyse one statement. ``state`` is of no more use afterwards."""
        handler = self.COMPOUND.get(type(node))
        if handler is None:
            return self._watched(SimpleStatements.simple, node, state)
        # Loops and `finally` come here again and again; nested ones would multiply.
        key = (id(node), state.key())
        if key not in self._known:
            self._known[key] = self._watched(handler, node, state)
        return self._known[key]

    def _watched(self, handler: Any, node: ast.stmt, state: State) -> Outcome:
        outer, self.unwinding = self.unwinding, None
        outcome: Outcome = handler(self, node, state)
        outcome.unwinds = join(outcome.unwinds, self.unwinding)
        self.unwinding = outer
        return outcome

    def _definition(self, node: FunctionNode | ast.ClassDef, state: State) -> Outcome:
        if isinstance(node, ast.ClassDef):
            self.define_class(node, state)
        else:
            self.define_function(node, state)
        return self.leave(state)

    def _if(self, node: ast.If, state: State) -> Outcome:
        _, true, false = self.decide(node.test, state)
        outcome = Outcome()
        for branch, body in ((true, node.body), (false, node.orelse)):
            outcome.add(self.block(body, branch), falls=True)
        return outcome

    def _while(self, node: ast.While, state: State) -> Outcome:
        outcome = Outcome()
        head = state
        while True:
            _, true, false = self.decide(node.test, head.copy())
            part = self.block(node.body, true)
            following = merged(head, part.falls, part.continues)
            if following.key() == head.key():
                break
            head = following
        return self._end_loop(outcome, part, false, node.orelse)

    def _for(self, node: ast.For | ast.AsyncFor, state: State) -> Outcome:
        head = state
        while True:
            turn = head.copy()
            pairs = self.assign_elements(node.target, node.iter, turn, f"in loop {id(node)}")
            part = self.block(node.body, turn)
            ends = join(part.falls, part.continues)
            following = merged(head, ends)
            if following.key() == head.key():
                break
            head = following
        over = head.copy()
        self.assign_elements(node.target, node.iter, over, f"in loop {id(node)}")
        for name, values in head.names.items():
            over.names[name] = values | over.names.get(name, frozenset())
        if ends is not None:
            # All elements went through the body, so what it found out holds for each.
            for bag, element in pairs:
                over.conditions[bag] = ends.condition(element) & ~ABSENT or SEEN
        return self._end_loop(Outcome(), part, over, node.orelse)

    def _end_loop(self, outcome: Outcome, part: Outcome, over: State, orelse: list[ast.stmt]) -> Outcome:
        for name in ("returns", "raises", "unwinds"):
            setattr(outcome, name, getattr(part, name))
        outcome.add(self.block(orelse, over), falls=True)
        outcome.falls = join(outcome.falls, part.breaks)
        return outcome

    def _try(self, node: ast.Try | ast.TryStar, state: State) -> Outcome:
        self.guards.stack.append(node)
        before = state.copy()
        body = self.block(node.body, state)
        self.guards.stack.pop()
        outcome = Outcome(breaks=body.breaks, continues=body.continues, returns=body.returns)
        if not any(_catches_all(handler.type) for handler in node.handlers):
            outcome.raises, outcome.unwinds = body.raises, body.unwinds
        for handler in node.handlers:
            caught = merged(body.raises, body.unwinds)
            if caught.dead:
                # Nothing here seems to raise; a handler is analysed all the same.
                caught = before.copy()
            if handler.name:
                self.set_name(handler.name, OTHERS, caught)
            self.handling += 1
            outcome.add(self.block(handler.body, caught), falls=True)
            self.handling -= 1
        outcome.add(self.block(node.orelse, merged(body.falls)), falls=True)
        return self._finally(node.finalbody, outcome) if node.finalbody else outcome

    def _finally(self, body: list[ast.stmt], before: Outcome) -> Outcome:
        result = Outcome()
        for name in EXITS:
            state = getattr(before, name)
            if state is not None:
                part = self.block(body, state.copy())
                result.add(part)
                setattr(result, name, join(getattr(result, name), part.falls))
        return result

    def _with(self, node: ast.With | ast.AsyncWith, state: State) -> Outcome:
        for item in node.items:
            values = self.value(item.context_expr, state)
            for token in tokens_of(values):
                self.take(token, item.context_expr, "entered by `with` as if it were the memory", state)
            self.may_raise(state)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, OTHERS, state)
        if state.dead:
            return Outcome(raises=state)
        self.guards.stack.append(node)
        outcome = self.block(node.body, state)
        self.guards.stack.pop()
        names = {key_of(i.context_expr.func) for i in node.items if isinstance(i.context_expr, ast.Call)}
        if names & {"suppress", "contextlib.suppress"}:
            outcome.falls = join(outcome.falls, outcome.unwinds, outcome.raises)
        return outcome

    def _match(self, node: ast.Match, state: State) -> Outcome:
        values = self.value(node.subject, state)
        outcome, rest = Outcome(), state
        for case in node.cases:
            matched, missed = self.match_subject(values, case.pattern, rest)
            for name in _captures(case.pattern):
                whole = isinstance(case.pattern, ast.MatchAs) and case.pattern.name == name
                self.set_name(name, values if whole else OTHERS, matched)
            if case.guard is not None:
                _, matched, unguarded = self.decide(case.guard, matched)
                missed = merged(missed, unguarded)
            outcome.add(self.block(case.body, matched), falls=True)
            rest = missed
        outcome.falls = join(outcome.falls, rest)
        return outcome

    COMPOUND: ClassVar[Mapping[type[ast.stmt], Any]] = {
        ast.If: _if,
        ast.While: _while,
        ast.For: _for,
        ast.AsyncFor: _for,
        ast.Try: _try,
        ast.TryStar: _try,
        ast.With: _with,
        ast.AsyncWith: _with,
        ast.Match: _match,
        ast.FunctionDef: _definition,
        ast.AsyncFunctionDef: _definition,
        ast.ClassDef: _definition,
    }


def _catches_all(classes: ast.expr | None) -> bool:
    return classes is None or key_of(classes) in {"Exception", "BaseException"}


def _captures(pattern: ast.pattern) -> list[str]:
    found = [getattr(node, "name", None) or getattr(node, "rest", None) for node in ast.walk(pattern)]
    return [name for name in found if isinstance(name, str)]
