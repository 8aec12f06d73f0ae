"""A negative index is an address before the array, on CUDA as on the host: nothing wraps around."""

from numba import cuda

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


def test_numbas_own_kernels_wrap_as_before():
    assert read_at.ptx((9, 0)) == read_at.ptx((9, 0))
    text, _ = cuda.compile_ptx(
        lambda x, at: x.__setitem__(at, 0.0), "void(float32[::1], int32)", cc=(9, 0)
    )
    assert "selp" in text or "shr.s64" in text
