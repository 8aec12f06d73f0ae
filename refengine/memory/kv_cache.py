"""The KV cache: pages of positions, shared by all sequences of a context.

A sequence holds pages in position order; page i has its positions 32 i to 32 i + 31. Where pages lie never changes
a result (see ``refengine.kernels.attention``). Sequences may share pages (``share``); one that is not full is copied
before a sequence goes on in it. The bookkeeping is on the host; buffers are on the device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.reservation import BufferRequest
from refengine.kernels.kv_types import KV_TYPES, PAGE, CacheType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from instrumentation.allocator import Allocator
    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.ownership import Owner
    from instrumentation.view import View


@dataclass(frozen=True)
class CacheShape:
    """Extents of a KV cache. ``n_ctx`` is rounded up to whole pages."""

    n_layer: int
    n_head_kv: int
    head_dim: int
    n_ctx: int
    n_sequences: int
    type_k: CacheType
    type_v: CacheType

    def __post_init__(self) -> None:
        assert min(self.n_layer, self.n_head_kv, self.head_dim, self.n_ctx, self.n_sequences) >= 1, self
        for name in (self.type_k, self.type_v):
            assert KV_TYPES[name].fits(self.head_dim), self

    @property
    def n_pages(self) -> int:
        """Pages of the whole cache."""
        return -(-self.n_ctx // PAGE)

    def requests(self, owner: Owner) -> list[BufferRequest]:
        """Buffers of the cache: keys and values of each layer."""
        extents = (self.n_pages, self.n_head_kv, self.head_dim)
        return [
            BufferRequest(nbytes=KV_TYPES[name].nbytes(*extents), owner=owner, name=f"kv.{part}.{layer}")
            for layer in range(self.n_layer)
            for part, name in (("k", self.type_k), ("v", self.type_v))
        ]


@dataclass
class _Sequence:
    pages: list[int] = field(default_factory=list)
    length: int = 0
    #: ``pages`` are others than the table has
    moved: bool = True


class KVCache:
    """Keys and values of every layer, with the books of who holds which page."""

    def __init__(self, allocator: Allocator, shape: CacheShape, owner: Owner) -> None:
        self.shape = shape
        requests = shape.requests(owner)
        size = allocator.arena_size(requests)
        self.arena: Arena = allocator.reserve_arena(size, owner=owner, name="kv").unwrap()
        try:
            self.buffers: tuple[Buffer, ...] = self.arena.reserve_all(requests).unwrap()
        except BaseException:
            self.arena.release()
            raise
        key, value = KV_TYPES[shape.type_k], KV_TYPES[shape.type_v]
        extents = (shape.n_pages, shape.n_head_kv, shape.head_dim)
        self.layers: list[tuple[View, View]] = [
            (
                k.view(key.dtype, key.keys(*extents), bits=key.bits),
                v.view(value.dtype, value.values(*extents), bits=value.bits),
            )
            for k, v in zip(self.buffers[::2], self.buffers[1::2], strict=True)
        ]
        self._free = list(range(shape.n_pages - 1, -1, -1))
        self._holders = [0] * shape.n_pages
        self._sequences = [_Sequence() for _ in range(shape.n_sequences)]
        self._table = np.zeros((shape.n_sequences, shape.n_pages), np.int32)

    @property
    def free_positions(self) -> int:
        """Positions in pages that no sequence holds."""
        return len(self._free) * PAGE

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, sequence: int) -> int:
        """Positions that a sequence holds."""
        return self._sequences[sequence].length

    def n_pages(self, sequence: int) -> int:
        """Pages that a sequence holds, those included that others hold too."""
        return len(self._sequences[sequence].pages)

    def fits(self, counts: Mapping[int, int]) -> bool:
        """Whether there is room for ``counts[sequence]`` more positions of each sequence."""
        missing = 0
        tails: dict[int, int] = {}
        for s, n in counts.items():
            missing += self._missing(s, n)
            tail = self._shared_tail(s) if n else None
            if tail is not None:
                tails[tail] = tails.get(tail, 0) + 1
        copies = sum(min(n, self._holders[page] - 1) for page, n in tails.items()) if tails else 0
        return copies + missing <= len(self._free)

    def extend(self, counts: Mapping[int, int]) -> bool:
        """Take room for ``counts[sequence]`` more positions of each sequence: all, or nothing and False.

        Pages that a sequence goes on in must be its own: ``part_tail`` first.
        """
        if not self.fits(counts):
            return False
        for s, n in counts.items():
            assert not n or self._shared_tail(s) is None, f"sequence {s} would write into a shared page"
            held = self._sequences[s]
            for _ in range(self._missing(s, n)):
                held.pages.append(self._take())
                held.moved = True
            held.length += n
        return True

    def part_tail(self, sequence: int) -> tuple[int, int] | None:
        """Give a sequence a last page of its own in place of one that it shares and that is not full.

        Returns (old page, new page): what the old one holds must be copied. None when there is nothing to do. The
        caller has asked ``fits`` before.
        """
        tail = self._shared_tail(sequence)
        if tail is None:
            return None
        new = self._take()
        held = self._sequences[sequence]
        held.pages[-1] = new
        held.moved = True
        self._holders[tail] -= 1
        return tail, new

    def join_tail(self, sequence: int, old: int) -> None:
        """Undo ``part_tail``, which replaced page ``old``."""
        held = self._sequences[sequence]
        self._drop(held.pages[-1])
        held.pages[-1] = old
        held.moved = True
        self._holders[old] += 1

    def share(self, source: int, target: int) -> None:
        """Let an empty sequence hold what another holds; no memory is taken or copied."""
        assert not self._sequences[target].pages, f"sequence {target} is not empty"
        held = self._sequences[source]
        self._sequences[target] = _Sequence(list(held.pages), held.length)
        for page in held.pages:
            self._holders[page] += 1

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` positions of a sequence; whole pages behind them that nobody holds are free."""
        held = self._sequences[sequence]
        assert 0 <= length <= held.length, (sequence, length, held.length)
        held.length = length
        keep = -(-length // PAGE)
        if keep < len(held.pages):
            for page in reversed(held.pages[keep:]):
                self._drop(page)
            del held.pages[keep:]
            held.moved = True

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self.truncate(sequence, 0)

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def _missing(self, sequence: int, n: int) -> int:
        held = self._sequences[sequence]
        return max(0, -(-(held.length + n) // PAGE) - len(held.pages))

    def _shared_tail(self, sequence: int) -> int | None:
        """Last page of a sequence when it is not full and others hold it too."""
        held = self._sequences[sequence]
        if held.length % PAGE == 0 or self._holders[held.pages[-1]] == 1:
            return None
        return held.pages[-1]

    def page_views(self, page: int) -> Iterator[View]:
        """Keys and values of one page in every layer."""
        for view in (view for layer in self.layers for view in layer):
            nbytes = view.nbytes // self.shape.n_pages
            yield view.buffer.view(np.uint8, nbytes, offset=page * nbytes, name=f"{view.name}[{page}]")

    def cells(
        self, sequence: npt.NDArray[np.int32], position: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Cell (page * PAGE + slot) of each (sequence, position), which must have been taken. int32 [n]."""
        out = np.empty(len(position), np.int32)
        for i, (s, p) in enumerate(zip(sequence.tolist(), position.tolist(), strict=True)):
            held = self._sequences[s]
            assert 0 <= p < held.length, (s, p, held.length)
            out[i] = held.pages[p // PAGE] * PAGE + p % PAGE
        return out

    def page_table(self) -> npt.NDArray[np.int32]:
        """Pages of each sequence in position order, 0 where there is none. int32 [n_sequences, n_pages].

        Valid until a sequence changes.
        """
        for row, held in zip(self._table, self._sequences, strict=True):
            if held.moved:
                row[: len(held.pages)] = held.pages
                row[len(held.pages) :] = 0
                held.moved = False
        return self._table

    def check_integrity(self) -> None:
        """Pages are free or held as often as counted; lengths fit their pages. Raises AssertionError: a bug here."""
        held = Counter(page for s in self._sequences for page in s.pages)
        assert [held[page] for page in range(self.shape.n_pages)] == self._holders, "holders miscounted"
        assert sorted([*held, *self._free]) == list(range(self.shape.n_pages)), "pages lost, or held and free"
        for number, s in enumerate(self._sequences):
            assert len(s.pages) == -(-s.length // PAGE), (
                f"sequence {number}: {s.length} in {len(s.pages)} pages"
            )

    def release(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()
        self.buffers = ()
        self.arena.release()
