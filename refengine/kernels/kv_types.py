"""Element types of the KV cache: how keys and values lie in memory, and the device functions that write and read them.

A layer's keys are [n_pages, n_head_kv, row, PAGE], so that the lanes of a warp take one position each and read side by
side; its values are [n_pages, n_head_kv, PAGE, row]. A row is one head's elements at one position. F32, F16 and BF16
rows have head_dim elements. A Q8_0 row has head_dim codes of 8 bits and behind them the two bytes, low first, of each
block's scale in half precision: blocks of 32 consecutive elements, as GGUF files have them, a value is code * scale.
So every type has one array for keys and one for values.
"""

# No "from __future__ import annotations": the types of a device function's parameters are read at run time.
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numba import cuda, float32, int8, int32, uint8, uint16

from instrumentation.errors import BadInputError
from instrumentation.kernel import DeviceFunction, device_function
from instrumentation.kernel.intrinsics import (
    bf16_to_f32,
    bit_field,
    f16_to_f32,
    f32_bits,
    f32_from_bits,
    f32_to_f16,
)
from instrumentation.kernel.types import f32, f32_4d, i32, u8_4d, u16_4d
from refengine.kernels.numerics import warp_max

#: positions of a page
PAGE = 32
SCALE_BYTES = 2
CacheType = Literal["f32", "f16", "bf16", "q8_0"]


@dataclass(frozen=True)
class KVType:
    """One element type.

    ``measure(x)`` is the scale of the block of which each lane of a warp holds one element, float32. ``encode(x,
    scale)`` is an element as it is stored, ``decode(element, scale)`` its float32 value. ``store_scale(cache, page,
    head, i, j, di, dj, scale)`` writes a scale, rounded to half precision: its first byte at [page, head, i, j], its
    second at [page, head, i + di, j + dj]. ``load_scale`` reads it there, float32. Types without scales ignore them.
    """

    name: CacheType
    #: of the cache's arrays, in a kernel's signature
    array: Any
    dtype: np.dtype[np.generic]
    measure: DeviceFunction
    encode: DeviceFunction
    decode: DeviceFunction
    store_scale: DeviceFunction
    load_scale: DeviceFunction
    #: consecutive elements of a row that share a scale; 0: there are no scales
    block: int = 0

    def __post_init__(self) -> None:
        # A warp measures a block, and a scale's place counts in elements of the array.
        assert self.block == 0 or (self.block == 32 and self.dtype.itemsize == 1), self

    @property
    def bits(self) -> str:
        """Format of the numbers whose bits the elements are: empty for codes with scales."""
        return "" if self.block else self.name

    def fits(self, head_dim: int) -> bool:
        """Whether rows of ``head_dim`` elements can be stored: they are whole blocks."""
        return head_dim >= 1 and (self.block == 0 or head_dim % self.block == 0)

    def row(self, head_dim: int) -> int:
        """Array elements of a row, scales included."""
        assert self.fits(head_dim), (self.name, head_dim)
        return head_dim + (SCALE_BYTES * head_dim // self.block if self.block else 0)

    def scale_block(self, head_dim: int) -> int:
        """Elements that a scale is loaded for: the whole row when there are no scales."""
        return self.block or head_dim

    def keys(self, n_pages: int, n_head_kv: int, head_dim: int) -> tuple[int, int, int, int]:
        """Shape of a layer's keys."""
        return (n_pages, n_head_kv, self.row(head_dim), PAGE)

    def values(self, n_pages: int, n_head_kv: int, head_dim: int) -> tuple[int, int, int, int]:
        """Shape of a layer's values."""
        return (n_pages, n_head_kv, PAGE, self.row(head_dim))

    def nbytes(self, n_pages: int, n_head_kv: int, head_dim: int) -> int:
        """Bytes of a layer's keys, and of its values."""
        return n_pages * n_head_kv * PAGE * self.row(head_dim) * int(self.dtype.itemsize)


# --- types without scales


@device_function
def _no_measure(_x: f32) -> Any:
    return float32(1.0)


@device_function
def _no_store(
    _cache: f32_4d, _page: i32, _head: i32, _i: i32, _j: i32, _di: i32, _dj: i32, _scale: f32
) -> None:
    pass


@device_function
def _no_load(_cache: f32_4d, _page: i32, _head: i32, _i: i32, _j: i32, _di: i32, _dj: i32) -> Any:
    return float32(1.0)


@device_function
def _as_is(x: Any, _scale: f32) -> Any:
    return x


@device_function
def _f16_encode(x: f32, _scale: f32) -> Any:
    return f32_to_f16(x)


@device_function
def _f16_decode(bits: int, _scale: f32) -> Any:
    return f16_to_f32(bits)


@device_function
def _bf16_encode(x: f32, _scale: f32) -> Any:
    """Round to nearest even; a NaN stays one, even if all its bits are in the half that goes."""
    bits = f32_bits(x)
    upper = bit_field(bits, 16, 0xFFFF)
    rounded = bit_field(bits + 0x7FFF + bit_field(bits, 16, 1), 16, 0xFFFF)
    return uint16(rounded if not math.isnan(x) else upper | 0x40)


@device_function
def _bf16_decode(bits: int, _scale: f32) -> Any:
    return bf16_to_f32(bits)


# --- Q8_0


@device_function
def _q8_0_measure(x: f32) -> Any:
    """Largest magnitude / 127; NaN when any element is NaN, since as integers the bits of NaN are the largest."""
    return f32_from_bits(warp_max(bit_field(f32_bits(x), 0, 0x7FFFFFFF))) / float32(127.0)


@device_function
def _q8_0_encode(x: f32, scale: f32) -> Any:
    """Code of x: x / scale rounded half away from zero. 0 where that is no number: the scale makes that NaN, or 0."""
    inverse = float32(1.0) / scale if scale != float32(0.0) else float32(0.0)
    # A product that is an explicit multiply-add cannot be contracted with what is subtracted from it.
    code = cuda.fma(x, inverse, float32(0.0))
    # Beyond 127 only where 1 / scale is infinite.
    size = min(abs(code), float32(127.0)) if not math.isnan(code) else float32(0.0)
    whole = int32(size)
    rounded = whole + int32(float32(2.0) * (size - float32(whole)))
    return uint8(rounded if code >= float32(0.0) else -rounded)


@device_function
def _q8_0_decode(code: int, scale: f32) -> Any:
    return float32(int8(code)) * scale


@device_function
def _q8_0_store(cache: u8_4d, page: i32, head: i32, i: i32, j: i32, di: i32, dj: i32, scale: f32) -> None:
    bits = f32_to_f16(scale)
    cache[page, head, i, j] = uint8(bits)
    cache[page, head, i + di, j + dj] = uint8(bits >> 8)


@device_function
def _q8_0_load(cache: u8_4d, page: i32, head: i32, i: i32, j: i32, di: i32, dj: i32) -> Any:
    return f16_to_f32(uint16(cache[page, head, i, j] | cache[page, head, i + di, j + dj] << 8))


def _plain(name: CacheType, array: Any, dtype: Any, encode: Any, decode: Any) -> KVType:
    return KVType(name, array, np.dtype(dtype), _no_measure, encode, decode, _no_store, _no_load)


_TYPES = (
    _plain("f32", f32_4d, np.float32, _as_is, _as_is),
    _plain("f16", u16_4d, np.uint16, _f16_encode, _f16_decode),
    _plain("bf16", u16_4d, np.uint16, _bf16_encode, _bf16_decode),
    KVType(
        "q8_0", u8_4d, np.dtype(np.uint8), _q8_0_measure, _q8_0_encode, _q8_0_decode, _q8_0_store, _q8_0_load,
        block=32,
    ),
)  # fmt: skip
KV_TYPES: dict[CacheType, KVType] = {kind.name: kind for kind in _TYPES}


def check_cache_type(option: str, name: str) -> CacheType:
    """The type of this name. Raises ``BadInputError`` naming the option."""
    for known in KV_TYPES:
        if name == known:
            return known
    raise BadInputError(f"{option} {name!r} is unknown; use one of {', '.join(KV_TYPES)}")


def check_head_dim(option: str, name: CacheType, head_dim: int) -> None:
    """Raise ``BadInputError`` unless a model's heads can be stored in a type."""
    kind = KV_TYPES[name]
    if not kind.fits(head_dim):
        others = [other.name for other in KV_TYPES.values() if other.fits(head_dim)]
        raise BadInputError(
            f"{option} {name}: rows are stored in blocks of {kind.block}, and this model's heads have {head_dim} "
            f"elements; use one of {', '.join(others)}"
        )
