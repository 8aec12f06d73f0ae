"""Q8_0: 32 codes of 8 signed bits, ``d * q``."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32, int8, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide
from refengine.kernels.quants.quads import byte_value


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    return f16_to_f32(halves[row, b]) * float32(int8(codes[row, b * 32 + lane]))


@device_function
def quad_weight(
    codes: u32_2d, halves: u16_2d, _words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    # With its highest bit turned round a code is 128 more, without a sign.
    word = int32(codes[row, step * 64 + place * 8 + quad] ^ 0x80808080)
    return f16_to_f32(halves[row, step * 8 + place]) * byte_value(word, i, 128)


def _fill(blocks: Blocks, out: Packed) -> None:
    out.halves[...] = blocks["d"]
    out.codes.view("V32")[...] = blocks["qs"]


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q8_0,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("qs", "V32")]),
    fill=_fill,
    group_bytes=32,
    block_halves=1,
    quads=Wide(quad_weight, codes=u32_2d),
)
