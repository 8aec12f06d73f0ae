"""Compile a kernel's plan for the host, or load what an earlier start compiled."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import structlog
from numba import types
from numba.core import errors

from instrumentation.kernel import host_cache
from instrumentation.kernel.checked import races
from instrumentation.kernel.checked.access import AccessTable, CheckedAccess
from instrumentation.kernel.host_pipeline import compile_entry, no_collections
from instrumentation.kernel.host_types import infer_lane_types
from instrumentation.kernel.lower_host import HostModule, HostOptions, KernelEmitter, entry_lines
from instrumentation.kernel.parse import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from instrumentation.kernel.plan import KernelPlan

_log = structlog.get_logger(__name__)
_lock = threading.RLock()
ENTRY = types.void(types.CPointer(types.int64), types.int64, types.int64)

# A short lane loop (32 rounds of a load, a conversion and a multiply-add) would be unrolled before LLVM looks for
# vectors, and stay scalar: 2 instead of 15 G weights/s for Q8_0. LLVM takes this for the process, and only once.
llvm.set_option("refengine", "-unroll-full-max-count=8")

#: called with a kernel's name before it is compiled (not when it comes from the cache)
compile_listeners: list[Callable[[str], None]] = []


class CompiledKernel:
    """Entry point of a compiled kernel: ``void entry(int64 *args, int64 begin, int64 end)`` at ``address``."""

    def __init__(self, function: Any, path: Path) -> None:
        self.function = function  # keeps the machine code alive
        self.address: int = function.address
        self.path = path

    def assembly(self) -> str:
        """Machine code as text, to see what vectorised."""
        return str(self.function._library.get_asm_str())  # noqa: SLF001


def compile_host(plan: KernelPlan, options: HostOptions, *, strict_floats: bool) -> CompiledKernel:
    """Lower and compile, or load from the cache. Raises ``KernelDialectError`` when types do not fit."""
    parts = [describe(plan.parsed), repr(plan.signature), repr(plan.block), repr(options), str(strict_floats)]
    stem = host_cache.file_stem(plan.parsed.name, "\n".join([*parts, host_cache.version()]))
    path = host_cache.cache_folder() / f"{stem}.py"
    if options.checked:
        races.link()
    with _lock:
        if not host_cache.is_whole(path):
            host_cache.write(path, generate(plan, options, strict_floats=strict_floats))
        entry = host_cache.load(path).entry
        index = host_cache.machine_code(path, entry)
        if index.exists():
            try:
                return CompiledKernel(compile_entry(ENTRY, entry), path)
            except Exception as error:  # noqa: BLE001 - whatever a damaged pickle raises
                _log.warning(
                    "kernel cache entry is damaged, compiling again", file=str(index), error=repr(error)
                )
                index.unlink(missing_ok=True)
        for listener in compile_listeners:
            listener(plan.parsed.name)
        try:
            return CompiledKernel(compile_entry(ENTRY, entry), path)
        except (errors.NumbaError, RuntimeError) as error:  # RuntimeError: LLVM's verifier
            path.unlink(missing_ok=True)
            reason = str(error).strip().splitlines()[0]
            plan.parsed.refuse(
                plan.parsed.line, f"{type(error).__name__} while compiling for the host: {reason}"
            )


def generate(plan: KernelPlan, options: HostOptions, *, strict_floats: bool) -> str:
    """Source of the host module of a kernel."""
    with no_collections():
        lanes = infer_lane_types(plan, strict_floats=strict_floats)
    module = HostModule(options, CheckedAccess() if options.checked else None)
    body = KernelEmitter(module, plan, lanes).run()
    return module.source(entry_lines(plan.signature, body, checked=options.checked))


def access_table(plan: KernelPlan) -> AccessTable:
    """What the numbers in a checked kernel's reports stand for; for code from the cache, too."""
    access = CheckedAccess()
    KernelEmitter(HostModule(HostOptions(checked=True), access), plan, {}).run()
    return access.table(plan.parsed.name)


__all__ = ["CompiledKernel", "access_table", "compile_host", "compile_listeners", "generate"]
