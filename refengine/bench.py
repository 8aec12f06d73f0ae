"""How fast a model runs, timed as ``llama-bench`` does, beside what the memory could do at best.

Two kinds of test, each from an empty cache and over random tokens: ``ppN`` decodes a prompt of N tokens in batches of
``n_batch``, ``tgN`` decodes N tokens one by one, of each of which the likeliest next one is asked for, as greedy
generation does. No text is made in the timed part. One run warms up; it and each timed run must give the same bits, or
what was timed is not the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gguf import LlamaFileType

from instrumentation.errors import BadInputError, Error
from refengine.batch import Batch
from refengine.bench_memory import CopyRate, TokenBytes, bytes_per_token, copy_rate
from refengine.config import ModelConfig
from refengine.engine import Engine, load
from refengine.gguf_file import GGUFFile
from refengine.inspection import summarise
from refengine.kernels.attention import SPAN
from refengine.options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from refengine.outputs import Candidates
    from refengine.weights import Progress

#: called with what is being done now
Step = Callable[[str], None]
_SEED = 20_240_229


class UnrepeatableError(Error):
    """A run gave other logits or candidates than the first one over the same tokens."""


@dataclass(frozen=True, slots=True)
class BenchTest:
    """One measurement: ``pp`` (prompt processing) or ``tg`` (text generation) of ``n`` tokens."""

    kind: Literal["pp", "tg"]
    n: int

    def __post_init__(self) -> None:
        assert self.n >= 1, self

    @property
    def name(self) -> str:
        """As other GGUF engines write it: ``pp512``."""
        return f"{self.kind}{self.n}"

    def batches(self, n_vocab: int, n_batch: int) -> list[Batch]:
        """What is decoded, one after the other; of each batch's last row the logits are wanted, or the best one."""
        tokens = np.random.default_rng(_SEED).integers(0, n_vocab, self.n)
        step = n_batch if self.kind == "pp" else 1
        n_best = 0 if self.kind == "pp" else 1
        return [Batch.of(tokens[i : i + step], i, 0, "last", n_best=n_best) for i in range(0, self.n, step)]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is measured: ``type`` is the architecture and the file's quantisation, ``nbytes`` of all its tensors."""

    path: Path
    type: str
    nbytes: int
    n_params: int


@dataclass(frozen=True)
class BenchPlan:
    """Tests, check levels and options, which fit the model. Made by ``of``."""

    model: ModelFacts
    tests: tuple[BenchTest, ...]
    levels: tuple[str, ...]
    repetitions: int
    #: what an engine is loaded with, ``check`` aside
    options: Mapping[str, Any]
    override_kv: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.tests, self
        assert self.levels, self
        assert self.repetitions >= 1, self

    @classmethod
    def of(
        cls,
        model: str | Path,
        *,
        n_prompt: Sequence[int] = (512,),
        n_gen: Sequence[int] = (128,),
        repetitions: int = 5,
        levels: Sequence[str] = ("off",),
        override_kv: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> BenchPlan:
        """Plan every test at every level; ``options`` are the fields of ``EngineOptions``. Reads no weights.

        A test of 0 tokens is left out. ``n_ctx`` 0 is as long as the longest test needs. Raises ``BadInputError``
        for anything that cannot be measured, and what reading the model's metadata raises.
        """
        for name, values in (("n_prompt", n_prompt), ("n_gen", n_gen)):
            wrong = next((n for n in values if n < 0), None)
            if wrong is not None:
                raise BadInputError(f"{name} is {wrong}; give 0 or more tokens, 0 leaves the test out")
        if repetitions < 1:
            raise BadInputError(f"repetitions is {repetitions}; give 1 or more")
        tests = [BenchTest("pp", n) for n in n_prompt if n] + [BenchTest("tg", n) for n in n_gen if n]
        if not tests:
            raise BadInputError("n_prompt and n_gen are 0: there is nothing to measure; give one of them")
        checked = [EngineOptions(**options, check=level) for level in levels]
        if not checked:
            raise BadInputError("no check level is given; give some, for example off")
        if checked[0].spec_type != "none":
            raise BadInputError(f"spec_type {checked[0].spec_type}: plain decoding is measured; leave it out")
        path = Path(model)
        with GGUFFile.open(path, override_kv=override_kv) as gguf:
            config = ModelConfig.from_gguf(gguf)
            facts = _facts(gguf, config)
        longest = max(tests, key=lambda test: test.n)
        most = checked[0].n_ctx or config.n_ctx_train
        if longest.n > most:
            limit, cure = f"the model was trained for at most {most}", "give fewer tokens"
            if checked[0].n_ctx:
                limit, cure = f"n_ctx is {most}", "give fewer tokens or a longer context"
            raise BadInputError(f"test {longest.name} has {longest.n} tokens; {limit}: {cure}")
        n_ctx = checked[0].n_ctx or min(-(-longest.n // SPAN) * SPAN, config.n_ctx_train)
        options = {**options, "n_ctx": n_ctx}
        EngineOptions(**options).context_settings(config)
        return cls(facts, tuple(tests), tuple(levels), repetitions, options, override_kv or {})


@dataclass(frozen=True, slots=True)
class Result:
    """One test at one check level."""

    test: BenchTest
    check: str
    device: str
    #: tokens per second of each repetition
    samples: tuple[float, ...]
    #: of a ``tg`` test
    token_bytes: TokenBytes | None
    #: None when it was not measured: without ``tg`` tests, or without memory for it
    copy: CopyRate | None

    def __post_init__(self) -> None:
        assert self.samples, self
        assert (self.token_bytes is not None) == (self.test.kind == "tg"), self

    @property
    def mean(self) -> float:
        """Tokens per second."""
        return statistics.fmean(self.samples)

    @property
    def stdev(self) -> float:
        """Standard deviation of the samples, tokens per second; 0 for one sample."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def percent_of_copy(self) -> float | None:
        """Bytes that the test moves in a second, in percent of what a copy moves; None when one is not known."""
        if self.token_bytes is None or self.copy is None:
            return None
        return 100 * self.token_bytes.total * self.mean / self.copy.per_second


def run(
    plan: BenchPlan,
    *,
    progress: Progress | None = None,
    step: Step = lambda _text: None,
    close: Callable[[Engine], None] = Engine.close,
) -> Generator[Result, None, None]:
    """Measure every test at every level, an engine for each level. Exhaust or close the generator.

    ``close`` ends an engine, whatever happened to it; what was found is in its ``findings``. Raises what loading and
    decoding raise, and ``UnrepeatableError``.
    """
    known: dict[BenchTest, bytes] = {}
    for level in plan.levels:
        engine = load(
            plan.model.path, override_kv=plan.override_kv, progress=progress, check=level, **plan.options
        )
        try:
            with closing(_measure(engine, plan, level, known, step)) as results:
                yield from results
        finally:
            close(engine)


def _measure(
    engine: Engine, plan: BenchPlan, level: str, known: dict[BenchTest, bytes], step: Step
) -> Generator[Result, None, None]:
    copy = None
    if any(test.kind == "tg" for test in plan.tests):
        step(f"check {level}: copy")
        copy = copy_rate(engine)
    for test in plan.tests:
        batches = test.batches(engine.config.n_vocab, engine.settings.n_batch)
        samples = []
        for repetition in range(plan.repetitions + 1):
            doing = f"run {repetition} of {plan.repetitions}" if repetition else "warm-up"
            step(f"check {level}: {test.name}, {doing}")
            seconds, found = _timed(engine, batches)
            if known.setdefault(test, found) != found:
                raise UnrepeatableError(
                    f"{test.name} at check level {level}, {doing}: logits differ from those of the first run over the "
                    "same tokens; the times mean nothing, and this is a bug"
                )
            if repetition:
                samples.append(test.n / seconds)
        moved = bytes_per_token(engine.context.plan, engine.weights, test.n) if test.kind == "tg" else None
        yield Result(test, level, engine.device.name, tuple(samples), moved, copy)
    engine.check_integrity()


def _timed(engine: Engine, batches: list[Batch]) -> tuple[float, bytes]:
    """Decode from an empty cache: seconds, and the best of every batch if the device found them, or the last logits."""
    best: list[Candidates] = []
    with engine.exclusive() as context:
        started = time.perf_counter()
        for batch in batches:
            context.require(context.decode(batch))
            best += context.best or ()
        seconds = time.perf_counter() - started
        found = b"".join(row.ids.tobytes() + row.logits.tobytes() for row in best)
        return seconds, found + context.logits.tobytes()


def _facts(gguf: GGUFFile, config: ModelConfig) -> ModelFacts:
    types = summarise(gguf).types
    file_type = gguf.metadata.get("general.file_type")
    known = {member.value: member.name for member in LlamaFileType}
    name = known.get(file_type, "") if isinstance(file_type, int) else ""
    kind = name.removeprefix("MOSTLY_").removeprefix("ALL_") or types[0].type
    return ModelFacts(
        path=Path(gguf.path),
        type=f"{config.architecture} {kind}",
        nbytes=sum(row.nbytes for row in types),
        n_params=sum(row.elements for row in types),
    )
