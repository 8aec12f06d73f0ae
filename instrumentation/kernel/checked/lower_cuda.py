"""Lowering ``checked`` for a GPU: a kernel's normal form -> Python source of one thread, in which accesses are checked.

Statements stay what they are, so that Numba gives them the types, and NVVM the bits, of the plain kernel. Sites and
calls have the numbers of the kernel's access table, which both devices' reports are read with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from numba.core import types as nb

from instrumentation.kernel.checked.cuda_ptx import with_checks
from instrumentation.kernel.checked.emit_cuda import DeviceFunctionEmitter, KernelEmitter, settled
from instrumentation.kernel.checked.numbered_access import NumberedAccess
from instrumentation.kernel.lower_cuda import compile_function
from instrumentation.kernel.lower_host import HostModule, HostOptions
from instrumentation.kernel.parse import NUMBER_TYPES

if TYPE_CHECKING:
    from instrumentation.kernel.checked.access import AccessTable
    from instrumentation.kernel.checked.bounds import View
    from instrumentation.kernel.lower_host import ArgumentShape
    from instrumentation.kernel.plan import KernelPlan


class CudaModule(HostModule):
    """Source of one generated module: device functions, then the kernel."""

    def __init__(
        self, table: AccessTable, block: tuple[int, ...], known: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(HostOptions(checked=True), NumberedAccess(table))
        self.block = block
        #: parameters that are constants, for the most part: where they are not looked up, loops need not do so
        self.known = known
        self._seen: dict[str, str] = {}

    def device_function(self, function: Any, shapes: tuple[ArgumentShape, ...]) -> str:
        """Name of the checked form of a device function, for arguments of these shapes; written once."""
        key = (id(function), shapes)
        if key not in self._device:
            name = f"d_{function.parsed.name}_{len(self._device)}"
            self._device[key] = name
            # What it calls is written first.
            lines = settled(lambda moving: DeviceFunctionEmitter(self, function.parsed, shapes, name, moving))
            self._sources.append("\n".join(lines))
        return self._device[key]

    def seen_function(self, function: Any, shapes: tuple[ArgumentShape, ...], view: View) -> str:
        """Name of the form of a device function in which a view's indices are not looked at."""
        lines = settled(
            lambda moving: DeviceFunctionEmitter(self, function.parsed, shapes, "d_", moving, view.again())
        )
        text = "\n".join(lines)
        if text not in self._seen:
            name = f"e_{function.parsed.name}_{len(self._seen)}"
            self._seen[text] = name
            self._sources.append(text.replace("def d_(", f"def {name}(", 1))
        return self._seen[text]

    def source(self, body: list[str]) -> str:
        """Whole text of the module around a kernel's text."""
        return "\n\n".join([*self._sources, "\n".join(body), ""])


def checked_source(
    plan: KernelPlan, table: AccessTable, known: frozenset[str] = frozenset()
) -> tuple[str, CudaModule]:
    """Text of a kernel's checked form and its device functions, and what it uses.

    ``known``: parameters of which the host knows, as a rule, that they are written.
    """
    module = CudaModule(table, plan.block, known)
    return module.source(settled(lambda moving: KernelEmitter(module, plan, moving))), module


def checked_signature(signature: dict[str, Any]) -> Any:
    """``void(...)`` signature of a checked kernel.

    Each array's address and extents, each scalar; then the address of the report, and how far each array's shadow lies
    from it, 0 where it has none: what ``entry_lines`` has for the host.
    """
    kinds: list[Any] = []
    arrays = 0
    for kind in signature.values():
        if isinstance(kind, nb.Array):
            kinds += [nb.int64] * (1 + kind.ndim)
            arrays += 1
        else:
            kinds.append(kind)
    return nb.void(*kinds, *[nb.int64] * (1 + arrays))


def compile_checked_ptx(
    plan: KernelPlan,
    table: AccessTable,
    compute_capability: tuple[int, int],
    known: frozenset[str] = frozenset(),
) -> str:
    """PTX of a kernel's checked form, as ``checked_source`` says. Raises ``DeviceError`` as ``compile_ptx`` does."""

    def make() -> Any:
        from numba import cuda  # noqa: PLC0415

        from instrumentation.kernel.checked.cuda import RUNTIME  # noqa: PLC0415

        source, module = checked_source(plan, table, known)
        namespace: dict[str, Any] = {
            "__name__": "refengine_checked_kernel",
            "cuda": cuda,
            "math": math,
            "helper": cuda.jit(device=True, forceinline=True),
            **{name: getattr(nb, name) for name in set(NUMBER_TYPES.values())},
            **RUNTIME,
            **{name: value.cuda for name, value in module.intrinsics.items()},
        }
        exec(compile(source, f"<checked {plan.parsed.name}>", "exec"), namespace)  # noqa: S102
        return namespace[plan.parsed.name]

    signature = checked_signature(plan.signature)
    text = compile_function(plan.parsed.name, make, signature, compute_capability)
    arrays = sum(isinstance(kind, nb.Array) for kind in plan.signature.values())
    return with_checks(text, len(signature.args) - arrays - 1)
