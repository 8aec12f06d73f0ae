"""A kernel as a GPU loads it: PTX by Numba, linked to machine code, kept on disk beside the host's kernels.

The toolkit's linker makes the machine code, not the driver: a driver refuses PTX of a toolkit that is newer than it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import structlog

from instrumentation.errors import DeviceError
from instrumentation.kernel import host_cache
from instrumentation.kernel.host_compile import compile_listeners
from instrumentation.kernel.parse import describe

if TYPE_CHECKING:
    from instrumentation.kernel.decorator import Kernel

_log = structlog.get_logger(__name__)
_lock = threading.RLock()
#: what the bits of an image depend on besides our own source; those that are not installed have no version
_COMPILERS = (
    "numba-cuda", "cuda-core", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12", "cuda-toolkit",
)  # fmt: skip
#: bytes of PTX parameter types
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([^\s(]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[usbf](8|16|32|64)\b")
Kind: TypeAlias = Literal["cubin", "ptx"]


@dataclass(frozen=True)
class CudaImage:
    """What a driver loads, and how the kernel in it is called."""

    kind: Kind
    #: name of the kernel in the image
    entry: str
    #: bytes of each parameter of the entry, in order
    parameters: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        assert self.kind in ("cubin", "ptx"), self.kind
        assert self.entry, "an image without a kernel"
        assert self.data, self.entry


def compile_image(kernel: Kernel, compute_capability: tuple[int, int], *, checked: bool = False) -> CudaImage:
    """Compile, or load from the cache. Raises ``DeviceError`` when the toolkit cannot do it."""
    path = image_path(kernel, compute_capability, checked=checked)
    with _lock:
        image = _read(path)
        if image is None:
            for listener in compile_listeners:
                listener(kernel.name)
            image = build_image(
                kernel.name, kernel.ptx(compute_capability, checked=checked), compute_capability
            )
            _write(path, image)
        return image


def image_path(kernel: Kernel, compute_capability: tuple[int, int], *, checked: bool = False) -> Path:
    """File of a kernel's image: its name hashes everything that the image depends on."""
    major, minor = compute_capability
    parts = [
        describe(kernel.parsed),
        repr(kernel.signature),
        repr(kernel.block),
        repr(kernel.ahead),
        repr(kernel.checked_resident if checked else kernel.resident),
        f"sm_{major}{minor}",
        f"checked {sorted(kernel.constants)}" if checked else "",
    ]
    stem = host_cache.file_stem(kernel.name, "\n".join([*parts, *_versions(), host_cache.version()]))
    return host_cache.cache_folder() / f"{stem}.cuda"


@cache
def _versions() -> tuple[str, ...]:
    found = []
    for name in _COMPILERS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def build_image(name: str, ptx: str, compute_capability: tuple[int, int]) -> CudaImage:
    """Link PTX to machine code, or keep it for the driver to compile where the linker is missing."""
    entry, parameters = entry_of(name, ptx)
    cubin = _link(name, ptx.encode(), compute_capability)
    if cubin is not None:
        return CudaImage("cubin", entry, parameters, cubin)
    return CudaImage("ptx", entry, parameters, ptx.encode() + b"\0")


def entry_of(name: str, ptx: str) -> tuple[str, tuple[int, ...]]:
    """Name of the entry in PTX text, and the bytes of each of its parameters."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise DeviceError(f"{name}: the compiler made PTX with {len(entries)} kernels; one was wanted")
    entry, declared = entries[0]
    lines = [line for line in declared.split(",") if line.strip()]
    sizes = [_PARAMETER.search(line) for line in lines]
    wrong = next((line for line, size in zip(lines, sizes, strict=True) if size is None or "[" in line), None)
    if wrong is not None:
        raise DeviceError(f"{name}: its PTX has a parameter that no argument is known for: {wrong.strip()}")
    return entry, tuple(_SIZES[size[1]] for size in sizes if size is not None)


def _link(name: str, ptx: bytes, compute_capability: tuple[int, int]) -> bytes | None:
    """Machine code by the toolkit's linker; None when there is none. Raises ``DeviceError`` with its log."""
    try:
        from cuda.bindings import nvjitlink  # noqa: PLC0415

        nvjitlink.version()
    except Exception as error:  # noqa: BLE001 - ImportError, or what its loader raises for a missing library
        _log.debug("no nvJitLink, the driver compiles PTX", error=str(error))
        return None
    major, minor = compute_capability
    handle: Any = None
    try:
        handle = nvjitlink.create(1, [f"-arch=sm_{major}{minor}"])
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, ptx, len(ptx), name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except Exception as error:
        log = _link_log(nvjitlink, handle)
        raise DeviceError(
            f"{name}: no machine code for compute capability {major}.{minor}: {error}{log}"
        ) from error
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)


def _link_log(nvjitlink: Any, handle: Any) -> str:
    if handle is None:
        return ""
    text = bytearray(nvjitlink.get_error_log_size(handle))
    nvjitlink.get_error_log(handle, text)
    log = " ".join(text.split(b"\0")[0].decode(errors="replace").split())
    return f": {log}" if log else ""


def _read(path: Path) -> CudaImage | None:
    """An image from its file; None when there is none, or none that is whole."""
    try:
        head, data = path.read_bytes().split(b"\n", 1)
        facts = json.loads(head)
        image = CudaImage(facts["kind"], facts["entry"], tuple(facts["parameters"]), data)
        whole = facts["sha256"] == hashlib.sha256(data).hexdigest()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        _log.warning("kernel cache entry is damaged, compiling again", file=str(path), error=repr(error))
        return None
    if not whole:
        _log.warning("kernel cache entry is damaged, compiling again", file=str(path), error="other bytes")
        return None
    return image


def _write(path: Path, image: CudaImage) -> None:
    """Put an image in place whole, or not at all; a cache that is full costs a compilation the next time."""
    facts = {
        "kind": image.kind,
        "entry": image.entry,
        "parameters": image.parameters,
        "sha256": hashlib.sha256(image.data).hexdigest(),
    }
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(facts).encode() + b"\n" + image.data)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        _log.warning("kernel is not kept in the cache", file=str(path), error=str(error))
