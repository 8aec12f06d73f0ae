"""What recurrent layers remember of each sequence: one state, and snapshots of it a few tokens back.

A state cannot be cut back like a KV cache. So the last states are kept: plane s holds the state s tokens before the
end of the sequence's last batch, and ``rollback`` only chooses the plane that the next batch starts from. Planes that
the last batch did not write are stale, and a rollback that would need one is refused: the caller then clears
the sequence and computes it again. A state that was never written is never read either, so that memory need not be
zeroed. The bookkeeping is on the host; buffers are on the device. Layouts: ``refengine.kernels.short_conv`` and
``refengine.kernels.gated_delta``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.reservation import BufferRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instrumentation.allocator import Allocator
    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.ownership import Owner
    from instrumentation.view import View

#: source plane of a segment whose sequence remembers nothing yet
EMPTY = -1
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class RecurrentShape:
    """Extents of the recurrent state of a context, always float32."""

    #: numbers of the model's recurrent layers
    layers: tuple[int, ...]
    #: value heads
    n_head: int
    state_size: int
    #: channels and taps of the short convolution
    n_channels: int
    n_taps: int
    n_sequences: int
    #: tokens that can be rolled back
    n_rs_seq: int

    def __post_init__(self) -> None:
        assert min(self.n_head, self.state_size, self.n_channels, self.n_sequences) >= 1, self
        assert self.n_taps >= 2, self
        assert self.n_rs_seq >= 0, self
        assert self.layers, self
        assert len(set(self.layers)) == len(self.layers), self

    @property
    def n_planes(self) -> int:
        """States kept for each sequence: the last one, and one for each token that can be rolled back."""
        return self.n_rs_seq + 1

    @property
    def conv_shape(self) -> tuple[int, ...]:
        """One layer's convolution history."""
        return (self.n_sequences, self.n_planes, self.n_taps - 1, self.n_channels)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """One layer's matrices."""
        return (self.n_sequences, self.n_planes, self.n_head, self.state_size**2)

    def requests(self, owner: Owner) -> list[BufferRequest]:
        """Buffers: convolution history and matrices of each layer."""
        return [
            BufferRequest(
                nbytes=int(np.prod(shape, dtype=np.int64)) * _FLOAT_BYTES,
                owner=owner,
                name=f"rs.{part}.{layer}",
            )
            for layer in self.layers
            for part, shape in (("conv", self.conv_shape), ("state", self.state_shape))
        ]


@dataclass
class _Sequence:
    #: tokens that the state has seen
    length: int = 0
    #: planes 0 to n_valid - 1 hold states of this sequence
    n_valid: int = 0
    #: plane that the next batch starts from; above 0 while a rollback is pending
    source: int = 0


class RecurrentState:
    """Convolution history and matrices of every recurrent layer, with the books of which planes are valid."""

    def __init__(self, allocator: Allocator, shape: RecurrentShape, owner: Owner) -> None:
        self.shape = shape
        requests = shape.requests(owner)
        size = allocator.arena_size(requests)
        self.arena: Arena = allocator.reserve_arena(size, owner=owner, name="recurrent").unwrap()
        try:
            self.buffers: tuple[Buffer, ...] = self.arena.reserve_all(requests).unwrap()
        except BaseException:
            self.arena.release()
            raise
        #: convolution history and matrices by layer number
        self.layers: Mapping[int, tuple[View, View]] = {
            layer: (conv.view(np.float32, shape.conv_shape), state.view(np.float32, shape.state_shape))
            for layer, conv, state in zip(shape.layers, self.buffers[::2], self.buffers[1::2], strict=True)
        }
        self._sequences = [_Sequence() for _ in range(shape.n_sequences)]

    def length(self, sequence: int) -> int:
        """Tokens that a sequence's state has seen."""
        return self._sequences[sequence].length

    def segments(self, sequence: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Table of a micro-batch for the kernels: int32 [n_sequences, 4], one row per sequence, in batch order.

        ``sequence`` [n_rows] is each row's; rows of one sequence must be consecutive. Columns: first row, number of
        rows, slot, plane to start from or ``EMPTY``. The rest are segments of no rows, so that the shape of a launch
        does not depend on how many sequences a batch has.
        """
        assert len(sequence), "a micro-batch has rows"
        table = np.zeros((self.shape.n_sequences, 4), np.int32)
        table[:, 3] = EMPTY
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))
        stops = [*starts[1:].tolist(), len(sequence)]
        owners = sequence[starts].tolist()
        assert len(set(owners)) == len(owners), f"rows of a sequence are apart: {sequence.tolist()}"
        for row, (first, stop, s) in enumerate(zip(starts.tolist(), stops, owners, strict=True)):
            held = self._sequences[s]
            table[row] = (first, stop - first, s, held.source if held.n_valid else EMPTY)
        return table

    def commit(self, sequence: int, n_rows: int) -> None:
        """A micro-batch with ``n_rows`` of a sequence has run: its planes are those of its end.

        One that failed may have written some layers and not others: ``clear`` its sequences.
        """
        assert n_rows >= 1, n_rows
        held = self._sequences[sequence]
        held.length += n_rows
        held.n_valid = min(n_rows, self.shape.n_planes)
        held.source = 0

    def can_roll_back(self, sequence: int, n: int) -> bool:
        """Whether ``rollback`` would be done."""
        held = self._sequences[sequence]
        return n == 0 or (held.source == 0 and 0 < n < held.n_valid)

    def rollback(self, sequence: int, n: int) -> bool:
        """Go back ``n`` tokens exactly; False, and nothing changes, when no valid plane holds that state.

        That is: n reaches as many rows as the last micro-batch had, or more than ``n_rs_seq``, or another rollback
        is pending, no batch having run since. Nothing is copied.
        """
        assert n >= 0, n
        if not self.can_roll_back(sequence, n):
            return False
        held = self._sequences[sequence]
        held.length -= n
        held.source += n
        return True

    def clear(self, sequence: int) -> None:
        """Forget a sequence: its next batch starts from zeros."""
        self._sequences[sequence] = _Sequence()

    def check_integrity(self) -> None:
        """Planes are within bounds and agree with lengths. Raises AssertionError: a bug here."""
        for number, s in enumerate(self._sequences):
            assert 0 <= s.n_valid <= self.shape.n_planes, f"sequence {number}: {s.n_valid} planes"
            assert s.n_valid <= s.length + s.source, f"sequence {number}: more planes than tokens: {s}"
            assert 0 <= s.source < max(1, s.n_valid), f"sequence {number}: starts from a stale plane: {s}"
            assert (s.n_valid == 0) == (s.length == 0), f"sequence {number}: a length without a state: {s}"

    def release(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()
        self.buffers = ()
        self.arena.release()
