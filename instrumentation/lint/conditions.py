"""Conditions: what each outcome of a test says about reservations."""

from __future__ import annotations

import ast

from instrumentation.lint.annotations import Kind, last_name
from instrumentation.lint.names import Names, key_of
from instrumentation.lint.state import (
    ABSENT,
    NONE,
    OTHER,
    OTHERS,
    Bag,
    Res,
    State,
    Value,
    Values,
    Verdict,
    merged,
    tokens_of,
)  # fmt: skip

Decision = tuple[Values, State, State]

_VERDICTS = {"ok": True, "error": False}


class Conditions(Names):
    """Tests. ``decide`` gives a test's values and the states in which it is true and false."""

    def value(self, node: ast.expr, state: State) -> Values:
        """Values of an expression; ``state`` becomes what it is afterwards."""
        raise NotImplementedError

    def decide(self, node: ast.expr, state: State) -> Decision:
        """Evaluate a test. ``state`` is of no more use afterwards."""
        if isinstance(node, ast.BoolOp):
            return self._decide_bool_op(node, state)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            values, true, false = self.decide(node.operand, state)
            return negated(values), false, true
        if isinstance(node, ast.IfExp):
            _, true, false = self.decide(node.test, state)
            one, one_true, one_false = self.decide(node.body, true)
            two, two_true, two_false = self.decide(node.orelse, false)
            return one | two, merged(one_true, two_true), merged(one_false, two_false)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and is_none(node.comparators[0]):
            return self._none_test(node, state)
        values = self.value(node, state)
        true, false = self.narrow(values, state, key_of(node))
        if isinstance(node, ast.Constant):
            (false if node.value else true).dead = True
        return values, true, false

    def _decide_bool_op(self, node: ast.BoolOp, state: State) -> Decision:
        conjunction = isinstance(node.op, ast.And)
        collected: list[Values] = []
        left: list[State] = []
        for operand in node.values:
            values, true, false = self.decide(operand, state)
            collected.append(values)
            state, leaving = (true, false) if conjunction else (false, true)
            left.append(leaving)
        ended = merged(*left)
        values = combined(collected, positive=conjunction)
        return (values, state, ended) if conjunction else (values, ended, state)

    def narrow(self, values: Values, state: State, key: str = "") -> tuple[State, State]:
        """States in which ``values`` are true and false."""
        true, false = state.copy(), state.copy()
        for value in values:
            if isinstance(value, Res):
                verdict = Verdict(frozenset({value.token}), positive=True)
                self._learn(
                    verdict, true, false, alone=len(values) == 1, sure=state.is_meant(value.token, values)
                )
            elif isinstance(value, Verdict):
                # A name that may also hold something else need not be what this reservation said.
                good, bad = (true, false) if value.positive else (false, true)
                alone = len(values) == 1
                self._learn(value, good, bad, alone=alone, sure=alone)
        if key in state.names and NONE in values:
            true.names[key] = values - {NONE}
        return true, false

    def _learn(self, verdict: Verdict, good: State, bad: State, *, alone: bool, sure: bool) -> None:
        for token in sorted(verdict.tokens):
            self.checked(token)
            if not good.decide(token, good=True, sure=sure) and alone:
                good.dead = True
            # One of several, or one that was perhaps never looked at: the other outcome says nothing.
            if verdict.exact and not bad.decide(token, good=False, sure=sure) and alone:
                bad.dead = True

    def _none_test(self, node: ast.Compare, state: State) -> Decision:
        """Decide ``x is None`` and ``x is not None``."""
        values = self.value(node.left, state)
        outcome = self.compared_with_none(values)
        if any(isinstance(value, Verdict) for value in outcome):
            is_none, is_some = self.narrow(outcome, state)
        else:
            is_none, is_some = self._split_none(key_of(node.left), values, state)
        if isinstance(node.ops[0], ast.IsNot | ast.NotEq):
            return negated(outcome), is_some, is_none
        return outcome, is_none, is_some

    @staticmethod
    def _split_none(key: str, values: Values, state: State) -> tuple[State, State]:
        is_none, is_some = state.copy(), state.copy()
        if NONE in values and key in state.names:
            is_some.names[key] = values - {NONE}
            is_none.names[key] = frozenset({NONE})
            for token in tokens_of(values):
                # The name is None, so this path did not make what it might have held.
                if not state.held_elsewhere(token, key):
                    is_none.conditions[token] = ABSENT
        elif values and all(isinstance(value, Res) for value in values):
            is_none.dead = True
        return is_none, is_some

    @staticmethod
    def compared_with_none(values: Values) -> Values:
        """Values of ``v is None``: ``r.error is None`` says that all went well."""
        found: set[Value] = {
            Verdict(value.tokens, not value.positive, value.exact)
            for value in values
            if isinstance(value, Verdict) and not value.positive
        }
        return frozenset(found) or OTHERS

    def is_instance(self, values: Values, classes: ast.expr, state: State) -> Values:
        """Values of ``isinstance(v, classes)``."""
        if any(isinstance(value, Verdict) and not value.positive for value in values):
            return values  # isinstance(r.error, ReservationError)
        names = [last_name(name) for name in _alternatives(classes)]
        says_reservation = [self.file.module.types.get(name) is Kind.PLAIN for name in names]
        unions = [t for t in tokens_of(values) if self.file.tokens[t].kind is Kind.UNION]
        if any(says_reservation) and not all(says_reservation):
            return OTHERS
        return self.said(unions, values, state, positive=not any(says_reservation))

    @staticmethod
    def said(tokens: list[int], values: Values, state: State, *, positive: bool) -> Values:
        """What an outcome says of those ``tokens`` that are among ``values``: of whichever is there."""
        meant = frozenset(token for token in tokens if state.is_meant(token, values))
        found: set[Value] = {Verdict(frozenset({token}), positive) for token in tokens if token not in meant}
        if meant:
            found.add(Verdict(meant, positive))
        return frozenset(found) or OTHERS

    def match_subject(self, values: Values, pattern: ast.pattern, state: State) -> tuple[State, State]:
        """States in which a pattern matches ``values``, and in which it does not."""
        if isinstance(pattern, ast.MatchAs):
            if pattern.pattern is None:
                return state.copy(), merged()
            return self.match_subject(values, pattern.pattern, state)
        if isinstance(pattern, ast.MatchOr):
            matched, rest = [], state
            for alternative in pattern.patterns:
                one, rest = self.match_subject(values, alternative, rest)
                matched.append(one)
            return merged(*matched), rest
        if isinstance(pattern, ast.MatchSingleton | ast.MatchValue):
            return self._match_constant(values, pattern, state)
        if isinstance(pattern, ast.MatchClass):
            return self._match_class(values, pattern, state)
        return state.copy(), state.copy()

    def _match_constant(
        self, values: Values, pattern: ast.MatchSingleton | ast.MatchValue, state: State
    ) -> tuple[State, State]:
        constant = pattern.value.value if isinstance(pattern.value, ast.Constant) else pattern.value
        if any(isinstance(value, Verdict) for value in values):
            if isinstance(constant, bool):
                true, false = self.narrow(values, state)
                return (true, false) if constant else (false, true)
            if constant is None:
                return self.narrow(self.compared_with_none(values), state)
        return state.copy(), state.copy()

    def _match_class(self, values: Values, pattern: ast.MatchClass, state: State) -> tuple[State, State]:
        outcome = self.is_instance(values, pattern.cls, state)
        matched, missed = self.narrow(outcome, state)
        tokens = tokens_of(values)
        is_reservation = self.file.module.types.get(last_name(pattern.cls)) is Kind.PLAIN
        if outcome == OTHERS and is_reservation and len(tokens) == len(values):
            missed = merged()
        # Attributes are read in this order, each only when those before it match.
        for name, sub in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
            if name in _VERDICTS and tokens:
                said = self.said(tokens, values, matched, positive=_VERDICTS[name])
                matched, also_missed = self.match_subject(said, sub, matched)
                missed = merged(missed, also_missed)
                continue
            for token in tokens if name == "value" else ():
                self.take(token, sub, "matched for its `.value`", matched)
            if not (isinstance(sub, ast.MatchAs) and sub.pattern is None):
                missed = merged(missed, matched)
        return matched, missed


def is_none(node: ast.expr) -> bool:
    """Whether a node is the constant None."""
    return isinstance(node, ast.Constant) and node.value is None


def negated(values: Values) -> Values:
    """Values of ``not v``: of a reservation itself, that it failed."""
    found: set[Value] = set()
    for value in values:
        if isinstance(value, Verdict):
            found.add(Verdict(value.tokens, not value.positive, value.exact))
        elif isinstance(value, Res):
            found.add(Verdict(frozenset({value.token}), positive=False))
        else:
            found.add(OTHER)
    return frozenset(found)


def combined(operands: list[Values], *, positive: bool) -> Values:
    """Values of ``a and b`` (positive) or ``a or b``.

    ``a.ok and b.ok`` being true says that both went well, and so does ``not a.ok or not b.ok`` being false.
    """
    tokens = frozenset(
        token
        for values in operands
        if len(values) == 1
        for value in values
        if isinstance(value, Verdict) and value.positive is positive
        for token in value.tokens
    )
    found: set[Value] = {v for values in operands for v in values if isinstance(v, Res | Bag)}
    if tokens:
        found.add(Verdict(tokens, positive, exact=False))
    return frozenset(found) | OTHERS if not tokens else frozenset(found)


def _alternatives(classes: ast.expr) -> list[ast.expr]:
    if isinstance(classes, ast.Tuple):
        return [name for element in classes.elts for name in _alternatives(element)]
    if isinstance(classes, ast.BinOp) and isinstance(classes.op, ast.BitOr):
        return _alternatives(classes.left) + _alternatives(classes.right)
    return [classes]
