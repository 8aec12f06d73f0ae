"""Q5_K: super-blocks of 8 blocks of 32 codes of 5 bits, ``d * scale * q - dmin * minimum``.

The file already gives each lane a byte: 32 bytes hold the high bits of eight blocks, 32 the low ones of two.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32, int32, uint16

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide
from refengine.kernels.quants.q4_k import unpack_scales
from refengine.kernels.quants.quads import byte_value


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32. Products are exact: fma rounds as a difference does."""
    j = b & 7
    first = (b >> 3) * 10
    scales = halves[row, first + 2 + j]
    scale = f16_to_f32(halves[row, first]) * float32(bit_field(scales, 0, 63))
    minimum = f16_to_f32(halves[row, first + 1]) * float32(bit_field(scales, 8, 63))
    place = (b >> 3) * 160 + lane
    low = bit_field(codes[row, place + 32 + (j >> 1) * 32], (j & 1) * 4, 15)
    high = bit_field(codes[row, place], j, 1)
    return cuda.fma(scale, float32(int32(low | high << 4)), -minimum)


@device_function
def quad_weight(
    codes: u32_2d, halves: u32_2d, _words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    first = step * 5
    both = halves[row, first]
    scales = bit_field(halves[row, first + 1 + (place >> 1)], (place & 1) * 16, 65535)
    scale = f16_to_f32(uint16(bit_field(both, 0, 65535))) * byte_value(bit_field(scales, 0, 63), 0, 0)
    minimum = f16_to_f32(uint16(bit_field(both, 16, 65535))) * byte_value(bit_field(scales, 8, 63), 0, 0)
    at = step * 40 + quad
    low = bit_field(codes[row, at + 8 + (place >> 1) * 8], (place & 1) * 4, 0x0F0F0F0F)
    high = bit_field(codes[row, at], place, 0x01010101)
    return cuda.fma(scale, byte_value(int32(low | high << 4), i, 0), -minimum)


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 10)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1] = blocks["dmin"]
    halves[:, :, 2:] = unpack_scales(blocks["scales"])
    out.codes.view("V160")[...] = blocks["codes"]


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q5_K,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("dmin", "<u2"), ("scales", "<u4", (3,)), ("codes", "V160")]),
    fill=_fill,
    group=256,
    group_bytes=160,
    block_halves=10,
    quads=Wide(quad_weight, codes=u32_2d, halves=u32_2d),
)
