"""Cut a kernel's body into what runs once per block and what runs once per thread.

A value is *uniform* when all threads of a block hold the same one: constants, scalar parameters, extents, block
indices, loads of read-only parameters at uniform indices, and what is computed from these under uniform control
flow. Everything else is *varying*. Barriers, shuffles and uniform control flow stand between *regions*; a region is
a run of statements that each thread executes, and becomes one loop over the block's threads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrumentation.kernel.access import AccessSets
    from instrumentation.kernel.parse import ParsedFunction

Loop = ast.For | ast.While


@dataclass
class Region:
    """Statements that every thread of the block runs, with nothing between them that threads must wait for."""

    statements: list[ast.stmt]


@dataclass
class Scalar:
    """An assignment, break or continue that the block runs once."""

    statement: ast.stmt


@dataclass
class Collective:
    """A barrier, or a shuffle assigned to a name."""

    statement: ast.stmt


@dataclass
class Control:
    """A uniform loop or branch around further parts."""

    statement: ast.For | ast.While | ast.If
    body: list[Part]
    orelse: list[Part] = field(default_factory=list)


Part = Region | Scalar | Collective | Control


class Uniformity:
    """Which names vary over the threads of a block, and which loops run inside one thread."""

    def __init__(self, parsed: ParsedFunction, access: AccessSets) -> None:
        self.parsed = parsed
        self.access = access
        self.varying: set[str] = set()
        self.per_thread_loops: set[Loop] = set()
        size = -1
        while size != len(self.varying) + len(self.per_thread_loops):
            size = len(self.varying) + len(self.per_thread_loops)
            self._walk(parsed.body, varying=False, loop=None)

    def varies(self, node: ast.expr) -> bool:  # noqa: C901, PLR0911
        """Whether an expression can differ between two threads of a block."""
        parsed = self.parsed
        if isinstance(node, ast.Name):
            return node.id in self.varying
        if isinstance(node, ast.Attribute):
            name = parsed.cuda_name(node)
            return name is not None and name.split(".")[0] in ("threadIdx", "laneid")
        if isinstance(node, ast.Subscript):
            if isinstance(node.value, ast.Attribute):
                return False
            assert isinstance(node.value, ast.Name)
            name = node.value.id
            return name in parsed.arrays or name in self.access.writes or self.varies(node.slice)
        if isinstance(node, ast.Call):
            cuda = parsed.cuda_name(node.func)
            if cuda is not None and cuda not in ("fma", "gridsize", "gridsize_axis"):
                return True
            for argument in node.args:
                if isinstance(argument, ast.Name) and argument.id in parsed.arrays:
                    return True
                if isinstance(argument, ast.Name) and argument.id in self.access.writes:
                    return True
            return any(self.varies(argument) for argument in node.args)
        return any(self.varies(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))

    def _walk(self, statements: list[ast.stmt], *, varying: bool, loop: Loop | None) -> None:
        for node in statements:
            if isinstance(node, ast.Assign | ast.AugAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and (varying or self.varies(node.value)):
                    self.varying.add(target.id)
            elif isinstance(node, ast.If):
                inner = varying or self.varies(node.test)
                if inner and self.parsed.has_collective([*node.body, *node.orelse]):
                    self.parsed.refuse(node, "a barrier or shuffle under a branch that differs between threads")
                self._walk(node.body, varying=inner, loop=loop)
                self._walk(node.orelse, varying=inner, loop=loop)
            elif isinstance(node, Loop):
                self._walk_loop(node, varying=varying)
            elif isinstance(node, ast.Break | ast.Continue) and varying and loop is not None:
                self.per_thread_loops.add(loop)

    def _walk_loop(self, node: Loop, *, varying: bool) -> None:
        bounds = node.iter.args if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) else []
        tests = [node.test] if isinstance(node, ast.While) else bounds
        outside = node.lineno in self.parsed.lanes_outside and not self.parsed.has_collective(node.body)
        if varying or outside or any(self.varies(test) for test in tests):
            self.per_thread_loops.add(node)
        inner = node in self.per_thread_loops
        if inner and self.parsed.has_collective(node.body):
            self.parsed.refuse(node, "a barrier or shuffle in a loop whose count differs between threads")
        if inner and isinstance(node, ast.For):
            assert isinstance(node.target, ast.Name)
            self.varying.add(node.target.id)
        # Control flow that is uniform inside a per-thread loop still runs once per thread.
        self._walk(node.body, varying=inner, loop=node)


def cut(parsed: ParsedFunction, uniformity: Uniformity, statements: list[ast.stmt]) -> list[Part]:
    """Parts of a statement list that stands under uniform control flow."""
    parts: list[Part] = []
    pending: list[ast.stmt] = []

    def flush() -> None:
        if pending:
            parts.append(Region(list(pending)))
            pending.clear()

    for node in statements:
        if isinstance(node, ast.Pass):
            continue
        if isinstance(node, ast.Return):
            parsed.refuse(node, "return inside a loop or beside an else: leave by conditions")
        if isinstance(node, ast.Break | ast.Continue):
            flush()
            parts.append(Scalar(node))
        elif isinstance(node, ast.Assign | ast.Expr) and parsed.collective(node.value):
            flush()
            parts.append(Collective(node))
        elif _is_uniform_assignment(uniformity, node):
            # Moving it before the pending region keeps that region whole; safe when the region never names it.
            position = len(parts)
            if names_in(pending) & stored_names(node):
                flush()
                position = len(parts)
            parts.insert(position, Scalar(node))
        elif isinstance(node, ast.If) and not uniformity.varies(node.test):
            flush()
            parts.append(
                Control(node, cut(parsed, uniformity, node.body), cut(parsed, uniformity, node.orelse))
            )
        elif isinstance(node, Loop) and node not in uniformity.per_thread_loops:
            flush()
            parts.append(Control(node, cut(parsed, uniformity, node.body)))
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return):
                    parsed.refuse(inner, "return inside a loop or beside an else: leave by conditions")
            pending.append(node)
    flush()
    return parts


def _is_uniform_assignment(uniformity: Uniformity, node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return False
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return isinstance(target, ast.Name) and target.id not in uniformity.varying


def names_in(nodes: Any) -> set[str]:
    """Every name that occurs in a node or a list of nodes."""
    roots = nodes if isinstance(nodes, list) else [nodes]
    return {n.id for root in roots for n in ast.walk(root) if isinstance(n, ast.Name)}


def stored_names(nodes: Any) -> set[str]:
    """Every name that is assigned in a node or a list of nodes."""
    roots = nodes if isinstance(nodes, list) else [nodes]
    return {
        n.id for root in roots for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def leaves(parts: list[Part], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Part]]:
    """Parts in program order, each with the chain of controls around it; a control comes before its body."""
    for part in parts:
        yield path, part
        if isinstance(part, Control):
            inner = (*path, id(part))
            yield from leaves(part.body, inner)
            # The two sides of a branch are different places: what one defines the other does not see.
            yield from leaves(part.orelse, (*path, -id(part)))


class Storage:
    """Where each varying name lives: in a lane array, in one region, or nowhere because it is recomputed."""

    def __init__(self, parsed: ParsedFunction, uniformity: Uniformity, parts: list[Part]) -> None:
        self.parsed = parsed
        self.uniformity = uniformity
        self.recomputed: dict[str, ast.expr] = {}
        self._index(parts)
        for path, part in leaves(parts):
            if isinstance(part, Region):
                for statement in part.statements:
                    self._try_recompute(path, statement)
        self.lanes = {
            name for name in uniformity.varying if name not in self.recomputed and not self._is_local(name)
        }

    def _index(self, parts: list[Part]) -> None:
        self.places: dict[str, list[tuple[tuple[int, ...], Part]]] = {}
        self.definitions: dict[str, int] = {}
        self.order: dict[str, int] = {}
        for number, (path, part) in enumerate(leaves(parts)):
            nodes: list[ast.AST]
            if isinstance(part, Region):
                nodes = list(part.statements)
            elif isinstance(part, Control):
                header = part.statement
                nodes = [header.test] if not isinstance(header, ast.For) else [header.target, header.iter]
            else:
                nodes = [part.statement]
            for name in names_in(nodes):
                self.places.setdefault(name, []).append((path, part))
            for root in nodes:
                for node in ast.walk(root):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        self.definitions[node.id] = self.definitions.get(node.id, 0) + 1
                        self.order.setdefault(node.id, number)

    def _try_recompute(self, path: tuple[int, ...], node: ast.stmt) -> None:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            return
        name = node.targets[0].id
        if self.definitions[name] != 1 or not self._is_cheap(node.value, self.order[name]):
            return
        if all(place[: len(path)] == path for place, _ in self.places[name]):
            self.recomputed[name] = node.value

    def _is_cheap(self, node: ast.expr, before: int) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int)
        if isinstance(node, ast.Name):
            name = node.id
            if name in self.uniformity.varying:
                return name in self.recomputed
            if name in self.parsed.parameters or name not in self.definitions:
                return True
            return self.definitions[name] == 1 and self.order[name] < before
        if isinstance(node, ast.BinOp):
            return self._is_cheap(node.left, before) and self._is_cheap(node.right, before)
        if isinstance(node, ast.Attribute):
            return self.parsed.cuda_name(node) is not None
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute)
        if isinstance(node, ast.Call):
            return self.parsed.cuda_name(node.func) in ("grid", "grid_axis", "gridsize", "gridsize_axis")
        return False

    def _is_local(self, name: str) -> bool:
        """One region holds every use, and a definition comes before any read of it on each way through."""
        places = self.places.get(name, [])
        if len(places) != 1 or not isinstance(places[0][1], Region):
            return False
        return _defined_first(places[0][1].statements, name)


def _defined_first(statements: list[ast.stmt], name: str) -> bool:
    using = [s for s in statements if name in names_in(s)]
    if not using:
        return True
    first = using[0]
    if isinstance(first, ast.Assign):
        target = first.targets[0]
        return isinstance(target, ast.Name) and target.id == name and name not in names_in(first.value)
    if len(using) > 1:
        return False
    if isinstance(first, ast.For):
        if isinstance(first.target, ast.Name) and first.target.id == name:
            return name not in names_in(first.iter)
        return name not in names_in(first.iter) and _defined_first(first.body, name)
    if isinstance(first, ast.While):
        return name not in names_in(first.test) and _defined_first(first.body, name)
    if isinstance(first, ast.If):
        return (
            name not in names_in(first.test)
            and _defined_first(first.body, name)
            and _defined_first(first.orelse, name)
        )
    return False
