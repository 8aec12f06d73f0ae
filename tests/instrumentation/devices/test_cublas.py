"""The binding of cuBLAS over a library that is not there: where it looks, what it refuses, what statuses become."""

import ctypes
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from instrumentation.devices import cublas
from instrumentation.devices.cublas import Cublas, open_cublas
from instrumentation.errors import BadInputError
from instrumentation.handles import LibraryCallError


class Function:
    """A function of the library: called with what ``ctypes`` would convert."""

    def __init__(self, body):
        self.body = body
        self.argtypes = None
        self.restype = None

    def __call__(self, *arguments):
        assert self.argtypes is None or len(arguments) == len(self.argtypes), (arguments, self.argtypes)
        return self.body(*arguments)


def library(*, version=(13, 1, 0), missing=(), **bodies):
    """A library whose functions succeed unless ``bodies`` says otherwise."""

    def put(reference, value):
        reference._obj.value = value
        return 0

    functions = {
        "cublasGetProperty": lambda which, value: put(value, version[which]),
        "cublasCreate_v2": lambda handle: put(handle, 0xABC0),
        "cublasGetStream_v2": lambda _handle, stream: put(stream, 0x5EED),
        "cublasGetStatusName": lambda status: f"CUBLAS_STATUS_{status}".encode(),
    }
    for name in ("cublasDestroy_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSgemm_v2"):
        functions[name] = lambda *_arguments: 0
    made = {name: Function(body) for name, body in (functions | bodies).items() if name not in missing}
    return SimpleNamespace(**made)


def test_calls():
    seen = []

    def sgemm(*arguments):
        seen.extend(arguments[:6] + arguments[7:11] + arguments[12:])
        seen.extend(factor._obj.value for factor in (arguments[6], arguments[11]))
        return 0

    own = Cublas(library(cublasSgemm_v2=sgemm), "libcublas.so.13")
    assert own.version == (13, 1, 0)
    handle = own.create()
    assert (handle, own.stream_of(handle)) == (0xABC0, 0x5EED)
    own.set_stream(handle, 0x5EED)
    own.set_workspace(handle, 0x1000, 1 << 20)
    own.sgemm(handle, True, False, 2, 3, 4, 0.5, 0xA, 4, 0xB, 5, -1.0, 0xC, 6)
    assert seen == [handle, 1, 0, 2, 3, 4, 0xA, 4, 0xB, 5, 0xC, 6, 0.5, -1.0]
    own.destroy(handle)


def test_a_status_becomes_an_error_with_its_name():
    own = Cublas(library(cublasSgemm_v2=lambda *_: 13, cublasCreate_v2=lambda _: 3), "libcublas.so.13")
    with pytest.raises(LibraryCallError, match=r"^cublasSgemm failed with CUBLAS_STATUS_13$") as caught:
        own.sgemm(1, False, False, 1, 1, 1, 1.0, 1, 1, 1, 1, 0.0, 1, 1)
    assert not caught.value.out_of_memory
    with pytest.raises(LibraryCallError, match="cublasCreate failed") as caught:
        own.create()
    assert caught.value.out_of_memory
    nameless = Cublas(
        library(missing=("cublasGetStatusName",), cublasDestroy_v2=lambda _: 1), "libcublas.so.13"
    )
    with pytest.raises(LibraryCallError, match="cublasDestroy failed with status 1"):
        nameless.destroy(1)


CURE = "install the extra cublas (version 12 or later), or use gemm kernels"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"version": (11, 11, 3)}, "gemm cublas: libcublas.so is version 11.11.3"),
        ({"missing": ("cublasSetWorkspace_v2",)}, "gemm cublas: libcublas.so has no cublasSetWorkspace_v2"),
    ],
)
def test_a_library_that_is_too_old(settings, said):
    with pytest.raises(BadInputError) as caught:
        Cublas(library(**settings), "libcublas.so")
    assert str(caught.value) == f"{said}; {CURE}"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with both halves of the library; what is loaded, in order."""
    open_cublas.cache_clear()
    loaded = []
    names = ("libcublas.so.13", "libcublasLt.so.13", "libnvblas.so.13")
    for name in names:
        (tmp_path / name).touch()

    class File(PurePosixPath):
        def locate(self):
            return tmp_path / self.name

    def files(name):
        if name != "nvidia-cublas":
            raise cublas.importlib.metadata.PackageNotFoundError(name)
        return [File(f"nvidia/cu13/lib/{name}") for name in names]

    def load(path):
        loaded.append(path.rpartition("/")[2])
        return library()

    monkeypatch.setattr(cublas.importlib.metadata, "files", files)
    monkeypatch.setattr(ctypes, "CDLL", load)
    yield loaded
    open_cublas.cache_clear()


def test_the_wheels_library_is_loaded_once_behind_its_other_half(wheel):
    assert open_cublas() is open_cublas()
    assert open_cublas().name == "cublas"
    assert wheel == ["libcublasLt.so.13", "libcublas.so.13"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (OSError("no such symbol"), r"libcublas\.so\.13 cannot be loaded \(no such symbol\); install"),
        (
            LibraryCallError("cublasGetProperty", "CUBLAS_STATUS_X"),
            r"cannot be used: cublasGetProperty failed with",
        ),
    ],
)
@pytest.mark.usefixtures("wheel")
def test_a_library_that_does_not_load(broken, said, monkeypatch):
    def load(_path):
        raise broken

    monkeypatch.setattr(
        *((ctypes, "CDLL") if isinstance(broken, OSError) else (cublas, "Cublas")), load_any(load)
    )
    with pytest.raises(BadInputError, match=said) as caught:
        open_cublas()
    assert "\n" not in str(caught.value)


def load_any(load):
    return lambda path, *_rest: load(path)
