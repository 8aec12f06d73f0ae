"""Attention over a paged cache, and the store into it, against the float64 twin."""

from dataclasses import dataclass

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine.kernels.attention import (
    CACHE_DTYPES,
    PAGE,
    SPAN,
    CacheType,
    attention,
    attention_f64,
    attention_merge,
    store_kv,
)

TYPES: tuple[CacheType, ...] = ("f32", "f16")
HEAD_DIMS = (16, 64, 80, 128, 256)


def garbage(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> Array:
    """What unwritten cells may hold: NaN (bytes 0xFF), or numbers that look right (bytes 0x3E)."""
    chosen = np.where(rng.random(shape) < 0.5, 0xFF, 0x3E).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(chosen, dtype.itemsize, axis=-1).view(dtype))


@dataclass
class Sequences:
    """Keys and values of sequences of ``lengths`` positions, stored by the kernel in scattered pages."""

    cache_type: CacheType
    head_dim: int
    n_head_kv: int
    lengths: list[int]
    seed: int
    spare: int = 3

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.keys = [self._values(n) for n in self.lengths]
        self.values = [self._values(n) for n in self.lengths]
        self.scatter()

    def _values(self, length: int) -> Array:
        values = self.rng.standard_normal((length, self.n_head_kv, self.head_dim)).astype(np.float32)
        return values.astype(np.float16).astype(np.float32) if self.cache_type == "f16" else values

    def scatter(self) -> None:
        """Store everything into pages in another order, with other garbage in the rest."""
        needed = [-(-n // PAGE) for n in self.lengths]
        n_pages = sum(needed) + self.spare
        free = self.rng.permutation(n_pages).astype(np.int32)
        # Entries behind a sequence's end name no page of it; they must not be looked at.
        self.pages = np.full((len(self.lengths), max(needed) + 1), 2**30, np.int32)
        cells = []
        for row, (count, length) in enumerate(zip(needed, self.lengths, strict=True)):
            taken, free = free[:count], free[count:]
            self.pages[row, :count] = taken
            position = np.arange(length)
            cells.append(taken[position // PAGE] * PAGE + position % PAGE)
        dtype = CACHE_DTYPES[self.cache_type]
        shape = (n_pages, self.n_head_kv)
        self.k_cache = garbage((*shape, self.head_dim, PAGE), dtype, self.rng)
        self.v_cache = garbage((*shape, PAGE, self.head_dim), dtype, self.rng)
        cell = np.concatenate(cells).astype(np.int32)
        order = self.rng.permutation(len(cell))
        stored = Bench().run(
            store_kv(self.cache_type),
            (self.n_head_kv, len(cell)),
            k=np.concatenate(self.keys)[order],
            v=np.concatenate(self.values)[order],
            cell=cell[order],
            k_cache=self.k_cache,
            v_cache=self.v_cache,
        )
        self.k_cache, self.v_cache = stored["k_cache"], stored["v_cache"]

    def attend(self, q: Array, sequence: Array, position: Array, threads: int | None = None) -> Array:
        n_tokens, n_head, head_dim = q.shape
        n_spans = -(-max(self.lengths) // SPAN)
        found = Bench(threads=threads).run(
            attention(self.cache_type, self.head_dim),
            (n_head, n_tokens, n_spans),
            q=q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            pages=self.pages,
            sequence=sequence,
            position=position,
            partial=poisoned((n_tokens, n_head, n_spans, head_dim + 2)),
            scale=self.scale,
        )
        merged = Bench(threads=threads).run(
            attention_merge(self.head_dim),
            (n_head, n_tokens),
            partial=found["partial"],
            position=position,
            out=poisoned(q.shape),
            scale=self.scale,
        )
        return merged["out"]

    def twin(self, q: Array, sequence: Array, position: Array) -> Array:
        out = np.empty(q.shape)
        for row in np.unique(sequence):
            own = sequence == row
            scale = float(np.float32(self.scale))
            out[own] = attention_f64(q[own], self.keys[row], self.values[row], position[own], scale)
        return out

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def queries(self, n_tokens: int, group: int) -> tuple[Array, Array, Array]:
        q = self.rng.standard_normal((n_tokens, self.n_head_kv * group, self.head_dim)).astype(np.float32)
        sequence = self.rng.integers(0, len(self.lengths), n_tokens).astype(np.int32)
        position = np.array([self.rng.integers(0, self.lengths[s]) for s in sequence], np.int32)
        return q, sequence, position


LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([31, 32, 33, 63, 64, 65]), st.integers(1, 200))


@pytest.mark.parametrize("cache_type", TYPES)
@settings(max_examples=40)
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    n_head_kv=st.integers(1, 3),
    group=st.integers(1, 4),
    n_tokens=st.integers(1, 6),
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_is_its_twin_wherever_pages_lie(
    cache_type: CacheType,
    head_dim: int,
    n_head_kv: int,
    group: int,
    n_tokens: int,
    lengths: list[int],
    seed: int,
):
    cached = Sequences(cache_type, head_dim, n_head_kv, lengths, seed)
    asked = cached.queries(n_tokens, group)
    out = cached.attend(*asked)
    assert nmse(out, cached.twin(*asked)) < 1e-11
    cached.scatter()
    assert same_bits(cached.attend(*asked), out)
    q, sequence, position = (array[-1:] for array in asked)
    assert same_bits(cached.attend(q.copy(), sequence, position), out[-1:])


@pytest.mark.parametrize("cache_type", TYPES)
def test_later_positions_are_not_seen(cache_type: CacheType):
    cached = Sequences(cache_type, 16, 2, [70], seed=0)
    q = cached.rng.standard_normal((70, 4, 16)).astype(np.float32)
    sequence, position = np.zeros(70, np.int32), np.arange(70, dtype=np.int32)
    out = cached.attend(q, sequence, position)
    for length in (1, 32, 33, 69):
        cut = Sequences(cache_type, 16, 2, [length], seed=1)
        cut.keys, cut.values = [cached.keys[0][:length]], [cached.values[0][:length]]
        cut.scatter()
        assert same_bits(cut.attend(q[:length], sequence[:length], position[:length]), out[:length])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_bit(threads: int):
    cached = Sequences("f16", 64, 3, [100, 40], seed=0)
    asked = cached.queries(6, 3)
    assert same_bits(cached.attend(*asked, threads=threads), cached.attend(*asked))


def test_the_first_position_sees_its_own_value_alone():
    cached = Sequences("f32", 16, 1, [1], seed=0)
    q, sequence, position = cached.queries(1, 2)
    out = cached.attend(q, sequence, position)
    assert same_bits(out[0, 0], cached.values[0][0, 0])
    assert same_bits(out[0, 1], cached.values[0][0, 0])


def test_a_nan_that_is_visible_shows():
    cached = Sequences("f32", 16, 1, [40], seed=0)
    cached.keys[0][35, 0, 3] = np.nan
    cached.scatter()
    q = np.ones((2, 1, 16), np.float32)
    out = cached.attend(q, np.zeros(2, np.int32), np.array([34, 39], np.int32))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_scores_far_apart_do_not_overflow():
    cached = Sequences("f32", 16, 1, [64], seed=0)
    q = np.full((1, 1, 16), 300, np.float32)
    cached.keys[0][:] = np.linspace(-50, 50, 64, dtype=np.float32)[:, None, None]
    cached.scatter()
    out = cached.attend(q, np.zeros(1, np.int32), np.array([63], np.int32))
    np.testing.assert_array_equal(out[0, 0], cached.values[0][63, 0])


@pytest.mark.parametrize("cache_type", TYPES)
@given(seed=st.integers(0, 2**32 - 1), head_dim=st.sampled_from(HEAD_DIMS), n_tokens=st.integers(1, 40))
def test_store_touches_its_cells_only(cache_type: CacheType, seed: int, head_dim: int, n_tokens: int):
    rng = np.random.default_rng(seed)
    k, v = rng.standard_normal((2, n_tokens, 2, head_dim)).astype(np.float32)
    cell = rng.permutation(3 * PAGE)[:n_tokens].astype(np.int32)
    dtype = CACHE_DTYPES[cache_type]
    before = {
        "k_cache": garbage((3, 2, head_dim, PAGE), dtype, rng),
        "v_cache": garbage((3, 2, PAGE, head_dim), dtype, rng),
    }
    after = Bench().run(store_kv(cache_type), (2, n_tokens), k=k, v=v, cell=cell, **before)
    encode = (lambda x: x) if cache_type == "f32" else (lambda x: x.astype(np.float16).view(np.uint16))
    page, slot = cell // PAGE, cell % PAGE
    before["k_cache"][page, :, :, slot] = encode(k)
    before["v_cache"][page, :, slot, :] = encode(v)
    assert same_bits(after["k_cache"], before["k_cache"])
    assert same_bits(after["v_cache"], before["v_cache"])
