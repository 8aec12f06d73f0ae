"""F16: weights as they are, kept as bits."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import uint16

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d, u64_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, Wide


@device_function
def weight(_codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    return f16_to_f32(halves[row, b * 32 + lane])


@device_function
def quad_weight(
    _codes: u8_2d, halves: u64_2d, _words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
) -> Any:
    """Weight ``4 * quad + i`` of block ``8 * step + place`` of a row, float32."""
    return f16_to_f32(uint16(halves[row, step * 64 + place * 8 + quad] >> (16 * i)))


def _fill(blocks: Blocks, out: Packed) -> None:
    out.halves[...] = blocks


FORMAT = QuantFormat(
    type=GGMLQuantizationType.F16,
    weight=weight,
    block=np.dtype("<u2"),
    fill=_fill,
    block_halves=1,
    quads=Wide(quad_weight, halves=u64_2d),
)
