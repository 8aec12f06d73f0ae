"""Attention over a paged cache, and the store into it, against the float64 twin."""

from dataclasses import dataclass

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cells import PAIRS, TYPES, decoded, empty_caches, fill, fitting, held

from refengine.kernels import CACHE_PAIRS, HEAD_DIMS, WHOLE_HEAD_DIM
from refengine.kernels.attention import (
    SPAN,
    WARPS,
    attention,
    attention_f64,
    attention_merge,
    attention_whole,
    store_kv,
)
from refengine.kernels.gates import output_gate
from refengine.kernels.kv_types import PAGE, CacheType

Pair = tuple[CacheType, CacheType]
F32: Pair = ("f32", "f32")


def head_dims(pair: Pair) -> tuple[int, ...]:
    """All head sizes for the pairs that stand for all, one for the rest: each is a kernel to compile."""
    return fitting(pair, HEAD_DIMS) if pair in CACHE_PAIRS else (64,)


@dataclass
class Sequences:
    """Keys and values of sequences of ``lengths`` positions, stored by the kernel in scattered pages."""

    types: Pair
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
        return self.rng.standard_normal((length, self.n_head_kv, self.head_dim)).astype(np.float32)

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
        k_cache, v_cache = empty_caches(self.types, n_pages, self.n_head_kv, self.head_dim, self.rng)
        cell = np.concatenate(cells).astype(np.int32)
        order = self.rng.permutation(len(cell))
        stored = Bench().run(
            store_kv(*self.types),
            (self.n_head_kv, len(cell)),
            k=np.concatenate(self.keys)[order],
            v=np.concatenate(self.values)[order],
            cell=cell[order],
            k_cache=k_cache,
            v_cache=v_cache,
        )
        self.k_cache, self.v_cache = stored["k_cache"], stored["v_cache"]

    def attend(
        self, q: Array, sequence: Array, position: Array, threads: int | None = None, warps: int = 1
    ) -> Array:
        n_tokens, n_head, head_dim = q.shape
        n_spans = -(-max(self.lengths) // SPAN)
        found = Bench(threads=threads).run(
            attention(*self.types, self.head_dim, warps),
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
            attention_merge(self.head_dim, min(warps, -(-self.head_dim // 32))),
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
            keys, values = held(self.types[0], self.keys[row]), held(self.types[1], self.values[row])
            out[own] = attention_f64(q[own], keys, values, position[own], scale)
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


@pytest.mark.parametrize("types", PAIRS, ids="-".join)
@settings(max_examples=15)
@given(
    data=st.data(),
    n_head_kv=st.integers(1, 3),
    group=st.integers(1, 4),
    n_tokens=st.integers(1, 6),
    lengths=st.lists(LENGTHS, min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_attention_is_its_twin_wherever_pages_lie(
    types: Pair,
    data: st.DataObject,
    n_head_kv: int,
    group: int,
    n_tokens: int,
    lengths: list[int],
    seed: int,
):
    cached = Sequences(types, data.draw(st.sampled_from(head_dims(types))), n_head_kv, lengths, seed)
    asked = cached.queries(n_tokens, group)
    out = cached.attend(*asked)
    assert nmse(out, cached.twin(*asked)) < 1e-11
    cached.scatter()
    assert same_bits(cached.attend(*asked), out)
    q, sequence, position = (array[-1:] for array in asked)
    assert same_bits(cached.attend(q.copy(), sequence, position), out[-1:])


@pytest.mark.parametrize("name", TYPES)
def test_later_positions_are_not_seen(name: CacheType):
    cached = Sequences((name, name), 64, 2, [70], seed=0)
    q = cached.rng.standard_normal((70, 4, 64)).astype(np.float32)
    sequence, position = np.zeros(70, np.int32), np.arange(70, dtype=np.int32)
    out = cached.attend(q, sequence, position)
    for length in (1, 32, 33, 69):
        cut = Sequences((name, name), 64, 2, [length], seed=1)
        cut.keys, cut.values = [cached.keys[0][:length]], [cached.values[0][:length]]
        cut.scatter()
        assert same_bits(cut.attend(q[:length], sequence[:length], position[:length]), out[:length])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_bit(threads: int):
    cached = Sequences(("f16", "q8_0"), 64, 3, [100, 40], seed=0)
    asked = cached.queries(6, 3)
    assert same_bits(cached.attend(*asked, threads=threads), cached.attend(*asked))


@pytest.mark.parametrize(("types", "head_dim"), [(F32, 16), (("f16", "f16"), 80), (("q8_0", "bf16"), 64)])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.one_of(LENGTHS, st.sampled_from([SPAN, SPAN + 1, 400])), min_size=1, max_size=2),
    nan=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_warps_do_not_change_a_bit(types: Pair, head_dim: int, lengths: list[int], nan: bool, seed: int):
    cached = Sequences(types, head_dim, 2, lengths, seed)
    q, sequence, position = cached.queries(4, 2)
    if nan:
        q[1, 0, 5] = np.nan
    one = cached.attend(q, sequence, position)
    for warps in WARPS[1:]:
        assert same_bits(cached.attend(q, sequence, position, warps=warps), one), warps


@pytest.mark.parametrize("warps", [1, 8])
def test_scores_that_are_all_infinite_on_one_page_leave_the_others(warps: int):
    cached = Sequences(F32, 16, 1, [64], seed=0)
    cached.keys[0][:32, :, 0] = -np.inf
    cached.scatter()
    position = np.array([63], np.int32)
    out = cached.attend(np.ones((1, 1, 16), np.float32), np.zeros(1, np.int32), position, warps=warps)
    rest = np.ones((1, 1, 16)), cached.keys[0][32:], cached.values[0][32:]
    assert nmse(out, attention_f64(*rest, position - 32, float(np.float32(cached.scale)))) < 1e-11


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_wide_blocks_keep_everything_in_registers(head_dim: int):
    text = attention_whole("f16", "f16", head_dim, 8, gated=True).ptx((9, 0))
    assert ".local" not in text
    # The keys of a page, or 64 dimensions of them, which no loop holds back.
    assert text.count("ld.global.b16") >= 2 * 64


@pytest.mark.parametrize(("head_dim", "warps"), [(64, 3), (64, 0), (64, 16), (18, 1), (1028, 1)])
def test_shapes_of_blocks_that_are_not_built_are_refused(head_dim: int, warps: int):
    with pytest.raises(AssertionError):
        attention(*F32, head_dim, warps)


def test_the_first_position_sees_its_own_value_alone():
    cached = Sequences(F32, 16, 1, [1], seed=0)
    q, sequence, position = cached.queries(1, 2)
    out = cached.attend(q, sequence, position)
    assert same_bits(out[0, 0], cached.values[0][0, 0])
    assert same_bits(out[0, 1], cached.values[0][0, 0])


def test_a_nan_that_is_visible_shows():
    cached = Sequences(F32, 16, 1, [40], seed=0)
    cached.keys[0][35, 0, 3] = np.nan
    cached.scatter()
    q = np.ones((2, 1, 16), np.float32)
    out = cached.attend(q, np.zeros(2, np.int32), np.array([34, 39], np.int32))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_scores_far_apart_do_not_overflow():
    cached = Sequences(F32, 16, 1, [64], seed=0)
    q = np.full((1, 1, 16), 300, np.float32)
    cached.keys[0][:] = np.linspace(-50, 50, 64, dtype=np.float32)[:, None, None]
    cached.scatter()
    out = cached.attend(q, np.zeros(1, np.int32), np.array([63], np.int32))
    np.testing.assert_array_equal(out[0, 0], cached.values[0][63, 0])


# --- the store


@pytest.mark.parametrize("types", PAIRS, ids="-".join)
@settings(max_examples=15)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    n_tokens=st.integers(1, 40),
    exponent=st.one_of(st.just(0), st.integers(-150, 120)),
)
def test_store_writes_its_cells_as_numpy_would_and_touches_no_others(
    types: Pair, data: st.DataObject, seed: int, n_tokens: int, exponent: int
):
    """From elements that are all denormal to elements whose scale is infinite in half precision; some are 0."""
    head_dim = data.draw(st.sampled_from(head_dims(types)))
    rng = np.random.default_rng(seed)
    shape = (2, n_tokens, 2, head_dim)
    exact = rng.standard_normal(shape) * 2.0**exponent * (rng.random(shape) < 0.9)
    k, v = exact.astype(np.float32)
    cell = rng.permutation(3 * PAGE)[:n_tokens].astype(np.int32)
    k_cache, v_cache = empty_caches(types, 3, 2, head_dim, rng)
    after = Bench().run(
        store_kv(*types), (2, n_tokens), k=k, v=v, cell=cell, k_cache=k_cache, v_cache=v_cache
    )
    fill(types[0], k_cache, cell, k, "k")
    fill(types[1], v_cache, cell, v, "v")
    assert same_bits(after["k_cache"], k_cache)
    assert same_bits(after["v_cache"], v_cache)


def stored(name: CacheType, row: Array) -> Array:
    """A row [head_dim] as the kernel stores it as a key, which must be as it stores it as a value."""
    k_cache, v_cache = empty_caches((name, name), 1, 1, len(row), np.random.default_rng(0))
    x, cell = row.astype(np.float32)[None, None], np.array([7], np.int32)
    after = Bench().run(store_kv(name, name), (1, 1), k=x, v=x, cell=cell, k_cache=k_cache, v_cache=v_cache)
    assert same_bits(after["k_cache"][0, 0, :, 7].copy(), after["v_cache"][0, 0, 7, :].copy())
    return after["v_cache"][0, 0, 7, :].copy()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [32, 41, 63])
@pytest.mark.parametrize("name", TYPES)
def test_what_is_not_finite_stays_so(name: CacheType, at: int, bad: float):
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    row[at] = bad
    found = decoded(name, stored(name, row))
    if name == "q8_0":  # through its scale, which the other elements of the block share
        assert np.isnan(found[32:]).all()
        assert np.isfinite(found[:32]).all()
    else:
        np.testing.assert_array_equal(found[at], np.float32(bad))
        assert np.isfinite(np.delete(found, at)).all()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_bf16_rounds_every_pattern_to_nearest_even(bits: list[int]):
    x = np.array(bits, np.uint32).view(np.float32)
    found = stored("bf16", x)
    wide = decoded("bf16", found)
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(x))
    finite = np.isfinite(x) & np.isfinite(wide)
    # No neighbour is nearer, and of two as near it is the even one.
    error = np.abs(wide[finite].astype(np.float64) - x[finite])
    for step in (-1, 1):
        with np.errstate(invalid="ignore"):
            near = decoded("bf16", (found[finite].astype(np.int64) + step).astype(np.uint16))
            other = np.abs(near.astype(np.float64) - x[finite])
        assert not (other < error).any()
        assert (found[finite][other == error] % 2 == 0).all()


def test_q8_0_rounds_halves_away_from_zero():
    row = np.zeros(32, np.float32)
    row[:9] = [127, 0.5, 1.5, 2.5, -0.5, -2.5, np.float32(0.49999997), -np.float32(0.49999997), 126.5]
    found = stored("q8_0", row)
    assert found[:9].view(np.int8).tolist() == [127, 1, 2, 3, -1, -3, 0, 0, 127]
    assert found[32:].view("<f2").tolist() == [1.0]


def test_q8_0_divides_by_the_scale_before_it_is_rounded():
    row = np.zeros(32, np.float32)
    row[:2] = 1.0, 0.49998
    found = stored("q8_0", row)
    assert found[:2].tolist() == [127, 63]
    assert round(0.49998 / float(found[32:].view("<f2")[0])) == 64


@pytest.mark.parametrize("warps", [1, 8])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("types", CACHE_PAIRS, ids="-".join)
@settings(max_examples=10)
@given(
    n_head_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    lengths=st.lists(st.one_of(LENGTHS, st.just(SPAN)), min_size=1, max_size=3),
    nan=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_span_attended_to_whole_has_the_bits_of_all_stages(
    types: Pair, gated: bool, warps: int, n_head_kv: int, group: int, lengths: list[int], nan: bool, seed: int
):
    head_dim = WHOLE_HEAD_DIM
    made = Sequences(types, head_dim, n_head_kv, lengths, seed)
    q, sequence, position = made.queries(4, group)
    if nan:
        q[1, 0, 5] = np.nan
    n_head = q.shape[1]
    q_gate = made.rng.standard_normal((4, n_head, 2 * head_dim)).astype(np.float32)
    wanted = made.attend(q, sequence, position)
    if gated:
        rows = {"x": wanted.reshape(-1, head_dim), "q_gate": q_gate.reshape(-1, 2 * head_dim)}
        y = poisoned((4 * n_head, head_dim))
        wanted = Bench().run(output_gate, 4 * n_head, **rows, y=y)["y"].reshape(wanted.shape)
    found = Bench().run(
        attention_whole(*types, head_dim, warps, gated=gated), (n_head, 4),
        q=q, k_cache=made.k_cache, v_cache=made.v_cache, pages=made.pages, sequence=sequence, position=position,
        q_gate=q_gate, y=poisoned((4, n_head, 1, head_dim)), scale=made.scale,
    )["y"]  # fmt: skip
    assert same_bits(found[:, :, 0], wanted)
