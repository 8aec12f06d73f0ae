"""The normal form: what every lowering and every analysis reads.

* captured constants are literals; each call of something captured names it directly;
* loops over tuples are unrolled; each loop's variable has a name of its own, and so has an assigned parameter;
* each shuffle is an assignment of its own, ``name = cuda.shfl_*(mask, name, offset)``; device functions that hold a
  collective or ask for their thread are inlined;
* what is promised to be one value for a block is an assignment of a name to a name: the block's, and each thread's own;
* an early return has become a branch around what follows it.
"""

from __future__ import annotations

import ast
from typing import Any, TypeVar

import numpy as np

from instrumentation.kernel.access import access_sets
from instrumentation.kernel.dialect import array_declaration
from instrumentation.kernel.dialect_expressions import constant
from instrumentation.kernel.origin import mark_inlined, origin_of
from instrumentation.kernel.parse import NUMBER_TYPES, ParsedFunction, describe, is_promised
from instrumentation.kernel.tree import walk

MAX_STATEMENTS = 20_000
Node = TypeVar("Node", bound=ast.AST)


def normalise(parsed: ParsedFunction) -> None:
    """Bring ``parsed.body`` into the normal form."""
    _Normaliser(parsed).run()


class _Normaliser:
    def __init__(self, parsed: ParsedFunction) -> None:
        self.parsed = parsed
        self.taken = {n.id for n in parsed.walk() if isinstance(n, ast.Name)} | set(parsed.captured)
        self.taken |= set(parsed.parameters)
        self.counter = 0
        self.statements = 0
        #: arrays whose loads must not move over a barrier
        self.unsteady: frozenset[str] = frozenset()

    def run(self) -> None:
        parsed = self.parsed
        self._own_parameters()
        self.unsteady = access_sets(parsed).writes | frozenset(parsed.arrays)
        fold = _Fold(self)
        parsed.body = self.block([fold.visit(statement) for statement in parsed.body])
        if parsed.is_kernel or parsed.inlined:
            parsed.body = self._early_returns(parsed.body)
        ast.fix_missing_locations(ast.Module(body=parsed.body, type_ignores=[]))

    def _own_parameters(self) -> None:
        """A parameter that is assigned could be one value per thread: such a one gets a name of its own."""
        parsed = self.parsed
        stored = {n.id for n in parsed.walk() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in [p for p in parsed.parameters if p in stored]:
            own = self.fresh(name)
            replace = Substitute({name: ast.Name(own, ast.Load())})
            first = ast.Assign([ast.Name(own, ast.Store())], ast.Name(name, ast.Load()))
            first.lineno = parsed.line
            parsed.body = [first, *[replace.visit(s) for s in parsed.body]]

    def fresh(self, stem: str) -> str:
        """A name that nothing else has."""
        while True:
            self.counter += 1
            name = f"{stem}__{self.counter}"
            if name not in self.taken:
                self.taken.add(name)
                return name

    def capture(self, stem: str, value: Any) -> ast.Name:
        """A name that stands for a captured value."""
        parsed = self.parsed
        if stem not in parsed.captured and stem not in self.taken:
            self.taken.add(stem)
            parsed.captured[stem] = value
        elif parsed.captured.get(stem) is not value:
            stem = self.fresh(stem)
            parsed.captured[stem] = value
        return ast.Name(stem, ast.Load())

    def bind(self, stem: str, value: ast.expr, place: ast.AST, before: list[ast.stmt]) -> ast.Name:
        """Assign an expression to a fresh name in a statement of its own."""
        name = self.fresh(stem)
        before.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), place))
        return ast.copy_location(ast.Name(name, ast.Load()), place)

    # --- statements

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for statement in statements:
            self.statements += 1
            if self.statements > MAX_STATEMENTS:
                self.parsed.refuse(
                    statement, f"more than {MAX_STATEMENTS} statements once loops are unrolled"
                )
            out.extend(self.statement(statement))
        return out

    def statement(self, node: ast.stmt) -> list[ast.stmt]:  # noqa: PLR0911
        if isinstance(node, ast.AnnAssign):
            if node.value is None:
                return []
            return self.statement(ast.copy_location(ast.Assign([node.target], node.value), node))
        if isinstance(node, ast.AugAssign):
            return self._augmented(node)
        if isinstance(node, ast.For):
            return self._unroll(node) if isinstance(node.iter, ast.Tuple) else self._for(node)
        if isinstance(node, ast.While):
            node.body = self.block(node.body)
            return [node]
        if isinstance(node, ast.If):
            before: list[ast.stmt] = []
            node.test = self.hoist(node.test, [node.test], before)
            if is_promised(node):
                node.test = self._agreed(node.test, node, before)
            node.body, node.orelse = self.block(node.body), self.block(node.orelse)
            return [*before, node]
        if isinstance(node, ast.Assign):
            if array_declaration(self.parsed, node) is not None:
                return []
            return self._assign(node)
        if isinstance(node, ast.Expr) and self.parsed.collective(node.value) == "barrier":
            assert isinstance(node.value, ast.Call)
            node.value.args = []
            return [node]
        if isinstance(node, ast.Expr | ast.Return) and node.value is not None:
            before = []
            node.value = self.hoist(node.value, [node.value], before, discarded=isinstance(node, ast.Expr))
            done = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
            return before if done else [*before, node]
        return [node]

    def _assign(self, node: ast.Assign) -> list[ast.stmt]:
        target = node.targets[0]
        if isinstance(target, ast.Tuple):
            return self._untuple(node)
        before: list[ast.stmt] = []
        whole: list[ast.expr] = [node.value, *([target.slice] if isinstance(target, ast.Subscript) else [])]
        node.value = self.hoist(node.value, whole, before)
        if isinstance(target, ast.Subscript):
            target.slice = self.hoist(target.slice, whole, before)
        if is_promised(node) and not isinstance(node.value, ast.Name):
            node.value = self.bind("own", node.value, node, before)
        return [*before, node]

    def _agreed(self, value: ast.expr, place: ast.stmt, before: list[ast.stmt]) -> ast.Name:
        """A name for what is promised to be one value for a block: each thread's own is kept beside it."""
        own = value if isinstance(value, ast.Name) else self.bind("own", value, place, before)
        name = self.bind("agreed", own, place, before)
        before[-1].uniform_promised = True  # type: ignore[attr-defined]
        before[-1].origin = origin_of(place)  # type: ignore[attr-defined]
        return name

    def _augmented(self, node: ast.AugAssign) -> list[ast.stmt]:
        target, before = node.target, list[ast.stmt]()
        if isinstance(target, ast.Subscript) and any(isinstance(n, ast.Call) for n in walk(target.slice)):
            # The index stands twice in the normal form: what it calls must not run twice.
            parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
            names: list[ast.expr] = [
                self.bind("index", self.hoist(part, [part], before), node, before) for part in parts
            ]
            target.slice = ast.Tuple(names, ast.Load()) if isinstance(target.slice, ast.Tuple) else names[0]
        source = clone(target)
        source.ctx = ast.Load()
        value = ast.copy_location(ast.BinOp(source, node.op, node.value), node)
        return [*before, *self._assign(ast.copy_location(ast.Assign([target], value), node))]

    def _for(self, node: ast.For) -> list[ast.stmt]:
        assert isinstance(node.target, ast.Name)
        assert isinstance(node.iter, ast.Call)
        before: list[ast.stmt] = []
        whole = list(node.iter.args)
        node.iter.args = [self.hoist(argument, whole, before) for argument in node.iter.args]
        if is_promised(node):
            node.iter.args = [
                each if isinstance(each, ast.Constant) else self._agreed(each, node, before)
                for each in node.iter.args
            ]
        # One name used for two loops, one uniform and one not, must not share a storage class.
        renamed = self.fresh(node.target.id)
        replace = Substitute({node.target.id: ast.Name(renamed, ast.Load())})
        node.target = ast.copy_location(ast.Name(renamed, ast.Store()), node.target)
        node.body = self.block([replace.visit(s) for s in node.body])
        return [*before, node]

    def _unroll(self, node: ast.For) -> list[ast.stmt]:
        assert isinstance(node.iter, ast.Tuple)
        assert isinstance(node.target, ast.Name)
        out: list[ast.stmt] = []
        for element in node.iter.elts:
            replace = Substitute({node.target.id: ast.Constant(constant(self.parsed, element))})
            out.extend(self.block([replace.visit(clone(s)) for s in node.body]))
        return out

    def _untuple(self, node: ast.Assign) -> list[ast.stmt]:
        target = node.targets[0]
        assert isinstance(target, ast.Tuple)
        out: list[ast.stmt] = []
        for axis, name in enumerate(target.elts):
            if isinstance(node.value, ast.Attribute):
                value: ast.expr = ast.Subscript(clone(node.value), ast.Constant(axis), ast.Load())
            else:
                assert isinstance(node.value, ast.Call)
                value = along_axis(node.value, axis)
            out.append(ast.copy_location(ast.Assign([name], value), node))
        return out

    # --- collectives and inlining

    def hoist(
        self, node: ast.expr, whole: list[ast.expr], before: list[ast.stmt], *, discarded: bool = False
    ) -> ast.expr:
        """Take shuffles and inlined device functions out of an expression of a statement, in evaluation order."""
        result = _Hoister(self, whole, before, node if discarded else None).visit(node)
        assert isinstance(result, ast.expr)
        return result

    def inline(self, call: ast.Call, helper: ParsedFunction, before: list[ast.stmt]) -> ast.expr | None:
        """Append the body of ``helper``, its names made fresh and its arguments bound; returns its value."""
        parsed = self.parsed
        # Its name goes with the call, and what it captured with its name.
        parsed.constants.append(f"{helper.name}={describe(helper)}")
        names: dict[str, ast.expr] = {}
        for parameter, argument in zip(helper.parameters, call.args, strict=True):
            if parameter in helper.ranks or isinstance(argument, ast.Constant):
                names[parameter] = argument
            else:
                names[parameter] = self.bind(parameter, argument, call, before)
        used = {n.id: n for n in helper.walk() if isinstance(n, ast.Name)}
        stored = {n.id for n in helper.walk() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {name: ast.Name(self.fresh(name), ast.Load()) for name in sorted(stored)}
        for name, array in helper.arrays.items():
            renamed = self.fresh(name)
            names[name] = ast.Name(renamed, ast.Load())
            parsed.arrays[renamed] = array
        for name in sorted(set(used) & set(helper.captured) - set(names)):
            names[name] = self.capture(name, helper.captured[name])
        body = [Substitute(names).visit(clone(s)) for s in helper.body]
        self.statements += sum(isinstance(n, ast.stmt) for n in helper.walk())
        if self.statements > MAX_STATEMENTS:
            parsed.refuse(call, f"more than {MAX_STATEMENTS} statements once {helper.name} is inlined")
        result: ast.expr | None = None
        mark_inlined((inner for statement in body for inner in ast.walk(statement)), call)
        if body and isinstance(body[-1], ast.Return):
            result = body.pop().value
        for statement in body:
            for inner in walk(statement):
                if hasattr(inner, "lineno"):
                    inner.lineno = call.lineno
        before.extend(body)
        if result is None or isinstance(result, ast.Name | ast.Constant):
            return result
        return self.bind(helper.name, result, call, before)

    def _early_returns(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """``if c: a; return`` followed by more becomes ``if c: a`` / ``else: more``; returns at the end go."""
        for i, node in enumerate(statements):
            if isinstance(node, ast.Return) and node.value is None:
                return statements[:i]
            if not isinstance(node, ast.If) or not any(
                isinstance(n, ast.Return) and n.value is None for n in walk(node)
            ):
                continue
            rest = statements[i + 1 :]
            goes_on = [side for side in (node.body, node.orelse) if _falls_through(side)]
            if len(goes_on) == 2 and rest:
                self.parsed.refuse(
                    node, "a return under two conditions with more after them: leave by conditions"
                )
            for side in goes_on:
                side.extend(rest)
            body, orelse = self._early_returns(node.body), self._early_returns(node.orelse)
            test = node.test
            if not body and orelse:
                test, body, orelse = ast.UnaryOp(ast.Not(), test), orelse, []
            wrapped = ast.copy_location(ast.If(test, body or [ast.Pass()], orelse), node)
            return [*statements[:i], ast.fix_missing_locations(wrapped)]
        return statements


def clone(node: Node) -> Node:
    """Copy of a tree; ``copy.deepcopy`` takes ten times as long."""
    new = node.__class__.__new__(node.__class__)
    for name, value in vars(node).items():
        if isinstance(value, ast.AST):
            setattr(new, name, clone(value))
        elif isinstance(value, list):
            setattr(new, name, [clone(item) if isinstance(item, ast.AST) else item for item in value])
        else:
            setattr(new, name, value)
    return new


def along_axis(call: ast.Call, axis: int) -> ast.Call:
    """``cuda.grid_axis(axis)`` for ``cuda.grid(n)``: one number instead of a tuple."""
    function = call.func
    assert isinstance(function, ast.Attribute)
    name = ast.Attribute(clone(function.value), f"{function.attr}_axis", ast.Load())
    return ast.copy_location(ast.Call(name, [ast.Constant(axis)], []), call)


def _falls_through(statements: list[ast.stmt]) -> bool:
    for node in statements:
        if isinstance(node, ast.Return):
            return False
        if isinstance(node, ast.If) and not _falls_through(node.body) and not _falls_through(node.orelse):
            return False
    return True


class Substitute(ast.NodeTransformer):
    """Replace names by expressions; a stored name can only become another name."""

    def __init__(self, names: dict[str, ast.expr]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace one name."""
        replacement = self.names.get(node.id)
        if replacement is None:
            return node
        new = clone(replacement)
        if isinstance(new, ast.Name):
            new.ctx = node.ctx
        return ast.copy_location(new, node)


class _Fold(ast.NodeTransformer):
    """Captured numbers become literals; callees that stand in modules become captured names."""

    def __init__(self, normaliser: _Normaliser) -> None:
        self.normaliser = normaliser
        self.parsed = normaliser.parsed

    def _number(self, node: ast.expr) -> ast.expr:
        value = self.parsed.resolve(node)
        if value is not None:
            self.parsed.constants.append(f"{ast.unparse(node)}={value!r}")
        if isinstance(value, np.generic) and not isinstance(value, float):
            kind = type(value)
            callee = self.normaliser.capture(NUMBER_TYPES[kind], kind)
            return ast.copy_location(ast.Call(callee, [ast.Constant(value.item())], []), node)
        if isinstance(value, bool | int | float):
            return ast.copy_location(ast.Constant(float(value) if isinstance(value, float) else value), node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._number(node) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node if self.parsed.cuda_name(node) is not None else self._number(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        value = constant(self.parsed, node)
        if isinstance(value, int | float) and isinstance(node.op, ast.USub):
            return ast.copy_location(ast.Constant(value), node)
        node.operand = self.visit(node.operand)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        cuda = self.parsed.cuda_name(node.func)
        if cuda in ("shared.array", "local.array"):
            return node
        if cuda in ("grid", "gridsize"):
            wanted = constant(self.parsed, node.args[0])
            return along_axis(node, 0) if wanted == 1 else node
        if cuda is None and isinstance(node.func, ast.Attribute):
            node.func = ast.copy_location(
                self.normaliser.capture(node.func.attr, self.parsed.resolve(node.func)), node.func
            )
        node.args = [self.visit(argument) for argument in node.args]
        return node


class _Hoister(ast.NodeTransformer):
    """Moves collectives out of an expression into statements before it."""

    def __init__(
        self,
        normaliser: _Normaliser,
        whole: list[ast.expr],
        before: list[ast.stmt],
        discarded: ast.expr | None,
    ) -> None:
        self.normaliser = normaliser
        self.parsed = normaliser.parsed
        self.whole = whole
        self.before = before
        self.discarded = discarded

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = self.parsed.device_function(node)
        if function is not None and function.parsed.inlined:
            self._refuse_moved_loads(node, function.parsed.name)
            self.generic_visit(node)
            result = self.normaliser.inline(node, function.parsed, self.before)
            if result is None:
                if node is not self.discarded:
                    self.parsed.refuse(node, f"{function.parsed.name} returns nothing")
                return ast.copy_location(ast.Constant(0), node)
            return ast.copy_location(result, node)
        self.generic_visit(node)
        if self.parsed.collective(node):
            if not isinstance(node.args[1], ast.Name):
                node.args[1] = self.normaliser.bind("moved", node.args[1], node, self.before)
            return self.normaliser.bind("shuffled", node, node, self.before)
        return node

    def _refuse_moved_loads(self, call: ast.Call, name: str) -> None:
        """What stands beside an inlined call is evaluated after it: no load may be among that."""
        inside = set(map(id, walk(call)))
        for root in self.whole:
            for node in walk(root):
                if id(node) in inside:
                    continue
                loads = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
                if loads and node.value.id in self.normaliser.unsteady:  # type: ignore[attr-defined]
                    self.parsed.refuse(
                        node, f"a load beside {name}, which waits: assign {name}'s result to a name first"
                    )
                other = self.parsed.device_function(node)
                cuda = self.parsed.cuda_name(node.func) if isinstance(node, ast.Call) else None
                plain_call = other is not None and not other.parsed.inlined and other.parsed.ranks
                if plain_call or (cuda or "").startswith("atomic."):
                    self.parsed.refuse(
                        node, f"memory is used beside {name}, which waits: assign its result to a name"
                    )
