"""A kernel without one of its barriers: for each one that is there."""

from __future__ import annotations

import ast
import copy
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from instrumentation.kernel.normalise import clone
from instrumentation.kernel.parse import ParsedFunction, describe
from instrumentation.kernel.plan import plan_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel import Kernel


def _barriers(parsed: ParsedFunction, body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Each barrier, as the statements that it stands among and its place there."""
    for i, node in enumerate(body):
        if isinstance(node, ast.Expr) and parsed.collective(node.value) == "barrier":
            yield body, i
        for name in ("body", "orelse"):
            yield from _barriers(parsed, getattr(node, name, []))


def without_a_barrier(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel as often as it has barriers, each time without another one; its launches find the others."""
    parsed = kernel.parsed
    for number in range(len(list(_barriers(parsed, parsed.body)))):
        body = [clone(statement) for statement in parsed.body]
        among, at = list(_barriers(parsed, body))[number]
        among[at] = ast.copy_location(ast.Pass(), among[at])
        other = copy.copy(kernel)
        vars(other).pop("access_table", None)
        # Compiled code is kept by the description.
        description = f"{describe(parsed)}\nwithout barrier {number}"
        other.parsed = replace(parsed, body=body, description=description)
        other.plan = plan_kernel(other.parsed, other.access, other.signature, other.block)
        other._host, other._lock = {}, threading.Lock()
        yield other
