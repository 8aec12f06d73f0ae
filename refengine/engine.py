"""The public API: ``load`` a GGUF file, ask the ``Engine`` for logits and text."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from instrumentation import interrupts
from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.errors import FindingError
from instrumentation.findings import Finding, FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reports.text import render
from refengine.config import ModelConfig, check_tensors
from refengine.context import MAX_OUTPUTS, Batch, Context, DecodeStatus
from refengine.errors import ComputeError, ContextSizeError, RequestError
from refengine.generation import FinishReason, Generation, Timings
from refengine.gguf_file import GGUFFile
from refengine.inspection import check_limit
from refengine.models import resolve_model
from refengine.options import EngineOptions
from refengine.sampling import Sampler, SamplingParams
from refengine.tokenizer import Tokenizer
from refengine.weights import Progress, WeightPlan, Weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from instrumentation.faults import Faults

Prompt = str | bytes | Sequence[int]
MODEL_OWNER = Owner("model")
#: logit of a token that must not be chosen: finite, so that it is told apart from a kernel's mistake
NEVER = np.float32(-1e30)


def load(
    path: str | Path,
    *,
    override_kv: Mapping[str, int | float | bool | str] | None = None,
    progress: Progress | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    faults: Faults | None = None,
    **options: Any,
) -> Engine:
    """Load a model. ``options`` are the fields of ``EngineOptions``, which documents them.

    ``progress(done, total)`` is called with bytes of weights. ``faults`` decides which device calls fail on purpose.
    Raises ``ModelFileError``, ``UnsupportedModelError``,
    ``BadInputError``, ``OutOfMemoryError``; what was reserved by then is given back.
    """
    checked = EngineOptions(**options)
    with GGUFFile.open(resolve_model(path), override_kv=override_kv) as gguf:
        return Engine(gguf, checked, progress=progress, on_finding=on_finding, faults=faults)


class Engine:
    """A loaded model with one target context. Made by ``load``; close it, or use it as a context manager."""

    def __init__(
        self,
        gguf: GGUFFile,
        options: EngineOptions,
        *,
        progress: Progress | None = None,
        on_finding: Callable[[Finding], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        started = time.perf_counter()
        self.options = options
        self.level = Level.parse(options.check)
        self.config = ModelConfig.from_gguf(gguf)
        check_tensors(gguf, self.config)
        self.settings = options.context_settings(self.config)
        self.tokenizer = Tokenizer.from_metadata(gguf.metadata)
        if self.tokenizer.n_vocab > self.config.n_vocab:
            raise gguf.error(
                "tokenizer.ggml.tokens",
                f"{self.tokenizer.n_vocab} tokens for {self.config.n_vocab} embeddings; want no more than those",
            )
        template = gguf.metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self._log = FindingLog(on_finding)
        # Held for one computation. A stream holds its turn from its first piece to its last.
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._turn_thread: int | None = None
        self._closed = False
        check_limit(gguf, options)
        with ExitStack() as undo:
            self.device = open_device(options.device, threads=options.threads)
            self.allocator = Allocator(
                self.device,
                level=self.level,
                findings=self._log,
                limit=options.device_memory_limit,
                faults=faults,
            )
            undo.callback(self.allocator.close)
            self.device.watch(self.allocator)
            self.device.faults = faults
            with interrupts.deferred():
                self.weights = Weights(
                    self.allocator, WeightPlan(gguf, self.config, MODEL_OWNER), MODEL_OWNER
                )
                undo.callback(self.weights.release)
            loader = self.device.create_stream(owner=MODEL_OWNER, name="load")
            undo.callback(loader.destroy)
            self.weights.load(loader, progress)
            with interrupts.deferred():
                self.context = Context(self.device, self.allocator, self.config, self.weights, self.settings)
                undo.callback(self.context.release)
            self._undo = undo.pop_all()
        self.load_seconds = time.perf_counter() - started

    # --- teacher forced

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each token: float32 [n_tokens, n_vocab], from an empty cache. Raises ``RequestError``."""
        ids = self._check_tokens(tokens)
        out = np.empty((len(ids), self.config.n_vocab), np.float32)
        self._teacher_forced(ids, out, hidden=False)
        return out

    def hidden(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Hidden states from which the logits after each token are made, after the final norm.

        float32 [n_tokens, n_embd], from an empty cache. Raises ``RequestError``.
        """
        ids = self._check_tokens(tokens)
        out = np.empty((len(ids), self.config.n_embd), np.float32)
        self._teacher_forced(ids, out, hidden=True)
        return out

    def _teacher_forced(self, ids: list[int], out: npt.NDArray[np.float32], *, hidden: bool) -> None:
        """Decode tokens from an empty cache; logits, or hidden states, of all of them into ``out``."""
        with self._sequence() as sequence:
            for start in range(0, len(ids), self.settings.n_batch):
                part = ids[start : start + self.settings.n_batch]
                self._decode(Batch.of(part, start, sequence, "all", hidden=hidden))
                rows = self.context.hidden if hidden else self.context.logits
                out[start : start + len(part)] = rows

    # --- generation

    def generate(
        self,
        prompt: Prompt,
        *,
        n_predict: int = -1,
        ignore_eos: bool = False,
        return_logits: bool = False,
        parse_special: bool = True,
        **sampling: Any,
    ) -> Generation:
        """Generate to the end and return everything; ``sampling`` are the fields of ``SamplingParams``."""
        run = _Run(
            self, prompt, n_predict, parse_special=parse_special, ignore_eos=ignore_eos, sampling=sampling
        )
        kept: list[npt.NDArray[np.float32]] = []
        # Closed here, not when the garbage collector comes by: an interrupt may hit between two pieces.
        with closing(run.pieces(kept if return_logits else None)) as pieces:
            text = "".join(pieces)
        empty = np.empty((0, self.config.n_vocab), np.float32)
        return run.result(text, np.stack(kept) if kept else empty if return_logits else None)

    def stream(
        self,
        prompt: Prompt,
        *,
        n_predict: int = -1,
        ignore_eos: bool = False,
        parse_special: bool = True,
        on_end: Callable[[Generation], None] | None = None,
        **sampling: Any,
    ) -> Generator[str, None, None]:
        """Pieces of text as they come, never half a character. ``on_end`` is given the whole at the end."""
        run = _Run(
            self, prompt, n_predict, parse_special=parse_special, ignore_eos=ignore_eos, sampling=sampling
        )

        def pieces() -> Generator[str, None, None]:
            text = []
            with closing(run.pieces(None)) as inner:
                for piece in inner:
                    text.append(piece)
                    yield piece
            if on_end is not None:
                on_end(run.result("".join(text), None))

        return pieces()

    # --- findings and end

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, merged per site."""
        return list(self._log)

    def check_integrity(self) -> list[Finding]:
        """Verify guard bytes, quarantine and books now; returns what is new and keeps it in ``findings``."""
        with self._lock:
            self.context.check_integrity()
            return self.allocator.check_integrity()

    def close(self) -> None:
        """Give everything back. Raises ``FindingError`` when memory leaked and the level is not ``off``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with interrupts.deferred():
                self._undo.close()
            leaks = self._log.of("MEM006")
        if leaks and self.level > Level.OFF:
            raise FindingError("\n\n".join(render(finding) for finding in leaks))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _check_tokens(self, tokens: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(t) for t in tokens]
        except TypeError as error:
            raise RequestError(
                f"tokens are not whole numbers ({error}); give a sequence of token ids"
            ) from None
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        wrong = next((t for t in ids if not 0 <= t < self.config.n_vocab), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is out of range; this model has tokens 0 to {self.config.n_vocab - 1}"
            )
        if len(ids) > self.settings.n_ctx:
            raise ContextSizeError(
                f"request ({len(ids)} tokens) exceeds the available context size ({self.settings.n_ctx} tokens), "
                "try increasing it"
            )
        return ids

    @contextmanager
    def _sequence(self) -> Iterator[int]:
        """The engine's one sequence, for one request at a time; empty before and after, whatever happened."""
        self._require_open()
        if self._turn_thread == threading.get_ident():
            raise RequestError(
                "a stream of this engine is not finished; exhaust or close it before the next request"
            )
        # Not re-entrant, and any thread may release it: a stream may end in another thread than it began in.
        with self._turn:
            self._turn_thread = threading.get_ident()
            try:
                self._clear(0)
                yield 0
            finally:
                self._turn_thread = None
                if not self._closed:
                    self._clear(0)

    def _clear(self, sequence: int) -> None:
        with self._lock:
            self._require_open()
            self.context.remove(sequence)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the engine is closed; load the model again")

    def _decode(self, batch: Batch) -> None:
        with self._lock:
            self._require_open()
            status = self.context.decode(batch)
        if status == DecodeStatus.OK:
            return
        if status == DecodeStatus.NO_KV_SLOT:
            raise ContextSizeError("Context size has been exceeded.")
        reason = f": {self.context.error}" if self.context.error else ""
        raise ComputeError(f"Compute error. (decode status {int(status)}){reason}") from self.context.error


class _Run:
    """One generation: prompt in batches, then token by token."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        n_predict: int,
        *,
        parse_special: bool,
        ignore_eos: bool,
        sampling: dict[str, Any],
    ) -> None:
        if not isinstance(n_predict, int) or (n_predict != -1 and n_predict < 1):
            raise RequestError(
                f"n_predict is {n_predict!r}; give a positive whole number, or -1 for until the end"
            )
        self.engine = engine
        self.n_predict = n_predict
        self.ignore_eos = ignore_eos
        self.sampler = Sampler(_sampling_params(sampling))
        if isinstance(prompt, str | bytes):
            prompt = engine.tokenizer.encode(prompt, parse_special=parse_special)
        self.prompt = engine._check_tokens(prompt)  # noqa: SLF001
        self.tokens: list[int] = []
        self.reason: FinishReason = "cancelled"
        self.timings = Timings()

    def pieces(self, logits: list[npt.NDArray[np.float32]] | None) -> Generator[str, None, None]:
        """Text as it comes; ``logits`` collects the row that each token was chosen from."""
        engine, decoder = self.engine, self.engine.tokenizer.stream(skip_special=True)
        with engine._sequence() as sequence:  # noqa: SLF001
            self._read_prompt(sequence)
            started = time.perf_counter()
            while True:
                row = engine.context.logits[-1]
                position = len(self.prompt) + len(self.tokens)
                token = self._choose(row, position)
                if logits is not None:
                    logits.append(row.copy())
                self.tokens.append(token)
                spent = time.perf_counter() - started
                self.timings = replace(
                    self.timings, predicted_tokens=len(self.tokens) - 1, predicted_seconds=spent
                )
                self.reason = self._reason(token, position)
                if self.reason != "stop":
                    yield from _some(decoder.push(token))
                if self.reason != "cancelled":
                    break
                engine._decode(Batch.of([token], position, sequence, "last"))  # noqa: SLF001
            yield from _some(decoder.flush())
        if self.reason == "context":
            raise ContextSizeError("Context size has been exceeded.")

    def _read_prompt(self, sequence: int) -> None:
        engine = self.engine
        started = time.perf_counter()
        for start in range(0, len(self.prompt), engine.settings.n_batch):
            part = self.prompt[start : start + engine.settings.n_batch]
            last = start + len(part) == len(self.prompt)
            engine._decode(Batch.of(part, start, sequence, "last" if last else "none"))  # noqa: SLF001
        spent = time.perf_counter() - started
        self.timings = replace(self.timings, prompt_tokens=len(self.prompt), prompt_seconds=spent)

    def _choose(self, row: npt.NDArray[np.float32], position: int) -> int:
        if self.ignore_eos:
            row = row.copy()
            row[sorted(self.engine.tokenizer.eos_ids)] = NEVER
        return self.sampler.sample(row, position, [*self.prompt, *self.tokens])

    def _reason(self, token: int, position: int) -> FinishReason:
        """``cancelled`` while the generation goes on: that is what an abandoned one ends with."""
        if token in self.engine.tokenizer.eos_ids and not self.ignore_eos:
            return "stop"
        if self.n_predict != -1 and len(self.tokens) >= self.n_predict:
            return "length"
        if position >= self.engine.settings.n_ctx:
            return "context"
        return "cancelled"

    def result(self, text: str, logits: npt.NDArray[np.float32] | None) -> Generation:
        """Everything about the run so far."""
        return Generation(
            text, list(self.tokens), self.prompt, self.reason, self.sampler.seed, self.timings, logits
        )


def _some(piece: str) -> Iterator[str]:
    if piece:
        yield piece


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    known = set(SamplingParams.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(f"unknown argument {unknown[0]}; sampling knows {', '.join(sorted(known))}")
    return SamplingParams(**given)


__all__ = ["MAX_OUTPUTS", "Engine", "load"]
