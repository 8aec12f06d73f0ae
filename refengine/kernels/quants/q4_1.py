"""Q4_1: 32 codes of 4 bits, ``d * q + m``."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import cuda, float32, uint16

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide, pair_nibbles
from refengine.kernels.quants.nibbles import nibble
from refengine.kernels.quants.quads import byte_value, nibbles


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32. The product is exact: fma rounds as a sum does."""
    scale = f16_to_f32(halves[row, 2 * b])
    minimum = f16_to_f32(halves[row, 2 * b + 1])
    return cuda.fma(scale, float32(nibble(codes, row, b, lane)), minimum)


@device_function
def quad_weight(
    codes: u32_2d, halves: u32_2d, _words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    both = halves[row, step * 8 + place]
    scale = f16_to_f32(uint16(bit_field(both, 0, 65535)))
    minimum = f16_to_f32(uint16(bit_field(both, 16, 65535)))
    return cuda.fma(scale, byte_value(nibbles(codes, row, step, place, quad), i, 0), minimum)


def _fill(blocks: Blocks, out: Packed) -> None:
    out.halves[:, 0::2] = blocks["d"]
    out.halves[:, 1::2] = blocks["m"]
    pair_nibbles(blocks["qs"], out.codes)


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q4_1,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("m", "<u2"), ("qs", "V16")]),
    fill=_fill,
    group=64,
    group_bytes=32,
    block_halves=2,
    quads=Wide(quad_weight, codes=u32_2d, halves=u32_2d),
)
