"""One generation on its way: what was asked, what has come, and how it ended."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from refengine.errors import ContextSizeError, RequestError
from refengine.generation import DraftStatistics, FinishReason, Generation, Timings
from refengine.outputs import Candidates, at_least

if TYPE_CHECKING:
    from collections.abc import Generator

    from refengine.outputs import Row
    from refengine.sampling import Sampler
    from refengine.tokenizer import Tokenizer

Status = Literal["queued", "running", "done", "failed", "cancelled"]
#: logit of a token that must not be chosen: finite, so that it is told apart from a kernel's mistake
NEVER = np.float32(-1e30)


class Driver(Protocol):
    """Who makes requests progress: the engine."""

    def drive(self, timeout: float | None) -> None:
        """Do one step of the work that is queued, or wait while another thread does, up to ``timeout`` seconds."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request and give its memory back."""
        ...


@dataclass(frozen=True)
class Ask:
    """What is asked of a model."""

    prompt: list[int]
    #: -1: until the end
    n_predict: int
    ignore_eos: bool
    return_logits: bool
    sampler: Sampler
    #: positions that the context has for it
    n_ctx: int

    def __post_init__(self) -> None:
        n = self.n_predict
        if not isinstance(n, int) or isinstance(n, bool) or (n != -1 and n < 1):
            raise RequestError(f"n_predict is {n!r}; give a positive whole number, or -1 for until the end")
        assert 1 <= len(self.prompt) <= self.n_ctx, self


class Request:
    """A request of an engine, made by ``Engine.submit``: ask for its ``result()``, or take ``pieces()`` as they come.

    Work is done by whoever waits, for all requests together, and by a thread of the engine for those submitted.
    """

    def __init__(self, number: int, ask: Ask, tokenizer: Tokenizer, driver: Driver) -> None:
        #: place in the order of arrival, for good: the smallest is served first and never preempted
        self.number = number
        self.ask = ask
        #: candidates that it wants of a row, as ``Batch.n_best``
        self.n_best = _n_best(ask, len(tokenizer.eos_ids))
        self.status: Status = "queued"
        self.error: Exception | None = None
        #: prompt, and what has been generated
        self.history: list[int] = list(ask.prompt)
        self.draft = DraftStatistics()
        self.preemptions = 0
        self._driver = driver
        self._eos_ids = tokenizer.eos_ids
        self._decoder = tokenizer.stream(skip_special=True)
        self._logits: list[npt.NDArray[np.float32]] = []
        self._pieces: deque[str] = deque()
        self._text: list[str] = []
        self._reason: FinishReason = "cancelled"
        #: prompt tokens that were decoded for it
        self._read = len(ask.prompt)
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    # --- for who asked

    @property
    def tokens(self) -> list[int]:
        """Generated token ids so far."""
        return self.history[len(self.ask.prompt) :]

    @property
    def text(self) -> str:
        """Generated text so far."""
        return "".join(self._text)

    @property
    def ended(self) -> bool:
        """Done, failed or cancelled."""
        return self.status in ("done", "failed", "cancelled")

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end. Raises what the request failed with, and ``TimeoutError`` after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + _seconds(timeout)
        while not self.ended:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"request {self.number} has not ended after {timeout} seconds")
            self._driver.drive(left)
        return self.generation()

    def pieces(self) -> Generator[str, None, None]:
        """Text as it comes, never half a character. Raises what the request failed with; closing it cancels."""
        try:
            while True:
                ended = (
                    self.ended
                )  # before the pieces are looked at: another thread may add the last one and end it
                while self._pieces:
                    yield self._pieces.popleft()
                if ended:
                    break
                self._driver.drive(None)
            self.generation()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End it now; does nothing when it has ended."""
        if not self.ended:
            self._driver.cancel(self)

    def generation(self) -> Generation:
        """What an ended request gave; raises what it failed with."""
        assert self.ended, self.status
        if self.error is not None:
            raise self.error
        logits = None
        if self.ask.return_logits:
            empty = np.empty((0, 0), np.float32)
            logits = np.stack(self._logits) if self._logits else empty
        return Generation(
            self.text, self.tokens, list(self.ask.prompt), self._reason, self.ask.sampler.seed, self._timings(),
            logits, self.draft, self.preemptions,
        )  # fmt: skip

    # --- for the scheduler

    def begin(self, reused: int) -> None:
        """A slot has taken it that holds its first ``reused`` tokens already."""
        self.status = "running"
        if self._started is None:
            self._started = time.perf_counter()
            self._read = len(self.ask.prompt) - reused

    def wait(self) -> None:
        """Its slot is needed by an older one; what was generated is kept."""
        self.status = "queued"
        self.preemptions += 1

    def take(self, row: Row) -> int:
        """Choose the token behind ``history`` from its logits, float32 [n_vocab], or at least ``n_best`` candidates.

        The last one ends the request.

        Raises ``ComputeError`` for logits that are not finite.
        """
        ask, position = self.ask, len(self.history)
        if isinstance(row, Candidates):
            assert not ask.return_logits, "all logits were asked for"
            best = row.with_logit(self._eos_ids, NEVER) if ask.ignore_eos else row
            token = ask.sampler.choose(best, position)
        else:
            token = ask.sampler.sample(self._choices(row), position, self.history)
            if ask.return_logits:
                self._logits.append(row.copy())
        self.history.append(token)
        self._book_time()
        reason = self._reason_to_end(token, position)
        if reason != "stop":
            self._emit(self._decoder.push(token))
        if reason is not None:
            self._emit(self._decoder.flush())
            self._reason = reason
            if reason == "context":
                self.fail(ContextSizeError("Context size has been exceeded."))
            else:
                self.status = "done"
        return token

    def _choices(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        ids = list(self._eos_ids)
        # What is not finite must stay, for the sampler to refuse.
        if not self.ask.ignore_eos or not np.isfinite(row[ids]).all():
            return row
        choices = row.copy()
        choices[ids] = NEVER
        return choices

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.error = error
        self.status = "failed"

    def give_up(self) -> None:
        """End it because nobody wants it any more."""
        self.status = "cancelled"

    def _reason_to_end(self, token: int, position: int) -> FinishReason | None:
        if token in self._eos_ids and not self.ask.ignore_eos:
            return "stop"
        if self.ask.n_predict != -1 and len(self.history) - len(self.ask.prompt) >= self.ask.n_predict:
            return "length"
        return "context" if position >= self.ask.n_ctx else None

    def _emit(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._text.append(piece)

    def _book_time(self) -> None:
        self._last_token = time.perf_counter()
        if self._first_token is None:
            self._first_token = self._last_token

    def _timings(self) -> Timings:
        if self._first_token is None or self._last_token is None:
            return Timings()
        assert self._started is not None, "a request that never began"
        n_predicted = len(self.history) - len(self.ask.prompt) - 1
        return Timings(
            self._read, self._first_token - self._started, n_predicted, self._last_token - self._first_token
        )


def _n_best(ask: Ask, n_eos: int) -> int:
    """Candidates to ask for; without end tokens as many more are needed as there are such tokens. 0: all logits."""
    n = 0 if ask.return_logits else ask.sampler.n_candidates()
    return at_least(n + (n_eos if ask.ignore_eos else 0)) if n else 0


def _seconds(timeout: float) -> float:
    if not isinstance(timeout, int | float) or not timeout <= threading.TIMEOUT_MAX:
        raise RequestError(f"timeout is {timeout!r}; give seconds, or None to wait for the end")
    return timeout
