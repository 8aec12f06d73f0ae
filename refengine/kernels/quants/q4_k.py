"""Q4_K: super-blocks of 8 blocks of 32 codes of 4 bits, ``d * scale * q - dmin * minimum``.

The file already gives each lane a byte: byte t of 32 holds the codes of weight t of two blocks.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32, uint16

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide
from refengine.kernels.quants.nibbles import nibble
from refengine.kernels.quants.quads import byte_value, nibbles


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32. Products are exact: fma rounds as a difference does."""
    first = (b >> 3) * 10
    scales = halves[row, first + 2 + (b & 7)]
    scale = f16_to_f32(halves[row, first]) * float32(bit_field(scales, 0, 63))
    minimum = f16_to_f32(halves[row, first + 1]) * float32(bit_field(scales, 8, 63))
    return cuda.fma(scale, float32(nibble(codes, row, b, lane)), -minimum)


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
    return cuda.fma(scale, byte_value(nibbles(codes, row, step, place, quad), i, 0), -minimum)


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 10)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1] = blocks["dmin"]
    halves[:, :, 2:] = unpack_scales(blocks["scales"])
    out.codes.view("V128")[...] = blocks["qs"]


def unpack_scales(packed: Blocks) -> Blocks:
    """Eight 6-bit scales and minima: uint32 ``[..., 3]`` of the file -> uint16 ``[..., 8]``, minima high."""
    scales, minima, rest = packed[..., 0], packed[..., 1], packed[..., 2]
    nibbles, pairs, sixes = np.uint32(0x0F0F0F0F), np.uint32(0x30303030), np.uint32(0x3F3F3F3F)
    words = np.empty_like(packed, shape=(2, *packed.shape[:-1], 2))
    words[0, ..., 0] = scales & sixes
    words[0, ..., 1] = (rest & nibbles) | ((scales >> 2) & pairs)
    words[1, ..., 0] = minima & sixes
    words[1, ..., 1] = ((rest >> 4) & nibbles) | ((minima >> 2) & pairs)
    unpacked = words.view(np.uint8).astype(np.uint16)
    both: Blocks = unpacked[0] | (unpacked[1] << 8)
    return both


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q4_K,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("dmin", "<u2"), ("scales", "<u4", (3,)), ("qs", "V128")]),
    fill=_fill,
    group=64,
    group_bytes=32,
    block_halves=10,
    quads=Wide(quad_weight, codes=u32_2d, halves=u32_2d),
)
