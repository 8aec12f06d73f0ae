"""What a KV cache of each element type holds, by NumPy alone: the bytes of keys and values, and what they stand for."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from refengine.kernels.kv_types import KV_TYPES, PAGE, CacheType

Array = npt.NDArray[Any]

TYPES: tuple[CacheType, ...] = get_args(CacheType)
PAIRS: tuple[tuple[CacheType, CacheType], ...] = tuple(itertools.product(TYPES, TYPES))


def encoded(name: CacheType, x: Array) -> Array:
    """Rows as they are stored: x float32 [..., head_dim] -> [..., row] of the cache's dtype."""
    assert x.dtype == np.float32
    if name == "f32":
        return x.copy()
    if name == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    if name == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), bits >> 16 | 0x40, nearest).astype(np.uint16)
    return _q8_0(x)


def _q8_0(x: Array) -> Array:
    """GGUF's Q8_0, with an answer where it has none: a code that is no number is 0, one that is too large is 127.

    ``gguf.quants`` gives the same bytes for finite blocks whose scale has a finite inverse.
    """
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    with np.errstate(all="ignore"):
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
        product = blocks * np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        size = np.minimum(np.nan_to_num(np.abs(product), nan=0.0, posinf=127.0), np.float32(127))
        # Half away from zero; exact in float64.
        codes = np.copysign(np.floor(size.astype(np.float64) + 0.5), product).astype(np.int8)
        halves = np.ascontiguousarray(scale.astype("<f2"))
    tail = halves.view(np.uint8).reshape(*x.shape[:-1], -1)
    return np.concatenate([codes.view(np.uint8).reshape(x.shape), tail], axis=-1)


def decoded(name: CacheType, rows: Array) -> Array:
    """Values of stored rows: [..., row] -> float32 [..., head_dim]."""
    if name == "f32":
        return rows.copy()
    if name == "f16":
        return rows.view(np.float16).astype(np.float32)
    if name == "bf16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    head_dim = rows.shape[-1] * 16 // 17
    codes = rows[..., :head_dim].view(np.int8).reshape(*rows.shape[:-1], -1, 32).astype(np.float32)
    scales = np.ascontiguousarray(rows[..., head_dim:]).view("<f2").astype(np.float32)
    with np.errstate(invalid="ignore"):
        return (codes * scales[..., None]).reshape(*rows.shape[:-1], head_dim)


def held(name: CacheType, x: Array) -> Array:
    """What a cache makes of x [..., head_dim], float32 or float64; an F32 cache of a float64 model keeps it exactly."""
    return x if name == "f32" else decoded(name, encoded(name, x.astype(np.float32)))


def fill(name: CacheType, cache: Array, cell: Array, x: Array, part: str) -> None:
    """Write x [n, n_head_kv, head_dim] into cells of a layer's keys (``part`` "k") or values ("v")."""
    page, slot = cell // PAGE, cell % PAGE
    if part == "k":
        cache[page, :, :, slot] = encoded(name, x)
    else:
        cache[page, :, slot, :] = encoded(name, x)


def empty_caches(
    pair: tuple[CacheType, CacheType], n_pages: int, n_head_kv: int, head_dim: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Keys and values whose every byte is 0xFF or 0x3E: NaN, or numbers that look right."""
    key, value = (KV_TYPES[name] for name in pair)
    extents = (n_pages, n_head_kv, head_dim)
    return _garbage(key.keys(*extents), key.dtype, rng), _garbage(value.values(*extents), value.dtype, rng)


def _garbage(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> Array:
    chosen = np.where(rng.random(shape) < 0.5, 0xFF, 0x3E).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(chosen, dtype.itemsize, axis=-1).view(dtype))


def fitting(pair: tuple[CacheType, CacheType], head_dims: tuple[int, ...]) -> tuple[int, ...]:
    """Head sizes that both types of a pair can store."""
    return tuple(n for n in head_dims if all(KV_TYPES[name].fits(n) for name in pair))
