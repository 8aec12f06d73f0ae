"""Launches as the driver takes them: parameters as Numba's own code packs them, images and their cache."""

import ctypes
import types

import numpy as np
import pytest
from cuda.core.utils import StridedMemoryView
from engines import Bench, increment, scale_by
from fake_cuda import fake_device
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from kernel_cases import cases
from numba import from_dtype
from numba import types as nb
from numba.cuda.args import ArgHint
from numba.cuda.dispatcher import _Kernel

from instrumentation.devices import cuda_kernels
from instrumentation.devices.cuda_context import parameter_sizes
from instrumentation.devices.cuda_launch import DeviceArray, pack, region_rows
from instrumentation.errors import DeviceError
from instrumentation.kernel import cuda_image
from instrumentation.kernel.cuda_image import build_image, compile_image, entry_of, image_path
from instrumentation.kernel.host_compile import compile_listeners

CC = (9, 0)
KINDS = {
    name: np.dtype(name) for name in ("float32", "float64", "int8", "uint16", "int32", "int64", "uint64")
}


class OnDevice(ArgHint):
    """An array that Numba takes as device memory that is there already."""

    def to_device(self, *_given):
        return StridedMemoryView.from_dlpack(self.value, stream_ptr=-1)


def numbas_bytes(kind, value) -> list[bytes]:
    """What Numba hands to the driver for an argument, parameter by parameter."""
    if isinstance(value, np.ndarray):
        value = OnDevice(value)
    packed: list = []
    _Kernel._prepare_args(types.SimpleNamespace(extensions=[]), kind, value, 0, [], packed)
    # cuda.core passes Python's integers as pointers.
    return [v.to_bytes(8, "little", signed=v < 0) if isinstance(v, int) else bytes(v) for v in packed]


def our_bytes(kind, value) -> list[bytes]:
    sizes = [8] * (5 + 2 * value.ndim) if isinstance(value, np.ndarray) else [np.dtype(str(kind)).itemsize]
    if isinstance(value, np.ndarray):
        value = DeviceArray(value.ctypes.data, value.shape, value.itemsize)
    parameters = pack({"a": kind}, [value])
    assert parameters.count == len(sizes)
    table = (ctypes.c_int64 * parameters.count).from_address(parameters.address)
    return [ctypes.string_at(at, size) for at, size in zip(table, sizes, strict=True)]


@given(data=st.data())
def test_arrays_are_packed_as_numba_packs_them(data):
    dtype = data.draw(st.sampled_from(list(KINDS.values())))
    shape = data.draw(npst.array_shapes(min_dims=1, max_dims=4, max_side=5))
    array = np.zeros(shape, dtype)
    kind = nb.Array(from_dtype(dtype), len(shape), "C")
    assert our_bytes(kind, array) == numbas_bytes(kind, array)


@given(data=st.data())
def test_numbers_are_packed_as_numba_packs_them(data):
    dtype = data.draw(st.sampled_from(list(KINDS.values())))
    value = data.draw(npst.from_dtype(dtype, allow_nan=False)).item()
    kind = from_dtype(dtype)
    assert our_bytes(kind, value) == numbas_bytes(kind, value)


def test_every_kernel_of_the_engine_declares_the_parameters_that_are_passed():
    seen = {case.kernel.name: case.kernel for case in cases()}
    picked = [kernel for i, kernel in enumerate(seen.values()) if i % 8 == 0]
    own = [cuda_kernels.find_mismatch, cuda_kernels.check_regions]
    for kernel in [*picked, *own, scale_by]:
        image = compile_image(kernel, CC)
        assert image.parameters == parameter_sizes(kernel), kernel.name
        assert image.kind == "cubin"
        assert image.data[:4] == b"\x7fELF"


def test_an_image_comes_from_the_cache_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    compile_listeners.append(compiled.append)
    try:
        first = compile_image(increment, CC)
        assert compile_image(increment, CC) == first
        assert compiled == ["increment"]
        path = image_path(increment, CC)
        path.write_bytes(path.read_bytes()[:-7])
        again = compile_image(increment, CC)  # Numba numbers its entries, so this one has another name
        assert (again.kind, again.parameters) == (first.kind, first.parameters)
        assert compile_image(increment, CC) == again
        assert compiled == ["increment"] * 2
        assert compile_image(increment, (8, 0)) != first
    finally:
        compile_listeners.remove(compiled.append)
    assert not list(path.parent.glob("*.tmp"))


def test_without_a_linker_the_driver_gets_the_ptx(monkeypatch):
    monkeypatch.setattr(cuda_image, "_link", lambda *_: None)
    image = build_image("increment", increment.ptx(CC), CC)
    assert image.kind == "ptx"
    assert image.data.endswith(b"\0")
    assert image.entry.encode() in image.data


def test_what_cannot_be_linked_is_told_with_the_linkers_log():
    text = increment.ptx(CC).replace("add.rn.f32", "frobnicate.f32").replace("add.f32", "frobnicate.f32")
    assert "frobnicate" in text
    with pytest.raises(
        DeviceError, match=r"increment: no machine code for compute capability 9\.0: .*frobnicate"
    ):
        build_image("increment", text, CC)


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        ("", "PTX with 0 kernels"),
        (".visible .entry a()\n.visible .entry b()", "PTX with 2 kernels"),
        (".visible .entry a(.param .align 8 .b8 a_0[16])", "no argument is known"),
        (".visible .entry a(.param .texref t)", "no argument is known"),
    ],
)
def test_entries_that_are_not_understood_are_refused(ptx, reason):
    with pytest.raises(DeviceError, match=reason):
        entry_of("k", ptx)


def test_a_kernel_with_other_parameters_than_are_passed_is_not_loaded():
    device = fake_device()
    compiled = device.context._compile
    device.context._compile = lambda kernel, cc, **_form: cuda_image.CudaImage(
        "ptx", kernel.name, (*parameter_sizes(kernel), 8), compiled(kernel, cc).data
    )
    with pytest.raises(DeviceError, match=r"increment: its compiled form takes parameters of .* bytes"):
        device.context.function(increment)
    assert device.context.driver.calls["load"] == 0


def test_a_prepared_launch_is_queued_often_and_loads_once():
    bench = Bench(device=fake_device())
    y = bench.put(bench.arena(), np.zeros(40, np.float32), "y")
    prepared = bench.stream.prepare(increment, 2, {"y": y})
    for _ in range(5):
        bench.stream.launch_prepared(prepared)
    assert (bench.get(y) == 5).all()
    bench.stream.launch(increment, 2, {"y": y})
    loads = bench.device.context.driver.calls["load"]
    bench.stream.launch(increment, 2, {"y": y})
    assert bench.device.context.driver.calls["load"] == loads


def test_region_rows_are_offsets_from_the_lowest_address():
    memory, rows = region_rows([(1000, 10, 0xFA), (400, 256, 0xFB)])
    assert memory == DeviceArray(400, (610,), 1)
    assert rows.tolist() == [[600, 10, 0xFA], [0, 256, 0xFB]]
