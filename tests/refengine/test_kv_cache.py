"""The KV cache's books against a model of plain lists, and its memory."""

from contextlib import contextmanager

import numpy as np
import pytest
from engines import TARGET, Bench, FailNth
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from instrumentation.errors import OutOfMemoryError
from instrumentation.levels import Level
from refengine.kernels.kv_types import PAGE
from refengine.memory.kv_cache import CacheShape, KVCache

SEQUENCES = 3


def cache_shape(n_ctx: int, type_k: str = "f32", type_v: str = "f32", head_dim: int = 8) -> CacheShape:
    sizes = {"n_layer": 2, "n_head_kv": 2, "head_dim": head_dim, "n_ctx": n_ctx, "n_sequences": SEQUENCES}
    return CacheShape(**sizes, type_k=type_k, type_v=type_v)


@contextmanager
def cache(n_ctx: int, **options):
    bench = Bench(**options)
    made = KVCache(bench.allocator, cache_shape(n_ctx), TARGET)
    yield made
    made.release()
    assert bench.allocator.close() == []


class Books(RuleBasedStateMachine):
    """Each position of each sequence keeps its cell from when it is taken until it is given back."""

    @initialize(n_ctx=st.integers(1, 200))
    def begin(self, n_ctx: int) -> None:
        self.bench = Bench(Level.OFF)
        self.cache = KVCache(self.bench.allocator, cache_shape(n_ctx), TARGET)
        self.n_pages = -(-n_ctx // PAGE)
        #: cell of each position
        self.cells: list[list[int]] = [[] for _ in range(SEQUENCES)]

    def pages_held(self, lengths: list[int]) -> int:
        return sum(-(-n // PAGE) for n in lengths)

    @rule(counts=st.dictionaries(st.integers(0, SEQUENCES - 1), st.integers(0, 100), min_size=1))
    def extend(self, counts: dict[int, int]) -> None:
        wanted = [len(cells) + counts.get(s, 0) for s, cells in enumerate(self.cells)]
        fits = self.pages_held(wanted) <= self.n_pages
        assert self.cache.extend(counts) == fits
        if not fits:
            return
        for s, n in counts.items():
            position = np.arange(len(self.cells[s]), wanted[s], dtype=np.int32)
            assert len(position) == n
            self.cells[s] += self.cache.cells(np.full(n, s, np.int32), position).tolist()

    @rule(sequence=st.integers(0, SEQUENCES - 1), part=st.floats(0, 1))
    def truncate(self, sequence: int, part: float) -> None:
        length = int(part * len(self.cells[sequence]))
        self.cache.truncate(sequence, length)
        del self.cells[sequence][length:]

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def remove(self, sequence: int) -> None:
        self.cache.remove(sequence)
        self.cells[sequence].clear()

    @rule(sequence=st.integers(0, SEQUENCES - 1), excess=st.integers(1, 5))
    def truncate_to_more_is_refused(self, sequence: int, excess: int) -> None:
        with pytest.raises(AssertionError):
            self.cache.truncate(sequence, len(self.cells[sequence]) + excess)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        lengths = [len(cells) for cells in self.cells]
        assert [self.cache.length(s) for s in range(SEQUENCES)] == lengths
        assert self.cache.free_positions == (self.n_pages - self.pages_held(lengths)) * PAGE
        everything = [cell for cells in self.cells for cell in cells]
        assert len(set(everything)) == len(everything)
        assert all(0 <= cell < self.n_pages * PAGE for cell in everything)
        table = self.cache.page_table()
        assert table.shape == (SEQUENCES, self.n_pages)
        assert table.dtype == np.int32
        for s, cells in enumerate(self.cells):
            position = np.arange(len(cells), dtype=np.int32)
            assert self.cache.cells(np.full(len(cells), s, np.int32), position).tolist() == cells
            assert [int(table[s, p // PAGE]) * PAGE + p % PAGE for p in range(len(cells))] == cells

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.release()
            assert self.bench.allocator.close() == []


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_extend_is_all_or_nothing():
    with cache(3 * PAGE) as books:
        assert books.extend({0: PAGE, 1: PAGE})
        assert not books.extend({0: 1, 2: 1})
        assert [books.length(s) for s in range(SEQUENCES)] == [PAGE, PAGE, 0]
        books.check_integrity()
        assert books.extend({2: PAGE})
        assert not books.extend({2: 1})
        assert books.free_positions == 0


def test_cells_of_positions_that_were_not_taken_are_refused():
    with cache(64) as books:
        assert books.extend({0: 3})
        with pytest.raises(AssertionError):
            books.cells(np.zeros(1, np.int32), np.array([3], np.int32))


@pytest.mark.parametrize("damage", ["lost page", "page held twice", "wrong length"])
def test_damaged_books_do_not_pass(damage: str):
    with cache(4 * PAGE) as books:
        assert books.extend({0: 40})
        held = books._sequences[0]
        if damage == "lost page":
            books._free.pop()
        elif damage == "page held twice":
            books._sequences[1].pages.append(held.pages[0])
            books._sequences[1].length = 1
        else:
            held.length = 20
        with pytest.raises(AssertionError):
            books.check_integrity()


@pytest.mark.parametrize("types", [("f32", "f16"), ("bf16", "q8_0"), ("q8_0", "f32")], ids="-".join)
@pytest.mark.parametrize("n_ctx", [1, 32, 33])
def test_views_fill_their_buffers(types: tuple[str, str], n_ctx: int):
    shape = cache_shape(n_ctx, *types, head_dim=64)
    bench = Bench()
    books = KVCache(bench.allocator, shape, TARGET)
    assert len(books.layers) == 2
    # Bytes of a head's elements at one position: 64 codes and two scales of two bytes for q8_0.
    row = {"f32": 256, "f16": 128, "bf16": 128, "q8_0": 68}
    for buffers, views in zip(
        zip(books.buffers[::2], books.buffers[1::2], strict=True), books.layers, strict=True
    ):
        for buffer, view, name in zip(buffers, views, types, strict=True):
            assert view.nbytes == buffer.nbytes == shape.n_pages * PAGE * 2 * row[name]
    assert [buffer.name for buffer in books.buffers] == ["kv.k.0", "kv.v.0", "kv.k.1", "kv.v.1"]
    books.release()
    assert bench.allocator.close() == []


@pytest.mark.parametrize("nth", [0, 1])
def test_a_failed_reservation_leaves_nothing(nth: int):
    bench = Bench(faults=FailNth(nth))
    with pytest.raises(OutOfMemoryError, match="on purpose"):
        KVCache(bench.allocator, cache_shape(64), TARGET)
    assert bench.allocator.table() == ()
    assert bench.allocator.arenas == ()
    assert bench.allocator.close() == []


@pytest.mark.parametrize("name", ["n_layer", "n_head_kv", "head_dim", "n_ctx", "n_sequences"])
def test_an_empty_shape_is_no_shape(name: str):
    values = {"n_layer": 1, "n_head_kv": 1, "head_dim": 4, "n_ctx": 1, "n_sequences": 1}
    with pytest.raises(AssertionError):
        CacheShape(**(values | {name: 0}), type_k="f32", type_v="f32")


@pytest.mark.parametrize("types", [("q8_0", "f32"), ("f32", "q8_0")], ids="-".join)
def test_a_shape_has_whole_blocks(types: tuple[str, str]):
    with pytest.raises(AssertionError):
        cache_shape(32, *types, head_dim=48)
