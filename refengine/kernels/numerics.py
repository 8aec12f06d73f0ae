"""Device functions that every kernel file uses: warp reductions and float32 functions with fixed bits.

The transcendental functions are written out in explicit multiply-adds, so that the host and CUDA compute the same
bits from the same source and LLVM can vectorise them.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda, float32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f32_bits, f32_from_bits

FULL = 0xFFFFFFFF
INFINITY = math.inf


@device_function
def warp_sum(value: Any) -> Any:
    """Sum over the 32 lanes of a warp, the same bits in every lane."""
    total = value
    for offset in (16, 8, 4, 2, 1):
        total = total + cuda.shfl_xor_sync(FULL, total, offset)
    return total


@device_function
def warp_max(value: Any) -> Any:
    """Largest value over the 32 lanes of a warp."""
    largest = value
    for offset in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_xor_sync(FULL, largest, offset))
    return largest


@device_function
def only_warp() -> Any:
    """Number of a thread's warp in a block of one."""
    return 0


@device_function
def own_warp() -> Any:
    """Number of a thread's warp in a block of (32, n) threads."""
    return cuda.threadIdx.y


@device_function
def exp_f32(x: Any) -> Any:
    """e**x in float32, within 2 ulp; 0 below -87.33 (no denormals), infinity above 88.37; NaN stays NaN.

    Cephes expf (Moshier): x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 7 in r, then 2**n by its bits.
    """
    # Adding 1.5 * 2**23 rounds to the nearest integer, which is then in the low bits.
    shifted = cuda.fma(x, float32(1.44269504088896341), float32(12582912.0))
    n = shifted - float32(12582912.0)
    r = cuda.fma(n, float32(-0.693359375), x)
    r = cuda.fma(n, float32(2.12194440e-4), r)
    p = float32(1.9875691500e-4)
    p = cuda.fma(p, r, float32(1.3981999507e-3))
    p = cuda.fma(p, r, float32(8.3334519073e-3))
    p = cuda.fma(p, r, float32(4.1665795894e-2))
    p = cuda.fma(p, r, float32(1.6666665459e-1))
    p = cuda.fma(p, r, float32(5.0000001201e-1))
    p = cuda.fma(p * r, r, r) + float32(1.0)
    scale = f32_from_bits((f32_bits(shifted) - 1262485377) << 23)
    # A product that is an explicit multiply-add cannot be contracted with what the caller adds to it.
    y = cuda.fma(p, scale, float32(0.0))
    # Above 127.5 ln 2 the power of two has no bits. Comparisons with NaN are false: it passes through both.
    y = float32(INFINITY) if x > float32(88.37) else y
    return float32(0.0) if x < float32(-87.33) else y


@device_function
def sigmoid_f32(x: Any) -> Any:
    """1 / (1 + e**-x) in float32."""
    return float32(1.0) / (float32(1.0) + exp_f32(-x))
