"""Engines with several requests: what each gives alone, and what must hold in every step when they run together."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DATA, same_bits
from structlog.testing import capture_logs

import refengine
from refengine.context import DecodeStatus
from refengine.errors import ContextSizeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from engines import Array

    from refengine.batch import Batch
    from refengine.generation import Generation
    from refengine.request import Request

#: no request of these tests goes on longer
LONGEST = 320
NO_SPACE = "failed to find free space in the KV cache, retrying with smaller batch size"
TOO_LONG = "Context size has been exceeded."
#: three texts that share no beginning
TEXTS = np.random.default_rng(17).integers(0, 290, (4, LONGEST)).tolist()


def loaded(name: str = "qwen35", **options: Any) -> refengine.Engine:
    defaults: dict[str, Any] = {
        "cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128, "device": "host", "threads": 1,
    }  # fmt: skip
    return refengine.load(DATA / f"{name}.gguf", **(defaults | options))


@dataclass(frozen=True)
class Wish:
    """What is asked of an engine. ``prompt`` is a tuple so that wishes can be looked up."""

    prompt: tuple[int, ...]
    n_predict: int = 8
    temperature: float = 0.0
    seed: int = 1
    ignore_eos: bool = True

    @classmethod
    def of(cls, text: int, n_prompt: int, n_predict: int = 8, **rest: Any) -> Wish:
        """The beginning of one of ``TEXTS``."""
        return cls(tuple(TEXTS[text][:n_prompt]), n_predict, **rest)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``Engine.submit`` besides the prompt."""
        return {
            "n_predict": self.n_predict,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "return_logits": True,
        }


@functools.cache
def plain(name: str, eos: int | None = None) -> refengine.Engine:
    """An engine with one slot and no drafts that is asked one thing at a time."""
    override = {} if eos is None else {"override_kv": {"tokenizer.ggml.eos_token_id": eos}}
    return loaded(name, n_ctx=LONGEST + 64, check="off", **override)


@functools.cache
def alone(name: str, wish: Wish, eos: int | None = None) -> Generation:
    """What a request gives when nothing else was ever asked."""
    engine = plain(name, eos)
    engine.drop_prefixes()
    return engine.generate(list(wish.prompt), **wish.arguments)


@functools.cache
def hidden_of(name: str, tokens: tuple[int, ...]) -> Array:
    """Hidden states of a whole text."""
    return plain(name).hidden(tokens)


def queued(engine: refengine.Engine, wish: Wish) -> Request:
    """Queue a request without the engine's thread: whoever drives decides when a step is made."""
    return engine.submit(list(wish.prompt), background=False, **wish.arguments)


def expect(name: str, wish: Wish, request: Request, n_ctx: int, eos: int | None = None) -> None:
    """A request ended as it would have alone, bit for bit; at the end of the context with the one error."""
    wanted = alone(name, wish, eos)
    n_most = n_ctx - len(wish.prompt) + 1
    assert request.ended
    if len(wanted.tokens) <= n_most and (len(wanted.tokens) < n_most or request.status == "done"):
        assert request.error is None, request.error
        found = request.generation()
        assert found.tokens == wanted.tokens
        assert found.text == wanted.text
        assert found.finish_reason == wanted.finish_reason
        assert found.logits is not None
        assert wanted.logits is not None
        assert same_bits(found.logits, wanted.logits)
        assert sum(len(piece) for piece in request._pieces) <= len(found.text)
    else:
        assert isinstance(request.error, ContextSizeError), request.error
        assert str(request.error) == TOO_LONG
        assert request.tokens == wanted.tokens[:n_most]
        assert same_bits(np.array(request._logits), np.asarray(wanted.logits)[:n_most])


@dataclass
class Watch:
    """Drives an engine step by step, and holds what its scheduler counts against what it sees."""

    engine: refengine.Engine
    requests: list[Request] = field(default_factory=list)
    #: rows that the target decoded
    rows: int = 0
    #: rows of each batch, by sequence
    batches: list[dict[int, int]] = field(default_factory=list)
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    #: steps since each request, by number, is the oldest
    oldest_steps: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        decode = self.engine.context.decode

        def watched(batch: Batch) -> DecodeStatus:
            status = decode(batch)
            if status == DecodeStatus.OK:
                self.rows += len(batch)
                sequences, counts = np.unique(batch.sequence, return_counts=True)
                self.batches.append(dict(zip(sequences.tolist(), counts.tolist(), strict=True)))
            return status

        self.engine.context.decode = watched  # type: ignore[method-assign]

    def ask(self, wish: Wish) -> Request:
        """Queue a request."""
        self.requests.append(queued(self.engine, wish))
        return self.requests[-1]

    def step(self) -> None:
        """One step; whatever ran, the oldest request must be one token further, and in its place."""
        scheduler = self.engine.scheduler
        going = sorted((r for r in self.requests if not r.ended), key=lambda r: r.number)
        oldest = going[0]
        before, preempted = self.held(oldest), oldest.preemptions
        with capture_logs() as lines:
            self.engine.drive()
        self.lines += lines
        self.oldest_steps[oldest.number] = self.oldest_steps.get(oldest.number, 0) + 1
        refused = any("rollback refused" in line["event"] for line in lines)
        assert oldest.ended or refused or self.held(oldest) > before, "the oldest request stands still"
        assert oldest.preemptions == preempted, "the oldest request was preempted"
        running = [slot.request.number for slot in scheduler.slots if slot.request is not None]
        waiting = [request.number for request in scheduler.queue]
        assert max(running, default=0) < min(waiting, default=1 << 30), "a younger one was admitted first"
        scheduler.check_integrity()
        self.engine.context.check_integrity()
        if self.engine.draft is not None:
            self.engine.draft.check_integrity()

    def held(self, request: Request) -> int:
        """Tokens of a request that are decoded."""
        slots = [slot for slot in self.engine.scheduler.slots if slot.request is request]
        return len(slots[0].held) if slots else 0

    def run(
        self, arrivals: Iterator[Wish] | None = None, before_step: Callable[[], None] | None = None
    ) -> None:
        """Until everything has ended; ``arrivals`` come one before each step."""
        while True:
            wish = next(arrivals, None) if arrivals is not None else None
            if wish is not None:
                self.ask(wish)
            if self.engine.scheduler.is_idle:
                return
            if before_step is not None:
                before_step()
            self.step()

    def check(self, failed: int = 0) -> None:
        """Statistics are what happened, requests took no more steps as the oldest than they have tokens."""
        counted = self.engine.scheduler.statistics
        assert counted.failed_decodes == failed
        logged = [line["event"] for line in self.lines]
        assert counted.retries == logged.count(NO_SPACE)
        assert counted.preemptions == logged.count("preempted") == sum(r.preemptions for r in self.requests)
        assert counted.generated_tokens == sum(len(r.tokens) for r in self.requests)
        drafts = [r.draft for r in self.requests]
        for part in ("blocks", "generated", "accepted"):
            assert getattr(counted.draft, part) == sum(getattr(draft, part) for draft in drafts)
        rejected = counted.draft.generated - counted.draft.accepted
        decoded = sum(len(r.history) - 1 for r in self.requests)
        assert self.rows == decoded + counted.recomputed_tokens + rejected - counted.reused_tokens
        refused = any("rollback refused" in event for event in logged)
        for request in self.requests:
            assert refused or self.oldest_steps.get(request.number, 0) <= len(request.history)


def check_all(name: str, watch: Watch, wishes: Sequence[Wish], failed: int = 0) -> None:
    """Each request gave what it gives alone, and the engine is whole; ``failed`` decodes were made to."""
    n_ctx = watch.engine.settings.n_ctx
    for wish, request in zip(wishes, watch.requests, strict=True):
        expect(name, wish, request, n_ctx)
    watch.check(failed)
    assert watch.engine.check_integrity() == []
    assert watch.engine.findings == []


class ChosenFaults:
    """Fails the sites that ``chosen`` says, from when ``enabled``; give it to ``load``."""

    def __init__(self, chosen: Callable[[str, str], bool] | None = None) -> None:
        self.chosen = chosen
        #: what failed
        self.fired: list[str] = []

    def refusal(self, kind: str, detail: str) -> str | None:
        if self.chosen is None or not self.chosen(kind, detail):
            return None
        self.fired.append(f"{kind} {detail}")
        return f"{kind} {detail} failed on purpose"
