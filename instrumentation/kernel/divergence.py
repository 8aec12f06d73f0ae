"""A barrier or shuffle that part of a block would miss: refused when a kernel is decorated, and a finding as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from instrumentation.errors import KernelDialectError
from instrumentation.findings import Finding, Frame

if TYPE_CHECKING:
    import ast

    from instrumentation.kernel.parse import ParsedFunction


class DivergenceError(KernelDialectError):
    """Threads of a block would wait for others that never come. ``finding`` is the SYN001 that says so."""

    def __init__(self, finding: Finding) -> None:
        frame = finding.source
        assert frame is not None, finding
        super().__init__(f"{frame.file}:{frame.line}: {frame.function}: {finding.message}")
        self.finding = finding


def refuse_divergence(
    parsed: ParsedFunction, node: ast.AST, reason: str, missed: ast.AST | None = None
) -> NoReturn:
    """Raise for what a node decides or is. ``missed``: the barrier or shuffle, where that is another line."""
    here = Frame(parsed.file, getattr(node, "lineno", parsed.line), parsed.name)
    line = getattr(missed, "lineno", here.line)
    if line != here.line:
        reason = f"{reason}, at line {line}"
    raise DivergenceError(
        Finding(
            code="SYN001",
            kind="barrier or shuffle that part of a block misses",
            message=reason,
            kernel=parsed.name,
            source=here,
            access=(here,),
            previous=(Frame(parsed.file, line, parsed.name),) if line != here.line else (),
        )
    )
