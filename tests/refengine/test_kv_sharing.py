"""Sequences that share pages: each reads back what it wrote, whatever the others do."""

import numpy as np
import pytest
from engines import TARGET, Bench
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from instrumentation.levels import Level
from refengine.kernels.kv_types import PAGE
from refengine.memory.kv_cache import CacheShape, KVCache

SEQUENCES = 3


class Sharing(RuleBasedStateMachine):
    """A cell is a number that its writer put there; a model keeps the numbers of each sequence."""

    @initialize(n_pages=st.integers(1, 7))
    def begin(self, n_pages: int) -> None:
        self.bench = Bench(Level.OFF)
        shape = CacheShape(
            n_layer=1,
            n_head_kv=1,
            head_dim=4,
            n_ctx=n_pages * PAGE,
            n_sequences=SEQUENCES,
            type_k="f32",
            type_v="f32",
        )
        self.cache = KVCache(self.bench.allocator, shape, TARGET)
        self.memory = np.full((n_pages, PAGE), -1)
        self.held: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.next = 0

    def cells(self, sequence: int, start: int) -> np.ndarray:
        position = np.arange(start, len(self.held[sequence]), dtype=np.int32)
        return self.cache.cells(np.full(len(position), sequence, np.int32), position)

    @rule(counts=st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(0, 70), min_size=1))
    def extend(self, counts: dict[int, int]) -> None:
        free = self.cache.free_pages
        if not self.cache.fits(counts):
            held = [self.cache.n_pages(s) for s in range(SEQUENCES)]
            assert not self.cache.extend(counts)
            assert (free, held) == (self.cache.free_pages, [self.cache.n_pages(s) for s in range(SEQUENCES)])
            return
        for s, n in counts.items():
            parted = self.cache.part_tail(s) if n else None
            if parted is not None:
                old, new = parted
                self.memory[new] = self.memory[old]
        assert self.cache.extend(counts)
        for s, n in counts.items():
            start = len(self.held[s])
            self.held[s] += range(self.next, self.next + n)
            self.memory.reshape(-1)[self.cells(s, start)] = self.held[s][start:]
            self.next += n

    @rule(original=st.integers(0, SEQUENCES - 1), copy=st.integers(0, SEQUENCES - 1))
    def share(self, original: int, copy: int) -> None:
        if original == copy:
            return
        self.cache.remove(copy)
        free = self.cache.free_pages
        self.cache.share(original, copy)
        assert self.cache.free_pages == free
        self.held[copy] = list(self.held[original])

    @rule(sequence=st.integers(0, SEQUENCES - 1), part=st.floats(0, 1))
    def truncate(self, sequence: int, part: float) -> None:
        length = int(part * len(self.held[sequence]))
        self.cache.truncate(sequence, length)
        del self.held[sequence][length:]

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def part_and_join(self, sequence: int) -> None:
        if not self.cache.free_pages:
            return
        before = self.cache.page_table().tolist(), self.cache.free_pages
        parted = self.cache.part_tail(sequence)
        if parted is not None:
            self.cache.join_tail(sequence, parted[0])
        assert (self.cache.page_table().tolist(), self.cache.free_pages) == before

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def reads_what_it_wrote(self) -> None:
        self.cache.check_integrity()
        for s in range(SEQUENCES):
            assert self.cache.length(s) == len(self.held[s])
            assert self.memory.reshape(-1)[self.cells(s, 0)].tolist() == self.held[s]

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.release()
            assert self.bench.allocator.close() == []


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.fixture
def books():
    bench = Bench(Level.OFF)
    sizes = {"n_layer": 2, "n_head_kv": 1, "head_dim": 4, "n_ctx": 4 * PAGE, "n_sequences": SEQUENCES}
    shape = CacheShape(**sizes, type_k="f32", type_v="f32")
    made = KVCache(bench.allocator, shape, TARGET)
    yield made
    made.release()
    assert bench.allocator.close() == []


def test_to_write_into_a_shared_page_is_a_bug(books: KVCache):
    assert books.extend({0: 5})
    books.share(0, 1)
    with pytest.raises(AssertionError, match="shared page"):
        books.extend({1: 1})


def test_a_page_that_is_full_is_shared_for_good(books: KVCache):
    assert books.extend({0: PAGE})
    books.share(0, 1)
    assert books.part_tail(1) is None
    assert books.extend({0: PAGE, 1: 2 * PAGE})
    assert books.free_pages == 0


def test_of_two_that_go_on_one_keeps_the_page(books: KVCache):
    assert books.extend({0: 2 * PAGE + 1})
    books.share(0, 1)
    assert books.free_pages == 1
    assert books.fits({0: 1, 1: 1}), "one copy is enough for both"
    assert not books.fits({0: PAGE, 1: 1})


def test_only_an_empty_sequence_can_take_a_share(books: KVCache):
    assert books.extend({0: 5, 1: 1})
    with pytest.raises(AssertionError, match="not empty"):
        books.share(0, 1)


def test_views_of_a_page_cover_keys_and_values_of_each_layer(books: KVCache):
    views = list(books.page_views(2))
    assert [view.name for view in views] == ["kv.k.0[2]", "kv.v.0[2]", "kv.k.1[2]", "kv.v.1[2]"]
    for view, whole in zip(views, (v for layer in books.layers for v in layer), strict=True):
        assert view.address == whole.address + 2 * PAGE * 4 * 4
        assert view.nbytes == PAGE * 4 * 4
