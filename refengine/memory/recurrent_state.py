"""What recurrent layers remember of each sequence: its last state, and the states a few tokens before.

A state cannot be cut back like a KV cache. So each sequence has n_rs_seq + 2 planes, and the books here say which plane
holds the state after how many tokens. A micro-batch writes its last states to planes that the books choose; the
plane of the state from before the batch is not among them until the batch ends. So a batch that failed, however much
of it ran, is undone by ``abort``, and a ``rollback`` of up to ``n_rs_seq`` tokens is exact: neither copies anything.
A plane that is handed out to be written leaves the books at once and enters them again when it was written, so
that a state half written is never read, and memory need not be zeroed.

The books are on the host; buffers are on the device. Layouts: ``refengine.kernels.short_conv`` and
``refengine.kernels.gated_delta``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.reservation import BufferRequest
from refengine.kernels.short_conv import FIRST_TARGET, segment_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from instrumentation.allocator import Allocator
    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.ownership import Owner
    from instrumentation.view import View

#: no plane: nothing to read, the sequence remembers nothing yet; or nothing to write
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
        """States kept for each sequence.

        The last one, one for each token that can be rolled back, and the one from before the batch that runs.
        """
        return self.n_rs_seq + 2

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
    """The books of one sequence. States are named by the number of tokens that they have seen."""

    #: tokens that the current state has seen; 0: zeros, in no plane
    length: int = 0
    #: plane of each state that is kept
    planes: dict[int, int] = field(default_factory=dict)
    #: the length when the open batch began, whose plane is not written; None: no batch is open
    pinned: int | None = None
    #: planes that a micro-batch writes now
    running: dict[int, int] = field(default_factory=dict)

    def hand_out(self, n_rows: int, n_planes: int) -> tuple[int, list[int]]:
        """Planes for a micro-batch: the one to read or ``EMPTY``, and those to write, the last state's first."""
        assert self.pinned is not None, f"no batch is open: {self}"
        assert not self.running, f"a micro-batch runs already: {self}"
        source = self.planes[self.length] if self.length else EMPTY
        end = self.length + n_rows
        # All but the pinned one, so that even one of many rows finds room: the source itself may be taken.
        states = [end - back for back in range(min(n_rows, n_planes - 1))]
        targets = sorted(set(range(n_planes)) - set(self.planes.values()))
        oldest_first = iter(sorted(self.planes.keys() - {self.pinned}))
        while len(targets) < len(states):
            targets.append(self.planes.pop(next(oldest_first)))
        self.running = dict(zip(states, targets, strict=False))
        return source, list(self.running.values())

    def go_back(self, length: int) -> None:
        """Make the state of ``length`` the current one, and drop those that are newer."""
        self.length = length
        self.planes = {n: plane for n, plane in self.planes.items() if n <= length}

    def check(self, n_planes: int) -> None:
        """Raises AssertionError: a bug here."""
        used = [*self.planes.values(), *self.running.values()]
        assert len(set(used)) == len(used), f"a plane holds two states: {self}"
        assert set(used) <= set(range(n_planes)), f"want planes 0 to {n_planes - 1}: {self}"
        assert all(0 < n <= self.length for n in self.planes), f"states that are newer than the last: {self}"
        assert all(n > self.length for n in self.running), f"states that are written twice: {self}"
        assert not self.running or self.pinned is not None, f"a micro-batch outside a batch: {self}"
        needed = {0 if self.running else self.length, self.pinned or 0} - {0}
        assert needed <= self.planes.keys(), f"states {sorted(needed)} are needed, not all are kept: {self}"


class RecurrentState:
    """Convolution history and matrices of every recurrent layer, with the books of which plane holds what."""

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

    def plane(self, sequence: int) -> int | None:
        """Plane that holds a sequence's last state; None when that is zeros, in no plane."""
        held = self._closed(sequence)
        return held.planes[held.length] if held.length else None

    def begin(self, sequences: Iterable[int]) -> None:
        """Open a batch of these sequences: ``abort`` goes back to what they are now."""
        for s in sequences:
            held = self._closed(s)
            held.pinned = held.length

    def segments(self, sequence: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Table of a micro-batch for the kernels: int32 [n_sequences, segment_columns(n_rs_seq)], in batch order.

        ``sequence`` [n_rows] is each row's; rows of one sequence must be consecutive, and its batch open. Columns as
        ``refengine.kernels.short_conv`` has them. Segments of no rows follow, so that the shape of a launch does not
        depend on how many sequences a batch has. The oldest states make room for those that will be written, and
        are lost from here on; ``advance`` or ``abort`` must follow.
        """
        assert len(sequence), "a micro-batch has rows"
        table = np.full((self.shape.n_sequences, segment_columns(self.shape.n_rs_seq)), EMPTY, np.int32)
        table[:, :FIRST_TARGET] = (0, 0, 0, EMPTY)
        starts = np.flatnonzero(np.diff(sequence, prepend=-1))
        stops = [*starts[1:].tolist(), len(sequence)]
        owners = sequence[starts].tolist()
        assert len(set(owners)) == len(owners), f"rows of a sequence are apart: {sequence.tolist()}"
        for row, first, stop, s in zip(table, starts.tolist(), stops, owners, strict=False):
            source, targets = self._sequences[s].hand_out(stop - first, self.shape.n_planes)
            row[:FIRST_TARGET] = (first, stop - first, s, source)
            row[FIRST_TARGET : FIRST_TARGET + len(targets)] = targets
        return table

    def advance(self, sequence: int, n_rows: int) -> None:
        """A micro-batch with ``n_rows`` of a sequence has run: the planes that it was to write are valid."""
        held = self._sequences[sequence]
        assert max(held.running, default=0) == held.length + n_rows, f"{n_rows} rows were not running: {held}"
        held.length += n_rows
        held.planes |= held.running
        held.running = {}

    def end(self, sequences: Iterable[int]) -> None:
        """Close a batch that is done."""
        for s in sequences:
            held = self._sequences[s]
            assert held.pinned is not None, f"no batch of sequence {s} is open: {held}"
            assert not held.running, f"a micro-batch of sequence {s} still runs: {held}"
            held.pinned = None

    def abort(self, sequences: Iterable[int]) -> None:
        """Close a batch that failed: sequences have the length and the state that they had at ``begin``.

        Older states that the batch did not take the planes of are kept, so rollbacks may reach less far.
        """
        for s in sequences:
            held = self._sequences[s]
            assert held.pinned is not None, f"no batch of sequence {s} is open: {held}"
            held.running = {}
            held.go_back(held.pinned)
            held.pinned = None

    def can_roll_back(self, sequence: int, n: int) -> bool:
        """Whether ``rollback`` would be done."""
        assert n >= 0, n
        held = self._closed(sequence)
        return n in (0, held.length) or (n <= self.shape.n_rs_seq and held.length - n in held.planes)

    def rollback(self, sequence: int, n: int) -> bool:
        """Go back ``n`` tokens exactly, to what the sequence was before they were computed.

        False, and nothing changes, when n is more than ``n_rs_seq`` or no plane holds that state any more; all the
        way back, to nothing, is always possible. After a batch the states of its last ``n_rs_seq`` + 1 tokens
        are there, and together with older ones as many as there were before. Nothing is copied.
        """
        if not self.can_roll_back(sequence, n):
            return False
        held = self._sequences[sequence]
        held.go_back(held.length - n)
        return True

    def clear(self, sequence: int) -> None:
        """Forget a sequence: its next batch starts from zeros."""
        self._closed(sequence)
        self._sequences[sequence] = _Sequence()

    def copies(self, source: int, target: int) -> list[tuple[int, int, int, int]]:
        """What to copy in each layer so that ``target``, which is clear, has the last state of ``source``.

        (source slot, source plane, target slot, target plane) of each copy. The books change with ``assume``, once
        the copies are done.
        """
        held = self._closed(source)
        assert self._closed(target).length == 0, f"sequence {target} is not clear: {self._sequences[target]}"
        assert source != target, f"sequence {source} onto itself"
        return [(source, held.planes[held.length], target, 0)] if held.length else []

    def assume(self, source: int, target: int) -> None:
        """``copies`` were done: ``target`` is at the length of ``source``, and can be rolled back to nothing."""
        made = _Sequence(self._sequences[source].length)
        for *_, plane in self.copies(source, target):
            made.planes[made.length] = plane
        self._sequences[target] = made

    def check_integrity(self) -> None:
        """Planes are within bounds, hold one state each, and what is needed is kept. Raises AssertionError: a bug."""
        for held in self._sequences:
            held.check(self.shape.n_planes)

    def _closed(self, sequence: int) -> _Sequence:
        held = self._sequences[sequence]
        assert held.pinned is None, f"a batch of sequence {sequence} is open, end or abort it: {held}"
        return held

    def release(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()
        self.buffers = ()
        self.arena.release()
