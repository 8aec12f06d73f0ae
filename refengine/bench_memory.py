"""What a token moves through memory, and what a plain copy can move: the two sides of a benchmark's percentage."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from instrumentation import interrupts
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest
from refengine.graph import BatchShape
from refengine.kernels.kv_types import KV_TYPES
from refengine.kernels.quants import format_of

if TYPE_CHECKING:
    from refengine.context_plan import ContextPlan
    from refengine.engine import Engine
    from refengine.graph import Graph, Node
    from refengine.weights import Matrix, Weights

BENCH = Owner("bench")
#: bytes that one copy reads: more than any cache holds
COPY_BYTES = 256 << 20
#: below this a copy says nothing about memory
MIN_COPY_BYTES = 64 << 10
#: of what is free, for the source; as much again is the target
_SHARE = 4
#: copies that are timed together, so that waiting for them does not count, and how often
_COPIES, _SAMPLES = 4, 5
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes that decoding one token reads and writes, the mean over a test. Activations are not counted."""

    #: read; experts that are not chosen are not
    weights: int
    #: keys and values read and written
    cache: float
    #: recurrent states read and written
    states: int

    def __post_init__(self) -> None:
        assert self.weights > 0, self
        assert min(self.cache, self.states) >= 0, self

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.cache + self.states


@dataclass(frozen=True, slots=True)
class CopyRate:
    """A copy within the device of ``nbytes`` bytes; ``per_second`` counts them twice, as read and as written."""

    nbytes: int
    per_second: float

    def __post_init__(self) -> None:
        assert self.nbytes >= 1, self
        assert self.per_second > 0, self


def bytes_per_token(plan: ContextPlan, weights: Weights, n_tokens: int) -> TokenBytes:
    """What each of ``n_tokens`` tokens that are decoded one by one from an empty cache moves, on average.

    Counted over the graph of one token: each weight that a node names, of embeddings one row and of experts those
    that are chosen; keys and values of the (n_tokens + 1) / 2 positions that a token sees on average, and its own;
    recurrent states once in and once out. All as they lie in the device's memory, each taken from it once.
    """
    assert n_tokens >= 1, n_tokens
    graph = plan.model_graph(BatchShape(1, 1, plan.settings.n_spans(n_tokens)))
    seen = (n_tokens + 1) / 2
    read = 0
    cache = 0.0
    states = 0
    for node in graph.nodes:
        read += sum(_weight_nbytes(graph, node, weights, name) for name in node.weights.values())
        if node.op == "attention":
            cache += seen * _position_nbytes(plan)
        elif node.op == "store_kv":
            cache += _position_nbytes(plan)
        elif node.op in ("short_conv", "gated_delta"):
            states += 2 * _state_nbytes(plan, node.op)
    return TokenBytes(read, cache, states)


def _weight_nbytes(graph: Graph, node: Node, weights: Weights, name: str) -> int:
    """Bytes of a weight that a node of a graph of one token reads."""
    if name in weights.vectors:
        return weights.vectors[name].nbytes
    matrix = weights.matrices[name]
    rows = matrix.n_out
    if node.op == "get_rows":
        rows = 1
    elif node.op == "mul_mat_experts":
        assert node.output is not None, node
        _, n_used, n_out = graph.tensors[node.output].shape
        rows = n_used * n_out
    return _matrix_nbytes(matrix) // matrix.n_out * rows


def _matrix_nbytes(matrix: Matrix) -> int:
    """Bytes of those of the three arrays that the format uses."""
    form = format_of(matrix.type)
    used = (
        (form.group_bytes, matrix.codes),
        (form.block_halves, matrix.halves),
        (form.block_words, matrix.words),
    )
    return sum(view.nbytes for width, view in used if width)


def _position_nbytes(plan: ContextPlan) -> int:
    """Bytes of one layer's keys and values of one position."""
    shape = plan.cache
    types = (KV_TYPES[name] for name in (shape.type_k, shape.type_v))
    return sum(shape.n_head_kv * kind.row(shape.head_dim) * kind.dtype.itemsize for kind in types)


def _state_nbytes(plan: ContextPlan, op: str) -> int:
    """Bytes of one layer's convolution history, or matrices, of one sequence."""
    shape = plan.recurrent
    assert shape is not None, plan
    _, _, *extents = shape.conv_shape if op == "short_conv" else shape.state_shape
    return prod(extents) * _FLOAT_BYTES


def copy_rate(engine: Engine) -> CopyRate | None:
    """The best of several copies within the engine's device, in memory of its own; None when too little is free.

    Raises what reserving and copying raise; nothing stays reserved. An interrupt waits for the copy that runs.
    """
    nbytes = _copy_nbytes(engine)
    if nbytes < MIN_COPY_BYTES:
        return None
    requests = [BufferRequest(nbytes, BENCH, f"copy.{part}") for part in ("source", "target")]
    allocator = engine.allocator
    with interrupts.deferred(), ExitStack() as undo:
        size = allocator.arena_size(requests)
        arena = allocator.reserve_arena(size, owner=BENCH, name="copy").unwrap()
        undo.callback(arena.release)
        buffers = arena.reserve_all(requests).unwrap()
        for buffer in buffers:
            undo.callback(buffer.free)
        stream = engine.device.create_stream(owner=BENCH, name="copy")
        undo.callback(stream.destroy)
        source, target = (buffer.view(np.uint8, (nbytes,)) for buffer in buffers)
        # Pages that were never written may all be one page of zeros.
        stream.fill(source, 1)
        stream.copy(target, source)
        stream.synchronize()
        best = float("inf")
        for _ in range(_SAMPLES):
            started = time.perf_counter()
            for _ in range(_COPIES):
                stream.copy(target, source)
            stream.synchronize()
            best = min(best, time.perf_counter() - started)
            if interrupts.pending():
                break
        return CopyRate(nbytes, 2 * _COPIES * nbytes / best)


def _copy_nbytes(engine: Engine) -> int:
    free = engine.device.memory_info().free
    limit = engine.options.device_memory_limit
    if limit is not None:
        free = min(free, limit - engine.allocator.snapshot().reserved)
    return min(COPY_BYTES, free // _SHARE)
