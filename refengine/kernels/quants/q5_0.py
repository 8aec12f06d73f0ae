"""Q5_0: 32 codes of 5 bits, ``d * (q - 16)``. A block's fifth bits are one word: bit t is weight t's."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32, int32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, pair_nibbles
from refengine.kernels.quants.nibbles import nibble


@device_function
def weight(codes: u8_2d, halves: u16_2d, words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    code = int32(nibble(codes, row, b, lane) | bit_field(words[row, b], lane, 1) << 4)
    return f16_to_f32(halves[row, b]) * (float32(code) - float32(16))


def _fill(blocks: Blocks, out: Packed) -> None:
    out.halves[...] = blocks["d"]
    out.words[...] = blocks["qh"]
    pair_nibbles(blocks["qs"], out.codes)


FORMAT = QuantFormat(
    type=GGMLQuantizationType.Q5_0,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("qh", "<u4"), ("qs", "V16")]),
    fill=_fill,
    group=64,
    group_bytes=32,
    block_halves=1,
    block_words=1,
)
