"""The public API: ``load`` a GGUF file, ask the ``Engine`` for logits and text."""

from __future__ import annotations

import operator
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import structlog

from instrumentation import interrupts
from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.errors import FindingError
from instrumentation.findings import Finding, FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reports.text import render
from refengine.batch import Batch
from refengine.config import ModelConfig, check_tensors
from refengine.context import Context
from refengine.errors import ContextSizeError, RequestError
from refengine.gguf_file import GGUFFile
from refengine.inspection import check_limit
from refengine.library_products import open_library
from refengine.models import resolve_model
from refengine.options import EngineOptions
from refengine.request import Ask
from refengine.sampling import Sampler, SamplingParams
from refengine.scheduler import Scheduler
from refengine.service import Service
from refengine.speculative import MtpDrafter
from refengine.tokenizer import Tokenizer
from refengine.weights import Progress, WeightPlan, Weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from instrumentation.faults import Faults
    from refengine.generation import Generation
    from refengine.request import Request

Prompt = str | bytes | Sequence[int]
MODEL_OWNER = Owner("model")
log = structlog.get_logger()


def load(
    path: str | Path | None = None,
    *,
    override_kv: Mapping[str, int | float | bool | str] | None = None,
    progress: Progress | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    faults: Faults | None = None,
    **options: Any,
) -> Engine:
    """Load a model: a GGUF file, a short name, or without ``path`` the model that comes with refengine.

    ``options`` are the fields of ``EngineOptions``, which documents them.

    ``progress(done, total)`` is called with bytes of weights. ``faults`` decides which device calls fail on purpose.
    Raises ``ModelFileError``, ``UnsupportedModelError``,
    ``BadInputError``, ``OutOfMemoryError``; what was reserved by then is given back.
    """
    checked = EngineOptions(**options)
    with GGUFFile.open(resolve_model(path), override_kv=override_kv) as gguf:
        return Engine(gguf, checked, progress=progress, on_finding=on_finding, faults=faults)


class Engine:
    """A loaded model with a target context, and a draft context if asked for.

    Made by ``load``; close it, or use it as a context manager. Several threads may use it at once.
    """

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
        self.device = open_device(
            options.device, threads=options.threads, schedule_seed=options.schedule_seed
        )
        if options.gemm == "cublas":
            open_library(self.device)  # refused before weights are read
        fewest, chooses = self.device.wide_loads, self.device.behind_bus
        plans = options.context_plans(self.config, fewest_launches=fewest, chooses=chooses)
        self.settings = plans[0].settings
        self.tokenizer = Tokenizer.from_metadata(gguf.metadata)
        if self.tokenizer.n_vocab > self.config.n_vocab:
            raise gguf.error(
                "tokenizer.ggml.tokens",
                f"{self.tokenizer.n_vocab} tokens for {self.config.n_vocab} embeddings; want no more than those",
            )
        template = gguf.metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self._log = FindingLog(on_finding)
        self._traps = options.traps
        check_limit(gguf, options, fewest_launches=fewest, chooses=chooses)
        with ExitStack() as undo:
            self.allocator = Allocator(
                self.device,
                level=self.level,
                findings=self._log,
                limit=options.device_memory_limit,
                faults=faults,
            )
            undo.callback(self.allocator.close)
            self.device.watch(
                self.allocator,
                check_numerics=options.check_numerics,
                trap_kernels=self._traps[0],
                trap_buffers=self._traps[1],
            )
            self.device.faults = faults
            with interrupts.deferred():
                self.weights = Weights(
                    self.allocator,
                    WeightPlan(gguf, self.config, MODEL_OWNER, draft=len(plans) > 1),
                    MODEL_OWNER,
                )
                undo.callback(self.weights.release)
            loader = self.device.create_stream(owner=MODEL_OWNER, name="load")
            try:
                self.weights.load(loader, progress)
            finally:
                loader.destroy()
            with interrupts.deferred():
                self.context = Context(self.device, self.allocator, self.weights, plans[0])
                undo.callback(self.context.release)
            #: the context of the MTP block, with ``spec_type``
            self.draft: Context | None = None
            if len(plans) > 1:
                with interrupts.deferred():
                    self.draft = Context(
                        self.device, self.allocator, self.weights, plans[1], follows=self.context
                    )
                    undo.callback(self.draft.release)
            self._undo = undo.pop_all()
        self._drafter = None
        if self.draft is not None and options.drafts is not None:
            self._drafter = MtpDrafter(self.draft, self.context, options.drafts)
        self.scheduler = Scheduler(self.context, self._drafter, options.n_draft)
        self._service = Service(self.scheduler, self.tokenizer)
        self.load_seconds = time.perf_counter() - started

    # --- teacher forced

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each token: float32 [n_tokens, n_vocab], from an empty cache. Raises ``RequestError``."""
        ids = self.check_tokens(tokens)
        out = np.empty((len(ids), self.config.n_vocab), np.float32)
        self._teacher_forced(ids, out, hidden=False)
        return out

    def hidden(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Hidden states from which the logits after each token are made, after the final norm.

        float32 [n_tokens, n_embd], from an empty cache. Raises ``RequestError``.
        """
        ids = self.check_tokens(tokens)
        out = np.empty((len(ids), self.config.n_embd), np.float32)
        self._teacher_forced(ids, out, hidden=True)
        return out

    def draft_logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits of the MTP block for (hidden state after tokens[p], tokens[p + 1]): float32 [n_tokens - 1, n_vocab].

        From an empty draft cache that begins with position 1, as if there were no token 0; a row's logits depend on
        differences of positions alone. Raises ``RequestError`` without a draft context, or for a single token.
        """
        drafter = self._drafter
        if drafter is None:
            raise RequestError("the engine has no draft context; load the model with spec_type draft-mtp")
        ids = self.check_tokens(tokens)
        if len(ids) < 2:
            raise RequestError("one token gives no draft logits; give at least two")
        out = np.empty((len(ids) - 1, self.config.n_vocab), np.float32)
        with self.exclusive():
            for start in range(0, len(out), self.settings.n_batch):
                part = ids[start : min(start + self.settings.n_batch, len(out))]
                self.context.require(self.context.decode(Batch.of(part, start, 0, "none")))
                rows = range(len(part))
                following = ids[start + 1 : start + 1 + len(part)]
                out[start : start + len(part)] = drafter.logits(following, rows, 0)
        return out

    def _teacher_forced(self, ids: list[int], out: npt.NDArray[np.float32], *, hidden: bool) -> None:
        """Decode tokens from an empty cache; logits, or hidden states, of all of them into ``out``."""
        with self.exclusive():
            for start in range(0, len(ids), self.settings.n_batch):
                part = ids[start : start + self.settings.n_batch]
                batch = Batch.of(part, start, 0, "all", hidden=hidden)
                self.context.require(self.context.decode(batch))
                out[start : start + len(part)] = self.context.hidden if hidden else self.context.logits

    @contextmanager
    def exclusive(self) -> Iterator[Context]:
        """The target context, empty, for a computation beside the requests: those that run are computed again later.

        What it computes is sequence 0, which is forgotten at the end. Other threads wait meanwhile; what this one asks
        of the engine itself is refused, except to queue and to cancel requests.
        """
        with self._service.exclusive():
            try:
                yield self.context
            finally:
                with interrupts.deferred():
                    for context in (self.context, self.draft):
                        if context is not None:
                            context.remove(0)
                    self.context.settle()

    @property
    def drafter(self) -> MtpDrafter | None:
        """What makes drafts, for a computation inside ``exclusive``."""
        return self._drafter

    # --- generation

    def submit(
        self,
        prompt: Prompt,
        *,
        n_predict: int = -1,
        ignore_eos: bool = False,
        return_logits: bool = False,
        parse_special: bool = True,
        background: bool = True,
        **sampling: Any,
    ) -> Request:
        """Queue a generation and return at once; ``sampling`` are the fields of ``SamplingParams``.

        Requests run together, ``n_slots`` at a time, in the order in which they came. Without ``background`` no
        thread works on it: it goes on while someone waits for a request or calls ``drive``, which makes a run of one
        thread repeatable step by step.
        """
        ask = self._ask(prompt, n_predict, ignore_eos, return_logits, parse_special, sampling)
        request = self._service.queue(ask)
        if background:
            self._service.start_pump()
        return request

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
        ask = self._ask(prompt, n_predict, ignore_eos, return_logits, parse_special, sampling)
        request = None
        try:
            with interrupts.deferred():
                request = self._service.queue(ask)
            return request.result()
        finally:
            if request is not None:
                request.cancel()

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
        ask = self._ask(prompt, n_predict, ignore_eos, False, parse_special, sampling)

        def pieces() -> Generator[str, None, None]:
            request = self._service.queue(ask)
            yield from request.pieces()
            if on_end is not None:
                on_end(request.generation())

        return pieces()

    def drive(self, timeout: float | None = None) -> None:
        """Do one step of the work that is queued, or wait while another thread does, up to ``timeout`` seconds."""
        self._service.drive(timeout)

    def drop_prefixes(self) -> None:
        """Forget the tokens that slots keep of ended requests, for those that begin with them."""
        self._service.drop_prefixes()

    def _ask(
        self,
        prompt: Prompt,
        n_predict: int,
        ignore_eos: bool,
        return_logits: bool,
        parse_special: bool,
        sampling: dict[str, Any],
    ) -> Ask:
        if isinstance(prompt, str | bytes):
            prompt = self.tokenizer.encode(prompt, parse_special=parse_special)
        sampler = Sampler(_sampling_params(sampling))
        return Ask(
            self.check_tokens(prompt), n_predict, ignore_eos, return_logits, sampler, self.settings.n_ctx
        )

    # --- findings and end

    @property
    def findings(self) -> list[Finding]:
        """Findings so far, merged per site."""
        return list(self._log)

    def check_integrity(self) -> list[Finding]:
        """Verify guard bytes, quarantine and books now; returns what is new and keeps it in ``findings``.

        Raises ``RequestError`` in the middle of a step, where ``on_finding`` is called.
        """
        with self._service.lock:
            self._service.require_settled()
            self.context.check_integrity()
            if self.draft is not None:
                self.draft.check_integrity()
            self.scheduler.check_integrity()
            return self.allocator.check_integrity()

    def close(self) -> None:
        """Give everything back; requests that have not ended fail.

        Raises ``FindingError`` when memory leaked and the level is not ``off``.
        """
        if not self._service.close(self._undo.close):
            return
        for globs in self._traps:
            if not globs.hit:
                log.warning(
                    "nothing has a name that the patterns match", option=globs.option, patterns=globs.text
                )
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

    def check_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Tokens as whole numbers. Raises ``RequestError``, and ``ContextSizeError`` for too many."""
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


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    known = set(SamplingParams.__dataclass_fields__)
    unknown = sorted(set(given) - known)
    if unknown:
        raise RequestError(f"unknown argument {unknown[0]}; sampling knows {', '.join(sorted(known))}")
    return SamplingParams(**given)


__all__ = ["Engine", "load"]
