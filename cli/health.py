"""The checks of ``refengine doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from cli.command import count_bytes
from cli.failures import one_line
from cli.health_check import Check
from cli.health_cuda import cuda_checks
from refengine import __version__
from refengine.models import KNOWN_MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = (
    "numba",
    "llvmlite",
    "numba-cuda",
    "numpy",
    "gguf",
    "tokenizers",
    "jinja2",
    "click",
    "structlog",
    "rich",
)
OURS = ("cli", "refengine", "instrumentation")


def examine() -> list[Check]:
    """Look at everything. Nothing here raises: what fails is a check that failed."""
    return [
        *_package_checks(), *_origin_checks(), *_host_checks(), *cuda_checks(), *_model_checks(),
    ]  # fmt: skip


def _package_checks() -> Iterator[Check]:
    yield Check("versions", "refengine", "ok", __version__)
    yield Check("versions", "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        try:
            yield Check("versions", name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check("versions", name, "failed", "not installed", f"pip install {name}")


def _origin_checks() -> Iterator[Check]:
    """``cli`` is a common name: another distribution may have put its own package over ours, or before it."""
    home = Path(__file__).parent.parent
    providers = importlib.metadata.packages_distributions()
    for name in OURS:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
        others = sorted(set(providers.get(name, ())) - {"refengine"})
        if origin is None or not _same(origin.parent, home):
            where = f"comes from {origin}, and this program from {home}"
            cure = "take the other folder off PYTHONPATH, or run from another directory"
            yield Check("packages", f"import {name}", "failed", where, cure)
        elif others:
            seen = f"is also installed by {', '.join(others)}"
            cure = f"pip uninstall {others[0]}, then pip install --force-reinstall --no-deps refengine"
            yield Check("packages", f"import {name}", "failed", seen, cure)
        else:
            yield Check("packages", f"import {name}", "ok", str(origin))


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


def _host_checks() -> Iterator[Check]:
    try:
        yield from _run_on_host()
    except Exception as error:  # noqa: BLE001 - whatever stops the host device is what we came to see
        detail = one_line(f"{type(error).__name__}: {error}")
        yield Check(
            "host", "kernel", "failed", detail, "reinstall with: pip install --force-reinstall refengine"
        )


def _run_on_host() -> Iterator[Check]:
    """Add two vectors through the guarded allocator, a stream and a compiled kernel."""
    import numpy as np  # noqa: PLC0415
    from llvmlite import binding  # noqa: PLC0415

    from instrumentation.allocator import Allocator  # noqa: PLC0415
    from instrumentation.devices.host import HostDevice  # noqa: PLC0415
    from instrumentation.findings import FindingLog  # noqa: PLC0415
    from instrumentation.levels import Level  # noqa: PLC0415
    from instrumentation.ownership import Owner  # noqa: PLC0415
    from instrumentation.reservation import BufferRequest  # noqa: PLC0415
    from refengine.kernels.elementwise import SPAN, add  # noqa: PLC0415

    features = {name for name, there in binding.get_host_cpu_features().items() if there}
    vectors = [name for name in ("avx512f", "avx2", "avx", "neon", "sve") if name in features]
    cores = f"{os.cpu_count()} cores, {binding.get_host_cpu_name()}, {', '.join(vectors) or 'no vector units known'}"
    yield Check("host", "processor", "ok", cores)

    owner, findings, n = Owner("doctor"), FindingLog(), 8 * SPAN
    device = HostDevice()
    allocator = Allocator(device, level=Level.GUARD, findings=findings)
    device.watch(allocator)
    requests = [BufferRequest(4 * n, owner, name) for name in "aby"]
    arena = allocator.reserve_arena(allocator.arena_size(requests), owner=owner, name="doctor").unwrap()
    buffers = arena.reserve_all(requests).unwrap()
    a, b, y = (buffer.view(np.float32, (n,)) for buffer in buffers)
    stream = device.create_stream(owner=owner, name="doctor")
    numbers, got = np.arange(n, dtype=np.float32), np.empty(n, np.float32)
    for view in (a, b):
        stream.copy_in(view, numbers)
    stream.launch(add, n // SPAN, {"a": a, "b": b, "y": y})
    stream.copy_out(got, y)
    stream.synchronize()
    stream.destroy()
    for buffer in buffers:
        buffer.free()
    arena.release()
    allocator.close()

    yield Check("host", "device", "ok", device.describe())
    folder = add.host().path.parent
    yield Check("host", "kernel cache", "ok", f"{folder}, {count_bytes(_folder_nbytes(folder))}")
    if len(findings) or not np.array_equal(got, 2 * numbers):
        seen = f"{len(findings)} findings" if len(findings) else "wrong sums"
        yield Check("host", "kernel", "failed", f"add ran with {seen}", f"delete the kernel cache {folder}")
    else:
        yield Check("host", "kernel", "ok", "add ran, its result and its guard bytes are right")


def _folder_nbytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # another process tidies up
            continue
    return total


def _model_checks() -> Iterator[Check]:
    for name, model in KNOWN_MODELS.items():
        path = model.find()
        if path is None:
            yield Check("models", name, "missing", "not installed", model.install)
        else:
            yield Check("models", name, "ok", f"{path}, {count_bytes(path.stat().st_size)}")
