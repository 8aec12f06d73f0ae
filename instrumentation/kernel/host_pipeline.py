"""How Numba compiles generated host code: only the passes that can find something in it, and no garbage collection.

A kernel's cold start is for the most part Numba's own Python code. Generated text has no closures, no ``with``, no
array expressions and nothing that Numba would inline itself, so the passes that look for these cost time and change
nothing: the machine code is that of Numba's usual pipeline.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numba import cfunc, njit
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.typed_passes import (
    AnnotateTypes,
    IRLegalization,
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import (
    DeadBranchPrune,
    FixupArgs,
    GenericRewrites,
    IRProcessing,
    ReconstructSSA,
    TranslateByteCode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

#: ``GenericRewrites`` is what makes a power by a literal exact
_STEPS = (
    TranslateByteCode, FixupArgs, IRProcessing, DeadBranchPrune, GenericRewrites, ReconstructSSA, NopythonTypeInference,
    PreLowerStripPhis, IRLegalization, AnnotateTypes, NativeLowering, NoPythonBackend,
)  # fmt: skip


class _Passes(PassManager):  # type: ignore[misc]
    """Passes without Numba's analysis of the whole function after each, which is there to find faults of passes."""

    _ENFORCING = False


class _GeneratedCode(CompilerBase):  # type: ignore[misc]
    """The compiler of a generated function."""

    def define_pipelines(self) -> list[_Passes]:
        """The one pipeline: there is no object mode to fall back to."""
        passes = _Passes("generated")
        for step in _STEPS:
            passes.add_pass(step, step.__name__)
        passes.finalize()
        return [passes]


def helper(function: Any) -> Any:
    """Compile a device function of a generated module when it is called; only generated code can call it."""
    return njit(
        error_model="numpy", forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True,
        pipeline_class=_GeneratedCode,
    )(function)  # fmt: skip


def compile_entry(signature: Any, entry: Any) -> Any:
    """Compile the entry point of a generated module, or load what Numba has on disk."""
    with no_collections():
        return cfunc(signature, cache=True, error_model="numpy", pipeline_class=_GeneratedCode)(entry)


@contextmanager
def no_collections() -> Iterator[None]:
    """Let no garbage be collected meanwhile: Numba makes objects by the million, and nearly all live to the end."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
