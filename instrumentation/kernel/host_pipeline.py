"""How Numba compiles generated host code: only the passes that can find something in it, and no garbage collection.

A kernel's cold start is for the most part Numba's own Python code. Generated text has no closures, no ``with``, no
array expressions, nothing that is counted by references and nothing that Numba would inline itself, so the passes that
look for these cost time and change nothing: the code that LLVM is given is, for its optimiser, that of Numba's usual
pipeline.
"""

# ruff: noqa: SLF001 - Numba's passes can be used apart by private names alone
from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llvmlite.binding import newpassmanagers
from numba import cfunc, njit
from numba.core import ir_utils, ssa, transforms
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.rewrites import rewrite_registry
from numba.core.typed_passes import (
    NativeLowering,
    NoPythonBackend,
    NopythonTypeInference,
    PreLowerStripPhis,
)
from numba.core.untyped_passes import DeadBranchPrune, FixupArgs, TranslateByteCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _step(name: str, run: Callable[[Any], None]) -> type[Any]:
    """A pass that changes the function of a compilation's state."""

    class Step(FunctionPass):  # type: ignore[misc]
        _name = name

        def __init__(self) -> None:
            super().__init__()

        def run_pass(self, state: Any) -> bool:
            run(state)
            return True

    return register_pass(mutates_CFG=True, analysis_only=False)(Step)  # type: ignore[no-any-return]


def _canonicalise(state: Any) -> None:
    state.func_ir.blocks = transforms.canonicalize_cfg(state.func_ir.blocks)


def _rewrite(state: Any) -> None:
    blocks = state.func_ir.blocks
    for kind in rewrite_registry.rewrites["before-inference"]:
        rewrite = kind(state)
        for label in blocks:
            while rewrite.match(state.func_ir, blocks[label], state.typemap, state.calltypes):
                blocks[label] = rewrite.apply()


def _split_variables(state: Any) -> None:
    ssa.reconstruct_ssa(state.func_ir)
    state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)


def _join_variables(state: Any) -> None:
    PreLowerStripPhis()._strip_phi_nodes(state.func_ir)
    state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)
    state.type_annotation = None


class RememberedTypes:
    """A typing context that finds the type of a call once: a kernel makes the same few by the thousand."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """Signature of a call; None where there is none."""
        key = function, tuple(arguments), tuple(named.items())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._context.resolve_function_type(function, arguments, named)
        return found


def _infer_types(state: Any) -> None:
    context = state.typingctx
    state.typingctx = RememberedTypes(context)
    try:
        NopythonTypeInference().run_pass(state)
    finally:
        state.typingctx = context


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Machine code of one function, optimised once: with what it calls. Before that it is only made smaller."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout
        builder = self._codegen._pass_builder()
        passes = newpassmanagers.create_new_function_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.add_instruction_combine_pass()
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)


def _open_library(state: Any) -> None:
    state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
    state.library.enable_object_caching()


#: Numba's own, where it does nothing else than to compile. The others compute again and again how long each variable
#: lives: that is to drop references in time, of which numbers and pointers have none.
_STEPS = (
    TranslateByteCode, FixupArgs, _step("canonicalise", _canonicalise), DeadBranchPrune, _step("rewrite", _rewrite),
    _step("split_variables", _split_variables), _step("infer_types", _infer_types),
    _step("join_variables", _join_variables), _step("open_library", _open_library), NativeLowering, NoPythonBackend,
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
