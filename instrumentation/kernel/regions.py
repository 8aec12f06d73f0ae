"""Cut a kernel's body into what runs once per block and what runs once per thread.

A value is *uniform* when all threads of a block hold the same one: constants, scalar parameters, extents, block
indices, loads of read-only parameters at uniform indices, and what is computed from these under uniform control
flow. Everything else is *varying*. Barriers, shuffles and uniform control flow stand between *regions*; a region is
a run of statements that each thread executes, and becomes one loop over the block's threads.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instrumentation.kernel.divergence import refuse_divergence
from instrumentation.kernel.origin import origin_of
from instrumentation.kernel.parse import is_promised, lanes_outside
from instrumentation.kernel.tree import walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from instrumentation.kernel.access import AccessSets
    from instrumentation.kernel.origin import Origin
    from instrumentation.kernel.parse import ParsedFunction

Loop = ast.For | ast.While


@dataclass
class Region:
    """Statements that every thread of the block runs, with nothing between them that threads must wait for."""

    statements: list[ast.stmt]


@dataclass
class Scalar:
    """An assignment, break, continue or pass that the block runs once."""

    statement: ast.stmt


@dataclass
class Agreed:
    """The block takes a value that each thread has, and that is promised to be the same one."""

    statement: ast.Assign


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


Part = Region | Scalar | Agreed | Collective | Control


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

    def varies(self, node: ast.expr) -> bool:
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
            if cuda is not None and cuda not in ("fma", "gridsize_axis"):
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
            if isinstance(node, ast.Assign):
                target = node.targets[0]
                alike = not self.varies(node.value) or is_promised(node)
                if isinstance(target, ast.Name) and (varying or not alike):
                    self.varying.add(target.id)
            elif isinstance(node, ast.If):
                inner = varying or self.varies(node.test)
                missed = self.parsed.first_collective([*node.body, *node.orelse]) if inner else None
                if missed is not None:
                    refuse_divergence(
                        self.parsed,
                        node,
                        "a barrier or shuffle under a branch that differs between threads",
                        missed,
                    )
                self._walk(node.body, varying=inner, loop=loop)
                self._walk(node.orelse, varying=inner, loop=loop)
            elif isinstance(node, Loop):
                self._walk_loop(node, varying=varying)
            elif isinstance(node, ast.Break | ast.Continue) and varying and loop is not None:
                self.per_thread_loops.add(loop)

    def _walk_loop(self, node: Loop, *, varying: bool) -> None:
        bounds = node.iter.args if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) else []
        tests = [node.test] if isinstance(node, ast.While) else bounds
        outside = lanes_outside(node) and not self.parsed.has_collective(node.body)
        if varying or outside or any(self.varies(test) for test in tests):
            self.per_thread_loops.add(node)
        inner = node in self.per_thread_loops
        missed = self.parsed.first_collective(node.body) if inner else None
        if missed is not None:
            refuse_divergence(
                self.parsed,
                node,
                "a barrier or shuffle in a loop whose count differs between threads",
                missed,
            )
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
        if isinstance(node, ast.Break | ast.Continue):
            flush()
            parts.append(Scalar(node))
        elif isinstance(node, ast.Assign | ast.Expr) and parsed.collective(node.value):
            flush()
            parts.append(Collective(node))
        elif isinstance(node, ast.Assign) and is_promised(node) and _is_uniform_assignment(uniformity, node):
            flush()
            parts.append(Agreed(node) if uniformity.varies(node.value) else Scalar(node))
        elif _is_uniform_assignment(uniformity, node):
            # Moving it before the pending region keeps that region whole; safe when the region never names it.
            position = len(parts)
            if names_in(pending) & stored_names([node]):
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
            pending.append(node)
    flush()
    return parts


def _is_uniform_assignment(uniformity: Uniformity, node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    return isinstance(target, ast.Name) and target.id not in uniformity.varying


def barrier_behind(parsed: ParsedFunction, parts: list[Part], name: str) -> tuple[Origin | None, bool | None]:
    """The first barrier or shuffle that runs, or runs so often, as a uniform name decides.

    With it goes what the name must be for the barrier to be reached, where it is that name alone that decides.
    """
    reached, size = {name}, 0
    while size != len(reached):  # names that are computed from it decide for it
        size = len(reached)
        for part in in_order(parts):
            if isinstance(part, Scalar | Agreed) and names_in([part.statement]) & reached:
                reached |= stored_names([part.statement])
    for part in in_order(parts):
        if isinstance(part, Control):
            header = part.statement
            decides = header.iter if isinstance(header, ast.For) else header.test
            found = parsed.first_collective([header])
            if found is not None and names_in([decides]) & reached:
                return origin_of(found), _wanted(header, found, name)
    return None, None


def _wanted(header: ast.stmt, found: ast.AST, name: str) -> bool | None:
    if not isinstance(header, ast.If):
        return None
    test, wanted = header.test, any(found in walk(statement) for statement in header.body)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, wanted = test.operand, not wanted
    return wanted if isinstance(test, ast.Name) and test.id == name else None


def in_order(parts: list[Part]) -> Iterator[Part]:
    """Parts in program order, a control before its body."""
    for part in parts:
        yield part
        if isinstance(part, Control):
            yield from in_order(part.body)
            yield from in_order(part.orelse)


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that occurs in some nodes."""
    return {n.id for root in nodes for n in walk(root) if isinstance(n, ast.Name)}


def stored_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Every name that is assigned in some nodes."""
    return {
        n.id for root in nodes for n in walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
