"""KL divergence, same-top rate and perplexity of an engine against a base file, and the making of one."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from instrumentation.errors import BadInputError
from refengine.batch import Batch
from refengine.context_plan import MAX_OUTPUTS
from refengine.golden.kld_base import KldBase, Layout, decode, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from refengine.context import Context
    from refengine.engine import Engine

#: tokens whose base log probability is below are left out of the divergence, as llama.cpp does
_LEAST = -16.0
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Mean:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Array) -> Mean:
        """Of samples [n]; the error of a single one is 0."""
        n = len(values)
        mean = float(values.mean())
        spread = max(0.0, float((values**2).mean()) - mean**2)
        return cls(mean, math.sqrt(spread / (n - 1)) if n > 1 else 0.0)


@dataclass
class Divergence:
    """Per-position numbers of an engine against a base, collected chunk by chunk."""

    #: columns kld, nll, nll_base, same top, difference of the right token's probability
    _rows: list[Array] = field(default_factory=list)

    def add(self, logits: Array, base: Array, following: Array) -> None:
        """Logits [n, n_vocab] and a base's log probabilities of the same rows; the token that came behind each [n]."""
        at = np.arange(len(following))
        exact = logits.astype(np.float64)
        high = exact.max(axis=1, keepdims=True)
        log_p = exact - high - np.log(np.exp(exact - high).sum(axis=1, keepdims=True))
        log_b = base.astype(np.float64)
        p_base = np.exp(log_b)
        kld = np.where(log_b > _LEAST, p_base * (log_b - log_p), 0.0).sum(axis=1)
        nll, nll_base = -log_p[at, following], -log_b[at, following]
        same = logits.argmax(axis=1) == base.argmax(axis=1)
        self._rows.append(np.stack([kld, nll, nll_base, same, np.exp(-nll) - np.exp(-nll_base)], axis=1))

    def summary(self) -> Summary:
        """Of all that was added."""
        kld, nll, nll_base, same, delta = np.concatenate(self._rows).T
        return Summary(
            n=len(kld),
            kld=Mean.of(kld),
            kld_median=float(np.median(kld)),
            kld_99=float(np.quantile(kld, 0.99)),
            kld_max=float(kld.max()),
            same_top=Mean.of(same),
            ppl=math.exp(min(float(nll.mean()), 700.0)),
            ppl_base=math.exp(min(float(nll_base.mean()), 700.0)),
            log_ratio=Mean.of(nll - nll_base),
            delta_p=Mean.of(delta),
            delta_p_rms=float(np.sqrt((delta**2).mean())),
        )


@dataclass(frozen=True)
class Summary:
    """What ``golden kld`` reports; divergences in nats, rates and probabilities 0 to 1."""

    #: positions
    n: int
    kld: Mean
    kld_median: float
    kld_99: float
    kld_max: float
    same_top: Mean
    ppl: float
    ppl_base: float
    #: log of the ratio of perplexities
    log_ratio: Mean
    delta_p: Mean
    delta_p_rms: float

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"positions       {self.n}"
        yield f"mean KLD        {self.kld.value:.6f} ± {self.kld.error:.6f} nat"
        yield f"median KLD      {self.kld_median:.6f} nat"
        yield f"99 % KLD        {self.kld_99:.6f} nat"
        yield f"max KLD         {self.kld_max:.6f} nat"
        yield f"same top        {self.same_top.value:.3%} ± {self.same_top.error:.3%}"
        yield f"PPL             {self.ppl:.6f}"
        yield f"PPL of base     {self.ppl_base:.6f}"
        yield f"ln ratio        {self.log_ratio.value:.6f} ± {self.log_ratio.error:.6f}"
        yield f"mean Δp         {self.delta_p.value:.4%} ± {self.delta_p.error:.4%}"
        yield f"RMS Δp          {self.delta_p_rms:.4%}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        made: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Mean):
                made |= {name: value.value, f"{name}_error": value.error}
            else:
                made[name] = value
        return made


def measure(
    engine: Engine, base: KldBase, n_chunks: int = 0, progress: Callable[[int, int], None] | None = None
) -> Summary:
    """Compare an engine with the first ``n_chunks`` of a base, 0: all. Raises ``BadInputError``."""
    layout = base.layout
    if layout.n_vocab != engine.config.n_vocab:
        raise BadInputError(
            f"{base.path}: n_vocab is {layout.n_vocab}; this model has {engine.config.n_vocab}: use the base's model"
        )
    total = min(n_chunks or layout.n_chunk, layout.n_chunk)
    found = Divergence()
    for number, (tokens, rows) in enumerate(zip(base.tokens[:total], base.chunks(), strict=False)):
        at = 0
        with closing(chunk_logits(engine, tokens.tolist())) as parts:
            for logits in parts:
                following = tokens[layout.first + 1 + at : layout.first + 1 + at + len(logits)]
                found.add(logits, decode(rows[at : at + len(logits)], layout.n_vocab), following)
                at += len(logits)
        if progress is not None:
            progress(number + 1, total)
    return found.summary()


def write_base(
    engine: Engine,
    path: Path,
    tokens: Sequence[int],
    n_ctx: int,
    n_chunks: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Layout:
    """Write what an engine says of the first ``n_chunks`` chunks of ``n_ctx`` tokens, 0: all whole ones."""
    if n_ctx < 3:
        raise BadInputError(f"chunks of {n_ctx} tokens predict nothing; give a --ctx-size of at least 3")
    n = min(n_chunks or len(tokens), len(tokens) // n_ctx)
    if n < 1:
        raise BadInputError(f"the text has {len(tokens)} tokens; want at least one chunk of {n_ctx}")
    layout = Layout(n_ctx, engine.config.n_vocab, n)
    chunks = np.array(tokens[: n * n_ctx], np.int32).reshape(n, n_ctx)
    with writing(path, layout, chunks) as write:
        for number, chunk in enumerate(chunks):
            with closing(chunk_logits(engine, chunk.tolist())) as parts:
                for logits in parts:
                    write(logits)
            if progress is not None:
                progress(number + 1, n)
    return layout


def chunk_logits(engine: Engine, tokens: list[int]) -> Generator[npt.NDArray[np.float32], None, None]:
    """Logits at the positions of a chunk's second half but its last, some rows at a time, in order."""
    tokenizer = engine.tokenizer
    ids = engine.check_tokens(tokens)
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        ids[0] = tokenizer.bos_id
    first, end = len(ids) // 2, len(ids) - 1
    n_batch = engine.settings.n_batch
    size = min(n_batch, MAX_OUTPUTS)
    with engine.exclusive() as context:
        for start in range(0, first, n_batch):
            _decode(context, ids[start : min(start + n_batch, first)], start, "none")
        for start in range(first, end, size):
            _decode(context, ids[start : min(start + size, end)], start, "all")
            yield context.logits


def _decode(context: Context, tokens: list[int], start: int, outputs: str) -> None:
    context.require(context.decode(Batch.of(tokens, start, 0, outputs)))
