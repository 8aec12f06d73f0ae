"""A negative index is an address before the array, on CUDA as on the host: nothing wraps around."""

from numba import cuda
from numba.core import types

from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, f32_2d, i32


@kernel(block=32)
def read_at(x: f32_1d, y: f32_2d, at: i32) -> None:
    """An index that may be negative at each access."""
    y[at - 1, at - 2] = x[at]


def test_nothing_is_selected_by_an_indexs_sign():
    text = read_at.ptx((9, 0))
    assert "st.global.f32" in text
    for instruction in ("selp", "setp", "shr.s64"):  # what Numba wraps with
        assert instruction not in text


def plain(x, at):  # what somebody else compiles with Numba
    x[at] = 1.0


def test_numbas_own_kernels_wrap_as_before():
    signature = types.void(types.float64[::1], types.int32)
    before, _ = cuda.compile_ptx(plain, signature, cc=(9, 0))
    assert read_at.ptx((9, 0))
    after, _ = cuda.compile_ptx(plain, signature, cc=(9, 0))
    for text in (before, after):
        assert any(instruction in text for instruction in ("selp", "setp", "shr"))
