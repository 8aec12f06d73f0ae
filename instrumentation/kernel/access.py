"""Which parameters a kernel reads and which it writes: what the audits record at each launch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrumentation.kernel.parse import ParsedFunction


@dataclass(frozen=True)
class AccessSets:
    """Array parameters by name. A parameter can be in both."""

    reads: frozenset[str]
    writes: frozenset[str]

    def kind(self, name: str) -> str:
        """Alias class of a parameter: ``rw`` when anything writes it, else ``ro``."""
        return "rw" if name in self.writes else "ro"


def access_sets(parsed: ParsedFunction) -> AccessSets:
    """Walk the normal form; what a device function does to an array that it is given counts as done here."""
    reads: set[str] = set()
    writes: set[str] = set()
    arrays = set(parsed.parameters)

    def callee(call: ast.Call, inner: AccessSets, parameters: list[str]) -> None:
        for argument, parameter in zip(call.args, parameters, strict=False):
            if isinstance(argument, ast.Name) and argument.id in arrays:
                reads.update([argument.id] if parameter in inner.reads else [])
                writes.update([argument.id] if parameter in inner.writes else [])

    for statement in parsed.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in arrays:
                (writes if isinstance(node.ctx, ast.Store) else reads).add(node.value.id)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                assert isinstance(node.target.value, ast.Name)
                reads.update({node.target.value.id} & arrays)
            if isinstance(node, ast.Call):
                if (parsed.cuda_name(node.func) or "").startswith("atomic."):
                    assert isinstance(node.args[0], ast.Name)
                    touched = {node.args[0].id} & arrays
                    reads.update(touched)
                    writes.update(touched)
                value: Any = parsed.resolve(node.func)
                if hasattr(value, "parsed") and hasattr(value, "access"):
                    callee(node, value.access, value.parsed.parameters)
    return AccessSets(frozenset(reads), frozenset(writes))
