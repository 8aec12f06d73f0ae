import pytest
from kernel_source import load_module
from numba.core import types as nb
from sample_kernels import arg_max, calls, collectives_inside, halves, tiled_product

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import HostOptions


@pytest.mark.parametrize(
    ("kernel", "reads", "writes"),
    [
        (tiled_product, {"a", "b"}, {"c"}),
        (arg_max, {"x"}, {"best", "where"}),
        (calls, {"matrix", "vector", "out"}, {"out"}),
        (collectives_inside, {"x"}, {"y", "z"}),
        (halves, {"h", "f"}, {"wide", "brain", "narrow"}),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_access_sets(kernel, reads, writes):
    assert kernel.reads == reads
    assert kernel.writes == writes


ACCESS = [
    ("y[t] = 1", "", "y"),
    ("v = y[t]", "y", ""),
    ("y[t] += 1", "y", "y"),
    ("cuda.atomic.add(y, t, 1)", "y", "y"),
    ("n = y.shape[0] + y.size", "", ""),
    ("put(y, t)", "", "y"),
    ("v = get(y, t)", "y", ""),
    ("outer(y, t)", "y", "y"),
    ("both(x, y, t)", "x", "y"),
    ("both(y, x, t)", "y", "x"),
    ("if t < 0:\n        y[t] = x[t]", "x", "y"),
    ("v = x[int(y[t])]", "x y", ""),
]
HELPERS = """
@device_function
def put(a, i):
    a[i] = 1
@device_function
def get(a, i):
    return a[i]
@device_function
def outer(a, i):
    if get(a, i) > 0:
        put(a, i)
@device_function
def both(a, b, i):
    cuda.syncthreads()
    b[i] = a[i]
"""


@pytest.mark.parametrize(("body", "reads", "writes"), ACCESS, ids=[a[0].split("\n")[0] for a in ACCESS])
def test_access_of_statements(body, reads, writes, tmp_path):
    head = "@kernel(block=32)\ndef k(x: f32_1d, y: f32_1d) -> None:\n    t = cuda.threadIdx.x\n"
    module = load_module(tmp_path / "access.py", HELPERS + head + f"    {body}\n")
    assert module.k.reads == set(reads.split())
    assert module.k.writes == set(writes.split())


def test_what_a_kernel_says_of_itself():
    assert tiled_product.name == "tiled_product"
    assert tiled_product.block == (8, 8)
    assert repr(tiled_product) == "<kernel tiled_product block=(8, 8)>"
    assert list(tiled_product.signature) == ["a", "b", "c"]
    assert tiled_product.signature["a"] == nb.float32[:, ::1]
    assert tiled_product.host() is tiled_product.host(HostOptions())
    assert tiled_product.host().address != tiled_product.host(HostOptions(reverse_lanes=True)).address


def test_errors_carry_the_exit_code_of_bad_input():
    assert KernelDialectError.exit_code == 2
