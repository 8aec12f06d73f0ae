"""Functions and kernels in their checked form for a GPU, with CUDA's own operations."""

from __future__ import annotations

import ast
from math import prod
from typing import TYPE_CHECKING

from numba.core import types as nb

from instrumentation.kernel.checked.loops import LoopEmitter
from instrumentation.kernel.checked.signs import signed_names
from instrumentation.kernel.checked.states import WORD
from instrumentation.kernel.lower_host import AXES
from instrumentation.kernel.plan import MAX_SHARED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.kernel.checked.bounds import View
    from instrumentation.kernel.checked.lower_cuda import CudaModule
    from instrumentation.kernel.lower_host import ArgumentShape
    from instrumentation.kernel.parse import ParsedFunction
    from instrumentation.kernel.plan import KernelPlan


class _CudaEmitter(LoopEmitter):
    """One thread's statements with CUDA's own operations."""

    def index_name(self, cuda: str, node: ast.AST) -> str:  # noqa: ARG002 - as the host's
        """Text of ``cuda.threadIdx.x`` and the like."""
        of, _, axis = cuda.partition(".")
        if of == "threadIdx":
            # The compiler does not know how many threads a block has: what an index is below spares it checks.
            extent = (*self.module.block, 1, 1)["xyz".index(axis)]
            return f"below(cuda.{cuda}, {extent})" if extent & (extent - 1) == 0 else f"cuda.{cuda}"
        return f"cuda.{cuda}"

    def cuda_call(self, cuda: str, node: ast.Call) -> str:
        """Text of a ``numba.cuda`` operation."""
        if cuda.startswith("atomic."):
            return super().cuda_call(cuda, node)
        if cuda in ("grid_axis", "gridsize_axis"):
            assert isinstance(node.args[0], ast.Constant)
            axis = AXES[int(node.args[0].value)]  # type: ignore[arg-type]
            extent = f"int64(cuda.blockDim.{axis})"
            if cuda == "gridsize_axis":
                return f"(int64(cuda.gridDim.{axis}) * {extent})"
            return f"(int64(cuda.blockIdx.{axis}) * {extent} + int64(cuda.threadIdx.{axis}))"
        return f"cuda.{cuda}({', '.join(self.text(each) for each in node.args)})"

    def declare(self) -> None:
        """Storage of the arrays that the function declares, and their shadows."""
        shared: list[tuple[str, int]] = []
        left = MAX_SHARED_BYTES - sum(a.nbytes for a in self.parsed.arrays.values() if a.space == "shared")
        for name, array in self.parsed.arrays.items():
            size = prod(array.shape)
            self.emit(f"v_{name} = {array.space}_array({array.element}, {size})")
            if name in self.bits:
                self.emit(f"s_{name} = uint64(0)")
            elif array.space == "local":
                self.emit(f"s_{name} = local_array(uint8, {size})")
                self.emit(f"for _i in range({size}):")
                self.emit(f"    forget(s_{name}, _i)")
            elif (states := -(-size // WORD) * WORD) <= left:
                left -= states
                shared.append((name, size))
                self.shared[name] = array.shape
                # Whole words: they are looked at as such.
                self.emit(f"s_{name} = shared_array(uint8, {states})")
            else:
                self.emit(f"s_{name} = 0")
        if shared:
            x, y, z = (*self.module.block, 1, 1)[:3]
            self.emit(f"_t = cuda.threadIdx.x + {x} * (cuda.threadIdx.y + {y} * cuda.threadIdx.z)")
            for name, size in shared:
                self.emit(f"for _i in range(_t, {size}, {x * y * z}):")
                self.emit(f"    forget(s_{name}, _i)")
            self.emit("cuda.syncthreads()")


class DeviceFunctionEmitter(_CudaEmitter):
    """A device function, which NVVM inlines."""

    def __init__(
        self,
        module: CudaModule,
        parsed: ParsedFunction,
        shapes: tuple[ArgumentShape, ...],
        name: str,
        moving: frozenset[str],
        view: View | None = None,
    ) -> None:
        self.shapes = dict(zip(parsed.parameters, shapes, strict=True))
        ranks = {p: shape[1] for p, shape in self.shapes.items() if shape}
        super().__init__(module, parsed, ranks, moving)
        self.view = view
        names: list[str] = []
        for parameter in parsed.parameters:
            names.append(f"v_{parameter}")
            if self.shapes[parameter]:
                names += [*self.extents(parameter), f"s_{parameter}"]
        self.lines = ["@helper", f"def {name}({', '.join([*names, '_where'])}):"]
        self.declare()
        self.depth = 0
        self.block(parsed.body)

    def kind(self, name: str) -> str:
        """Alias class of an array: the caller's."""
        shape = self.shapes.get(name)
        return shape[0] if shape else "lane"

    def is_own(self, name: str) -> bool:
        """Whether a name is an array of one thread, or may be."""
        shape = self.shapes.get(name)
        return super().is_own(name) or (shape is not None and shape[0] == "lane")


class KernelEmitter(_CudaEmitter):
    """The body of a kernel."""

    def __init__(self, module: CudaModule, plan: KernelPlan, moving: frozenset[str]) -> None:
        ranks = {n: t.ndim for n, t in plan.signature.items() if isinstance(t, nb.Array)}
        super().__init__(module, plan.parsed, ranks, moving)
        self.plan = plan
        kinds = {n: t.dtype if isinstance(t, nb.Array) else t for n, t in plan.signature.items()}
        given = (n for n, kind in kinds.items() if kind in nb.signed_domain)
        self.signs = signed_names(plan.parsed, given)
        self.twice = True
        self._write()

    def kind(self, name: str) -> str:
        """Alias class of an array."""
        return "lane" if name in self.parsed.arrays else self.plan.access.kind(name)

    def _write(self) -> None:
        names: list[str] = []
        bound: list[str] = []
        for name, kind in self.plan.signature.items():
            if isinstance(kind, nb.Array):
                names += [f"a_{name}", *self.extents(name)]
                bound.append(f"    v_{name} = global_array(a_{name}, {kind.dtype})")
            else:
                names.append(f"v_{name}")
        shadows = [f"s_{name}" for name in self.ranks]
        head = f"def {self.parsed.name}({', '.join([*names, '_report', *shadows])}):"
        self.lines = [head, *bound, "    _where = (_report, int64(0))"]
        self.declare()
        self.depth = 0
        self.block(self.parsed.body)


def settled(write: Callable[[frozenset[str]], _CudaEmitter]) -> list[str]:
    """Lines of a function: written until it is known which own arrays are accessed at constant places alone."""
    moving: frozenset[str] = frozenset()
    while True:
        emitter = write(moving)
        if emitter.moving <= moving:
            return emitter.lines
        moving |= emitter.moving
