"""The recurrent state's books against a plain model, its memory, and rollbacks with the kernels that write it."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from engines import TARGET, Array, Bench, FailNth, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from instrumentation.errors import OutOfMemoryError
from instrumentation.levels import Level
from refengine.kernels.gated_delta import columns_per_block, gated_delta
from refengine.kernels.short_conv import short_conv
from refengine.memory.recurrent_state import EMPTY, RecurrentShape, RecurrentState

SEQUENCES = 3
SIZE, KEY_HEADS, HEADS, TAPS = 16, 1, 2, 4
CHANNELS = (2 * KEY_HEADS + HEADS) * SIZE


def shape(n_rs_seq: int, n_sequences: int = SEQUENCES) -> RecurrentShape:
    return RecurrentShape((0, 1, 4), HEADS, SIZE, CHANNELS, TAPS, n_sequences, n_rs_seq)


@contextmanager
def recurrent(n_rs_seq: int, **options):
    bench = Bench(**options)
    made = RecurrentState(bench.allocator, shape(n_rs_seq), TARGET)
    yield made
    made.check_integrity()
    made.release()
    assert bench.allocator.close() == []


class Books(RuleBasedStateMachine):
    """The model: the tokens that each sequence has seen, and what each plane was written from."""

    @initialize(n_rs_seq=st.integers(0, 4))
    def begin(self, n_rs_seq: int) -> None:
        self.bench = Bench(Level.OFF)
        self.state = RecurrentState(self.bench.allocator, shape(n_rs_seq), TARGET)
        self.n_planes = n_rs_seq + 1
        self.next_token = 0
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        #: of each plane the tokens that its state has seen; None: never written
        self.planes: list[list[list[int] | None]] = [[None] * self.n_planes for _ in range(SEQUENCES)]

    @rule(
        counts=st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, 7)), min_size=1, max_size=5)
    )
    def decode(self, counts: list[tuple[int, int]]) -> None:
        batch = list(dict(counts).items())
        sequence = np.array([s for s, n in batch for _ in range(n)], np.int32)
        table = self.state.segments(sequence)
        assert table.shape == (SEQUENCES, 4)
        assert (table[len(batch) :, 1] == 0).all()
        for (s, n), (first, n_rows, slot, source) in zip(batch, table.tolist(), strict=False):
            assert (sequence[first : first + n_rows] == s).all()
            assert (n_rows, slot) == (n, s)
            # What the kernels read is exactly the sequence's history.
            seen = [] if source == EMPTY else self.planes[s][source]
            assert seen == self.tokens[s]
            self.tokens[s] = self.tokens[s] + list(range(self.next_token, self.next_token + n))
            self.next_token += n
            for plane in range(min(n, self.n_planes)):
                self.planes[s][plane] = self.tokens[s][: len(self.tokens[s]) - plane]
            self.state.commit(s, n)

    @rule(sequence=st.integers(0, SEQUENCES - 1), n=st.integers(0, 6))
    def rollback(self, sequence: int, n: int) -> None:
        before = self.state.segments(np.array([sequence], np.int32))
        possible = self.state.can_roll_back(sequence, n)
        assert self.state.rollback(sequence, n) == possible
        if possible:
            del self.tokens[sequence][len(self.tokens[sequence]) - n :]
        else:
            assert (self.state.segments(np.array([sequence], np.int32)) == before).all()

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def clear(self, sequence: int) -> None:
        self.state.clear(sequence)
        self.tokens[sequence] = []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check_integrity()
        assert [self.state.length(s) for s in range(SEQUENCES)] == [len(t) for t in self.tokens]

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.release()
            assert self.bench.allocator.close() == []


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(("n_rs_seq", "n_rows"), [(3, 1), (3, 2), (3, 3), (3, 4), (3, 9), (0, 5), (1, 2)])
def test_rollback_reaches_what_the_last_batch_wrote_and_no_further(n_rs_seq: int, n_rows: int):
    for n in range(8):
        with recurrent(n_rs_seq) as state:
            state.commit(1, 10)
            state.commit(1, n_rows)
            done = state.rollback(1, n)
            assert done == (n < min(n_rows, n_rs_seq + 1))
            assert state.length(1) == 10 + n_rows - n * done


def test_a_second_rollback_needs_a_batch_between():
    with recurrent(4) as state:
        state.commit(0, 5)
        assert state.rollback(0, 1)
        assert not state.rollback(0, 1)
        assert state.rollback(0, 0)
        assert state.length(0) == 4
        state.commit(0, 2)
        assert state.rollback(0, 1)


def test_nothing_rolls_back_where_nothing_is():
    with recurrent(4) as state:
        assert not state.rollback(0, 1)
        state.commit(0, 5)
        state.clear(0)
        assert not state.rollback(0, 1)
        assert state.segments(np.zeros(2, np.int32))[0].tolist() == [0, 2, 0, EMPTY]


def test_the_table_follows_the_batch():
    with recurrent(2) as state:
        state.commit(0, 3)
        state.commit(2, 3)
        assert state.rollback(2, 2)
        table = state.segments(np.array([2, 2, 1, 0, 0, 0], np.int32))
        assert table.dtype == np.int32
        assert table.tolist() == [[0, 2, 2, 2], [2, 1, 1, EMPTY], [3, 3, 0, 0]]


def test_rows_of_one_sequence_that_are_apart_are_refused():
    with recurrent(2) as state, pytest.raises(AssertionError, match="apart"):
        state.segments(np.array([0, 1, 0], np.int32))


@pytest.mark.parametrize("damage", ["stale source", "too many planes", "length without state"])
def test_damaged_books_do_not_pass(damage: str):
    with recurrent(2) as state:
        state.commit(0, 2)
        held = state._sequences[0]
        if damage == "stale source":
            held.source = 2
        elif damage == "too many planes":
            held.n_valid = 4
        else:
            held.n_valid = 0
        with pytest.raises(AssertionError):
            state.check_integrity()
        state.clear(0)


def test_views_fill_their_buffers():
    with recurrent(3) as state:
        assert list(state.layers) == [0, 1, 4]
        assert [b.name for b in state.buffers] == [
            f"rs.{p}.{i}" for i in (0, 1, 4) for p in ("conv", "state")
        ]
        for views, buffers in zip(
            state.layers.values(), zip(state.buffers[::2], state.buffers[1::2], strict=True), strict=True
        ):
            assert [v.nbytes for v in views] == [b.nbytes for b in buffers]
        conv, matrices = state.layers[4]
        assert conv.shape == (SEQUENCES, 4, TAPS - 1, CHANNELS)
        assert matrices.shape == (SEQUENCES, 4, HEADS, SIZE * SIZE)


@pytest.mark.parametrize("nth", [0, 1])
def test_a_failed_reservation_leaves_nothing(nth: int):
    bench = Bench(faults=FailNth(nth))
    with pytest.raises(OutOfMemoryError, match="on purpose"):
        RecurrentState(bench.allocator, shape(1), TARGET)
    assert bench.allocator.table() == ()
    assert bench.allocator.close() == []


@pytest.mark.parametrize(
    "wrong", [{"layers": ()}, {"layers": (1, 1)}, {"n_head": 0}, {"n_taps": 1}, {"n_sequences": 0}, {"n_rs_seq": -1}]
)  # fmt: skip
def test_an_empty_shape_is_no_shape(wrong: dict[str, object]):
    values = dict(vars(shape(1)))
    with pytest.raises(AssertionError):
        RecurrentShape(**(values | wrong))


@dataclass
class Layer:
    """One recurrent layer over device memory: the convolution, then the delta rule."""

    n_rs_seq: int
    fill: int
    n_sequences: int = 2
    weight: Array = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Bench(threads=1)
        self.state = RecurrentState(self.bench.allocator, shape(self.n_rs_seq, self.n_sequences), TARGET)
        for view in self.state.layers[1]:
            self.bench.stream.fill(view, self.fill)
        self.weight = np.random.default_rng(0).standard_normal((CHANNELS, TAPS)).astype(np.float32)

    def decode(self, *parts: tuple[int, Array, Array]) -> list[Array]:
        """Rows of sequences in one batch: (sequence, x, gates) each; y of each."""
        x, gates = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
        sequence = np.concatenate([np.full(len(part[1]), part[0], np.int32) for part in parts])
        segments = self.state.segments(sequence)
        history, states = self.state.layers[1]
        arena = self.bench.arena(1 << 18)
        put = {"x": x, "weight": self.weight, "segments": segments, "gates": gates}
        views = {name: self.bench.put(arena, array, name) for name, array in put.items()}
        for name, like in (("qkv", x), ("y", np.empty((len(x), HEADS * SIZE), np.float32))):
            views[name] = self.bench.put(arena, np.full_like(like, np.nan), name)
        n_segments = len(segments)
        conv = {name: views[name] for name in ("x", "weight", "segments")}
        self.bench.stream.launch(
            short_conv(TAPS), (-(-CHANNELS // 32), n_segments),
            {**conv, "history": history, "y": views["qkv"]},
        )  # fmt: skip
        rule = {name: views[name] for name in ("qkv", "gates", "segments", "y")}
        self.bench.stream.launch(
            gated_delta(SIZE), (SIZE // columns_per_block(SIZE), HEADS, n_segments),
            {**rule, "states": states, "eps": 1e-6},
        )  # fmt: skip
        y = self.bench.get(views["y"])
        for view in views.values():
            view.buffer.free()
        arena.release()
        for s, rows, _ in parts:
            self.state.commit(s, len(rows))
        self.state.check_integrity()
        return np.split(y, np.cumsum([len(part[1]) for part in parts])[:-1])

    def current(self, sequence: int) -> list[Array]:
        """Bytes of the state that the sequence's next batch starts from."""
        plane = self.state.segments(np.array([sequence], np.int32))[0, 3]
        return [self.bench.get(view)[sequence, plane] for view in self.state.layers[1]]

    def close(self) -> None:
        assert self.bench.findings.list() == ()
        self.state.release()
        assert self.bench.allocator.close() == []


def rows(rng: np.random.Generator, n: int) -> tuple[Array, Array]:
    gates = np.stack([rng.uniform(0.3, 1, (n, HEADS)), rng.uniform(0, 1, (n, HEADS))], axis=1)
    return rng.standard_normal((n, CHANNELS)).astype(np.float32), gates.astype(np.float32)


@pytest.mark.parametrize("fill", [0x3E, 0xFF])
@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 4),
    shorter=st.integers(0, 3),
    back=st.integers(1, 4),
    before=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_rolled_back_state_never_decoded_what_was_taken_back(
    fill: int, n: int, shorter: int, back: int, before: int, seed: int
):
    n_rows = max(1, n + 1 - shorter)
    rng = np.random.default_rng(seed)
    prompt, drafted, after = rows(rng, before), rows(rng, n_rows), rows(rng, 3)
    other = [rows(rng, count) for count in (2, 4)]
    layer, plain = Layer(n, fill), Layer(n, 0xFF ^ fill)
    if before:
        layer.decode((0, *prompt), (1, *other[0]))
        plain.decode((0, *prompt))
    layer.decode((1, *other[1]), (0, *drafted))
    done = layer.state.rollback(0, back)
    assert done == (back < min(n_rows, n + 1))
    if done:
        kept = tuple(part[: n_rows - back] for part in drafted)
        plain.decode((0, *kept))
        for found, wanted in zip(layer.current(0), plain.current(0), strict=True):
            assert same_bits(found, wanted)
        found = layer.decode((0, *after), (1, *other[0]))[0]
        assert np.isfinite(found).all()
        assert same_bits(found, plain.decode((0, *after))[0])
    layer.close()
    plain.close()


@pytest.mark.parametrize("fill", [0x00, 0x3E, 0xFF])
def test_a_sequence_split_anywhere_beside_others_gives_the_same_bits(fill: int):
    rng = np.random.default_rng(1)
    x, gates = rows(rng, 9)
    whole = Layer(2, 0)
    wanted = whole.decode((0, x, gates))[0]
    layer = Layer(2, fill)
    for cut in range(1, 9):
        layer.state.clear(1)
        first, _ = layer.decode((1, x[:cut], gates[:cut]), (0, *rows(rng, 2)))
        _, second = layer.decode((0, *rows(rng, 1)), (1, x[cut:], gates[cut:]))
        assert same_bits(np.concatenate([first, second]), wanted)
        for found, right in zip(layer.current(1), whole.current(0), strict=True):
            assert same_bits(found, right)
    layer.close()
    whole.close()
