"""The workload of a sweep: its steps on a device of its own, and what failed in each of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import refengine
from instrumentation.errors import DeviceError, OutOfMemoryError
from refengine.config import ModelConfig
from refengine.errors import ComputeError, RequestError
from refengine.gguf_file import GGUFFile
from refengine.options import EngineOptions
from refengine.sweep_counting import CountingDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from instrumentation.faults import FaultInjector, Site
    from instrumentation.findings import Finding
    from refengine.engine import Engine

#: what a failed call may become; a finding or a complaint about the request is something else
TYPED = (DeviceError, OutOfMemoryError, ComputeError)
SECOND_PROMPT = 3


@dataclass(frozen=True)
class Workload:
    """A model, how it is loaded, and the prompts of its requests as token ids."""

    model: Path
    options: Mapping[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    n_predict: int = 3

    @classmethod
    def of(cls, model: str | Path, *, n_predict: int = 3, **options: Any) -> Workload:
        """Two prompts for any model: one of several micro-batches, and one of a few tokens.

        Raises ``BadInputError`` and what reading the model's metadata raises.
        """
        path = Path(model)
        checked = EngineOptions(**options)
        with GGUFFile.open(path) as gguf:
            config = ModelConfig.from_gguf(gguf)
        sizes = checked.context_settings(config)
        first = sizes.n_ubatch + sizes.n_ubatch // 2 + 1
        if first + n_predict > sizes.n_ctx:
            raise RequestError(
                f"a prompt of {first} tokens (more than n_ubatch {sizes.n_ubatch}) and {n_predict} to predict do not "
                f"fit n_ctx {sizes.n_ctx}; give a smaller n_ubatch or a larger n_ctx"
            )

        def prompt(length: int, start: int) -> tuple[int, ...]:
            return tuple((start + 7 * i) % config.n_vocab for i in range(length))

        second = min(SECOND_PROMPT, first - 1)
        return cls(path, options, (prompt(first, 5), prompt(second, 11)), n_predict)


@dataclass(frozen=True)
class Answer:
    """Tokens that a request gave, and the SHA-256 of the logits that each was chosen from."""

    tokens: tuple[int, ...]
    logits: str


@dataclass(frozen=True)
class Books:
    """What an engine holds between two requests."""

    reserved: int
    #: payload bytes by arena
    arenas: Mapping[str, int]
    overlays: int


@dataclass(frozen=True)
class Step:
    """How one step of a workload ended. Text of the error only: its traceback would keep the engine's memory."""

    name: str
    fired: tuple[Site, ...]
    answer: Answer | None = None
    error: str | None = None
    typed: bool = True


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

        return self._step("load", load)

    def request(self, number: int) -> Step:
        """Answer a prompt; requests count from 1."""

        def answer() -> Answer:
            assert self.engine is not None
            made = self.engine.generate(
                list(self.workload.prompts[number - 1]),
                n_predict=self.workload.n_predict,
                temperature=0,
                ignore_eos=True,
                return_logits=True,
            )
            assert made.logits is not None
            return Answer(tuple(made.tokens), hashlib.sha256(made.logits.tobytes()).hexdigest())

        return self._step(f"request {number}", answer)

    def unload(self) -> Step:
        """Unload the model."""
        assert self.engine is not None
        return self._step("unload", self.engine.close)

    @property
    def requests(self) -> range:
        """Numbers of the requests."""
        return range(1, len(self.workload.prompts) + 1)

    def books(self) -> Books:
        """What is held now."""
        assert self.engine is not None
        allocator = self.engine.allocator
        snapshot = allocator.snapshot()
        return Books(
            snapshot.reserved,
            {name: usage.current for name, usage in sorted(snapshot.arenas.items())},
            sum(len(arena.overlays) for arena in allocator.arenas),
        )

    def _step(self, name: str, action: Callable[[], Answer | None]) -> Step:
        before = len(self.injector.fired)
        answer, error, typed = None, None, True
        try:
            answer = action()
        except Exception as raised:  # noqa: BLE001 - what is not typed is what a sweep looks for
            typed = isinstance(raised, TYPED)
            error = str(raised) if typed else f"{type(raised).__name__}: {raised}"
        return Step(name, tuple(self.injector.fired[before:]), answer, error, typed)
