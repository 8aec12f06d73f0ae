"""F32: weights as they are, kept as bits."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f32_from_bits
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat


@device_function
def weight(_codes: u8_2d, _halves: u16_2d, words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    return f32_from_bits(words[row, b * 32 + lane])


def _fill(blocks: Blocks, out: Packed) -> None:
    out.words[...] = blocks


FORMAT = QuantFormat(
    type=GGMLQuantizationType.F32,
    weight=weight,
    block=np.dtype("<u4"),
    fill=_fill,
    block_words=1,
)
