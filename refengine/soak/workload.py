"""Requests of a soak: drawn once from a seed, asked again and again in an order drawn from the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

Kind: TypeAlias = Literal["fits", "too big", "too long"]
MIN_CONTEXT = 32

# Parts of the context. Four slots of these are about one and a half contexts: there is always someone without room.
_PROMPT = (0.05, 0.20)
_PREDICT = (0.02, 0.30)

# Parts of the pool.
#: prompt and answer together do not fit the context
_TOO_BIG = 0.02
#: the prompt alone does not
_TOO_LONG = 0.02
_CANCELLED = 0.05
_GREEDY = 0.5
#: begins as the others of this part do, for as long as the shortest prompt
_SHARED = 0.2
_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Planned:
    """A request that clients may ask for."""

    #: place in the pool
    number: int
    prompt: tuple[int, ...]
    n_predict: int
    temperature: float
    seed: int
    kind: Kind = "fits"
    #: generated tokens after which its client gives it up
    cancel_after: int | None = None

    def __post_init__(self) -> None:
        assert self.prompt, self
        assert self.n_predict >= 1, self
        assert self.cancel_after is None or 0 < self.cancel_after < self.n_predict, self


class Workload:
    """A pool of ``size`` requests for a context of ``n_ctx`` positions, and who asks for which.

    Raises ``BadInputError`` for a context that is too small to share.
    """

    def __init__(self, n_ctx: int, n_vocab: int, *, size: int, seed: int) -> None:
        if n_ctx < MIN_CONTEXT:
            raise BadInputError(f"n_ctx is {n_ctx} for a sequence; a soak wants at least {MIN_CONTEXT}")
        sizes, self._order = np.random.default_rng(seed).spawn(2)
        self.n_ctx = n_ctx
        self.n_vocab = n_vocab
        self.pool: tuple[Planned, ...] = tuple(self._draw(size, sizes))

    def next(self) -> Planned:
        """The next request that a client asks for."""
        return self.pool[int(self._order.integers(len(self.pool)))]

    def _draw(self, size: int, rng: np.random.Generator) -> Iterator[Planned]:
        n_big, n_long = round(_TOO_BIG * size), round(_TOO_LONG * size)
        shares: tuple[tuple[Kind, int], ...] = (
            ("too big", n_big), ("too long", n_long), ("fits", size - n_big - n_long)
        )  # fmt: skip
        kinds = [kind for kind, n in shares for _ in range(n)]
        # Exact shares in any order: a small pool has them too.
        kinds = [kinds[i] for i in rng.permutation(size)]
        greedy = rng.permutation(size) < _GREEDY * size
        cancelled = rng.permutation(size) < round(_CANCELLED * size)
        shared = rng.permutation(size) < _SHARED * size
        beginning = rng.integers(self.n_vocab, size=max(1, int(_PROMPT[0] * self.n_ctx))).tolist()
        for number, kind in enumerate(kinds):
            prompt = self._prompt(rng, kind)
            if shared[number]:
                prompt = (*beginning, *prompt[len(beginning) :])
            n_predict = self._between(rng, *_PREDICT)
            if kind == "too big":
                # The last token takes no position: n_ctx + 1 together would fit.
                n_predict += self.n_ctx + 1 - len(prompt)
            gives_up = cancelled[number] and kind == "fits" and n_predict > 1
            yield Planned(
                number=number,
                prompt=prompt,
                n_predict=n_predict,
                temperature=0.0 if greedy[number] else _TEMPERATURE,
                seed=int(rng.integers(1 << 32)),
                kind=kind,
                cancel_after=n_predict // 2 if gives_up else None,
            )

    def _prompt(self, rng: np.random.Generator, kind: Kind) -> tuple[int, ...]:
        n = self._between(rng, *_PROMPT)
        if kind == "too long":
            n += self.n_ctx
        return tuple(rng.integers(self.n_vocab, size=n).tolist())

    def _between(self, rng: np.random.Generator, low: float, high: float) -> int:
        """A number of positions, uniform between two parts of the context; at least 1."""
        return int(rng.integers(max(1, int(low * self.n_ctx)), int(high * self.n_ctx), endpoint=True))
