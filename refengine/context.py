"""One role's memory and stream: what ``decode`` runs in."""

from __future__ import annotations

import enum
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog

from instrumentation import interrupts
from instrumentation.errors import DeviceError, OutOfMemoryError
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest, ReservationError
from refengine.architectures import BUILDERS
from refengine.errors import AbortedError
from refengine.executor import Executor, Operations
from refengine.graph import BatchShape, ContextShape
from refengine.kernels.attention import PAGE, SPAN
from refengine.kernels.rope import rope_tables
from refengine.memory.kv_cache import CacheShape, KVCache
from refengine.memory.recurrent_state import RecurrentShape, RecurrentState

if TYPE_CHECKING:
    from instrumentation.allocator import Allocator
    from instrumentation.devices.base import Device, Stream
    from instrumentation.view import View
    from refengine.config import ModelConfig
    from refengine.graph import Graph
    from refengine.kernels.attention import CacheType
    from refengine.weights import Weights

log = structlog.get_logger()

#: rows of logits that one micro-batch can give: a vocabulary of 250,000 makes each a megabyte
MAX_OUTPUTS = 32


class DecodeStatus(enum.IntEnum):
    """Result of ``Context.decode``; the numbers are those of other GGUF engines."""

    OK = 0
    NO_KV_SLOT = 1
    ABORTED = 2
    INVALID_BATCH = -1
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


@dataclass(frozen=True)
class Batch:
    """Tokens to compute, each at a position of a sequence. All arrays [n_tokens].

    For a model with recurrent layers the rows of a sequence must be consecutive.
    """

    tokens: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    sequence: npt.NDArray[np.int32]
    #: whose logits are wanted
    outputs: npt.NDArray[np.bool_]
    #: whether the hidden states of those rows are wanted too
    hidden: bool = False

    def __post_init__(self) -> None:
        shape = (len(self.tokens),)
        for array in (self.tokens, self.position, self.sequence):
            assert array.shape == shape, self
            assert array.dtype == np.int32, self
        assert self.outputs.shape == shape, self
        assert self.outputs.dtype == np.bool_, self

    @classmethod
    def of(cls, tokens: Any, start: int, sequence: int, outputs: str, *, hidden: bool = False) -> Batch:
        """Consecutive tokens of one sequence from position ``start``; outputs ``"all"``, ``"last"`` or ``"none"``."""
        ids = np.asarray(tokens, np.int32)
        wanted = np.full(len(ids), outputs == "all")
        if outputs == "last":
            wanted[-1] = True
        position = np.arange(start, start + len(ids), dtype=np.int32)
        return cls(ids, position, np.full(len(ids), sequence, np.int32), wanted, hidden)


@dataclass(frozen=True)
class ContextSettings:
    """Sizes of a context; see ``refengine.load`` for what they mean."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_sequences: int
    cache_type: CacheType
    capture: bool
    #: reserve compute memory for the largest batch at load; otherwise it grows with what is computed
    worst_case_reserve: bool = True

    def __post_init__(self) -> None:
        assert min(self.n_ctx, self.n_batch, self.n_ubatch, self.n_sequences) >= 1, self

    @property
    def worst_shapes(self) -> list[BatchShape]:
        """Batch shapes that need the most memory: one, since a plan grows with each extent of its shape."""
        cells = -(-self.n_ctx // PAGE) * PAGE
        n_tokens = min(self.n_ubatch, self.n_batch, cells, self.n_ctx * self.n_sequences)
        return [BatchShape(n_tokens, min(n_tokens, MAX_OUTPUTS), self.n_spans(self.n_ctx))]

    @property
    def reserved_shapes(self) -> list[BatchShape]:
        """Batch shapes whose compute memory is reserved at load."""
        return self.worst_shapes if self.worst_case_reserve else [BatchShape(1, 1, 1)]

    def n_spans(self, n_positions: int) -> int:
        """Spans that a graph covers for rows that see up to ``n_positions``: a power of two, or all that there are.

        Few different shapes, so that captured launches are used again, and never twice the work.
        """
        most = -(-self.n_ctx // SPAN)
        wanted = -(-n_positions // SPAN)
        return min(1 << (wanted - 1).bit_length(), most)


def cache_shape(config: ModelConfig, settings: ContextSettings) -> CacheShape:
    """KV cache of a model in a context."""
    return CacheShape(
        n_layer=len(config.attention_layers),
        n_head_kv=config.n_head_kv,
        head_dim=config.head_dim,
        n_ctx=settings.n_ctx,
        n_sequences=settings.n_sequences,
        type=settings.cache_type,
    )


def recurrent_shape(config: ModelConfig, settings: ContextSettings) -> RecurrentShape | None:
    """Recurrent state of a model in a context; None for a model without."""
    hybrid = config.hybrid
    if hybrid is None:
        return None
    return RecurrentShape(
        layers=config.recurrent_layers,
        n_head=hybrid.n_value_head,
        state_size=hybrid.state_size,
        n_channels=hybrid.n_channels,
        n_taps=hybrid.n_taps,
        n_sequences=settings.n_sequences,
        n_rs_seq=0,
    )


def graph_builder(config: ModelConfig, settings: ContextSettings) -> Any:
    """Function from a batch shape to the model's graph in a context."""
    context = ContextShape(settings.n_sequences, cache_shape(config, settings).n_pages)
    build = BUILDERS[config.architecture]

    def of_shape(shape: BatchShape) -> Graph:
        return build(config, context, shape)

    return of_shape


def rotary_requests(config: ModelConfig, settings: ContextSettings, owner: Owner) -> list[BufferRequest]:
    """Buffers of the cosine and sine tables: float32 [n_ctx, n_rot / 2] each."""
    nbytes = settings.n_ctx * (config.n_rot // 2) * 4
    return [BufferRequest(nbytes=nbytes, owner=owner, name=f"rotary.{part}") for part in ("cosine", "sine")]


class Context:
    """A model's weights with the memory and the stream of one role (``target``)."""

    def __init__(
        self,
        device: Device,
        allocator: Allocator,
        config: ModelConfig,
        weights: Weights,
        settings: ContextSettings,
        role: str = "target",
    ) -> None:
        self.config = config
        self.settings = settings
        self.owner = Owner(role)
        with ExitStack() as undo:
            self.stream: Stream = device.create_stream(owner=self.owner, name=role)
            undo.callback(self.stream.destroy)
            self.cache = KVCache(allocator, cache_shape(config, settings), self.owner)
            undo.callback(self.cache.release)
            #: None for a model without recurrent layers
            self.states: RecurrentState | None = None
            shape = recurrent_shape(config, settings)
            if shape is not None:
                self.states = RecurrentState(allocator, shape, self.owner)
                undo.callback(self.states.release)
            rotary = self._load_rotary(allocator, weights, undo)
            operations = Operations(
                weights,
                dict(zip(config.attention_layers, self.cache.layers, strict=True)),
                self.states.layers if self.states is not None else {},
                settings.cache_type,
                rotary,
            )
            self.executor = Executor(
                allocator, self.stream, self.owner, graph_builder(config, settings), operations,
                capture=settings.capture,
            )  # fmt: skip
            self.executor.reserve(self.executor.nbytes(settings.reserved_shapes))
            undo.callback(self.executor.release)
            self._undo = undo.pop_all()
        #: logits of the last decode's wanted rows, float32 [n_outputs, n_vocab]
        self.logits: npt.NDArray[np.float32] = np.empty((0, config.n_vocab), np.float32)
        #: final-normed hidden states of the same rows, float32 [n_outputs, n_embd]; no rows unless asked for
        self.hidden: npt.NDArray[np.float32] = np.empty((0, config.n_embd), np.float32)
        #: what the last decode failed with
        self.error: Exception | None = None
        #: sequences that the last decode had to forget: compute them again from position 0
        self.forgotten: tuple[int, ...] = ()
        self._is_running = False

    def _load_rotary(self, allocator: Allocator, weights: Weights, undo: ExitStack) -> tuple[View, View]:
        config, settings = self.config, self.settings
        factors = None
        if config.rope_freqs:
            host = np.empty(config.n_rot // 2, np.float32)
            self.stream.copy_out(host, weights.vectors["rope_freqs.weight"])
            self.stream.synchronize()
            factors = host
        tables = rope_tables(settings.n_ctx, config.n_rot, config.rope_base, config.rope_freq_scale, factors)
        requests = rotary_requests(config, settings, self.owner)
        arena = allocator.reserve_arena(
            allocator.arena_size(requests), owner=self.owner, name="rotary"
        ).unwrap()
        undo.callback(arena.release)
        buffers = arena.reserve_all(requests).unwrap()
        for buffer in buffers:
            undo.callback(buffer.free)
        # A copy that is queued when the next one fails must run while its buffer lives.
        undo.callback(self.stream.synchronize)
        views = []
        for buffer, table in zip(buffers, tables, strict=True):
            view = buffer.view(np.float32, table.shape)
            self.stream.copy_in(view, table)
            views.append(view)
        self.stream.synchronize()
        cosine, sine = views
        return cosine, sine

    def decode(self, batch: Batch) -> DecodeStatus:
        """Compute a batch; positions of a sequence must follow what its cache holds.

        On ``OK`` ``logits`` has a row for each wanted token, in batch order. On anything else the cache is as it
        was before the call, and ``error`` says why; but recurrent states are overwritten as they are computed, so for
        a model that has them the sequences of a batch that failed while it ran are forgotten whole: their length is
        0, ``forgotten`` lists them, and the caller computes them again.

        An interrupt waits until the current micro-batch is done or its kernels' launches are undone; then the status
        is ``ABORTED`` and the signal is acted on when this returns.
        """
        with interrupts.deferred():
            return self._decode(batch)

    def _decode(self, batch: Batch) -> DecodeStatus:
        self.error = None
        self.forgotten = ()
        self._is_running = False
        if not self._is_valid(batch):
            return DecodeStatus.INVALID_BATCH
        counts = Counter(batch.sequence.tolist())
        before = {s: self.cache.length(s) for s in counts}
        if not self.cache.extend(counts):
            log.warning("failed to find free space in the KV cache", n_tokens=len(batch.tokens))
            return DecodeStatus.NO_KV_SLOT
        done = False
        try:
            status = self._run_all(batch)
            done = status == DecodeStatus.OK
        finally:
            if not done:
                self._undo_batch(before)
        return status

    def _undo_batch(self, before: dict[int, int]) -> None:
        if self.states is None or not self._is_running:
            for s, length in before.items():
                self.cache.truncate(s, length)
            return
        for s in before:
            self.remove(s)
        self.forgotten = tuple(before)
        lost = f"recurrent states were being written: sequences {sorted(before)} are forgotten; compute them again"
        if self.error is not None:
            self.error.add_note(lost)
        log.warning("recurrent states lost", owner=str(self.owner), sequences=sorted(before))

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self.cache.remove(sequence)
        if self.states is not None:
            self.states.clear(sequence)

    def truncate(self, sequence: int, length: int) -> bool:
        """Keep the first ``length`` positions of a sequence; False, and nothing changes, when that cannot be done.

        Recurrent states go back to 0, or as far as ``RecurrentState.rollback`` can.
        """
        if length == 0:
            self.remove(sequence)
            return True
        if self.states is not None and not self.states.rollback(
            sequence, self.cache.length(sequence) - length
        ):
            return False
        self.cache.truncate(sequence, length)
        return True

    def check_integrity(self) -> None:
        """The books of the cache and the states hold and agree. Raises AssertionError: a bug here."""
        self.cache.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
            for s in range(self.settings.n_sequences):
                lengths = self.cache.length(s), self.states.length(s)
                assert lengths[0] == lengths[1], f"sequence {s}: cache and state have seen {lengths} tokens"

    def _is_valid(self, batch: Batch) -> bool:
        if not 1 <= len(batch.tokens) <= self.settings.n_batch:
            return False
        if batch.tokens.min() < 0 or batch.tokens.max() >= self.config.n_vocab:
            return False
        if batch.sequence.min() < 0 or batch.sequence.max() >= self.settings.n_sequences:
            return False
        for s in np.unique(batch.sequence):
            position = batch.position[batch.sequence == s]
            start = self.cache.length(int(s))
            follows = np.array_equal(position, np.arange(start, start + len(position)))
            if not follows or start + len(position) > self.settings.n_ctx:
                return False
        if self.states is not None:
            n_runs = 1 + int(np.count_nonzero(np.diff(batch.sequence)))
            return n_runs == len(np.unique(batch.sequence))
        return True

    def _run_all(self, batch: Batch) -> DecodeStatus:
        n_outputs = int(batch.outputs.sum())
        self.logits = np.empty((n_outputs, self.config.n_vocab), np.float32)
        self.hidden = np.empty((n_outputs if batch.hidden else 0, self.config.n_embd), np.float32)
        start = filled = 0
        while start < len(batch.tokens):
            if start and interrupts.pending():
                return DecodeStatus.ABORTED
            stop = self._micro_batch_end(batch, start)
            rows = np.flatnonzero(batch.outputs[start:stop]).astype(np.int32)
            outputs: dict[str, npt.NDArray[Any]] = {}
            if len(rows):
                outputs["result_output"] = self.logits[filled : filled + len(rows)]
                if batch.hidden:
                    outputs["result_norm"] = self.hidden[filled : filled + len(rows)]
            status = self._run(batch, start, stop, rows, outputs)
            if status != DecodeStatus.OK:
                return status
            start, filled = stop, filled + len(rows)
        return DecodeStatus.OK

    def _micro_batch_end(self, batch: Batch, start: int) -> int:
        stop = min(start + self.settings.n_ubatch, len(batch.tokens))
        wanted = np.flatnonzero(batch.outputs[start:stop])
        return stop if len(wanted) <= MAX_OUTPUTS else start + int(wanted[MAX_OUTPUTS])

    def _run(
        self,
        batch: Batch,
        start: int,
        stop: int,
        rows: npt.NDArray[np.int32],
        outputs: dict[str, npt.NDArray[Any]],
    ) -> DecodeStatus:
        n_spans = self.settings.n_spans(int(batch.position[start:stop].max()) + 1)
        executable = self.executor.prepare(BatchShape(stop - start, len(rows), n_spans))
        if isinstance(executable, ReservationError):
            return self._failed(DecodeStatus.ALLOC_FAILED, "failed to reserve graph", executable)
        position, sequence = batch.position[start:stop], batch.sequence[start:stop]
        inputs: dict[str, npt.NDArray[Any]] = {
            "tokens": batch.tokens[start:stop],
            "position": position,
            "sequence": sequence,
            "cell": self.cache.cells(sequence, position),
            "pages": self.cache.page_table(),
        }
        if len(rows):
            inputs["output_rows"] = rows
        if self.states is not None:
            inputs["segments"] = self.states.segments(sequence)
        self._is_running = True
        try:
            self.executor.run(executable, inputs, outputs)
        except AbortedError:
            return DecodeStatus.ABORTED
        except OutOfMemoryError as error:
            return self._failed(DecodeStatus.ALLOC_FAILED, "failed to reserve graph", error)
        except DeviceError as error:
            return self._failed(DecodeStatus.COMPUTE_FAILED, "failed to compute graph", error)
        if self.states is not None:
            for s, n_rows in Counter(sequence.tolist()).items():
                self.states.commit(s, n_rows)
        return DecodeStatus.OK

    def _failed(self, status: DecodeStatus, event: str, error: Exception) -> DecodeStatus:
        self.error = error
        facts: dict[str, object] = {}
        if isinstance(error, ReservationError):
            facts["requested"] = error.requested
            facts["free"] = error.free
            facts["holders"] = [f"{row.name} of {row.owner}: {row.nbytes}" for row in error.holders]
        log.error(event, owner=str(self.owner), **facts, error=str(error))
        return status

    def release(self) -> None:
        """Give everything back."""
        self._undo.close()
