"""The graph of an MTP block with the memory that it runs in: its own cache and chain, hidden rows of the target's."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DRAFT, TARGET

from instrumentation.reservation import BufferRequest
from refengine.architectures import DRAFT_BUILDERS
from refengine.executor import Executor, Operations
from refengine.graph import BatchShape, ContextShape, Graph
from refengine.kernels.attention import SPAN
from refengine.kernels.rope import rope_tables
from refengine.memory.kv_cache import CacheShape, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from engines import Array, World

    from instrumentation.buffer import Buffer
    from instrumentation.ownership import Lease, Owner
    from instrumentation.view import View
    from refengine.config import ModelConfig

N_CTX = 128
N_SEQUENCES = 2


class Drafter:
    """Runs the draft graph of a model whose MTP weights are loaded.

    ``hidden`` [n_hidden, n_embd] belongs to the target and is lent while ``lease`` runs, ``chain`` to the draft.
    """

    def __init__(
        self, made: World, undo: ExitStack, hidden: Array, *, capture: bool, config: ModelConfig | None = None
    ) -> None:
        self.made, self._undo = made, undo
        config = self.config = config or made.config
        self.stream = made.device.create_stream(owner=DRAFT, name="draft")
        undo.callback(self.stream.destroy)
        shape = CacheShape(1, config.n_head_kv, config.head_dim, N_CTX, N_SEQUENCES, "f32", "f32")
        self.cache = KVCache(made.allocator, shape, DRAFT)
        undo.callback(self.cache.release)
        cosine, sine = (
            self._put(DRAFT, f"rotary {i}", table)
            for i, table in enumerate(rope_tables(N_CTX, config.n_rot, config.rope_base))
        )
        self.hidden = self._put(TARGET, "hidden", hidden)
        self.chain = self._put(DRAFT, "chain", np.full((N_SEQUENCES, config.n_embd), np.nan, np.float32))
        self.lease: Lease = self.buffer.lend(to=DRAFT, mode="read")
        self.context = ContextShape(N_SEQUENCES, shape.n_pages, len(hidden))
        operations = Operations(
            made.weights, {config.n_layer: self.cache.layers[0]}, {}, ("f32", "f32"), (cosine, sine),
            {"hidden": self.hidden, "chain": self.chain},
        )  # fmt: skip
        self.executor = Executor(made.allocator, self.stream, DRAFT, self.build, operations, capture=capture)
        self.executor.reserve(self.executor.nbytes([BatchShape(N_CTX, N_CTX, self.n_spans(N_CTX))]))
        undo.callback(self.executor.release)

    @property
    def buffer(self) -> Buffer:
        """That of ``hidden``."""
        return self.hidden.buffer

    def build(self, shape: BatchShape) -> Graph:
        return DRAFT_BUILDERS[self.config.architecture](self.config, self.context, shape)

    def n_spans(self, n_positions: int) -> int:
        return -(-n_positions // SPAN)

    def _put(self, owner: Owner, name: str, array: Array) -> View:
        request = BufferRequest(array.nbytes, owner, name)
        allocator = self.made.allocator
        arena = allocator.reserve_arena(allocator.arena_size([request]), owner=owner, name=name).unwrap()
        self._undo.callback(arena.release)
        (buffer,) = arena.reserve_all([request]).unwrap()
        self._undo.callback(buffer.free)
        view = buffer.view(array.dtype, array.shape, name=name)
        self.write(view, array)
        return view

    def write(self, view: View, array: Array) -> None:
        """As the owner of the view's buffer would."""
        stream = self.made.device.create_stream(owner=view.buffer.owner, name="put")
        stream.copy_in(view, np.ascontiguousarray(array))
        stream.synchronize()
        stream.destroy()

    def read(self, view: View) -> Array:
        array = np.empty(view.shape, view.dtype)
        self.stream.copy_out(array, view)
        self.stream.synchronize()
        return array

    def run(
        self,
        tokens: Sequence[int],
        hidden_rows: Sequence[int],
        *,
        sequence: int | Sequence[int] = 0,
        chain_rows: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
    ) -> Array:
        """Logits [n_outputs, n_vocab] of tokens that follow what their sequences hold; of all, or of rows ``outputs``.

        A sequence's last row goes to its row of the chain unless ``chain_rows`` says where each one goes.
        """
        n = len(tokens)
        of = np.broadcast_to(np.asarray(sequence, np.int32), (n,))
        at, last = np.empty(n, np.int32), {}
        for row, s in enumerate(of.tolist()):
            at[row] = self.cache.length(s)
            assert self.cache.extend({s: 1})
            last[s] = row
        goals = np.full(n, -1, np.int32)
        goals[list(last.values())] = list(last)
        if chain_rows is not None:
            goals[:] = chain_rows
        wanted = np.arange(n) if outputs is None else np.asarray(outputs, np.int64)
        executable: Any = self.executor.prepare(BatchShape(n, len(wanted), self.n_spans(int(at.max()) + 1)))
        inputs: dict[str, Array] = {
            "tokens": np.asarray(tokens, np.int32),
            "position": at,
            "sequence": of,
            "cell": self.cache.cells(of, at),
            "pages": self.cache.page_table(),
            "hidden_rows": np.asarray(hidden_rows, np.int32),
            "chain_rows": goals,
        }
        results: dict[str, Array] = {}
        logits = np.empty((len(wanted), self.config.n_vocab), np.float32)
        if len(wanted):
            inputs["output_rows"] = wanted.astype(np.int32)
            results["result_output"] = logits
        self.executor.run(executable, inputs, results)
        return logits

    def forget(self) -> None:
        """Empty the cache."""
        for sequence in range(N_SEQUENCES):
            self.cache.remove(sequence)


@contextmanager
def drafter(
    made: World, hidden: Array, *, capture: bool = True, config: ModelConfig | None = None
) -> Iterator[Drafter]:
    """A drafter that gives everything back."""
    with ExitStack() as undo:
        yield Drafter(made, undo, hidden.astype(np.float32), capture=capture, config=config)


@contextmanager
def with_aliases(made: World, aliases: Mapping[str, str]) -> Iterator[None]:
    """Let weights of a model answer to further names."""
    matrices = made.weights.matrices
    matrices.update({name: matrices[of] for name, of in aliases.items()})
    yield
    for name in aliases:
        del matrices[name]
