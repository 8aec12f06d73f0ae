"""One role's memory and stream: what ``decode`` runs in."""

from __future__ import annotations

import enum
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog

from instrumentation import interrupts
from instrumentation.errors import DeviceError, OutOfMemoryError
from instrumentation.following import require_room
from instrumentation.reservation import BufferRequest, ReservationError
from refengine.batch import Batch, micro_batches
from refengine.context_plan import MAX_OUTPUTS, ContextPlan, ContextSettings
from refengine.errors import AbortedError, ComputeError, ContextSizeError
from refengine.executor import MAX_EXECUTABLES, Executor, Operations
from refengine.graph import BatchShape
from refengine.kernels.rope import rope_tables
from refengine.library_products import ARENA, LibraryProducts
from refengine.memory.kv_cache import KVCache
from refengine.memory.recurrent_state import RecurrentState
from refengine.outputs import candidates_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from instrumentation.allocator import Allocator
    from instrumentation.devices.base import Device, Event, Stream
    from instrumentation.view import View
    from refengine.executor import Tap
    from refengine.outputs import Candidates, Rows
    from refengine.weights import Weights

__all__ = ["Context", "ContextPlan", "ContextSettings", "DecodeStatus"]
log = structlog.get_logger()


class DecodeStatus(enum.IntEnum):
    """Result of ``Context.decode``; the numbers are those of other GGUF engines."""

    OK = 0
    NO_KV_SLOT = 1
    ABORTED = 2
    INVALID_BATCH = -1
    ALLOC_FAILED = -2
    COMPUTE_FAILED = -3


class Context:
    """A model's weights with the memory and the stream of one role, ``target`` or ``draft``.

    ``follows``: the target of a draft context. Its hidden states, which the draft's graphs name, are read under
    ``Context.lend_hidden``. Raises ``FindingError`` (OWN003), before anything is reserved, when the draft is smaller.
    """

    def __init__(
        self,
        device: Device,
        allocator: Allocator,
        weights: Weights,
        plan: ContextPlan,
        follows: Context | None = None,
    ) -> None:
        self.plan = plan
        if follows is not None:
            require_room(plan.extents, follows.plan.extents, allocator.findings)
        self.config = plan.config
        self.settings = plan.settings
        self.owner = plan.owner
        with ExitStack() as undo:
            self.stream: Stream = device.create_stream(owner=self.owner, name=plan.role)
            undo.callback(self.stream.destroy)
            self.cache = KVCache(allocator, plan.cache, self.owner)
            undo.callback(self.cache.release)
            #: None for a model without recurrent layers
            self.states: RecurrentState | None = None
            if plan.recurrent is not None:
                self.states = RecurrentState(allocator, plan.recurrent, self.owner)
                undo.callback(self.states.release)
            rotary = self._load_rotary(allocator, weights, undo)
            #: hidden states that outlive a graph: ``ContextPlan.kept_rows``
            self.kept = self._reserve_kept(allocator, undo)
            self._handed: Event | None = None
            if self.settings.hands_over:
                self._handed = device.create_event(owner=self.owner, name="hidden states")
                undo.callback(self._handed.destroy)
            library = self._open_library(device, allocator, undo)
            operations = Operations(
                weights,
                dict(zip(plan.attention_layers, self.cache.layers, strict=True)),
                self.states.layers if self.states is not None else {},
                (self.settings.cache_type_k, self.settings.cache_type_v),
                rotary,
                {**self.kept, **(follows.kept if follows is not None else {})},
                wide=device.wide_loads,
                library=library,
            )
            self.executor = Executor(
                allocator, self.stream, self.owner, plan.graph, operations,
                capture=self.settings.capture, handed="hidden" if self.settings.hands_over else None,
            )  # fmt: skip
            device.bound_graphs(self.owner, MAX_EXECUTABLES)
            self.executor.reserve(
                self.executor.nbytes(self.settings.reserved_shapes),
                worst_case=self.settings.worst_case_reserve,
            )
            undo.callback(self.executor.release)
            self._undo = undo.pop_all()
        self._room = np.empty((0, self.config.n_vocab), np.float32)
        #: logits of the last decode's wanted rows, float32 [n_outputs, n_vocab]; none when candidates were wanted.
        #: The next decode may write others there
        self.logits: npt.NDArray[np.float32] = np.empty((0, self.config.n_vocab), np.float32)
        #: candidates of the same rows; None when all logits were wanted, or the device is not one to look for them
        self.best: list[Candidates] | None = None
        #: final-normed hidden states of the same rows, float32 [n_outputs, n_embd]; no rows unless asked for
        self.hidden: npt.NDArray[np.float32] = np.empty((0, self.config.n_embd), np.float32)
        #: what the last decode failed with
        self.error: Exception | None = None

    # --- memory

    def _load_rotary(self, allocator: Allocator, weights: Weights, undo: ExitStack) -> tuple[View, View]:
        config, settings = self.config, self.settings
        factors = None
        if config.rope_freqs:
            host = np.empty(config.n_rot // 2, np.float32)
            self.stream.copy_out(host, weights.vectors["rope_freqs.weight"])
            self.stream.synchronize()
            factors = host
        tables = rope_tables(settings.n_ctx, config.n_rot, config.rope_base, config.rope_freq_scale, factors)
        views = self._reserve(allocator, "rotary", self.plan.rotary, [table.shape for table in tables], undo)
        for view, table in zip(views, tables, strict=True):
            self.stream.copy_in(view, table)
        self.stream.synchronize()
        cosine, sine = views
        return cosine, sine

    def _reserve_kept(self, allocator: Allocator, undo: ExitStack) -> dict[str, View]:
        if self.plan.kept_rows is None:
            return {}
        name, rows = self.plan.kept_rows
        shape = (rows, self.config.n_embd)
        return {name: self._reserve(allocator, "kept", self.plan.kept, [shape], undo)[0]}

    def _open_library(self, device: Device, allocator: Allocator, undo: ExitStack) -> LibraryProducts | None:
        if not self.plan.library:
            return None
        shapes = [(request.nbytes // 4,) for request in self.plan.library]
        workspace, weights = self._reserve(allocator, ARENA, self.plan.library, shapes, undo)
        library = LibraryProducts(device, self.stream, self.owner, workspace, weights)
        undo.callback(library.release)
        return library

    def _reserve(
        self,
        allocator: Allocator,
        name: str,
        requests: list[BufferRequest],
        shapes: Iterable[tuple[int, ...]],
        undo: ExitStack,
    ) -> list[View]:
        """An arena with float32 buffers, given back by ``undo``."""
        size = allocator.arena_size(requests)
        arena = allocator.reserve_arena(size, owner=self.owner, name=name).unwrap()
        undo.callback(arena.release)
        buffers = arena.reserve_all(requests).unwrap()
        for buffer in buffers:
            undo.callback(buffer.free)
        # A copy that is queued when the next one fails must run while its buffer lives.
        undo.callback(self.stream.synchronize)
        return [buffer.view(np.float32, shape) for buffer, shape in zip(buffers, shapes, strict=True)]

    @contextmanager
    def lend_hidden(self, to: Context) -> Iterator[None]:
        """Let another context read the hidden states of the last decode, behind what this stream has queued.

        They may be on their way still: ``decode`` waits for what it returns and for nothing else. The other stream
        waits for them, the host does not.
        """
        assert self._handed is not None, "a context that hands nothing over"
        self.stream.record(self._handed)
        buffer = self.kept["hidden"].buffer
        with buffer.lend(to=to.owner, mode="read", after=self._handed, by=self.owner):
            try:
                to.stream.wait(self._handed)
            except DeviceError:
                # Nobody waits for the mark now, and an idle stream has an empty queue.
                self.stream.synchronize()
                raise
            yield

    def settle(self) -> None:
        """Wait for hidden states that the last decode hands over and that nobody took."""
        if self._handed is not None:
            self.stream.synchronize()

    # --- sequences

    def length(self, sequence: int) -> int:
        """Positions that a sequence holds."""
        return self.cache.length(sequence)

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self.cache.remove(sequence)
        if self.states is not None:
            self.states.clear(sequence)

    def keep(self, sequence: int) -> None:
        """Forget every other sequence."""
        for other in range(self.settings.n_sequences):
            if other != sequence:
                self.remove(other)

    def truncate(self, sequence: int, length: int) -> bool:
        """Keep the first ``length`` positions of a sequence; False, and nothing changes, when that cannot be done.

        Recurrent states go back to 0, or as far as ``RecurrentState.rollback`` can.
        """
        if length == 0:
            self.remove(sequence)
            return True
        if self.states is not None and not self.states.rollback(sequence, self.length(sequence) - length):
            return False
        self.cache.truncate(sequence, length)
        return True

    def copy(self, source: int, target: int) -> None:
        """Make ``target`` hold what ``source`` holds; cached pages are shared until one of them goes on.

        Raises what a device copy raises; then ``target`` is empty.
        """
        if source == target:
            return
        with interrupts.deferred():
            self.remove(target)
            if self.states is not None:
                self._copy_state(self.states, source, target)
            self.cache.share(source, target)

    def _copy_state(self, states: RecurrentState, source: int, target: int) -> None:
        try:
            for old_slot, old_plane, slot, plane in states.copies(source, target):
                for view in (view for layer in states.layers.values() for view in layer):
                    self.stream.copy(view.row(slot).row(plane), view.row(old_slot).row(old_plane))
        finally:
            self.stream.synchronize()
        states.assume(source, target)

    @contextmanager
    def tapped(self, tap: Tap) -> Iterator[None]:
        """Decode in elementary operations, whose tensors are all there, and call ``tap`` behind each launch.

        No bit of a result changes; no launch is captured.
        """
        with self.executor.tapped(self.plan.model_graph, tap):
            yield

    def state_rows(self, sequence: int) -> dict[int, tuple[View, View]]:
        """Convolution history and matrices of a sequence's last state, by layer; none before its first token."""
        plane = None if self.states is None else self.states.plane(sequence)
        if self.states is None or plane is None:
            return {}
        return {
            layer: (conv.row(sequence).row(plane), state.row(sequence).row(plane))
            for layer, (conv, state) in self.states.layers.items()
        }

    def check_integrity(self) -> None:
        """The books of cache, states and compute memory hold and agree. Raises AssertionError: a bug here."""
        self.cache.check_integrity()
        self.executor.check_integrity()
        if self.states is not None:
            self.states.check_integrity()
            for s in range(self.settings.n_sequences):
                lengths = self.length(s), self.states.length(s)
                assert lengths[0] == lengths[1], f"sequence {s}: cache and state have seen {lengths} tokens"

    # --- decode

    @property
    def rows(self) -> Rows:
        """What the last decode gave of its wanted rows: candidates if there are some, or else logits."""
        return self.logits if self.best is None else self.best

    def decode(self, batch: Batch) -> DecodeStatus:
        """Compute a batch; positions of a sequence must follow what its cache holds.

        On ``OK`` ``rows`` has one for each wanted token, in batch order. On anything else every sequence is as it
        was before the call, and ``error`` says why.

        An interrupt waits until the current micro-batch is done or its kernels' launches are undone; then the status
        is ``ABORTED`` and the signal is acted on when this returns.
        """
        with interrupts.deferred():
            return self._decode(batch)

    def require(self, status: DecodeStatus) -> None:
        """Raise what a request is told when the last decode ended so: nothing for ``OK``."""
        if status == DecodeStatus.OK:
            return
        if status == DecodeStatus.NO_KV_SLOT:
            raise ContextSizeError("Context size has been exceeded.")
        reason = f": {self.error}" if self.error else ""
        raise ComputeError(f"Compute error. (decode status {int(status)}){reason}") from self.error

    def _decode(self, batch: Batch) -> DecodeStatus:
        self.error = None
        counts = self._counted(batch)
        if counts is None:
            return DecodeStatus.INVALID_BATCH
        if not self.cache.fits(counts):
            log.debug("failed to find free space in the KV cache", owner=str(self.owner), n_tokens=len(batch))
            return DecodeStatus.NO_KV_SLOT
        before = {s: self.length(s) for s in counts}
        done = False
        if self.states is not None:
            self.states.begin(counts)
        try:
            status = self._part_tails(counts)
            if status == DecodeStatus.OK:
                taken = self.cache.extend(counts)
                assert taken, "there was room before the tails were parted"
                status = self._run_all(batch)
            done = status == DecodeStatus.OK
        finally:
            if not done:
                for s, length in before.items():
                    self.cache.truncate(s, length)
            if self.states is not None:
                (self.states.end if done else self.states.abort)(counts)
        return status

    def _part_tails(self, sequences: Iterable[int]) -> DecodeStatus:
        """Copy shared pages that are about to be written."""
        for s in sequences:
            parted = self.cache.part_tail(s)
            if parted is None:
                continue
            old, new = parted
            copied = False
            try:
                try:
                    pairs = zip(self.cache.page_views(old), self.cache.page_views(new), strict=True)
                    for source, target in pairs:
                        self.stream.copy(target, source)
                finally:
                    self.stream.synchronize()
                copied = True
            except DeviceError as error:
                return self._failed(DecodeStatus.COMPUTE_FAILED, "failed to copy a shared page", error)
            finally:
                if not copied:
                    self.cache.join_tail(s, old)
        return DecodeStatus.OK

    def _counted(self, batch: Batch) -> dict[int, int] | None:
        """Rows of each sequence; None for a batch that cannot be computed."""
        settings, n_vocab = self.settings, self.config.n_vocab
        if not 1 <= len(batch) <= settings.n_batch:
            return None
        counts: dict[int, int] = {}
        last = -1
        # Most batches have a few rows, for which NumPy is slower than this.
        for token, position, s in zip(
            batch.tokens.tolist(), batch.position.tolist(), batch.sequence.tolist(), strict=True
        ):
            if not (0 <= s < settings.n_sequences and 0 <= token < n_vocab):
                return None
            n = counts.get(s, 0)
            if position != self.length(s) + n or position >= settings.n_ctx:
                return None
            if n and s != last and self.states is not None:
                return None
            counts[s] = n + 1
            last = s
        return counts

    def _run_all(self, batch: Batch) -> DecodeStatus:
        n_outputs = int(np.count_nonzero(batch.outputs))
        n_best = batch.n_best if self.settings.chooses and n_outputs else 0
        best = np.empty((n_outputs if n_best else 0, 2 * n_best + 1), np.int32)
        self.best = None
        self.logits = self._room_for_logits(0 if n_best else n_outputs)
        self.hidden = np.empty((n_outputs if batch.hidden else 0, self.config.n_embd), np.float32)
        filled = 0
        for start, stop in micro_batches(batch, self.settings.limits):
            if start and interrupts.pending():
                return DecodeStatus.ABORTED
            part = batch.part(start, stop)
            n_rows = int(np.count_nonzero(part.outputs))
            outputs: dict[str, npt.NDArray[Any]] = {}
            if n_rows:
                name, wanted = ("result_best", best) if n_best else ("result_output", self.logits)
                outputs[name] = wanted[filled : filled + n_rows]
                if batch.hidden:
                    outputs["result_norm"] = self.hidden[filled : filled + n_rows]
            status = self._run(part, start, outputs, n_best if n_rows else 0)
            if status != DecodeStatus.OK:
                return status
            filled += n_rows
        if n_best:
            self.best = candidates_of(best, self.config.n_vocab)
        return DecodeStatus.OK

    def _room_for_logits(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Float32 [n_rows, n_vocab]; for a few rows the same memory each time, whose pages are there already."""
        if n_rows > MAX_OUTPUTS:
            return np.empty((n_rows, self.config.n_vocab), np.float32)
        if n_rows > len(self._room):
            self._room = np.empty((n_rows, self.config.n_vocab), np.float32)
        return self._room[:n_rows]

    def _run(
        self, part: Batch, start: int, outputs: dict[str, npt.NDArray[Any]], n_best: int
    ) -> DecodeStatus:
        """Run the micro-batch that begins at row ``start`` of its batch."""
        rows = part.outputs.nonzero()[0]
        n_spans = self.settings.n_spans(int(part.position.max()) + 1)
        executable = self.executor.prepare(BatchShape(len(part), len(rows), n_spans, n_best))
        if isinstance(executable, ReservationError):
            return self._failed(DecodeStatus.ALLOC_FAILED, "failed to reserve graph", executable)
        inputs = self._inputs(part, start)
        if len(rows):
            inputs["output_rows"] = rows
        try:
            self.executor.run(executable, inputs, outputs)
        except AbortedError:
            return DecodeStatus.ABORTED
        except OutOfMemoryError as error:
            return self._failed(DecodeStatus.ALLOC_FAILED, "failed to reserve graph", error)
        except DeviceError as error:
            return self._failed(DecodeStatus.COMPUTE_FAILED, "failed to compute graph", error)
        if self.states is not None:
            for s, n_rows in Counter(part.sequence.tolist()).items():
                self.states.advance(s, n_rows)
        return DecodeStatus.OK

    def _inputs(self, part: Batch, start: int) -> dict[str, npt.NDArray[Any]]:
        inputs: dict[str, npt.NDArray[Any]] = {
            "tokens": part.tokens,
            "position": part.position,
            "sequence": part.sequence,
            "cell": self.cache.cells(part.sequence, part.position),
            "pages": self.cache.page_table(),
        }
        if self.states is not None:
            inputs["segments"] = self.states.segments(part.sequence)
        if self.settings.hands_over:
            inputs["hidden_rows"] = np.arange(start, start + len(part), dtype=np.int32)
        if part.hidden_rows is not None:
            inputs["hidden_rows"] = part.hidden_rows
        if part.chain_rows is not None:
            inputs["chain_rows"] = part.chain_rows
        return inputs

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
