"""Which parameters a kernel reads and which it writes: what the audits record at each launch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """Walk a body; what a device function does to an array that it is given counts as done here."""
    reads: set[str] = set()
    writes: set[str] = set()
    arrays = set(parsed.parameters)
    for node in parsed.walk():
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            (writes if isinstance(node.ctx, ast.Store) else reads).add(node.value.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            assert isinstance(node.target.value, ast.Name)
            reads.add(node.target.value.id)
        elif isinstance(node, ast.Call):
            if (parsed.cuda_name(node.func) or "").startswith("atomic."):
                assert isinstance(node.args[0], ast.Name)
                reads.add(node.args[0].id)
                writes.add(node.args[0].id)
            callee = parsed.device_function(node)
            if callee is not None:
                inner: AccessSets = callee.access
                for argument, parameter in zip(node.args, callee.parsed.parameters, strict=False):
                    if isinstance(argument, ast.Name):
                        reads.update([argument.id] if parameter in inner.reads else [])
                        writes.update([argument.id] if parameter in inner.writes else [])
    return AccessSets(frozenset(reads & arrays), frozenset(writes & arrays))
