"""The workload of a sweep: its steps on a device of its own, and what failed in each of them."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import refengine
from instrumentation.errors import DeviceError, OutOfMemoryError
from refengine.config import ModelConfig
from refengine.errors import ComputeError, RequestError
from refengine.gguf_file import GGUFFile
from refengine.kernels.kv_types import PAGE
from refengine.options import EngineOptions
from refengine.speculative import MtpDrafter
from refengine.sweep.counting import CountingDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from instrumentation.faults import FaultInjector, Site
    from instrumentation.findings import Finding
    from refengine.context_plan import ContextSettings
    from refengine.engine import Engine
    from refengine.request import Request

#: what a failed call may become; a finding or a complaint about the request is something else
TYPED = (DeviceError, OutOfMemoryError, ComputeError)
SHORT_PROMPT = 3
#: tokens of each answer: with drafts enough for one of several tokens behind the first token
N_PREDICT, N_PREDICT_DRAFTS = 3, 5
Prompt: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A model, how it is loaded, and the prompts of its requests as token ids, by the round in which they are asked.

    Requests of a round are queued together and run as the engine has slots; between rounds it forgets everything.
    """

    model: Path
    options: Mapping[str, Any]
    rounds: tuple[tuple[Prompt, ...], ...]
    n_predict: int = N_PREDICT

    def __post_init__(self) -> None:
        assert all(self.rounds), self
        assert all(prompt for prompts in self.rounds for prompt in prompts), self

    @classmethod
    def of(cls, model: str | Path, *, n_predict: int | None = None, **options: Any) -> Workload:
        """Two rounds for any model.

        First a prompt of several micro-batches for each slot, and one that waits for a slot and begins like the
        first; with several slots they fill the KV cache, so that one is preempted where the slots share it. Then a
        prompt of a few tokens. Raises ``BadInputError`` and what reading the model's metadata raises.
        """
        path = Path(model)
        checked = EngineOptions(**options)
        with GGUFFile.open(path) as gguf:
            config = ModelConfig.from_gguf(gguf)
        sizes = checked.context_settings(config)
        if n_predict is None:
            n_predict = N_PREDICT if checked.drafts is None else N_PREDICT_DRAFTS
        first = _first_length(sizes)
        if first + 1 + n_predict > sizes.n_ctx:
            raise RequestError(
                f"a prompt of {first + 1} tokens (more than n_ubatch {sizes.n_ubatch}) and {n_predict} to predict do "
                f"not fit n_ctx {sizes.n_ctx}; give a smaller n_ubatch or a larger n_ctx"
            )

        def prompt(length: int, start: int) -> Prompt:
            return tuple((start + 7 * i) % config.n_vocab for i in range(length))

        together = [prompt(first, 5 + 3 * slot) for slot in range(sizes.n_sequences)]
        waiting = (*together[0], 1 % config.n_vocab)
        alone = prompt(min(SHORT_PROMPT, first - 1), 11)
        return cls(path, options, ((*together, waiting), (alone,)), n_predict)


def _first_length(sizes: ContextSettings) -> int:
    """Tokens of the first prompts: more than one micro-batch, and with several slots the pages of a slot but one cell.

    Then each slot asks for a page more within three tokens, and there are fewer of those than slots.
    """
    several = sizes.n_ubatch + sizes.n_ubatch // 2 + 1
    pages = sizes.n_pages // sizes.n_sequences
    return max(several, pages * PAGE - 1) if sizes.n_sequences > 1 and pages * PAGE < sizes.n_ctx else several


@dataclass(frozen=True)
class Answer:
    """Tokens that a request gave, and the SHA-256 of the logits that each was chosen from."""

    tokens: tuple[int, ...]
    logits: str


@dataclass(frozen=True)
class Books:
    """What an engine holds between two rounds."""

    reserved: int
    #: payload bytes by arena, ``owner/name``
    arenas: Mapping[str, int]


class Reports(NamedTuple):
    """Failures that the engine has counted: decodes of its target context, and of its draft context."""

    target: int
    draft: int


NOTHING = Reports(0, 0)


@dataclass(frozen=True)
class Ending:
    """How a request, or loading or unloading, ended. Text of the error only: its traceback would keep memory."""

    name: str
    answer: Answer | None = None
    error: str | None = None
    typed: bool = True


@dataclass(frozen=True)
class Step:
    """What happened in one step of a workload."""

    name: str
    fired: tuple[Site, ...]
    endings: tuple[Ending, ...]
    #: what the engine counted meanwhile
    reports: Reports = NOTHING

    @property
    def failed(self) -> tuple[Ending, ...]:
        """Those that ended in an error."""
        return tuple(ending for ending in self.endings if ending.error is not None)

    @property
    def answers(self) -> tuple[Answer | None, ...]:
        """What each gave; None where there was an error."""
        return tuple(ending.answer for ending in self.endings)


class Script:
    """A workload on a device of its own; each step reports what failed in it."""

    def __init__(self, workload: Workload, injector: FaultInjector) -> None:
        self.workload = workload
        self.injector = injector
        self.device = CountingDevice(workload.options.get("threads"))
        self.found: list[Finding] = []
        self.engine: Engine | None = None

    def disturb(self, *, on: bool) -> None:
        """Count calls and let them fail, or neither."""
        self.injector.enabled = self.device.counting = on

    def open(self) -> Engine:
        """Load the model; raises what that raises."""
        options = {**self.workload.options, "device": self.device}
        return refengine.load(
            self.workload.model, faults=self.injector, on_finding=self.found.append, **options
        )

    def load(self) -> Step:
        """Load the model."""

        def load() -> None:
            self.engine = self.open()

        return self._alone("load", load)

    def ask(self, number: int) -> Step:
        """Ask the requests of a round together, and wait for all of them; rounds count from 1."""
        engine = self.engine
        assert engine is not None
        before, reported = len(self.injector.fired), self.reports()
        requests = [
            engine.submit(
                list(prompt),
                background=False,
                n_predict=self.workload.n_predict,
                temperature=0,
                ignore_eos=True,
                return_logits=True,
            )
            for prompt in self.workload.rounds[number - 1]
        ]
        first = 1 + sum(map(len, self.workload.rounds[: number - 1]))
        endings = tuple(
            _ending(f"request {name}", functools.partial(_answer, request))
            for name, request in enumerate(requests, first)
        )
        reports = Reports(*(now - then for now, then in zip(self.reports(), reported, strict=True)))
        return Step(f"round {number}", tuple(self.injector.fired[before:]), endings, reports)

    def unload(self) -> Step:
        """Unload the model."""
        assert self.engine is not None
        return self._alone("unload", self.engine.close)

    def _alone(self, name: str, action: Callable[[], None]) -> Step:
        before = len(self.injector.fired)
        ending = _ending(name, action)
        return Step(name, tuple(self.injector.fired[before:]), (ending,))

    @property
    def rounds(self) -> range:
        """Numbers of the rounds."""
        return range(1, len(self.workload.rounds) + 1)

    def reports(self) -> Reports:
        """Failures that the engine has counted so far."""
        assert self.engine is not None
        scheduler = self.engine.scheduler
        drafter = scheduler.drafter
        return Reports(
            scheduler.statistics.failed_decodes, drafter.failures if isinstance(drafter, MtpDrafter) else 0
        )

    def books(self) -> Books:
        """What is held now."""
        assert self.engine is not None
        allocator = self.engine.allocator
        arenas: Counter[str] = Counter()
        for arena in allocator.arenas:
            arenas[f"{arena.owner}/{arena.name}"] += sum(buffer.nbytes for buffer in arena.live_buffers())
        return Books(allocator.snapshot().reserved, dict(sorted(arenas.items())))


def _answer(request: Request) -> Answer:
    try:
        made = request.result()
    finally:
        request.cancel()
    assert made.logits is not None
    return Answer(tuple(made.tokens), hashlib.sha256(made.logits.tobytes()).hexdigest())


def _ending(name: str, action: Callable[[], Answer | None]) -> Ending:
    answer, error, typed = None, None, True
    try:
        answer = action()
    except Exception as raised:  # noqa: BLE001 - what is not typed is what a sweep looks for
        typed = isinstance(raised, TYPED)
        error = str(raised) if typed else f"{type(raised).__name__}: {raised}"
    return Ending(name, answer, error, typed)
