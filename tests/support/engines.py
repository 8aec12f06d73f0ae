"""Engines, contexts and kernels as users run them: a host device, a guarded allocator, real models."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda, float32

import refengine
from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.devices.host import HostDevice, HostStream
from instrumentation.findings import FindingLog
from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32, f32_1d, i32
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.view import View
from refengine.architectures import BUILDERS
from refengine.batch import Batch
from refengine.config import ModelConfig
from refengine.context import Context, DecodeStatus
from refengine.context_plan import ContextPlan, ContextSettings
from refengine.gguf_file import GGUFFile
from refengine.weights import WeightPlan, Weights

DATA = Path(__file__).resolve().parent.parent / "data"
#: models with recorded logits and greedy continuations, of the architectures that run
PAIRS = sorted(file.stem for file in DATA.glob("*.gguf") if file.stem.split("-")[0] in BUILDERS)
MODEL, TARGET, DRAFT = Owner("model"), Owner("target"), Owner("draft")
Array = npt.NDArray[Any]


def nmse(found: Array, wanted: Array) -> float:
    """Squared error over squared signal."""
    reference = wanted.astype(np.float64)
    error = float(((found.astype(np.float64) - reference) ** 2).sum())
    signal = float((reference**2).sum())
    return error / signal if signal else error


def same_bits(found: Array, wanted: Array) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def n_queued(stream: Any) -> int:
    """Operations that a stream of the host device, or of one over the fake driver, was given since it began."""
    return int(getattr(stream.handle, "queued", None) or getattr(stream, "_queued", 0))


class FailNth:
    """Fails the ``nth`` reservation, counted from 0; with ``nth`` None it only counts."""

    def __init__(self, nth: int | None = None) -> None:
        self.nth = nth
        self.seen = 0

    def refusal(self, kind: str, detail: str) -> str | None:
        if kind != "reserve":
            return None
        self.seen += 1
        return f"{detail} failed on purpose" if self.nth == self.seen - 1 else None


class Bench:
    """A guarded device, the host unless given, with one stream and memory at hand."""

    def __init__(
        self, level: Level = Level.GUARD, threads: int | None = None, device: Any = None, **options: Any
    ) -> None:
        self.device: Any = HostDevice(threads) if device is None else device
        self.findings = FindingLog()
        self.allocator = Allocator(self.device, level=level, findings=self.findings, **options)
        self.device.watch(self.allocator)
        self.stream = self.device.create_stream(owner=TARGET, name="target")

    def arena(self, nbytes: int = 1 << 20, owner: Owner = TARGET) -> Any:
        return self.allocator.reserve_arena(nbytes, owner=owner, name="test").unwrap()

    def put(self, arena: Any, array: Array, name: str, owner: Owner = TARGET) -> View:
        """A buffer that holds a copy of ``array``, exactly as large."""
        view: View = (
            arena.reserve(max(1, array.nbytes), owner=owner, name=name)
            .unwrap()
            .view(array.dtype, array.shape)
        )
        if array.nbytes:
            stream = self.device.create_stream(owner=owner, name="put")
            stream.copy_in(view, np.ascontiguousarray(array))
            stream.destroy()
        return view

    def get(self, view: View, stream: HostStream | None = None) -> Array:
        array = np.empty(view.shape, view.dtype)
        own = stream or self.stream
        own.copy_out(array, view)
        own.synchronize()
        return array

    def run(self, kernel: Kernel, grid: int | tuple[int, ...], **arguments: Any) -> dict[str, Array]:
        """Launch on copies of the arrays; what the kernel wrote, whole, by parameter. No finding may come of it."""
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        requests = [BufferRequest(max(1, array.nbytes), TARGET, name) for name, array in arrays.items()]
        arena = self.arena(self.allocator.arena_size(requests))
        views = {name: self.put(arena, array, name) for name, array in arrays.items()}
        self.stream.launch(kernel, grid, {**arguments, **views})
        written = {name: self.get(views[name]) for name in arrays if name in kernel.writes}
        for view in views.values():
            view.buffer.free()
        arena.release()
        assert self.findings.list() == ()
        return written


def poisoned(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    """What a kernel must overwrite: NaN, or the bytes of it."""
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xFF
    return array


@dataclass
class World:
    """A context of a small model with everything that it stands on."""

    device: HostDevice
    allocator: Allocator
    findings: FindingLog
    weights: Weights
    config: ModelConfig
    contexts: list[Context] = field(default_factory=list)

    def context(self, **settings: Any) -> Context:
        defaults: dict[str, Any] = {
            "n_ctx": 64, "n_batch": 64, "n_ubatch": 32, "n_sequences": 1, "capture": True,
            "cache_type_k": "f32", "cache_type_v": "f32",
        }  # fmt: skip
        chosen = ContextSettings(**(defaults | settings))
        made = Context(self.device, self.allocator, self.weights, ContextPlan(self.config, chosen))
        self.contexts.append(made)
        return made


@contextmanager
def world(
    name: str = "llama",
    level: Level = Level.GUARD,
    threads: int | None = None,
    *,
    draft: bool = False,
    **options: Any,
) -> Iterator[World]:
    """Weights of a model on a guarded host device; nothing may be left, and no finding, at the end.

    ``draft``: with those of its MTP block.
    """
    bench = Bench(level, threads, **options)
    with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
        config = ModelConfig.from_gguf(gguf)
        weights = Weights(bench.allocator, WeightPlan(gguf, config, MODEL, draft=draft), MODEL)
        loader = bench.device.create_stream(owner=MODEL, name="load")
        weights.load(loader)
        loader.destroy()
    made = World(bench.device, bench.allocator, bench.findings, weights, config)
    yield made
    assert bench.allocator.check_integrity() == []
    for context in made.contexts:
        context.release()
    weights.release()
    assert bench.allocator.table() == ()
    assert bench.allocator.close() == []
    assert bench.findings.list() == ()


def decode(context: Context, tokens: Sequence[int], sequence: int = 0, outputs: str = "all") -> Array:
    """Logits of tokens that follow what the sequence holds."""
    batch = Batch.of(tokens, context.cache.length(sequence), sequence, outputs)
    assert context.decode(batch) == DecodeStatus.OK, context.error
    return context.logits.copy()


@kernel(block=32)
def write_from(x: f32_1d, y: f32_1d, first: i32, count: i32) -> None:
    """Copies x[0] to ``count`` elements of y from ``first`` on, which may lie outside: what a faulty kernel does."""
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < count:
        y[first + i] = x[0]


@kernel(block=32)
def increment(y: f32_1d) -> None:
    """Adds 1 to each element."""
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < y.shape[0]:
        y[i] = y[i] + float32(1.0)


@kernel(block=32)
def scale_by(x: f32_1d, y: f32_1d, factor: f32, offset: i32) -> None:
    """y = x * factor + offset."""
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < y.shape[0]:
        y[i] = x[i] * factor + float32(offset)


def fill_all(engine: refengine.Engine, value: int) -> None:
    """Caches, states, hidden and chain rows of both contexts, through the streams that own them."""
    for context in (engine.context, engine.draft):
        if context is None:
            continue
        views = [view for layer in context.cache.layers for view in layer] + list(context.kept.values())
        if context.states is not None:
            views += [view for layer in context.states.layers.values() for view in layer]
        for view in views:
            context.stream.fill(view, value)
        context.stream.synchronize()
