"""NVIDIA's cuBLAS through ``ctypes``: the few functions that one product needs, each checked.

The library is that of the wheel (``nvidia-cublas``, which the extra ``cublas`` brings), or else the one that
``cuda.pathfinder`` finds.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrumentation.errors import BadInputError
from instrumentation.handles import Library, LibraryCallError

if TYPE_CHECKING:
    from instrumentation.blas import BlasCalls

LEAST_MAJOR = 12
_WHEELS = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu13")
_FILE = re.compile(r"(lib)?cublas(64_|\.so\.)\d+(\.dll)?")
_ALLOC_FAILED = 3
_MAJOR, _MINOR, _PATCH = range(3)
_INT, _POINTER, _FLOATS = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
#: parameters by function; each returns a status
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cublasGetProperty": (_INT, ctypes.POINTER(_INT)),
    "cublasCreate_v2": (ctypes.POINTER(_POINTER),),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasGetStream_v2": (_POINTER, ctypes.POINTER(_POINTER)),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasSgemm_v2": (
        _POINTER, _INT, _INT, _INT, _INT, _INT, _FLOATS, _POINTER, _INT, _POINTER, _INT, _FLOATS, _POINTER, _INT,
    ),
}  # fmt: skip


class Cublas:
    """One process's cuBLAS. Every call needs a current context, in which a handle stays all its life."""

    name = "cublas"
    least_workspace = 16 << 10
    workspace_alignment = 256

    def __init__(self, library: Any, path: str) -> None:
        self._functions: dict[str, Any] = {}
        for name, parameters in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise BadInputError(f"gemm cublas: {path} has no {name}; {_cure()}")
            function.argtypes, function.restype = parameters, ctypes.c_int
            self._functions[name] = function
        self._status_name = getattr(library, "cublasGetStatusName", None)
        if self._status_name is not None:
            self._status_name.argtypes, self._status_name.restype = (ctypes.c_int,), ctypes.c_char_p
        self.version = tuple(self._property(which) for which in (_MAJOR, _MINOR, _PATCH))
        if self.version[0] < LEAST_MAJOR:
            raise BadInputError(
                f"gemm cublas: {path} is version {'.'.join(map(str, self.version))}; {_cure()}"
            )

    def _call(self, name: str, *arguments: Any) -> None:
        status = self._functions[name](*arguments)
        if status:
            named = self._status_name(status) if self._status_name is not None else None
            text = named.decode("ascii", "replace") if named else f"status {status}"
            raise LibraryCallError(name.removesuffix("_v2"), text, out_of_memory=status == _ALLOC_FAILED)

    def _property(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cublasGetProperty", which, ctypes.byref(value))
        return value.value

    def create(self) -> int:
        """See ``LibraryCalls``."""
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(handle))
        return int(handle.value or 0)

    def destroy(self, handle: int) -> None:
        """See ``LibraryCalls``."""
        self._call("cublasDestroy_v2", handle)

    def set_stream(self, handle: int, stream: Any) -> None:
        """See ``LibraryCalls``."""
        self._call("cublasSetStream_v2", handle, int(stream))

    def stream_of(self, handle: int) -> int:
        """See ``LibraryCalls``."""
        stream = ctypes.c_void_p()
        self._call("cublasGetStream_v2", handle, ctypes.byref(stream))
        return int(stream.value or 0)

    def set_workspace(self, handle: int, address: int, nbytes: int) -> None:
        """See ``LibraryCalls``."""
        self._call("cublasSetWorkspace_v2", handle, address, nbytes)

    def sgemm(
        self,
        handle: int,
        trans_a: bool,
        trans_b: bool,
        m: int,
        n: int,
        k: int,
        alpha: float,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: float,
        c: int,
        ldc: int,
    ) -> None:
        """See ``BlasCalls``. The two factors are read before it returns: they are the host's."""
        one, two = ctypes.c_float(alpha), ctypes.c_float(beta)
        self._call(
            "cublasSgemm_v2", handle, int(trans_a), int(trans_b), m, n, k, ctypes.byref(one), a, lda, b, ldb,
            ctypes.byref(two), c, ldc,
        )  # fmt: skip


@functools.cache
def open_cublas() -> Library[BlasCalls]:
    """This process's cuBLAS. Raises ``BadInputError`` in one line where there is none, or one that is too old."""
    path = _find()
    try:
        # Its other half by its place, too: what is beside a wheel's library need not be on the loader's path.
        for half in sorted(Path(path).parent.glob(Path(path).name.replace("cublas", "cublasLt"))):
            ctypes.CDLL(str(half))
        library = ctypes.CDLL(path)
    except OSError as error:
        raise BadInputError(f"gemm cublas: {path} cannot be loaded ({error}); {_cure()}") from None
    try:
        return Library(Cublas(library, path))
    except LibraryCallError as error:
        raise BadInputError(f"gemm cublas: {path} cannot be used: {error}; {_cure()}") from None


def _find() -> str:
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate()))
            if _FILE.fullmatch(file.name) and path.exists():
                return str(path)
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # noqa: PLC0415 - comes with the CUDA extras

        return str(load_nvidia_dynamic_lib("cublas").abs_path)
    except Exception:  # noqa: BLE001 - whatever is in the way, the library is not to be had
        raise BadInputError(f"gemm cublas: no cuBLAS library is installed; {_cure()}") from None


def _cure() -> str:
    return f"install the extra cublas (version {LEAST_MAJOR} or later), or use gemm kernels"
