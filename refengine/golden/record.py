"""Compute a recording with an engine: a prompt's tensors, then its likeliest continuation in two ways."""

from __future__ import annotations

import hashlib
import platform
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from instrumentation.errors import Error
from refengine.batch import Batch
from refengine.errors import ComputeError, ContextSizeError, RequestError
from refengine.golden.case import ENGINE, SETTINGS, DeviceId, ModelId, Recording, Step
from refengine.golden.tap import DEFAULT, MTP, STATES, TensorTap, matches, states_of
from refengine.models import KNOWN_MODELS, resolve_model

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection

    from refengine.context import Context
    from refengine.engine import Engine
    from refengine.golden.case import Array

_READ_BYTES = 1 << 20


class GoldenError(Error):
    """A recording cannot be made because the engine contradicts itself. Names what differs."""


@dataclass(frozen=True)
class Request:
    """What is to be recorded of a prompt."""

    name: str
    tokens: tuple[int, ...]
    prompt: str | None = None
    n_predict: int = 0
    #: the last rows of the prompt, 0: all
    n_rows: int = 0
    #: patterns of names, or the names themselves
    tensors: Collection[str] = DEFAULT


def model_id(model: str | os.PathLike[str]) -> ModelId:
    """Name and SHA-256 of a model file; the name is the short one if it has one, or the file's without its folder."""
    path = resolve_model(model)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    short = (name for name, known in KNOWN_MODELS.items() if known.find() == path)
    return ModelId(next(short, path.name), digest.hexdigest())


def device_id(engine: Engine) -> DeviceId:
    """Kind and architecture of an engine's device."""
    device = engine.device
    kind = device.name.partition(":")[0]
    capability = getattr(getattr(device, "context", None), "compute_capability", None)
    arch = platform.machine() if capability is None else f"sm_{capability[0]}{capability[1]}"
    return DeviceId(kind, arch or "unknown")


def record(engine: Engine, request: Request, model: ModelId) -> Recording:
    """Compute what a request asks for, on an engine with nothing else to do.

    Tensors come from a run in elementary operations. The continuation is computed twice: token after token, and as
    requests are served. Raises ``RequestError``, ``ContextSizeError``, ``ComputeError``, and ``GoldenError`` when the
    logits behind the prompt are not the same bits in both.
    """
    tokens = engine.check_tokens(request.tokens)
    if len(tokens) + request.n_predict > engine.settings.n_ctx:
        raise ContextSizeError(
            f"{request.name}: {len(tokens)} tokens and {request.n_predict} to predict exceed the context size of "
            f"{engine.settings.n_ctx}; record with a larger --ctx-size or smaller --predict"
        )
    run = _Run(engine, tokens, request)
    with engine.exclusive() as context:
        tensors, steps = run.tensors()
        last = context.logits[-1].copy()
        greedy = run.greedy(last)
    generated = run.generated(last) if request.n_predict else None
    options = {name: getattr(engine.options, name) for name in SETTINGS}
    return Recording(
        name=request.name,
        engine=ENGINE,
        tensors=tensors,
        tolerance={},
        device=device_id(engine),
        model=model,
        prompt=request.prompt,
        tokens=tuple(tokens),
        settings=options | {"n_ctx": engine.settings.n_ctx},
        steps=steps,
        greedy=greedy if request.n_predict else None,
        generated=generated,
        n_predict=request.n_predict,
    )


def require_consistent(recording: Recording) -> None:
    """Raise ``GoldenError`` unless the two continuations are the same tokens."""
    greedy, generated = recording.greedy, recording.generated
    if greedy is None or generated is None or greedy == generated:
        return
    pairs = enumerate(zip(greedy, generated, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(greedy), len(generated)))
    raise GoldenError(
        f"{recording.name}: token {at} of the continuation is another one as requests are served than decoded alone: "
        "this is a bug of the engine; find it with --check audit, or record with --no-drafts"
    )


class _Run:
    """One prompt on one engine."""

    def __init__(self, engine: Engine, tokens: list[int], request: Request) -> None:
        self.engine = engine
        self.tokens = tokens
        self.request = request
        self.n_rows = min(request.n_rows or len(tokens), len(tokens))
        self.target: Context = engine.context
        patterns = tuple(request.tensors)
        self.wanted: Callable[[str], bool] = lambda name: matches(name, patterns)

    def tensors(self) -> tuple[dict[str, Array], tuple[Step, ...]]:
        """Decode the prompt; the tensors of its last rows, and all steps of the graphs."""
        n, engine = len(self.tokens), self.engine
        first = n - self.n_rows
        self._decode(0, first, "none")
        taps = [TensorTap(self.target, self.wanted, self.n_rows)]
        drafts = n - 1 - first
        with ExitStack() as stack:
            stack.enter_context(self.target.tapped(taps[0]))
            if engine.draft is not None and drafts:
                taps.append(TensorTap(engine.draft, self.wanted, drafts, MTP))
                stack.enter_context(engine.draft.tapped(taps[1]))
            self._decode(first, n, "all")
            # Leaving gives the graphs back, and waits for what they still hand over.
        states = states_of(self.target, self.wanted)
        found = {name: array for tap in taps for name, array in tap.tensors().items()}
        found |= states
        if not found:
            raise RequestError(
                f"{self.request.name}: no tensor has a name like {', '.join(self.request.tensors)}; "
                f"there are {', '.join(step.name for step in taps[0].steps[:8])} and others"
            )
        steps = _with_states([step for tap in taps for step in tap.steps], self.target)
        return {step.name: found[step.name] for step in steps if step.name in found}, tuple(steps)

    def _decode(self, start: int, stop: int, outputs: str) -> None:
        """Decode tokens of the prompt, and feed the MTP block with what that makes known."""
        size = self.engine.settings.n_batch
        for at in range(start, stop, size):
            part = self.tokens[at : min(at + size, stop)]
            self.target.require(self.target.decode(Batch.of(part, at, 0, outputs)))
            following = self.tokens[at + 1 : at + 1 + len(part)]
            if self.engine.drafter is not None and following:
                self.engine.drafter.logits(following, range(len(following)), 0)

    def greedy(self, logits: Array) -> tuple[int, ...]:
        """The likeliest token, and so on, each decoded alone."""
        ends, made = self.engine.tokenizer.eos_ids, [int(np.argmax(logits))]
        while len(made) < self.request.n_predict and made[-1] not in ends:
            at = len(self.tokens) + len(made) - 1
            self.target.require(self.target.decode(Batch.of(made[-1:], at, 0, "last")))
            made.append(int(np.argmax(self.target.logits[-1])))
        return tuple(made)

    def generated(self, logits: Array) -> tuple[int, ...]:
        """The same as a request is served; its first row of logits must be the tapped run's."""
        self.engine.drop_prefixes()
        made = self.engine.generate(
            self.tokens, n_predict=self.request.n_predict, temperature=0, return_logits=True
        )
        if made.logits is None or not len(made.logits):
            raise ComputeError(f"{self.request.name}: nothing was generated")
        if made.logits[0].tobytes() != logits.tobytes():
            raise GoldenError(
                f"{self.request.name}: logits of the last token are not the same bits when operations are fused: "
                "this is a bug of the engine; find it with --check audit"
            )
        return tuple(made.tokens)


def _with_states(steps: list[Step], context: Context) -> list[Step]:
    """Steps, and behind the operation that updates a recurrent state that state."""
    shapes = {
        f"{state}-{layer}": tuple(view.shape)
        for layer, views in context.state_rows(0).items()
        for state, view in zip(STATES, views, strict=True)
    }
    updates = {tensor: state for state, tensor in STATES.items()}
    made = []
    for step in steps:
        made.append(step)
        before, _, layer = step.name.rpartition("-")
        name = f"{updates.get(before)}-{layer}"
        if name in shapes:
            made.append(Step(name, step.op, shapes[name], step.sources))
    return made


def drafts_if_it_can(model: str | os.PathLike[str]) -> str:
    """The ``spec_type`` of a model: with drafts where it has an MTP block."""
    from refengine.architectures import can_draft  # noqa: PLC0415
    from refengine.config import ModelConfig  # noqa: PLC0415
    from refengine.gguf_file import GGUFFile  # noqa: PLC0415

    with GGUFFile.open(resolve_model(model)) as gguf:
        config = ModelConfig.from_gguf(gguf)
    return "draft-mtp" if can_draft(config) else "none"


def again(recording: Recording) -> Request:
    """The request that a recording answers."""
    rows = [len(array) for name, array in recording.tensors.items() if not name.startswith((*STATES, MTP))]
    return Request(
        recording.name, recording.tokens, recording.prompt, recording.n_predict,
        max(rows, default=len(recording.tokens)), tuple(recording.tensors) or ("result_output",),
    )  # fmt: skip
