"""Recurrent states after failed batches, rollbacks and copies, with the kernels that write them.

Whatever happened to a sequence, its states have the bits of one that only ever saw the tokens that it has now.
"""

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from engines import TARGET, Array, Bench, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kernel_runner import run

from refengine.kernels.gated_delta import columns_per_block, gated_delta
from refengine.kernels.short_conv import ROWS, short_conv
from refengine.memory.recurrent_state import EMPTY, RecurrentShape, RecurrentState

SEQUENCES, GARBAGE = 3, 0x3E
SIZE, KEY_HEADS, HEADS, TAPS = 16, 1, 2, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE
EPS = 1e-6
N_TOKENS = 7
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((CHANNELS, TAPS)).astype(np.float32)
#: of each token the row of x, and the gates
X = RNG.standard_normal((N_TOKENS, CHANNELS)).astype(np.float32)
GATES = np.stack(
    [RNG.uniform(0.3, 1, (N_TOKENS, HEADS)), RNG.uniform(0, 1, (N_TOKENS, HEADS))], axis=1
).astype(np.float32)
CONV, RULE = short_conv(TAPS), gated_delta(SIZE)
#: sequence -> its tokens
MicroBatch = dict[int, list[int]]


def grids(n_segments: int, n_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (-(-CHANNELS // 32), n_segments, -(-n_rows // ROWS)), (
        SIZE // columns_per_block(SIZE),
        HEADS,
        n_segments,
    )


@functools.cache
def recomputed(tokens: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """y of each token, and the last history and matrices, of one batch from the beginning."""
    ids, segments = list(tokens), np.array([[0, len(tokens), 0, EMPTY, 0]], np.int32)
    qkv, y = poisoned((len(ids), CHANNELS)), poisoned((len(ids), HEADS * SIZE))
    history, states = poisoned((1, 1, TAPS - 1, CHANNELS)), poisoned((1, 1, HEADS, SIZE * SIZE))
    conv_grid, rule_grid = grids(1, len(ids))
    run(CONV, conv_grid, X[ids], WEIGHT, segments, history, qkv)
    run(RULE, rule_grid, qkv, GATES[ids], segments, states, y, EPS)
    return y, history[0, 0], states[0, 0]


class Layer:
    """One recurrent layer over device memory, and the tokens that each sequence has."""

    def __init__(self, n_rs_seq: int, fill: int = GARBAGE) -> None:
        self.bench = Bench(threads=1)
        shape = RecurrentShape((0,), HEADS, SIZE, CHANNELS, TAPS, SEQUENCES, n_rs_seq)
        self.state = RecurrentState(self.bench.allocator, shape, TARGET)
        self.history, self.matrices = self.state.layers[0]
        for view in (self.history, self.matrices):
            self.bench.stream.fill(view, fill)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]

    def decode(self, *batch: MicroBatch, fails_in: int | None = None) -> None:
        """Micro-batches of one batch, or those before the one that fails and leaves garbage; None: none does."""
        before = {s: list(self.tokens[s]) for parts in batch for s in parts}
        self.state.begin(before)
        for i, parts in enumerate(batch):
            segments = self.state.segments(
                np.repeat(list(parts), [len(ids) for ids in parts.values()]).astype(np.int32)
            )
            if i == fails_in:
                self._spoil(segments)
                break
            self._run(parts, segments)
            self.state.check_integrity()
        if fails_in is None:
            self.state.end(before)
        else:
            self.state.abort(before)
            for s, ids in before.items():
                self.tokens[s] = ids

    def _run(self, parts: MicroBatch, segments: Array) -> None:
        ids = [token for part in parts.values() for token in part]
        bench, arena = self.bench, self.bench.arena(1 << 18)
        put = {
            "x": X[ids], "weight": WEIGHT, "gates": GATES[ids], "segments": segments,
            "qkv": poisoned((len(ids), CHANNELS)), "y": poisoned((len(ids), HEADS * SIZE)),
        }  # fmt: skip
        views = {name: bench.put(arena, array, name) for name, array in put.items()}
        conv_grid, rule_grid = grids(len(segments), len(ids))
        conv = {name: views[name] for name in ("x", "weight", "segments")}
        bench.stream.launch(CONV, conv_grid, {**conv, "history": self.history, "y": views["qkv"]})
        rule = {name: views[name] for name in ("qkv", "gates", "segments", "y")}
        bench.stream.launch(RULE, rule_grid, {**rule, "states": self.matrices, "eps": EPS})
        y = bench.get(views["y"])
        for view in views.values():
            view.buffer.free()
        arena.release()
        for (s, part), (first, n_rows) in zip(parts.items(), segments[:, :2].tolist(), strict=False):
            self.state.advance(s, len(part))
            self.tokens[s] = self.tokens[s] + part
            assert same_bits(y[first : first + n_rows], recomputed(tuple(self.tokens[s]))[0][-n_rows:])

    def _spoil(self, segments: Array) -> None:
        """What a micro-batch that fails may leave: anything, where it was to write."""
        for _, n_rows, slot, _, *targets in segments.tolist():
            for plane in targets[:n_rows]:
                for view in (self.history, self.matrices):
                    self.bench.stream.fill(view.row(slot).row(plane), GARBAGE)

    def roll_back(self, sequence: int, n: int) -> bool:
        done = self.state.rollback(sequence, n)
        if done:
            del self.tokens[sequence][len(self.tokens[sequence]) - n :]
        return done

    def clear(self, sequence: int) -> None:
        self.state.clear(sequence)
        self.tokens[sequence] = []

    def copy(self, source: int, target: int) -> None:
        for from_slot, from_plane, to_slot, to_plane in self.state.copies(source, target):
            for view in (self.history, self.matrices):
                self.bench.stream.copy(view.row(to_slot).row(to_plane), view.row(from_slot).row(from_plane))
        self.state.assume(source, target)
        self.tokens[target] = list(self.tokens[source])

    def check(self) -> None:
        """Every state that the books say is kept is that of its tokens, bit by bit."""
        self.state.check_integrity()
        for s, (held, tokens) in enumerate(zip(self.state._sequences, self.tokens, strict=True)):
            assert held.length == len(tokens)
            for length, plane in held.planes.items():
                _, history, matrices = recomputed(tuple(tokens[:length]))
                assert same_bits(self.bench.get(self.history.row(s).row(plane)), history)
                assert same_bits(self.bench.get(self.matrices.row(s).row(plane)), matrices)

    def close(self) -> None:
        self.check()
        assert self.bench.findings.list() == ()
        self.state.release()
        assert self.bench.allocator.close() == []


TOKENS = st.lists(st.integers(0, N_TOKENS - 1), min_size=1, max_size=6)
BATCH = st.lists(st.dictionaries(st.integers(0, SEQUENCES - 1), TOKENS, min_size=1), min_size=1, max_size=4)


class Life(RuleBasedStateMachine):
    """Everything that happens to sequences, in any order."""

    @initialize(n_rs_seq=st.integers(0, 4))
    def begin(self, n_rs_seq: int) -> None:
        self.layer = Layer(n_rs_seq)

    @rule(batch=BATCH)
    def decode(self, batch: list[MicroBatch]) -> None:
        self.layer.decode(*batch)

    @rule(batch=BATCH, data=st.data())
    def fail(self, batch: list[MicroBatch], data: st.DataObject) -> None:
        fails_in = data.draw(st.integers(0, len(batch) - 1))
        self.layer.decode(*batch, fails_in=fails_in)
        if data.draw(st.booleans()):
            self.layer.decode(*batch)

    @rule(sequence=st.integers(0, SEQUENCES - 1), n=st.integers(0, 5))
    def roll_back(self, sequence: int, n: int) -> None:
        self.layer.roll_back(sequence, n)

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def clear(self, sequence: int) -> None:
        self.layer.clear(sequence)

    @rule(pair=st.permutations(range(SEQUENCES)))
    def copy(self, pair: Sequence[int]) -> None:
        self.layer.clear(pair[1])
        self.layer.copy(pair[0], pair[1])

    @invariant()
    def every_state_is_exact(self) -> None:
        if hasattr(self, "layer"):
            self.layer.check()

    def teardown(self) -> None:
        if hasattr(self, "layer"):
            self.layer.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("fill", [0x00, 0x3E, 0xFF])
@settings(max_examples=20, deadline=None)
@given(
    n_rs_seq=st.integers(1, 4),
    prompt=TOKENS,
    drafted=st.lists(TOKENS, min_size=1, max_size=3),
    after=TOKENS,
    data=st.data(),
)
def test_a_rolled_back_state_never_decoded_what_was_taken_back(
    fill: int,
    n_rs_seq: int,
    prompt: list[int],
    drafted: list[list[int]],
    after: list[int],
    data: st.DataObject,
):
    """Tokens are taken back at once or bit by bit, from a micro-batch or from several."""
    layer = Layer(n_rs_seq, fill)
    layer.decode({0: prompt, 1: [0, 1]})
    layer.decode(*({1: [i], 0: part} for i, part in enumerate(drafted)))
    left = min(n_rs_seq, sum(len(part) for part in drafted))
    while left:
        n = data.draw(st.integers(1, left))
        assert layer.roll_back(0, n)
        left -= n
    layer.decode({0: after, 1: [3]})
    layer.close()


@pytest.mark.parametrize("fails_in", range(4))
def test_a_failed_batch_is_decoded_again_with_the_same_bits(fails_in: int):
    layer = Layer(1)
    layer.decode({0: [1, 2, 3], 2: [4]})
    batch = ({0: [4, 5, 6]}, {0: [1, 2, 3], 1: [5]}, {1: [6, 6], 0: [2]}, {1: [0]})
    for _ in range(3):
        layer.decode(*batch, fails_in=fails_in)
        assert layer.tokens == [[1, 2, 3], [], [4]]
        layer.check()
    layer.decode(*batch)
    layer.close()


@pytest.mark.parametrize("fill", [0x00, 0x3E, 0xFF])
def test_a_sequence_split_anywhere_beside_others_gives_the_same_bits(fill: int):
    tokens = [3, 1, 4, 1, 5, 2, 6, 5, 3]
    layer = Layer(2, fill)
    for cut in range(1, 9):
        layer.clear(1)
        layer.decode({1: tokens[:cut], 0: [2, 2]})
        layer.decode({0: [5], 1: tokens[cut:]})
        layer.check()
    layer.close()
