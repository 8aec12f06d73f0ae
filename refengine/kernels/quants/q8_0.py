"""Q8_0: 32 codes of 8 signed bits, ``d * q``."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32, int8

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    return f16_to_f32(halves[row, b]) * float32(int8(codes[row, b * 32 + lane]))


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
)
