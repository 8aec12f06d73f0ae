"""A kernel with a fault of order: without one of its barriers, or with one that part of a block does not reach."""

from __future__ import annotations

import ast
import copy
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from instrumentation.kernel.normalise import clone
from instrumentation.kernel.origin import origin_of
from instrumentation.kernel.parse import ParsedFunction, describe
from instrumentation.kernel.plan import plan_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel import Kernel

_HALF = "_own = cuda.threadIdx.x < 16\n_agreed = _own\nif _agreed:\n    cuda.syncthreads()"


def _barriers(parsed: ParsedFunction, body: list[ast.stmt]) -> Iterator[tuple[list[ast.stmt], int]]:
    """Each barrier, as the statements that it stands among and its place there."""
    for i, node in enumerate(body):
        if isinstance(node, ast.Expr) and parsed.collective(node.value) == "barrier":
            yield body, i
        for name in ("body", "orelse"):
            yield from _barriers(parsed, getattr(node, name, []))


def n_barriers(kernel: Kernel) -> int:
    """Barriers in the text of a kernel."""
    return len(list(_barriers(kernel.parsed, kernel.parsed.body)))


def without_a_barrier(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel as often as it has barriers, each time without another one; its launches find the others."""
    for number in range(n_barriers(kernel)):
        yield without_barrier(kernel, number)


def without_barrier(kernel: Kernel, number: int) -> Kernel:
    """The kernel without one barrier, counted in the order of its text; from the end when it is negative."""
    return _changed(kernel, number, [ast.Pass()], "without barrier")


def with_half_a_barrier(kernel: Kernel, number: int, *, promised: bool) -> Kernel:
    """The kernel with one barrier that only the first 16 threads along x reach.

    ``promised``: its source says that all of them do. Without, it is refused as when it is decorated: raises
    ``DivergenceError``.
    """
    statements = ast.parse(_HALF).body
    statements[1].uniform_promised = promised  # type: ignore[attr-defined]
    return _changed(kernel, number, statements, f"with half of a barrier ({promised}),")


def _changed(kernel: Kernel, number: int, statements: list[ast.stmt], what: str) -> Kernel:
    parsed = kernel.parsed
    body = [clone(statement) for statement in parsed.body]
    among, at = list(_barriers(parsed, body))[number]
    barrier = among[at]
    assert isinstance(barrier, ast.Expr)
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, barrier)
            node.origin = origin_of(barrier.value)  # type: ignore[attr-defined]
    among[at : at + 1] = statements
    other = copy.copy(kernel)
    vars(other).pop("access_table", None)
    # Compiled code is kept by the description.
    other.parsed = replace(parsed, body=body, description=f"{describe(parsed)}\n{what} {number}")
    other.plan = plan_kernel(other.parsed, other.access, other.signature, other.block)
    other._host, other._lock = {}, threading.Lock()  # noqa: SLF001 - another object of its class
    return other
