"""Q3_K: super-blocks of 16 groups of 16 codes of 3 bits, ``d * (scale - 32) * (q - 4)``.

The file already gives each lane a byte: 32 bytes hold the high bits of eight blocks, 32 the low ones of four.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    j = b & 7
    first = (b >> 3) * 9
    d = f16_to_f32(halves[row, first])
    scales = halves[row, first + 1 + j]
    scale_0 = d * (float32(bit_field(scales, 0, 63)) - float32(32))
    scale_1 = d * (float32(bit_field(scales, 8, 63)) - float32(32))
    scale = scale_0 if lane < 16 else scale_1
    place = (b >> 3) * 96 + lane
    low = bit_field(codes[row, place + 32 + (j >> 2) * 32], (j & 3) * 2, 3)
    high = bit_field(codes[row, place], j, 1)
    return scale * (float32(int32(low | high << 2)) - float32(4))


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 9)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1:] = unpack_scales(blocks["scales"])
    out.codes.view("V96")[...] = blocks["codes"]


def unpack_scales(packed: Blocks) -> Blocks:
    """Sixteen 6-bit scales: uint32 ``[..., 3]`` as in the file -> uint16 ``[..., 8]``, two scales in each."""
    low_0, low_1, high = packed[..., 0], packed[..., 1], packed[..., 2]
    nibbles, pairs = np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    words = np.empty_like(packed, shape=(*packed.shape[:-1], 4))
    words[..., 0] = (low_0 & nibbles) | ((high << 4) & pairs)
    words[..., 1] = (low_1 & nibbles) | ((high << 2) & pairs)
    words[..., 2] = ((low_0 >> 4) & nibbles) | (high & pairs)
    words[..., 3] = ((low_1 >> 4) & nibbles) | ((high >> 2) & pairs)
    return words.view("<u2")


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q3_K,
    weight=weight,
    block=np.dtype([("codes", "V96"), ("scales", "<u4", (3,)), ("d", "<u2")]),
    fill=_fill,
    group=256,
    group_bytes=96,
    block_halves=9,
)
