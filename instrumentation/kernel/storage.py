"""Where each per-thread value of a kernel lives on the host.

In a *lane array* when it must outlive its region; as a plain local of the lane loop when one region holds its whole
life; nowhere when it is cheap and is computed again where it is used (``row * n + lane``), which keeps index
arithmetic visible to LLVM.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.kernel.regions import Collective, Control, Part, Region, Uniformity, names_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel.parse import ParsedFunction

Path = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One occurrence of a name: where in program order, under which controls, in which part."""

    position: int
    path: Path
    part: Part
    store: bool


class Storage:
    """Storage class of each varying name: ``lanes``, ``recomputed`` (with its expression), or local to a region."""

    def __init__(self, parsed: ParsedFunction, uniformity: Uniformity, parts: list[Part]) -> None:
        self.parsed = parsed
        self.uniformity = uniformity
        self.recomputed: dict[str, ast.expr] = {}
        self.uses: dict[str, list[Use]] = {}
        self._position = 0
        names = _Names()
        #: a shuffle reads its source in another thread's place
        self._shuffled: set[str] = set()
        for path, part in _in_order(parts):
            self._index(path, part)
        for path, part in _in_order(parts):
            if isinstance(part, Region):
                for statement in part.statements:
                    self._try_recompute(path, statement)
        self.lanes = {
            name
            for name in uniformity.varying
            if name not in self.recomputed and not self._is_local(name, names)
        }

    def _index(self, path: Path, part: Part) -> None:
        nodes: list[ast.AST]
        if isinstance(part, Region):
            nodes = list(part.statements)
        elif isinstance(part, Control):
            header = part.statement
            nodes = [header.iter, header.target] if isinstance(header, ast.For) else [header.test]
        else:
            nodes = [part.statement]
        if isinstance(part, Collective):
            self._shuffled |= names_in([part.statement])
        for root in nodes:
            for name in _evaluation_order(root):
                self._position += 1
                use = Use(self._position, path, part, isinstance(name.ctx, ast.Store))
                self.uses.setdefault(name.id, []).append(use)

    def _definition(self, name: str) -> Use | None:
        """The only assignment of a name, or None when there are several or none."""
        stores = [use for use in self.uses.get(name, ()) if use.store]
        return stores[0] if len(stores) == 1 else None

    def _try_recompute(self, path: Path, node: ast.stmt) -> None:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            return
        name = node.targets[0].id
        definition = self._definition(name)
        if (
            definition is None
            or name in self._shuffled
            or not self._is_cheap(node.value, definition.position)
        ):
            return
        # A read before the definition (in a loop's next round) means the old value: that must be kept.
        later = all(use.position >= definition.position for use in self.uses[name])
        if later and all(use.path[: len(path)] == path for use in self.uses[name]):
            self.recomputed[name] = node.value

    def _is_cheap(self, node: ast.expr, before: int) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int)
        if isinstance(node, ast.Name):
            name = node.id
            if name in self.uniformity.varying:
                return name in self.recomputed
            if name in self.parsed.parameters:
                return True
            definition = self._definition(name)
            return definition is not None and definition.position < before
        if isinstance(node, ast.BinOp):
            return self._is_cheap(node.left, before) and self._is_cheap(node.right, before)
        if isinstance(node, ast.Attribute):
            return self.parsed.cuda_name(node) is not None
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute)
        if isinstance(node, ast.Call):
            return self.parsed.cuda_name(node.func) in ("grid_axis", "gridsize_axis")
        return False

    def _is_local(self, name: str, names: _Names) -> bool:
        """One region holds every use, and on each way through it an assignment comes before any read."""
        parts = {id(use.part): use.part for use in self.uses.get(name, ())}
        if len(parts) != 1:
            return False
        part = next(iter(parts.values()))
        return (
            isinstance(part, Region)
            and _Assigned(name, names).block(part.statements, assigned=False) is not None
        )


class _Names:
    """Names in expressions, each walked once: every name of a region is looked for in all of its statements."""

    def __init__(self) -> None:
        self._found: dict[int, set[str]] = {}

    def __call__(self, node: ast.expr) -> set[str]:
        if id(node) not in self._found:
            self._found[id(node)] = names_in([node])
        return self._found[id(node)]


class _Assigned:
    """Definite assignment of one name over the statements of one thread; None means a read came first."""

    def __init__(self, name: str, names: _Names) -> None:
        self.name = name
        self.names = names

    def block(self, statements: list[ast.stmt], *, assigned: bool) -> bool | None:
        state: bool | None = assigned
        for node in statements:
            if state is None:
                return None
            if isinstance(node, ast.Break | ast.Continue):
                return True  # what follows is not reached from here
            state = self._statement(node, assigned=state)
        return state

    def _reads(self, nodes: list[ast.expr], *, assigned: bool) -> bool:
        return not assigned and any(self.name in self.names(node) for node in nodes)

    def _statement(self, node: ast.stmt, *, assigned: bool) -> bool | None:  # noqa: PLR0911
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                if self._reads([node.value], assigned=assigned):
                    return None
                return assigned or target.id == self.name
            return None if self._reads([node.value, target], assigned=assigned) else assigned
        if isinstance(node, ast.Expr):
            return None if self._reads([node.value], assigned=assigned) else assigned
        if isinstance(node, ast.If):
            if self._reads([node.test], assigned=assigned):
                return None
            sides = [self.block(side, assigned=assigned) for side in (node.body, node.orelse)]
            return None if None in sides else all(sides)
        if isinstance(node, ast.For):
            if self._reads([node.iter], assigned=assigned):
                return None
            is_target = isinstance(node.target, ast.Name) and node.target.id == self.name
            return None if self.block(node.body, assigned=assigned or is_target) is None else assigned
        if isinstance(node, ast.While):
            if self._reads([node.test], assigned=assigned):
                return None
            return None if self.block(node.body, assigned=assigned) is None else assigned
        return assigned


def _in_order(parts: list[Part], path: Path = ()) -> Iterator[tuple[Path, Part]]:
    """Parts in program order, each with the chain of controls around it; a control comes before its body."""
    for part in parts:
        yield path, part
        if isinstance(part, Control):
            yield from _in_order(part.body, (*path, id(part)))
            # The two sides of a branch are different places: what one defines the other does not see.
            yield from _in_order(part.orelse, (*path, -id(part)))


def _evaluation_order(node: ast.AST) -> Iterator[ast.Name]:
    """Names in the order in which they are read and assigned."""
    if isinstance(node, ast.Name):
        yield node
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign):
        children = [node.value, *node.targets]
    elif isinstance(node, ast.For):
        children = [node.iter, node.target, *node.body]
    for child in children:
        yield from _evaluation_order(child)
