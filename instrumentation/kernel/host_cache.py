"""The folder of generated host sources, with Numba's machine code beside them.

A source's name hashes everything that it depends on, so a file that is there is right: processes may write the same
one at the same time, and a kernel that changes gets another file.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba
import platformdirs
import structlog

_log = structlog.get_logger(__name__)


@functools.cache
def version() -> str:
    """Hash of this package's sources and of the compiler's version."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Folder of generated sources: ``REFENGINE_CACHE_DIR`` or the user's cache folder.

    One that cannot be written is replaced by a temporary folder of this process, with a line in the log.
    """
    return _usable(os.environ.get("REFENGINE_CACHE_DIR") or str(platformdirs.user_cache_path("refengine")))


@functools.cache
def _usable(root: str) -> Path:
    folder = Path(root) / "kernels"
    try:
        # Numba writes into a folder of its own beside the sources, and looks elsewhere when it cannot.
        (folder / "__pycache__").mkdir(parents=True, exist_ok=True)
        for place in (folder, folder / "__pycache__"):
            with tempfile.TemporaryFile(dir=place):
                pass
    except OSError as error:
        temporary = tempfile.TemporaryDirectory(prefix="refengine-kernels-", ignore_cleanup_errors=True)
        _temporary.append(temporary)
        _log.warning(
            "kernel cache is not writable", folder=str(folder), error=str(error), using=temporary.name
        )
        return Path(temporary.name)
    return folder


#: kept until the process ends
_temporary: list[tempfile.TemporaryDirectory[str]] = []


def file_stem(kernel: str, description: str) -> str:
    """File name, without suffix, of a kernel's generated source; safe on every file system."""
    readable = re.sub(r"[^A-Za-z0-9_]", "_", kernel)[:40]
    return f"{readable}_{hashlib.sha256(description.encode()).hexdigest()[:24]}"


#: last line of a generated source: one that a crash or a full disk cut short does not have it
_END = "# end\n"


def is_whole(path: Path) -> bool:
    """Whether a generated source is there to its end."""
    try:
        return path.read_text(encoding="utf-8").endswith(_END)
    except (OSError, UnicodeDecodeError):
        return False


def write(path: Path, source: str) -> None:
    """Put a source in place whole, or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(source.rstrip("\n") + "\n" + _END)
    try:
        if not is_whole(path):  # a later file of the same text would make Numba compile again
            Path(partial).replace(path)
    except OSError:  # Windows, while another process opens the file that it has just put there
        if not is_whole(path):
            raise
    finally:
        Path(partial).unlink(missing_ok=True)


def load(path: Path) -> Any:
    """Module of a generated source."""
    # Numba's cached code names its module and looks for it among those that are loaded.
    name = f"refengine_kernel_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def machine_code(path: Path, function: Any) -> Path:
    """Numba's index file for a function of a generated source."""
    line = function.__code__.co_firstlineno
    tag = f"py{sys.version_info[0]}{sys.version_info[1]}"
    return path.parent / "__pycache__" / f"{path.stem}.{function.__qualname__}-{line}.{tag}.nbi"
