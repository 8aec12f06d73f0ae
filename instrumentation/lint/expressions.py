"""Expressions: their values, and what evaluating them does to reservations."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, ClassVar

from instrumentation.lint.calls import Calls
from instrumentation.lint.conditions import combined, is_none, negated
from instrumentation.lint.names import key_of
from instrumentation.lint.state import (
    NONE,
    OTHERS,
    SEEN,
    UNCHECKED,
    Bag,
    Maker,
    State,
    Values,
    Verdict,
    merged,
    tokens_of,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class Expressions(Calls):
    """Values of expressions, and assignment."""

    def value(self, node: ast.expr, state: State) -> Values:
        """Values of an expression; ``state`` becomes what it is afterwards."""
        handler = self.HANDLERS.get(type(node))
        if handler is not None:
            found: Values = handler(self, node, state)
            return found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.look(self.value(child, state), state)
        return OTHERS

    def _name(self, node: ast.Name, state: State) -> Values:
        return state.names.get(node.id, OTHERS)

    def _constant(self, node: ast.Constant, state: State) -> Values:  # noqa: ARG002
        return frozenset({NONE}) if node.value is None else OTHERS

    def _attribute(self, node: ast.Attribute, state: State) -> Values:
        key = key_of(node)
        if key in state.names:
            return state.names[key]
        held = self.attribute_of_class(node, state)
        if held is not None:
            return held
        base = self.value(node.value, state)
        maker = None if tokens_of(base) else self.maker_of(node)
        return frozenset({maker}) if maker else self.member(base, node, state)

    def _subscript(self, node: ast.Subscript, state: State) -> Values:
        base = self.value(node.value, state)
        self.look(self.value(node.slice, state), state)
        self.may_raise(state)
        key = key_of(node)
        if key in state.names:
            return state.names[key]
        if isinstance(node.slice, ast.Slice):
            bags = frozenset(value for value in base if isinstance(value, Bag))
            self._misuse(base, node, "subscripted", state)
            return bags or OTHERS
        found: Values = frozenset()
        for value in sorted(base, key=repr):
            if isinstance(value, Bag):
                found |= self.element(value, node, state)
        self._misuse(base, node, "subscripted", state)
        if key and found:
            state.names[key] = found
        return found or OTHERS

    def _misuse(self, values: Values, node: ast.expr, how: str, state: State) -> None:
        for token in tokens_of(values):
            self.take(token, node, f"{how} as if it were the memory", state)

    def _bool_op(self, node: ast.BoolOp, state: State) -> Values:
        collected: list[Values] = []
        left: list[State] = []
        conjunction = isinstance(node.op, ast.And)
        for operand in node.values[:-1]:
            values, true, false = self.decide(operand, state.copy())
            collected.append(values)
            left.append(false if conjunction else true)
            state.become(true if conjunction else false)
        # The last operand decides nothing: its value is the result.
        collected.append(self.value(node.values[-1], state))
        state.become(merged(state, *left))
        return combined(collected, positive=conjunction)

    def _if_expression(self, node: ast.IfExp, state: State) -> Values:
        _, true, false = self.decide(node.test, state.copy())
        values = self.value(node.body, true) | self.value(node.orelse, false)
        state.become(merged(true, false))
        return values

    def _unary(self, node: ast.UnaryOp, state: State) -> Values:
        values = self.value(node.operand, state)
        if isinstance(node.op, ast.Not):
            return negated(values)
        self.look(values, state)
        return OTHERS

    def _compare(self, node: ast.Compare, state: State) -> Values:
        values = self.value(node.left, state)
        if len(node.ops) == 1:
            other, operator = node.comparators[0], node.ops[0]
            negative = isinstance(operator, ast.IsNot | ast.NotEq)
            if is_none(other):
                said = self.compared_with_none(values)
                return negated(said) if negative else said
            equality = isinstance(operator, ast.Is | ast.IsNot | ast.Eq | ast.NotEq)
            if equality and isinstance(other, ast.Constant) and isinstance(other.value, bool):
                said = frozenset(v for v in values if isinstance(v, Verdict)) or OTHERS
                return said if other.value is not negative else negated(said)
        self.look(values, state)
        for comparator in node.comparators:
            self.look(self.value(comparator, state), state)
        return OTHERS

    def _walrus(self, node: ast.NamedExpr, state: State) -> Values:
        values = self.value(node.value, state)
        self.assign(node.target, values, state)
        return values

    def _lambda(self, node: ast.Lambda, state: State) -> Values:
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.hand_over(self.value(default, state), default, "passed on", state)
        found: list[Values] = []

        def run(around: State) -> None:
            inner = around.copy()
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    inner.names[argument.arg] = OTHERS
            outer, self.unwinding = self.unwinding, None
            found.append(self.value(node.body, inner))
            self.unwinding = outer

        self.close_over(node, run, state)
        made = tokens_of(found[0])
        if made:
            info = self.file.tokens[made[0]]
            return frozenset({Maker(info.what.removeprefix("the result of ").removesuffix("()"), info.kind)})
        return OTHERS

    def close_over(self, node: ast.AST, run: Callable[[State], None], state: State) -> None:
        """Analyse a nested function with what its names hold here; again when they hold something else."""
        free = free_names(node)
        self.closures[node] = (free, run)
        self.capture(free, state)
        run(state)

    def capture(self, names: Iterable[str], state: State) -> None:
        """Hand over what a nested function reads."""
        for name in sorted(names):
            self.discharge(state.names.get(name, OTHERS), state)

    def set_name(self, key: str, values: Values, state: State, *, local: bool = True) -> None:
        """Bind a name; a nested function that reads it may run from now on."""
        super().set_name(key, values, state, local=local)
        for free, run in list(self.closures.values()) if tokens_of(values) else ():
            if key in free:
                self.capture([key], state)
                run(state)

    def _display(self, node: ast.List | ast.Tuple | ast.Set | ast.Dict, state: State) -> Values:
        elements: list[ast.expr] = []
        if isinstance(node, ast.Dict):
            elements += [key for key in node.keys if key is not None] + node.values
        else:
            elements += node.elts
        return self._gather(elements, node, state)

    def _gather(self, elements: Iterable[ast.expr], node: ast.expr, state: State) -> Values:
        gathered = []
        for element in elements:
            values = self.value(element, state)
            self.hand_over(values, element, "stored in a container", state)
            gathered.append(values)
        return self.bag(gathered, node, state)

    def _starred(self, node: ast.Starred, state: State) -> Values:
        values = self.value(node.value, state)
        return self.elements(values, node, state)

    def _transparent(self, node: ast.Await, state: State) -> Values:
        values = self.value(node.value, state)
        self.may_raise(state)
        return values

    def _yield(self, node: ast.Yield | ast.YieldFrom, state: State) -> Values:
        if node.value is not None:
            values = self.value(node.value, state)
            self.returned(values, state, each=True)
            if isinstance(node, ast.YieldFrom):
                self.elements(values, node, state)
            self.hand_over_result(values, state)
        self.may_raise(state)
        return OTHERS

    def returned(self, values: Values, state: State, *, each: bool = False) -> None:
        """Note what the function gives its caller."""
        raise NotImplementedError

    def hand_over_result(self, values: Values, state: State) -> None:
        """Return or yield: the duty to look is the caller's."""
        for token in tokens_of(values):
            self.checked(token)
        self.discharge(values, state)

    def _comprehension(self, node: ast.expr, state: State) -> Values:
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [getattr(node, "elt")]  # noqa: B009
        _, bag = self.comprehension(node, results, state)
        return bag

    def comprehension(self, node: ast.expr, results: list[ast.expr], state: State) -> tuple[Values, Values]:
        """Values of the last result of a comprehension, and the container that it makes."""
        assert isinstance(node, _COMPREHENSIONS)
        inner, skipped = state.copy(), [state.copy()]
        bound: set[str] = set()
        for generator in node.generators:
            self.assign_elements(generator.target, generator.iter, inner, f"in comprehension {id(node)}")
            bound |= {n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)}
            for test in generator.ifs:
                _, inner, false = self.decide(test, inner)
                skipped.append(false)
        values: Values = OTHERS
        gathered = []
        for result in results:
            values = self.value(result, inner)
            self.hand_over(values, result, "stored in a container", inner)
            gathered.append(values)
        bag = self.bag(gathered, node, inner)
        before = state.copy()
        state.become(merged(inner, *skipped))
        for value in bag:
            if isinstance(value, Bag):
                state.conditions[value.token] = inner.condition(value.token)
        for name in bound:
            state.names.pop(name, None)
            if name in before.names:
                state.names[name] = before.names[name]
        return values, bag

    def assign_elements(
        self, target: ast.expr, iterable: ast.expr, state: State, role: str
    ) -> list[tuple[int, int]]:
        """Bind a loop's target to an element; pairs of tokens (container, element)."""
        name = (
            iterable.func.id if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) else ""
        )
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        arguments = iterable.args if isinstance(iterable, ast.Call) else []
        if name == "enumerate" and len(parts) == 2 and arguments:
            self.assign(parts[0], OTHERS, state)
            return self.assign_elements(parts[1], arguments[0], state, role)
        if name == "zip" and len(parts) == len(arguments) and parts:
            pairs = []
            for part, argument in zip(parts, arguments, strict=True):
                pairs += self.assign_elements(part, argument, state, role)
            return pairs
        values = self.value(iterable, state)
        found = self.elements(values, iterable, state, role)
        self.may_raise(state)
        self.assign(target, found, state)
        bags = [value.token for value in values if isinstance(value, Bag)]
        tokens = tokens_of(found)
        return [(bag, tokens[0]) for bag in bags if tokens]

    def assign(self, target: ast.expr, values: Values, state: State) -> None:
        """Bind a target."""
        if isinstance(target, ast.Name):
            if target.id == "_":
                for token in tokens_of(values):
                    if state.condition(token) & UNCHECKED and not state.held_elsewhere(token, "_"):
                        self.lose(token, state, "is discarded in `_`")
            self.set_name(target.id, values, state)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self._assign_place(target, values, state)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, OTHERS, state)
        elif isinstance(target, ast.Tuple | ast.List):
            self._misuse(values, target, "unpacked", state)
            bags = [value for value in values if isinstance(value, Bag)]
            for index, part in enumerate(target.elts):
                found: Values = OTHERS
                if bags and not isinstance(part, ast.Starred):
                    found = self.element(bags[0], part, state, f"part {index}")
                    for token in tokens_of(found):
                        condition = state.condition(token)
                        state.conditions[token] = (
                            condition & ~SEEN | UNCHECKED if condition & SEEN else condition
                        )
                self.assign(part, found, state)

    def _assign_place(self, target: ast.Attribute | ast.Subscript, values: Values, state: State) -> None:
        base = self.value(target.value, state)
        if isinstance(target, ast.Subscript):
            self.look(self.value(target.slice, state), state)
        elif tokens_of(base):
            self.member(base, target, state)
        key = key_of(target)
        this = self.resolver.this
        stored = bool(this) and isinstance(target, ast.Attribute) and key == f"{this}.{target.attr}"
        for token in tokens_of(values):
            # A reservation that is known to have succeeded may be used by every method.
            if stored and isinstance(target, ast.Attribute):
                self.file.tokens[token].attribute = target.attr
                if state.condition(token) & (UNCHECKED | SEEN):
                    self.file.stored[token] = target.attr
        self.hand_over(values, target, "stored", state)
        if key:
            self.set_name(key, values, state)
        if isinstance(target, ast.Subscript) and tokens_of(values):
            container = key_of(target.value)
            bag = self.bag([values], target, state)
            if container and bag != OTHERS:
                state.names[container] = state.names.get(container, OTHERS) | bag

    HANDLERS: ClassVar[Mapping[type[ast.expr], Any]] = {
        ast.Name: _name,
        ast.Constant: _constant,
        ast.Attribute: _attribute,
        ast.Subscript: _subscript,
        ast.Call: Calls.call,
        ast.BoolOp: _bool_op,
        ast.IfExp: _if_expression,
        ast.UnaryOp: _unary,
        ast.Compare: _compare,
        ast.NamedExpr: _walrus,
        ast.Lambda: _lambda,
        ast.List: _display,
        ast.Tuple: _display,
        ast.Set: _display,
        ast.Dict: _display,
        ast.Starred: _starred,
        ast.Await: _transparent,
        ast.Yield: _yield,
        ast.YieldFrom: _yield,
        **dict.fromkeys(_COMPREHENSIONS, _comprehension),
    }


def free_names(node: ast.AST) -> frozenset[str]:
    """Names that a function reads and does not bind."""
    own: set[str] = set()
    read: set[str] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.arg):
            own.add(child.arg)
        elif isinstance(child, ast.Name):
            (read if isinstance(child.ctx, ast.Load) else own).add(child.id)
    return frozenset(read - own)
