"""Q6_K: super-blocks of 16 groups of 16 codes of 6 bits, ``d * scale * (q - 32)`` with signed 8-bit scales.

The file already gives each lane a byte: 128 bytes hold low nibbles of two blocks, 64 the high bits of four.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32, int8, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide
from refengine.kernels.quants.quads import byte_value


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    j = b & 7
    first = (b >> 3) * 9
    d = f16_to_f32(halves[row, first])
    scales = halves[row, first + 1 + j]
    scale_0 = d * float32(int8(bit_field(scales, 0, 255)))
    scale_1 = d * float32(int8(bit_field(scales, 8, 255)))
    scale = scale_0 if lane < 16 else scale_1
    place = (b >> 3) * 192 + lane
    # blocks 0 and 1 of four stand in the low nibbles of 64 bytes, blocks 2 and 3 in their high ones
    low = bit_field(codes[row, place + (j >> 2) * 64 + (j & 1) * 32], (j & 2) * 2, 15)
    high = bit_field(codes[row, place + 128 + (j >> 2) * 32], (j & 3) * 2, 3)
    return scale * (float32(int32(low | high << 4)) - float32(32))


@device_function
def quad_weight(
    codes: u32_2d, halves: u16_2d, _words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    first = step * 9
    scale = float32(int8(bit_field(halves[row, first + 1 + place], (quad >> 2) * 8, 255)))
    at = step * 48 + quad
    low = bit_field(codes[row, at + (place >> 2) * 16 + (place & 1) * 8], (place & 2) * 2, 0x0F0F0F0F)
    high = bit_field(codes[row, at + 32 + (place >> 2) * 8], (place & 3) * 2, 0x03030303)
    return f16_to_f32(halves[row, first]) * scale * byte_value(int32(low | high << 4), i, 32)


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 9)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1:] = blocks["scales"]
    out.codes.view("V192")[...] = blocks["codes"]


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q6_K,
    weight=weight,
    block=np.dtype([("codes", "V192"), ("scales", "<u2", (8,)), ("d", "<u2")]),
    fill=_fill,
    group=256,
    group_bytes=192,
    block_halves=9,
    quads=Wide(quad_weight, codes=u32_2d),
)
