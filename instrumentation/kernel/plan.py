"""A kernel's plan: everything about it that does not need types, made once, when it is decorated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from instrumentation.kernel.divergence import refuse_divergence
from instrumentation.kernel.regions import Part, Uniformity, cut
from instrumentation.kernel.storage import Storage

if TYPE_CHECKING:
    import ast

    from instrumentation.kernel.access import AccessSets
    from instrumentation.kernel.parse import ParsedFunction

#: what a block may declare statically on every CUDA device
MAX_SHARED_BYTES = 48 * 1024
#: a host thread keeps the local arrays of all threads of a block on its stack
MAX_LOCAL_BYTES = 512 * 1024


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """What each lowering to the host starts from."""

    parsed: ParsedFunction
    access: AccessSets
    #: Numba type of each parameter, in order
    signature: dict[str, Any]
    block: tuple[int, ...]
    parts: list[Part]
    storage: Storage

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return prod(self.block)


def plan_kernel(
    parsed: ParsedFunction, access: AccessSets, signature: dict[str, Any], block: tuple[int, ...]
) -> KernelPlan:
    """Find what is uniform and cut at collectives.

    Raises ``DivergenceError`` for a collective that some threads could miss, and ``KernelDialectError`` for too much
    memory.
    """
    threads = prod(block)
    if threads % 32:
        for node in parsed.walk():
            if (parsed.collective(node) or "barrier") != "barrier":
                refuse_divergence(
                    parsed, node, f"a shuffle in blocks of {threads} threads: a multiple of 32 is needed"
                )
    shared = sum(a.nbytes for a in parsed.arrays.values() if a.space == "shared")
    local = sum(a.nbytes for a in parsed.arrays.values() if a.space == "local") * threads
    if shared > MAX_SHARED_BYTES:
        parsed.refuse(parsed.line, f"shared arrays of {shared} bytes: a block has {MAX_SHARED_BYTES}")
    if local > MAX_LOCAL_BYTES:
        parsed.refuse(
            parsed.line,
            f"local arrays of {local} bytes over {threads} threads: at most {MAX_LOCAL_BYTES} a block",
        )
    uniformity = Uniformity(parsed, access)
    parts = cut(parsed, uniformity, parsed.body)
    return KernelPlan(parsed, access, signature, block, parts, Storage(parsed, uniformity, parts))


def line_of(parsed: ParsedFunction, node: ast.AST) -> int:
    """Line of a node, counted from its function's ``def``: generated code names it so, whatever moves above."""
    return int(getattr(node, "lineno", parsed.line)) - parsed.line
