"""IQ4_XS: super-blocks of 8 blocks of 32 4-bit codes of non-linear values, ``d * (scale - 32) * value``."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numba import float32

from instrumentation.kernel import device_function
from instrumentation.kernel.intrinsics import bit_field, f16_to_f32
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.kernels.quants.layout import Blocks, Packed, QuantFormat, pair_nibbles
from refengine.kernels.quants.nibbles import kvalue, nibble


@device_function
def weight(codes: u8_2d, halves: u16_2d, _words: u32_2d, row: i32, b: i32, lane: i32) -> Any:
    """Weight ``32 * b + lane`` of a row, float32."""
    first = (b >> 3) * 5
    code = bit_field(halves[row, first + 1 + ((b >> 1) & 3)], (b & 1) * 8, 63)
    scale = f16_to_f32(halves[row, first]) * (float32(code) - float32(32))
    return scale * kvalue(nibble(codes, row, b, lane))


def _fill(blocks: Blocks, out: Packed) -> None:
    halves = out.halves.reshape(*blocks.shape, 5)
    halves[:, :, 0] = blocks["d"]
    halves[:, :, 1:] = unpack_scales(blocks["scales_l"], blocks["scales_h"])
    pair_nibbles(blocks["qs"].reshape(blocks.shape[0], -1), out.codes)


def unpack_scales(low: Blocks, high: Blocks) -> Blocks:
    """Eight 6-bit scales: uint8 ``[..., 4]`` nibbles, uint16 ``[...]`` high bits -> uint16 ``[..., 4]``."""
    nibbles = low.astype(np.uint16)
    pairs = high[..., np.newaxis] >> np.arange(0, 16, 4, dtype=np.uint16)
    even = (nibbles & 15) | ((pairs & 3) << 4)
    odd = (nibbles >> 4) | ((pairs & 12) << 2)
    return even | (odd << 8)


FORMAT = QuantFormat(
    type=GGMLQuantizationType.IQ4_XS,
    weight=weight,
    block=np.dtype([("d", "<u2"), ("scales_h", "<u2"), ("scales_l", "u1", (4,)), ("qs", "V16", (8,))]),
    fill=_fill,
    group=64,
    group_bytes=32,
    block_halves=5,
)
