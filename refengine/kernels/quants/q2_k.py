"""Q2_K: super-blocks of 16 groups of 16 codes of 2 bits, ``d * scale * q - dmin * minimum``.

The file already gives each lane a byte: byte t of 32 holds the codes of weight t of four blocks.
"""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32. Products are exact: fma rounds as a difference does."""
    first = (b >> 3) * 10
    d = f16_to_f32(halves[row, first])
    dmin = f16_to_f32(halves[row, first + 1])
    scales = halves[row, first + 2 + (b & 7)]
    # Both groups of the block are read by all lanes, so that what depends on the lane is one select.
    scale_0 = d * float32(bit_field(scales, 0, 15))
    minimum_0 = dmin * float32(bit_field(scales, 4, 15))
    scale_1 = d * float32(bit_field(scales, 8, 15))
    minimum_1 = dmin * float32(bit_field(scales, 12, 15))
    scale = scale_0 if lane < 16 else scale_1
    minimum = minimum_0 if lane < 16 else minimum_1
    code = bit_field(codes[row, (b >> 2) * 32 + lane], (b & 3) * 2, 3)
    return cuda.fma(scale, float32(code), -minimum)


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 10)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1] = blocks["dmin"]
    halves[:, :, 2:] = blocks["scales"]
    out.codes.view("V64")[...] = blocks["qs"]


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q2_K,
    weight=weight,
    # a scale: scale (low nibble) and minimum of the first 16 weights, then of the second
    block=np.dtype([("scales", "<u2", (8,)), ("qs", "V64"), ("d", "<u2"), ("dmin", "<u2")]),
    fill=_fill,
    group=128,
    group_bytes=32,
    block_halves=10,
)
