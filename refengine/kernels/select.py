"""The k best logits of each row, in two launches: blocks take chunks of a row, then one block merges their lists.

A logit and its index are one integer, greater for the greater logit and, of equal ones, for the lower index: a key. So
the best k are one list, whatever the chunks and whichever thread compares. Lists are merged as Batcher's bitonic
networks do it: the greater ones of a list and another one backwards are the best k of both.
"""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda, int32, int64

from instrumentation.kernel import DeviceFunction, Kernel, device_function, kernel
from instrumentation.kernel.intrinsics import f32_bits
from instrumentation.kernel.types import f32_2d, i32, i32_2d, i64_1d, i64_3d
from refengine.kernels.numerics import warp_sum

#: how many candidates kernels are made for
CANDIDATES = (1, 16, 64)
#: columns of a row that a block takes
CHUNK = 2048
_BLOCK = 256
_WARPS = _BLOCK // 32
_EXPONENT = 0x7F800000
_MAX = 0x7FFFFFFF
_LOW_WORD = 0xFFFFFFFF
#: no logit: less than every key
_NONE = -(2**63) + 1
_NO_INDEX = -1
_MINUS_INFINITY = -0x00800000


def n_chunks(n: int) -> int:
    """Chunks of a row of ``n`` columns."""
    return -(-n // CHUNK)


@device_function
def _key(bits: i32, index: i32) -> Any:
    """Key of the logit of these bits; -0 is 0. NaN has none."""
    magnitude = bits & _MAX
    ordered = bits if bits >= 0 else bits ^ _MAX
    ordered = 0 if magnitude == 0 else ordered
    key = (ordered << 32) | (_MAX - index)
    return _NONE if magnitude > _EXPONENT else key


@device_function
def _total(own: Any, sums: i64_1d) -> Any:
    """Sum over a block of an int64 of each thread. ``sums``: shared, one for each warp."""
    thread = cuda.threadIdx.x
    part = warp_sum(own)
    if thread % 32 == 0:
        sums[thread // 32] = part
    cuda.syncthreads()
    total = int64(0)
    for w in range(_WARPS):
        total += sums[w]
    return total


@functools.cache
def _sort_runs(k: int) -> DeviceFunction:
    """Sort each run of ``k`` keys in descending order; the first of ``n`` keys, a multiple of k."""

    @device_function
    def sort_runs(keys: i64_1d, n: i32) -> None:
        thread = cuda.threadIdx.x
        size = 2
        while size <= k:
            distance = size // 2
            while distance > 0:
                for b in range((n // 2 + _BLOCK - 1) // _BLOCK):
                    pair = b * _BLOCK + thread
                    if pair < n // 2:
                        i = 2 * pair - (pair & (distance - 1))
                        low = min(keys[i], keys[i + distance])
                        high = max(keys[i], keys[i + distance])
                        # Runs of less than k alternate, so that two of them are a bitonic one.
                        ascending = (i & size & (k - 1)) != 0
                        keys[i] = low if ascending else high
                        keys[i + distance] = high if ascending else low
                cuda.syncthreads()
                distance = distance // 2
            size = size * 2

    return sort_runs


@functools.cache
def _merge_runs(k: int) -> DeviceFunction:
    """Merge ``runs`` (a power of two) descending runs of ``k`` keys into the best k, in the place of the first."""

    @device_function
    def merge_runs(keys: i64_1d, runs: i32) -> None:
        thread = cuda.threadIdx.x
        left = runs // 2
        while left > 0:
            n = left * k
            for b in range((n + _BLOCK - 1) // _BLOCK):
                i = b * _BLOCK + thread
                if i < n:
                    keys[i] = max(keys[i], keys[i + n + k - 1 - 2 * (i & (k - 1))])
            cuda.syncthreads()
            distance = k // 2
            while distance > 0:
                for c in range((n // 2 + _BLOCK - 1) // _BLOCK):
                    pair = c * _BLOCK + thread
                    if pair < n // 2:
                        j = 2 * pair - (pair & (distance - 1))
                        low = min(keys[j], keys[j + distance])
                        high = max(keys[j], keys[j + distance])
                        keys[j] = high
                        keys[j + distance] = low
                cuda.syncthreads()
                distance = distance // 2
            left = left // 2

    return merge_runs


@functools.cache
def best_of_chunks(k: int) -> Kernel:
    """Kernel for the first launch. Grid: (n_chunks(n), n_rows)."""
    assert k in CANDIDATES, k
    sort_runs, merge_runs = _sort_runs(k), _merge_runs(k)

    @kernel(block=_BLOCK, strict=True)
    def best_of_chunks(x: f32_2d, keys: i64_3d, bad: i32_2d) -> None:
        """The best of each chunk, and how many are not finite.

        x [n_rows, n]; keys [n_rows, n_chunks, k], descending; bad [n_rows, n_chunks].
        """
        own = cuda.shared.array(CHUNK, int64)
        sums = cuda.shared.array(_WARPS, int64)
        thread = cuda.threadIdx.x
        chunk = cuda.blockIdx.x
        row = cuda.blockIdx.y
        first = chunk * CHUNK
        count = min(x.shape[1] - first, CHUNK)
        runs = 1
        while runs * k < count:
            runs = runs * 2
        n_bad = int64(0)
        for b in range((runs * k + _BLOCK - 1) // _BLOCK):
            i = b * _BLOCK + thread
            if i < count:
                bits = f32_bits(x[row, first + i])
                own[i] = _key(bits, first + i)
                n_bad += 1 if (bits & _EXPONENT) == _EXPONENT else 0
            elif i < runs * k:
                own[i] = _NONE
        n_bad = _total(n_bad, sums)
        sort_runs(own, runs * k)
        merge_runs(own, runs)
        if thread < k:
            keys[row, chunk, thread] = own[thread]
        if thread == 0:
            bad[row, chunk] = int32(n_bad)

    return _named(best_of_chunks, k)


@functools.cache
def best_of_rows(k: int) -> Kernel:
    """Kernel for the second launch. Grid: n_rows."""
    assert k in CANDIDATES, k
    merge_runs = _merge_runs(k)
    most = CHUNK // k

    @kernel(block=_BLOCK, strict=True)
    def best_of_rows(x: f32_2d, keys: i64_3d, bad: i32_2d, best: i32_2d) -> None:
        """x, keys and bad as ``best_of_chunks`` has them.

        best [n_rows, 2 * k + 1]: indices, best first, -1 behind the last one; the bits of their logits, minus infinity
        behind the last one; how many logits of the row are not finite, of which NaN is never among the best.
        """
        found = cuda.shared.array(CHUNK, int64)
        sums = cuda.shared.array(_WARPS, int64)
        thread = cuda.threadIdx.x
        row = cuda.blockIdx.x
        n_lists = keys.shape[1]
        n_bad = int64(0)
        for c in range((n_lists + _BLOCK - 1) // _BLOCK):
            at = c * _BLOCK + thread
            if at < n_lists:
                n_bad += bad[row, at]
        n_bad = _total(n_bad, sums)
        if thread < k:
            found[thread] = _NONE
        for g in range((n_lists + most - 2) // (most - 1)):
            # The best so far are one more list, in front of those of this round.
            begin = g * (most - 1)
            count = min(n_lists - begin, most - 1) + 1
            runs = 1
            while runs < count:
                runs = runs * 2
            for b in range((runs * k + _BLOCK - 1) // _BLOCK):
                i = b * _BLOCK + thread
                if i >= k and i < runs * k:
                    of = i // k
                    found[i] = keys[row, begin + of - 1, i % k] if of < count else _NONE
            cuda.syncthreads()
            merge_runs(found, runs)
        if thread < k:
            key = found[thread]
            none = key == _NONE
            index = 0 if none else _MAX - (key & _LOW_WORD)
            bits = f32_bits(x[row, index])
            best[row, thread] = int32(_NO_INDEX) if none else int32(index)
            best[row, k + thread] = int32(_MINUS_INFINITY) if none else bits
        if thread == 0:
            best[row, 2 * k] = int32(n_bad)

    return _named(best_of_rows, k)


def _named(made: Kernel, k: int) -> Kernel:
    made.name = f"{made.name}_{k}"
    return made


Floats = npt.NDArray[np.floating]


def best_f64(
    x: Floats, k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Twin of both kernels: indices [n_rows, k], logits [n_rows, k], and how many are not finite [n_rows]."""
    wide = x.astype(np.float64)
    index = np.full((len(x), k), _NO_INDEX, np.int32)
    value = np.full((len(x), k), -np.inf)
    for i, row in enumerate(wide):
        numbers = np.flatnonzero(~np.isnan(row))
        order = numbers[np.argsort(-row[numbers], kind="stable")][:k]
        index[i, : len(order)] = order
        value[i, : len(order)] = row[order]
    return index, value, np.count_nonzero(~np.isfinite(wide), axis=1).astype(np.int32)


def best_of_chunks_f64(x: Floats, k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Twin of ``best_of_chunks``: keys [n_rows, n_chunks, k] and how many are not finite [n_rows, n_chunks]."""
    chunks = range(0, x.shape[1], CHUNK)
    parts = [best_f64(x[:, first : first + CHUNK], k) for first in chunks]
    keys = [
        np.where(index == _NO_INDEX, _NONE, _keys(value, index.astype(np.int64) + first))
        for first, (index, value, _) in zip(chunks, parts, strict=True)
    ]
    return np.stack(keys, axis=1), np.stack([bad for _, _, bad in parts], axis=1)


def _keys(value: Floats, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    bits = (value.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
    ordered = np.where(bits >= 0, bits, bits ^ _MAX)
    keys: npt.NDArray[np.int64] = (ordered << 32) | (_MAX - index)
    return keys


def packed_f64(x: Floats, k: int) -> npt.NDArray[np.int32]:
    """Twin of ``best_of_rows``: [n_rows, 2 * k + 1]."""
    index, value, bad = best_f64(x, k)
    return np.concatenate([index, value.astype(np.float32).view(np.int32), bad[:, None]], axis=1)
