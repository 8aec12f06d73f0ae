"""A byte 5-gram: what counting alone makes of the same text, to hold the model's loss against.

Interpolated Witten-Bell smoothing: the probability behind a context of n bytes is the counted one mixed with that
behind its last n - 1 bytes, by how many different bytes have followed it; below them all, each of 256 bytes alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDER = 5
Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Table:
    """Counts by key, keys ascending."""

    keys: Keys
    counts: Counts

    @classmethod
    def of(cls, keys: Keys, counts: Counts | None = None) -> Self:
        """How often each of ascending keys comes, or the sum of its counts."""
        firsts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        if counts is None:
            return cls(keys[firsts], np.diff(firsts, append=len(keys)))
        return cls(keys[firsts], np.add.reduceat(counts, firsts))

    def __getitem__(self, keys: Keys) -> Counts:
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


@dataclass(frozen=True)
class ByteNgram:
    """Counts of all grams of 1 to ``ORDER`` bytes; of their contexts how often they come and what follows them."""

    grams: tuple[_Table, ...]
    totals: tuple[_Table, ...]
    followers: tuple[_Table, ...]

    @classmethod
    def train(cls, texts: Sequence[bytes]) -> Self:
        """Count; a text begins behind nothing. At least one has ``ORDER`` bytes."""
        grams = [
            _Table.of(np.sort(np.concatenate([_keys(text, n)[n - 1 :] for text in texts])))
            for n in range(1, ORDER + 1)
        ]
        contexts = [table.keys >> np.uint64(8) for table in grams]
        totals = [_Table.of(keys, table.counts) for keys, table in zip(contexts, grams, strict=True)]
        return cls(tuple(grams), tuple(totals), tuple(_Table.of(keys) for keys in contexts))

    def bits(self, text: bytes) -> npt.NDArray[np.float64]:
        """Bits of each byte of a text behind those before it."""
        probability = np.full(len(text), 1 / 256)
        for n, (grams, totals, followers) in enumerate(
            zip(self.grams, self.totals, self.followers, strict=True), 1
        ):
            keys = _keys(text, n)
            contexts = keys >> np.uint64(8)
            seen, kinds = totals[contexts], followers[contexts]
            mixed = (grams[keys] + kinds * probability) / np.maximum(seen + kinds, 1)
            usable = (np.arange(len(text)) >= n - 1) & (seen > 0)
            probability = np.where(usable, mixed, probability)
        bits: npt.NDArray[np.float64] = -np.log2(probability)
        return bits


def _keys(text: bytes, n: int) -> Keys:
    """[len(text)]: the n bytes up to each place as one number, fewer at the beginning."""
    data = np.frombuffer(text, np.uint8).astype(np.uint64)
    keys = np.zeros(len(data), np.uint64)
    for back in range(min(n, len(data))):
        keys[back:] |= data[: len(data) - back] << np.uint64(8 * back)
    return keys
