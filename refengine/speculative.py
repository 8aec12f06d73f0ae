"""Drafts of a model's MTP head: a second context that guesses what the target will say next.

The draft context's row at position p takes token p and the target's hidden state of position p - 1 (zeros at the
start), and guesses token p + 1. After each decode of the target it is fed what the decode made known; a draft then
goes on from its own hidden states, and is cut off again when it has been made. What the target says never
depends on a draft, so a draft context that fails costs speed and nothing else: it is reported, the sequence goes on
without drafts until it is computed anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import structlog

from instrumentation.errors import DeviceError, OutOfMemoryError
from refengine.batch import Batch
from refengine.context import DecodeStatus
from refengine.outputs import Candidates, at_least

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from refengine.context import Context
    from refengine.outputs import Row

log = structlog.get_logger()
#: hidden row of a sequence's first token: zeros
START = -1
#: a draft's probability is taken among this many likeliest tokens
_CANDIDATES = 10


@dataclass(frozen=True)
class DraftSettings:
    """How long drafts are, and how sure."""

    n_max: int = 3
    n_min: int = 0
    p_min: float = 0.0

    def __post_init__(self) -> None:
        assert self.n_min >= 0, self
        assert self.n_max >= 0, self
        assert 0.0 <= self.p_min <= 1.0, self


@dataclass(frozen=True)
class Feed:
    """What a decode of the target made known of a sequence: tokens from position ``start`` on.

    ``hidden_rows``: for each token the row of the target's last batch that is the position before, or ``START``.
    """

    sequence: int
    tokens: list[int]
    start: int
    hidden_rows: list[int]
    #: whether the last token is one that the target has yet to decode, so that a draft can follow
    drafts_follow: bool

    def __post_init__(self) -> None:
        assert 1 <= len(self.tokens) == len(self.hidden_rows), self
        assert (self.start == 0) == (self.hidden_rows[0] == START), self


class Drafter(Protocol):
    """Guesses what a target context will say next."""

    def feed(self, feeds: Sequence[Feed]) -> None:
        """Learn what the target's last decode made known."""
        ...

    def draft(
        self, wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """Up to ``wanted[sequence]`` tokens behind each sequence's history, whose last token was fed last."""
        ...

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        ...

    def truncate(self, sequence: int, length: int) -> bool:
        """Keep the first ``length`` positions of a sequence; False, and nothing changes, when it has fewer."""
        ...


class Guess(NamedTuple):
    """The likeliest token, and its probability among the ten likeliest."""

    token: int
    probability: float

    @classmethod
    def of(cls, row: Row) -> Guess:
        """From a row's logits, or its candidates; of equals the lowest id.

        The probability is NaN when a logit is NaN or plus infinity, of candidates also when one is minus infinity.
        """
        if isinstance(row, Candidates):
            if row.n_bad:
                return cls(int(row.ids[0]) if len(row.ids) else 0, math.nan)
            token, best = int(row.ids[0]), row.logits[:_CANDIDATES]
        else:
            token = int(np.argmax(row))
            best = np.sort(np.partition(row, -_CANDIDATES)[-_CANDIDATES:] if len(row) > _CANDIDATES else row)[
                ::-1
            ]
        with np.errstate(invalid="ignore"):
            weights = np.exp(best.astype(np.float64) - float(best[0]))
        return cls(token, float(1.0 / weights.sum()))


@dataclass
class _Progress:
    """Where a sequence's drafting stands; the rest follows from the draft context's books."""

    #: what follows the last token that was fed
    first: Guess
    #: drafts made since
    drafts: list[int] = field(default_factory=list)


class MtpDrafter:
    """Drafts by a model's own MTP block, in a context of its own that shares the target's weights."""

    def __init__(self, context: Context, target: Context, settings: DraftSettings) -> None:
        self.context = context
        self.target = target
        self.settings = settings
        #: decodes of the draft context that failed
        self.failures = 0
        self._progress: dict[int, _Progress] = {}

    def feed(self, feeds: Sequence[Feed]) -> None:
        """See ``Drafter.feed``. A sequence whose earlier feed failed is left alone until it starts anew."""
        for feed in feeds:
            self._progress.pop(feed.sequence, None)
        known = [feed for feed in feeds if self.context.length(feed.sequence) == feed.start]
        if known:
            self._feed(known)

    def _feed(self, feeds: list[Feed]) -> None:
        batch = Batch.joined([_fed_rows(feed) for feed in feeds])
        status = self._decode(batch)
        if status == DecodeStatus.OK:
            rows = iter(self.context.rows)
            for feed in feeds:
                if feed.drafts_follow:
                    self._progress[feed.sequence] = _Progress(Guess.of(next(rows)))
        elif len(feeds) > 1 and status != DecodeStatus.ABORTED:
            for feed in feeds:
                self._feed([feed])
        else:
            for feed in feeds:
                log.warning(
                    "draft lost, going on without",
                    sequence=feed.sequence,
                    status=int(status),
                    error=str(self.context.error or "interrupted"),
                )
                self.remove(feed.sequence)

    def draft(
        self, wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """See ``Drafter.draft``; asked again without a feed between, it gives the same."""
        del histories  # the hidden states know more
        fresh = {s: n for s, n in wanted.items() if s in self._progress and not self._progress[s].drafts}
        self._chain(fresh)
        made = {s: self._progress[s].drafts[:n] for s, n in wanted.items() if s in self._progress}
        return {s: drafts for s, drafts in made.items() if len(drafts) >= max(1, self.settings.n_min)}

    def _chain(self, wanted: Mapping[int, int]) -> None:
        growing = []
        for s, n in wanted.items():
            progress = self._progress[s]
            if n >= 1 and self._is_sure(progress.first):
                progress.drafts.append(progress.first.token)
                growing.append(s)
        lengths = {s: self.context.length(s) for s in growing}
        growing = [s for s in growing if wanted[s] > 1]
        try:
            self._grow(growing, wanted)
        finally:
            for s, length in lengths.items():
                self.context.truncate(s, length)

    def _grow(self, growing: list[int], wanted: Mapping[int, int]) -> None:
        """Add a draft to each sequence at a time, until it has what is wanted or is not sure any more."""
        while growing:
            status = self._decode(self._chain_rows(growing))
            if status != DecodeStatus.OK:
                log.warning("draft ends early", status=int(status), error=str(self.context.error))
                break
            for s, row in zip(list(growing), self.context.rows, strict=True):
                drafts, guess = self._progress[s].drafts, Guess.of(row)
                if self._is_sure(guess):
                    drafts.append(guess.token)
                if not self._is_sure(guess) or len(drafts) >= wanted[s]:
                    growing.remove(s)

    def _is_sure(self, guess: Guess) -> bool:
        return guess.probability >= self.settings.p_min  # not when it is NaN

    def _chain_rows(self, sequences: list[int]) -> Batch:
        """One row for each sequence: its last draft, behind its own hidden state."""
        ids = np.array(sequences, np.int32)
        return Batch(
            tokens=np.array([self._progress[s].drafts[-1] for s in sequences], np.int32),
            position=np.array([self.context.length(s) for s in sequences], np.int32),
            sequence=ids,
            outputs=np.ones(len(ids), np.bool_),
            n_best=at_least(_CANDIDATES),
            hidden_rows=START - 1 - ids,
            chain_rows=ids,
        )

    def logits(
        self, tokens: Sequence[int], hidden_rows: Sequence[int], sequence: int
    ) -> npt.NDArray[np.float32]:
        """Teacher forced: logits of each row that follows what a sequence holds, as ``Context.logits`` has them.

        Raises what the decode failed with.
        """
        ids = np.asarray(tokens, np.int32)
        batch = Batch.of(ids, self.context.length(sequence), sequence, "all")
        rows = np.asarray(hidden_rows, np.int32)
        status = self._decode(
            Batch(
                batch.tokens, batch.position, batch.sequence, batch.outputs,
                hidden_rows=rows, chain_rows=np.full(len(ids), -1, np.int32),
            )
        )  # fmt: skip
        self.context.require(status)
        return self.context.logits

    def remove(self, sequence: int) -> None:
        """See ``Drafter.remove``."""
        self._progress.pop(sequence, None)
        self.context.remove(sequence)

    def truncate(self, sequence: int, length: int) -> bool:
        """See ``Drafter.truncate``."""
        if self.context.length(sequence) < length:
            return False
        self._progress.pop(sequence, None)
        return self.context.truncate(sequence, length)

    def _decode(self, batch: Batch) -> DecodeStatus:
        """Decode while the target's hidden states are lent."""
        try:
            with self.target.lend_hidden(self.context):
                status = self.context.decode(batch)
        except (DeviceError, OutOfMemoryError) as error:
            self.context.error = error
            status = DecodeStatus.COMPUTE_FAILED
            log.error("hidden states were not handed over", error=str(error))  # noqa: TRY400 - logged in one line
        if status not in (DecodeStatus.OK, DecodeStatus.ABORTED):
            self.failures += 1
        return status


def _fed_rows(feed: Feed) -> Batch:
    n = len(feed.tokens)
    outputs = np.zeros(n, np.bool_)
    chain = np.full(n, -1, np.int32)
    if feed.drafts_follow:
        outputs[-1] = True
        chain[-1] = feed.sequence
    return Batch(
        tokens=np.array(feed.tokens, np.int32),
        position=np.arange(feed.start, feed.start + n, dtype=np.int32),
        sequence=np.full(n, feed.sequence, np.int32),
        outputs=outputs,
        n_best=at_least(_CANDIDATES),
        hidden_rows=np.array(feed.hidden_rows, np.int32),
        chain_rows=chain,
    )
