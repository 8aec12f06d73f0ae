"""Choosing the next token from logits: penalties, truncations, temperature, one draw.

The order and the definition of each step are llama.cpp's. The draw is not: its random number is a function of
(seed, position) alone, so what is sampled at a position depends neither on how many draws came before nor on
which other requests run, and a token sampled again after a rollback is the same token.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

import numpy as np

from refengine.errors import ComputeError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from refengine.outputs import Candidates

RANDOM_SEED: Final = -1


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen. Raises ``RequestError`` naming the parameter that is out of range."""

    temperature: float = 0.8
    """At or below 0 the most likely token is taken, the lowest id among equals."""
    top_k: int = 40
    """Keep the k most likely tokens; 0 or less keeps all."""
    top_p: float = 0.95
    """Keep the most likely tokens that together reach this probability; 1 keeps all."""
    min_p: float = 0.05
    """Drop tokens below this fraction of the highest probability; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, up to this probability; 1 keeps all."""
    repeat_last_n: int = 64
    """Penalties look at this many last tokens, the prompt's included; 0 at none, -1 at all."""
    repeat_penalty: float = 1.0
    """Divides a positive and multiplies a negative logit of a token that was seen; 1 is off."""
    frequency_penalty: float = 0.0
    """Taken from a logit once for each time that its token was seen."""
    presence_penalty: float = 0.0
    """Taken from a logit once if its token was seen."""
    seed: int = RANDOM_SEED
    """-1 draws a seed; ``Sampler.seed`` says which."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = int if field.type == "int" else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                kind = "an integer" if wanted is int else "a number"
                raise RequestError(f"{field.name} is of type {type(value).__name__}; wanted {kind}")
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{field.name} is {value}; wanted a finite number")
            if isinstance(value, int) and value.bit_length() > 64:
                raise RequestError(f"{field.name} is of {value.bit_length()} bits; wanted at most 64")
        for name in ("top_p", "min_p", "typical_p"):
            self._check(name, "0 to 1", 0 <= getattr(self, name) <= 1)
        for name in ("temperature", "frequency_penalty", "presence_penalty"):
            self._check(name, "-1e6 to 1e6", -1e6 <= getattr(self, name) <= 1e6)
        self._check("repeat_last_n", "-1 (the whole context), 0 (off) or more", self.repeat_last_n >= -1)
        self._check("repeat_penalty", "1e-6 to 1e6", 1e-6 <= self.repeat_penalty <= 1e6)
        self._check("seed", "-1 (drawn) or 0 to 2**64 - 1", -1 <= self.seed < 1 << 64)

    def _check(self, name: str, wanted: str, good: bool) -> None:
        if not good:
            raise RequestError(f"{name} is {getattr(self, name)}; wanted {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn."""
        return self.temperature <= 0

    @property
    def penalises(self) -> bool:
        """Whether what was seen before changes the logits."""
        neutral = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) == (1, 0, 0)
        return self.repeat_last_n != 0 and not neutral


class Sampler:
    """Samples by ``params``. Holds no state beyond the seed: share it, call it in any order."""

    def __init__(self, params: SamplingParams) -> None:
        self.params: Final = params
        self.seed: Final = secrets.randbits(32) if params.seed == RANDOM_SEED else params.seed

    def sample(self, logits: NDArray[np.float32], position: int, history: Sequence[int] = ()) -> int:
        """Return the token for ``position``.

        ``logits``: float32 [n_vocab], left as they are. ``history``: the tokens before ``position``, the
        prompt's included, oldest first; read only if a penalty is on.
        Raises ``ComputeError`` if a logit is NaN or infinite.
        """
        if self.params.greedy:
            _check_row(logits, position)
            return int(np.argmax(self._penalised(logits, history)))
        return self._drawn(*self.candidates(logits, history, position=position), position)

    def n_candidates(self) -> int:
        """How many of the likeliest tokens ``choose`` needs; 0: all, so it is ``sample`` that chooses."""
        if self.params.penalises:
            return 0
        return 1 if self.params.greedy else max(0, self.params.top_k)

    def choose(self, best: Candidates, position: int) -> int:
        """As ``sample`` from the whole row, from ``n_candidates`` or more of its likeliest tokens, or all.

        Raises ``ComputeError`` if a logit of the row is NaN or infinite.
        """
        best.require_finite(position)
        n = self.n_candidates()
        assert 1 <= n <= len(best.ids) or len(best.ids) == best.n_vocab, (n, len(best.ids))
        if self.params.greedy:
            return int(best.ids[0])
        ids = best.ids[:n].astype(np.int64)
        return self._drawn(*self._truncated(ids, best.logits[:n]), position)

    def _drawn(self, ids: NDArray[np.int64], probs: NDArray[np.float64], position: int) -> int:
        cumulative = np.cumsum(probs)
        drawn = np.searchsorted(cumulative, self.uniform(position) * cumulative[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])

    def candidates(
        self, logits: NDArray[np.float32], history: Sequence[int] = (), *, position: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return what ``sample`` draws from: ids int64 [n] and probabilities float64 [n], likeliest first.

        Equal logits stand in the order of their ids. A greedy sampler has one candidate.
        """
        _check_row(logits, position)
        logits = self._penalised(logits, history)
        params = self.params
        if params.greedy:
            return np.array([np.argmax(logits)], np.int64), np.ones(1)
        ids = _top_k(logits, params.top_k)
        return self._truncated(ids, logits[ids])

    def _truncated(
        self, ids: NDArray[np.int64], logits: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What is left of the likeliest tokens, and their probabilities."""
        params = self.params
        kept = logits.astype(np.float64)
        for step, p in ((_typical, params.typical_p), (_top_p, params.top_p), (_min_p, params.min_p)):
            keep = step(kept, p)
            ids, kept = ids[keep], kept[keep]
        # Differences first: a tiny temperature must not turn two large logits into two infinities.
        with np.errstate(over="ignore"):
            weights = np.exp((kept - kept[0]) / params.temperature)
        return ids, weights / weights.sum()

    def uniform(self, position: int) -> float:
        """Return the random number of ``position``, in [0, 1)."""
        if position < 0:
            raise RequestError(f"position is {position}; wanted 0 or more")
        # The position counts blocks of 2**64 draws, so that no two positions share a number.
        bits = np.random.Philox(key=self.seed, counter=position << 64)
        return float(np.random.Generator(bits).random())

    def _penalised(self, logits: NDArray[np.float32], history: Sequence[int]) -> NDArray[np.float32]:
        params = self.params
        if not params.penalises or not len(history):
            return logits
        last = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
        seen, counts = np.unique(np.asarray(last, dtype=np.int64), return_counts=True)
        if seen[0] < 0 or seen[-1] >= len(logits):
            wrong = seen[0] if seen[0] < 0 else seen[-1]
            raise RequestError(f"history has token {wrong}, outside the vocabulary (0 to {len(logits) - 1})")
        logits = logits.copy()
        values = logits[seen].astype(np.float64)
        values = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
        values -= counts * params.frequency_penalty + params.presence_penalty
        largest = np.finfo(np.float32).max
        logits[seen] = np.clip(values, -largest, largest)
        return logits


def logprobs(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the natural logarithms of the probabilities: float64 [..., n_vocab], like ``logits``.

    Raises ``ComputeError`` if a logit is NaN or infinite.
    """
    _check_finite(logits, None)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _check_row(logits: NDArray[np.float32], position: int | None) -> None:
    if logits.ndim != 1 or not len(logits):
        raise ComputeError(f"logits have shape {logits.shape}; wanted one row, [n_vocab]")
    _check_finite(logits, position)


def _check_finite(logits: NDArray[np.floating], position: int | None) -> None:
    finite = np.isfinite(logits)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        at = "" if position is None else f" at position {position}"
        raise ComputeError(
            f"the logit of token {where[-1]}{at} is {logits[where]} ({int((~finite).sum())} of "
            f"{finite.size} are not finite); find the first bad tensor with --check-numerics"
        )


def _top_k(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the ids of the ``k`` highest logits (all if k <= 0), highest first, equals by id."""
    n = len(logits)
    blocks = 512
    if 0 < k <= blocks < n // 4:
        # k blocks have a maximum of at least the k-th highest maximum, so the k-th highest logit is no lower:
        # two cheap passes leave a few hundred tokens to sort.
        width = n // blocks
        maxima = logits[: width * blocks].reshape(blocks, width).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(maxima, blocks - k)[blocks - k])
        order = np.argsort(-logits[ids], kind="stable")
        return ids[order[:k]]
    order = np.argsort(-logits, kind="stable")
    return order[:k] if k > 0 else order


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result


# Each step takes logits [n], highest first, and returns which stay: at least one, in the same order.


def _typical(logits: NDArray[np.float64], p: float) -> NDArray[np.int64] | slice:
    """Locally typical sampling (Meister et al. 2022)."""
    if p >= 1:
        return slice(None)
    probs = _softmax(logits)
    surprise = np.log(np.exp(logits - logits[0]).sum()) - (logits - logits[0])
    distance = np.abs(surprise - probs @ surprise)
    order = np.argsort(distance, kind="stable")
    # The token that takes the sum past p is the last to stay.
    n_keep = int(np.searchsorted(np.cumsum(probs[order]), p, side="right")) + 1
    return np.sort(order[:n_keep])


def _top_p(logits: NDArray[np.float64], p: float) -> slice:
    """Nucleus sampling (Holtzman et al. 2019). The token that takes the sum to ``p`` is the last to stay."""
    if p >= 1:
        return slice(None)
    return slice(int(np.searchsorted(np.cumsum(_softmax(logits)), p, side="left")) + 1)


def _min_p(logits: NDArray[np.float64], p: float) -> slice:
    """Keep probabilities of at least ``p`` times the highest one."""
    if p <= 0:
        return slice(None)
    return slice(int(np.count_nonzero(logits >= logits[0] + math.log(p))))
