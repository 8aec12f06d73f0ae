"""Which lines of a kernel store to one of its arrays, device functions included."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.kernel.origin import Origin, origin_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.findings import Frame
    from instrumentation.kernel.decorator import Kernel
    from instrumentation.kernel.parse import ParsedFunction


@dataclass(frozen=True, slots=True)
class Stores:
    """Places that store to an array, in the order of the source."""

    #: each place once, without the calls around it
    frames: tuple[Frame, ...]
    #: some line says that an infinity which it stores is meant
    infinite: bool

    @property
    def lines(self) -> tuple[str, ...]:
        """``norm.py:31``, each once."""
        return tuple(f"{frame.file.rpartition('/')[2]}:{frame.line}" for frame in self.frames)


@functools.lru_cache(maxsize=4096)
def stores_to(kernel: Kernel, argument: str) -> Stores:
    """Stores and atomics of a kernel to one of its array parameters."""
    origins = list(_origins(kernel.parsed, argument))
    frames = sorted({origin.frames[0] for origin in origins}, key=lambda frame: (frame.file, frame.line))
    return Stores(tuple(frames), any(origin.may_be_infinite for origin in origins))


def _origins(parsed: ParsedFunction, array: str) -> Iterator[Origin]:
    for node in parsed.walk():
        origin = origin_of(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == array:
            if isinstance(node.ctx, ast.Store) and origin is not None:
                yield origin
        elif isinstance(node, ast.Call) and origin is not None:
            yield from _of_call(parsed, node, origin, array)


def _of_call(parsed: ParsedFunction, node: ast.Call, origin: Origin, array: str) -> Iterator[Origin]:
    if (parsed.cuda_name(node.func) or "").startswith("atomic."):
        if isinstance(node.args[0], ast.Name) and node.args[0].id == array:
            yield origin
        return
    callee = parsed.device_function(node)
    if callee is None:
        return
    for given, parameter in zip(node.args, callee.parsed.parameters, strict=False):
        if isinstance(given, ast.Name) and given.id == array:
            yield from (inner.called_from(origin) for inner in _origins(callee.parsed, parameter))
