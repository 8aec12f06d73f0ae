"""Device functions that formats of 4-bit codes share."""

from typing import Any

from numba import float32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field
from instrumentation.kernel.types import i32, u8_2d

#: values of the non-linear 4-bit formats (IQ4_NL, IQ4_XS)
KVALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_BIAS = 128
_TABLE_0, _TABLE_1, _TABLE_2, _TABLE_3 = (
    int.from_bytes(bytes(value + _BIAS for value in KVALUES[i : i + 4]), "little") for i in (0, 4, 8, 12)
)


@device_function
def nibble(codes: u8_2d, row: i32, b: i32, lane: i32) -> Any:
    """4-bit code (int32): a byte holds a lane's codes of an even block (low) and of the next one (high)."""
    return bit_field(codes[row, (b >> 1) * 32 + lane], (b & 1) * 4, 15)


@device_function
def kvalue(code: i32) -> Any:
    """Value (float32) of a non-linear code. The table is four words: selects vectorise, loads do not."""
    low = _TABLE_0 if code < 4 else _TABLE_1
    high = _TABLE_2 if code < 12 else _TABLE_3
    word = low if code < 8 else high
    return float32(bit_field(word, (code & 3) * 8, 255)) - float32(_BIAS)
