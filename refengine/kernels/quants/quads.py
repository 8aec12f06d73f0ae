"""Device functions for lanes that own four columns: four codes are the bytes of one word."""

from typing import Any

from numba import float32, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f32_from_bits
from instrumentation.kernel.types import i32, u32_2d

# Floats of 2**23 and 2**15: an integer in the mantissa's low bits, or 8 bits up, adds itself to them.
_UNITS, _UNITS_OF_BYTE_1 = 0x4B000000, 0x47000000


@device_function
def byte_value(word: i32, i: i32, less: i32) -> Any:
    """Byte i of a word, 0 to 255, less a constant, as float32: without a conversion, which a GPU has few units for."""
    pair = bit_field(word, 0, 65535) if i < 2 else bit_field(word, 16, 65535)
    low = f32_from_bits(int32(bit_field(pair, 0, 255) | _UNITS)) - float32(8388608 + less)
    high = f32_from_bits(int32(bit_field(pair, 0, 65280) | _UNITS_OF_BYTE_1)) - float32(32768 + less)
    return low if i % 2 == 0 else high


@device_function
def nibbles(codes: u32_2d, row: i32, step: i32, place: i32, quad: i32) -> Any:
    """Four 4-bit codes (int32), a byte each, of formats that keep an even block low and the next one high."""
    return bit_field(codes[row, step * 32 + (place >> 1) * 8 + quad], (place & 1) * 4, 0x0F0F0F0F)
