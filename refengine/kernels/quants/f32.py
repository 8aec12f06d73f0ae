"""F32: weights as they are, kept as bits."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f32_from_bits
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d, u64_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide


@device_function
def weight(_codes: u8_2d, _halves: u16_2d, words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    return f32_from_bits(words[row, b * 32 + lane])


@device_function
def quad_weight(
    _codes: u8_2d, _halves: u16_2d, words: u64_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    pair = words[row, step * 128 + place * 16 + 2 * quad + (i >> 1)]
    return f32_from_bits(int32(pair >> (32 * (i & 1))))


def _fill(blocks: Blocks, out: Packed) -> None:
    out.words[...] = blocks


FORMAT = QuantFormat(
    type=GGMLQuantizationType.F32,
    weight=weight,
    block=np.dtype("<u4"),
    fill=_fill,
    block_words=1,
    quads=Wide(quad_weight, words=u64_2d),
)
