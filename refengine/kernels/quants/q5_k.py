"""Q5_K: super-blocks of 8 blocks of 32 codes of 5 bits, ``d * scale * q - dmin * minimum``.

The file already gives each lane a byte: 32 bytes hold the high bits of eight blocks, 32 the low ones of two.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat
from refengine.kernels.quants.q4_k import unpack_scales


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
)
