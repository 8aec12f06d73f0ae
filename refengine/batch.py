"""What one decode computes: tokens at positions of sequences, and how they are cut into micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Tokens to compute, each at a position of a sequence. All arrays [n_tokens].

    For a model with recurrent layers the rows of a sequence must be consecutive.
    """

    tokens: Rows
    position: Rows
    sequence: Rows
    #: whose logits are wanted
    outputs: npt.NDArray[np.bool_]
    #: whether the hidden states of those rows are wanted too
    hidden: bool = False
    #: candidates that are wanted of each output row, one of ``refengine.kernels.select.CANDIDATES``; 0: all its logits
    n_best: int = 0
    #: for a draft context: where each row's hidden state comes from (``refengine.kernels.hidden.gather_hidden``)
    hidden_rows: Rows | None = None
    #: for a draft context: the sequence for which a row's own hidden state is kept, or -1
    chain_rows: Rows | None = None

    def __post_init__(self) -> None:
        shape = (len(self.tokens),)
        for array in (self.tokens, self.position, self.sequence, self.hidden_rows, self.chain_rows):
            assert array is None or (array.shape == shape and array.dtype == np.int32), self
        assert self.outputs.shape == shape, self
        assert self.outputs.dtype == np.bool_, self

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(
        cls, tokens: Any, start: int, sequence: int, outputs: str, *, hidden: bool = False, n_best: int = 0
    ) -> Batch:
        """Consecutive tokens of one sequence from position ``start``; outputs ``"all"``, ``"last"`` or ``"none"``."""
        ids = np.asarray(tokens, np.int32)
        wanted = np.full(len(ids), outputs == "all")
        if outputs == "last":
            wanted[-1] = True
        position = np.arange(start, start + len(ids), dtype=np.int32)
        return cls(ids, position, np.full(len(ids), sequence, np.int32), wanted, hidden, n_best)

    @classmethod
    def joined(cls, parts: Sequence[Batch]) -> Batch:
        """One batch of several, in order; all of them have the optional rows, or none has.

        Of output rows as much is wanted as of those of the part that wants the most.
        """
        first = parts[0]
        if len(parts) == 1:
            return first
        best = [part.n_best for part in parts if part.outputs.any()]

        def rows(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        return cls(
            rows("tokens"), rows("position"), rows("sequence"), rows("outputs"), first.hidden,
            0 if 0 in best else max(best, default=0), rows("hidden_rows"), rows("chain_rows"),
        )  # fmt: skip

    def part(self, start: int, stop: int) -> Batch:
        """Rows from ``start`` to before ``stop``."""
        if (start, stop) == (0, len(self)):
            return self
        cut = slice(start, stop)
        return replace(
            self,
            tokens=self.tokens[cut],
            position=self.position[cut],
            sequence=self.sequence[cut],
            outputs=self.outputs[cut],
            hidden_rows=None if self.hidden_rows is None else self.hidden_rows[cut],
            chain_rows=None if self.chain_rows is None else self.chain_rows[cut],
        )


@dataclass(frozen=True)
class MicroBatchLimits:
    """What one pass over the weights can take."""

    n_rows: int
    n_outputs: int
    #: rows at the end of a sequence's part of a batch that stay in one micro-batch
    keep_tail: int

    def __post_init__(self) -> None:
        assert 1 <= self.keep_tail <= min(self.n_rows, self.n_outputs), self


def micro_batches(batch: Batch, limits: MicroBatchLimits) -> list[tuple[int, int]]:
    """(start, stop) of each micro-batch, in order, covering the batch.

    The last ``keep_tail`` rows of a sequence are never parted: so a draft block, which is no longer, is whole.
    """
    if len(batch) <= limits.n_rows and np.count_nonzero(batch.outputs) <= limits.n_outputs:
        return [(0, len(batch))]
    cuts = [0]
    rows = outputs = 0
    for first, end in _runs(batch.sequence):
        start = first
        while start < end:
            take = _rows_that_fit(batch.outputs[start:end], limits.n_rows - rows, limits.n_outputs - outputs)
            if take < end - start:
                # What is left behind must be whole in the next micro-batch.
                take = min(take, end - start - limits.keep_tail)
            if take <= 0:
                assert rows, "an empty micro-batch takes a tail"
                cuts.append(start)
                rows = outputs = 0
                continue
            rows += take
            outputs += int(np.count_nonzero(batch.outputs[start : start + take]))
            start += take
    cuts.append(len(batch))
    return list(itertools.pairwise(cuts))


def _runs(sequence: Rows) -> list[tuple[int, int]]:
    """(start, stop) of each run of rows of one sequence."""
    edges = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
    return list(itertools.pairwise(edges))


def _rows_that_fit(outputs: npt.NDArray[np.bool_], n_rows: int, n_outputs: int) -> int:
    """Rows at the front of ``outputs`` that fit: at most ``n_rows``, of which at most ``n_outputs`` are wanted."""
    wanted = np.flatnonzero(outputs[:n_rows])
    if len(wanted) > n_outputs:
        return int(wanted[n_outputs])
    return min(n_rows, len(outputs))
