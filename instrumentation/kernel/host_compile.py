"""Compile a parsed kernel for the host and keep the result on disk.

The generated source goes to a cache folder under a name that hashes everything it depends on (the kernel's and its
device functions' sources, captured constants, signature, block, options, this package and Numba), so that Numba's
own disk cache beside it can never serve a stale function, and a second start neither lowers nor compiles.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import platformdirs
from numba.core import compiler, types as nb
from numba.core.registry import cpu_target
from numba.core.typed_passes import type_inference_stage

from instrumentation.kernel import host_runtime, strict
from instrumentation.kernel.access import AccessSets
from instrumentation.kernel.lower_host import HostModule, HostOptions, KernelEmitter, entry_lines
from instrumentation.kernel.parse import ParsedFunction

#: called with a kernel's name before it is compiled (not when it comes from the cache)
compile_listeners: list[Callable[[str], None]] = []


def cache_folder() -> Path:
    """Folder of generated sources: ``REFENGINE_CACHE_DIR`` or the user's cache folder."""
    base = os.environ.get("REFENGINE_CACHE_DIR")
    root = Path(base) if base else Path(platformdirs.user_cache_path("refengine"))
    folder = root / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _version() -> str:
    """Hash of this package's sources and of Numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def describe(parsed: ParsedFunction) -> str:
    """Everything about a parsed function that its lowering depends on, as text."""
    parts = [parsed.source, repr(sorted(parsed.arrays.items())), repr(sorted(parsed.lanes_outside))]
    for name, value in sorted(parsed.captured.items()):
        if hasattr(value, "parsed"):
            parts.append(f"{name}={describe(value.parsed)}")
        elif isinstance(value, int | float | tuple):
            parts.append(f"{name}={value!r}")
    return "\n".join(parts)


class CompiledKernel:
    """Entry point of a compiled kernel: ``void entry(int64 *args, int64 begin, int64 end)`` at ``address``."""

    def __init__(self, function: Any, path: Path) -> None:
        self.function = function  # keeps the machine code alive
        self.address: int = function.address
        self.path = path

    def assembly(self) -> str:
        """Machine code as text, to see what vectorised."""
        return str(self.function._library.get_asm_str())  # noqa: SLF001


def compile_host(
    parsed: ParsedFunction,
    access: AccessSets,
    signature: dict[str, Any],
    block: tuple[int, ...],
    options: HostOptions,
    *,
    strict_floats: bool,
) -> CompiledKernel:
    """Lower and compile, or load from the cache."""
    text = "\n".join([describe(parsed), repr(signature), repr(block), repr(options), str(strict_floats), _version()])
    name = f"{parsed.name}_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    path = cache_folder() / f"{name}.py"
    if not path.exists():
        source = generate(parsed, access, signature, block, options, strict_floats=strict_floats)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(source, encoding="utf-8")
        partial.replace(path)
    if not any((path.parent / "__pycache__").glob(f"{name}.entry*.nbi")):
        for listener in compile_listeners:
            listener(parsed.name)
    module = _load(name, path)
    return CompiledKernel(module.entry, path)


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"refengine_kernel_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a cached function finds its globals by this name
    spec.loader.exec_module(module)
    return module


def generate(
    parsed: ParsedFunction,
    access: AccessSets,
    signature: dict[str, Any],
    block: tuple[int, ...],
    options: HostOptions,
    *,
    strict_floats: bool,
) -> str:
    """Source of the host module of a kernel."""
    lanes = infer_lane_types(parsed, access, signature, block, strict_floats=strict_floats)
    module = HostModule(options)
    emitter = KernelEmitter(module, parsed, access, signature, block, lanes)
    return module.source(entry_lines(signature, emitter.run()))


def infer_lane_types(
    parsed: ParsedFunction,
    access: AccessSets,
    signature: dict[str, Any],
    block: tuple[int, ...],
    *,
    strict_floats: bool,
) -> dict[str, str]:
    """Element type of each lane array: what Numba infers for the name when one thread runs alone."""
    module = HostModule(HostOptions())
    emitter = KernelEmitter(module, parsed, access, signature, block, None)
    parameters: list[str] = ["_gx", "_gy", "_gz", "_bx", "_by", "_bz"]
    kinds: list[Any] = [nb.int64] * 6
    for name, kind in signature.items():
        parameters.append(f"v_{name}")
        if isinstance(kind, nb.Array):
            kinds.append(nb.CPointer(kind.dtype))
            parameters += [f"v_{name}_d{axis}" for axis in range(kind.ndim)]
            kinds += [nb.int64] * kind.ndim
        else:
            kinds.append(kind)
    source = module.source([f"def entry({', '.join(parameters)}):", *emitter.run(), "    return 0"])
    path = cache_folder() / f"types_{parsed.name}_{os.getpid()}_{time.monotonic_ns()}.py"
    path.write_text(source, encoding="utf-8")
    try:
        function = _load(path.stem, path).entry
        ir = compiler.run_frontend(function)
        typemap, _, _, _ = type_inference_stage(
            cpu_target.typing_context, _refreshed_target(), ir, tuple(kinds), None
        )
        lines = [
            int(match[1]) if (match := re.search(r"# line (\d+)$", line)) else 0 for line in source.splitlines()
        ]
        strict.check(parsed, ir, typemap, lines, emitter.storage.lanes, floats=strict_floats)
    finally:
        path.unlink(missing_ok=True)
    found: dict[str, str] = {}
    for name in sorted(emitter.storage.lanes):
        kind = typemap.get(f"v_{name}")
        if kind is None:  # a name that only dead code assigns
            continue
        kind = nb.unliteral(kind)
        if not isinstance(kind, nb.Integer | nb.Float | nb.Boolean):
            parsed.refuse(parsed.line, f"{name!r} has type {kind}: a value kept by a thread is a number")
        found[name] = "boolean" if isinstance(kind, nb.Boolean) else str(kind)
    return found


def _refreshed_target() -> Any:
    cpu_target.typing_context.refresh()
    target = cpu_target.target_context
    target.refresh()
    return target


__all__ = ["CompiledKernel", "cache_folder", "compile_host", "compile_listeners", "describe", "host_runtime"]
