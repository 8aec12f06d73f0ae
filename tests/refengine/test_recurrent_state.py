"""The recurrent state's books against a plain model, and its memory."""

import copy
from collections.abc import Callable
from contextlib import contextmanager

import numpy as np
import pytest
from engines import TARGET, Bench, FailNth
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from instrumentation.errors import OutOfMemoryError
from instrumentation.levels import Level
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


def batches() -> st.SearchStrategy:
    """Micro-batches of one batch: for each the rows of each sequence, in an order."""
    micro = st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.integers(1, 7)), min_size=1, max_size=4).map(
        lambda pairs: list(dict(pairs).items())
    )
    return st.lists(micro, min_size=1, max_size=4)


class Books(RuleBasedStateMachine):
    """The model: the tokens that each sequence has seen, and what each plane was written from."""

    @initialize(n_rs_seq=st.integers(0, 4))
    def begin(self, n_rs_seq: int) -> None:
        self.bench = Bench(Level.OFF)
        self.state = RecurrentState(self.bench.allocator, shape(n_rs_seq), TARGET)
        self.n_rs_seq = n_rs_seq
        self.next_token = 0
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        #: how far back each sequence can go at least
        self.reach = [0] * SEQUENCES
        #: of each plane the tokens that its state has seen; None: never written, or half
        self.planes: list[list[list[int] | None]] = [[None] * (n_rs_seq + 2) for _ in range(SEQUENCES)]

    def micro_batch(self, parts: list[tuple[int, int]], tokens: dict[int, list[int]], *, fails: bool) -> None:
        sequence = np.array([s for s, n in parts for _ in range(n)], np.int32)
        table = self.state.segments(sequence)
        assert table.shape == (SEQUENCES, 5 + self.n_rs_seq)
        assert (table[len(parts) :, 1] == 0).all()
        self.state.check_integrity()
        for (s, n), (first, n_rows, slot, source, *targets) in zip(parts, table.tolist(), strict=False):
            assert (sequence[first : first + n_rows] == s).all()
            assert (n_rows, slot) == (n, s)
            # What the kernels read is exactly the sequence's history.
            assert tokens[s] == ([] if source == EMPTY else self.planes[s][source])
            assert [plane != EMPTY for plane in targets] == [s < n for s in range(self.n_rs_seq + 1)]
            tokens[s] = tokens[s] + list(range(self.next_token, self.next_token + n))
            self.next_token += n
            for back, plane in enumerate(targets[:n]):
                self.planes[s][plane] = None if fails else tokens[s][: len(tokens[s]) - back]
            if not fails:
                self.state.advance(s, n)

    @rule(batch=batches())
    def decode(self, batch: list[list[tuple[int, int]]]) -> None:
        running = {s: self.tokens[s] for parts in batch for s, _ in parts}
        self.state.begin(running)
        for parts in batch:
            self.micro_batch(parts, running, fails=False)
        self.state.end(running)
        for s, tokens in running.items():
            self.reach[s] = min(self.n_rs_seq, self.reach[s] + len(tokens) - len(self.tokens[s]))
            self.tokens[s] = tokens

    @rule(batch=batches(), tried=st.integers(0, 4))
    def fail(self, batch: list[list[tuple[int, int]]], tried: int) -> None:
        running = {s: self.tokens[s] for parts in batch for s, _ in parts}
        self.state.begin(running)
        ran = batch[:tried]
        for parts in ran:
            self.micro_batch(parts, running, fails=parts is ran[-1])
        self.state.abort(running)
        for s in running:
            # The planes that were not taken still hold what they held.
            n_rows = sum(n for parts in ran for t, n in parts if t == s)
            self.reach[s] = min(self.reach[s], max(0, self.n_rs_seq + 1 - n_rows))

    @rule(sequence=st.integers(0, SEQUENCES - 1), n=st.integers(0, 6))
    def rollback(self, sequence: int, n: int) -> None:
        before = copy.deepcopy(self.state._sequences)
        length = len(self.tokens[sequence])
        possible = self.state.can_roll_back(sequence, n)
        if n <= self.reach[sequence] or n == length:
            assert possible
        elif n > self.n_rs_seq:
            assert not possible
        assert self.state._sequences == before
        assert self.state.rollback(sequence, n) == possible
        if possible:
            del self.tokens[sequence][length - n :]
            self.reach[sequence] = max(0, self.reach[sequence] - n)
        else:
            assert self.state._sequences == before

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def clear(self, sequence: int) -> None:
        self.state.clear(sequence)
        self.tokens[sequence], self.reach[sequence] = [], 0

    @rule(pair=st.permutations(range(SEQUENCES)))
    def copy(self, pair: list[int]) -> None:
        source, target = pair[:2]
        self.clear(target)
        for from_slot, from_plane, to_slot, to_plane in self.state.copies(source, target):
            assert (from_slot, to_slot) == (source, target)
            self.planes[target][to_plane] = self.planes[source][from_plane]
        self.state.assume(source, target)
        self.tokens[target] = list(self.tokens[source])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check_integrity()
        assert [self.state.length(s) for s in range(SEQUENCES)] == [len(t) for t in self.tokens]
        for held, tokens, planes in zip(self.state._sequences, self.tokens, self.planes, strict=True):
            for length, plane in held.planes.items():
                assert planes[plane] == tokens[:length]

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.release()
            assert self.bench.allocator.close() == []


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def decoded(state: RecurrentState, sequence: int, *n_rows: int) -> None:
    """The books of a batch with these micro-batches."""
    state.begin([sequence])
    for n in n_rows:
        state.segments(np.full(n, sequence, np.int32))
        state.advance(sequence, n)
    state.end([sequence])


@pytest.mark.parametrize("n_rs_seq", [0, 1, 3])
@pytest.mark.parametrize("n_rows", [(1,), (2,), (3,), (4,), (9,), (1, 1), (2, 1, 1), (1, 6), (6, 1)], ids=str)
def test_rollback_reaches_n_rs_seq_tokens_across_batches_and_no_further(n_rs_seq: int, n_rows: tuple):
    for n in range(11):
        with recurrent(n_rs_seq) as state:
            for _ in range(10):
                decoded(state, 1, 1)
            decoded(state, 1, *n_rows)
            before = copy.deepcopy(state._sequences)
            assert state.can_roll_back(1, n) == (n <= n_rs_seq)
            assert state.rollback(1, n) == (n <= n_rs_seq)
            assert state.length(1) == 10 + sum(n_rows) - n * (n <= n_rs_seq)
            if n == 0 or n > n_rs_seq:
                assert state._sequences == before


@pytest.mark.parametrize("n_rs_seq", [0, 1, 2, 3])
def test_as_many_rows_as_one_micro_batch_had_do_not_roll_back_past_n_rs_seq(n_rs_seq: int):
    for n_rows in range(n_rs_seq + 1, n_rs_seq + 5):
        with recurrent(n_rs_seq) as state:
            decoded(state, 0, 10)
            decoded(state, 0, n_rows)
            before = copy.deepcopy(state._sequences)
            assert not state.rollback(0, n_rows)
            assert state._sequences == before


def test_all_the_way_back_is_always_possible():
    with recurrent(0) as state:
        decoded(state, 0, 5)
        assert not state.rollback(0, 4)
        assert not state.rollback(0, 6)
        assert state.rollback(0, 5)
        assert state.length(0) == 0
        assert state.rollback(0, 0)


def test_rollbacks_repeat_until_states_run_out():
    with recurrent(3) as state:
        decoded(state, 0, 5)
        assert state.rollback(0, 1)
        assert state.rollback(0, 2)
        assert not state.rollback(0, 1), "the state of one token was never kept"
        decoded(state, 0, 1)
        assert state.rollback(0, 1)
        assert state.length(0) == 2


def test_nothing_rolls_back_where_nothing_is():
    with recurrent(4) as state:
        assert not state.rollback(0, 1)
        decoded(state, 0, 5)
        state.clear(0)
        assert not state.rollback(0, 1)
        state.begin([0])
        assert state.segments(np.zeros(2, np.int32))[0].tolist() == [0, 2, 0, EMPTY, 0, 1, -1, -1, -1]
        state.abort([0])


def test_the_table_follows_the_batch():
    with recurrent(2) as state:
        decoded(state, 0, 3)
        decoded(state, 2, 3)
        assert state.rollback(2, 2)
        state.begin(range(3))
        table = state.segments(np.array([2, 2, 1, 0, 0, 0], np.int32))
        assert table.dtype == np.int32
        # The free planes first, then those of the oldest states; not those that are read.
        assert table.tolist() == [
            [0, 2, 2, 2, 0, 1, -1], [2, 1, 1, EMPTY, 0, -1, -1], [3, 3, 0, 0, 3, 2, 1],
        ]  # fmt: skip
        state.abort(range(3))


def test_the_state_from_before_the_batch_is_not_written_before_its_end():
    with recurrent(1) as state:
        decoded(state, 0, 4)
        state.begin([0])
        pinned = state.segments(np.zeros(2, np.int32))[0, 3]
        state.advance(0, 2)
        for _ in range(5):
            row = state.segments(np.zeros(2, np.int32))[0]
            assert row[3] in row[4:], "written over the one that is read, since there is no other"
            assert pinned not in row[3:]
            state.advance(0, 2)
        state.end([0])
        state.begin([0])
        assert pinned in state.segments(np.zeros(2, np.int32))[0, 4:]
        state.abort([0])


def test_an_aborted_batch_takes_rollbacks_only_from_the_planes_that_it_took():
    for n_rows, reach in ((1, 3), (2, 2), (3, 1), (4, 0), (9, 0)):
        with recurrent(3) as state:
            decoded(state, 0, 10)
            state.begin([0])
            state.segments(np.zeros(n_rows, np.int32))
            state.abort([0])
            assert state.length(0) == 10
            assert [n for n in range(10) if state.can_roll_back(0, n)] == list(range(reach + 1))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda state: state.segments(np.zeros(1, np.int32)), "no batch is open"),
        (lambda state: state.end([0]), "no batch of sequence 0 is open"),
        (lambda state: state.abort([0]), "no batch of sequence 0 is open"),
        (lambda state: state.advance(0, 1), "1 rows were not running"),
        (lambda state: state.begin([1]), "a batch of sequence 1 is open"),
        (lambda state: state.rollback(1, 1), "a batch of sequence 1 is open"),
        (lambda state: state.clear(1), "a batch of sequence 1 is open"),
        (lambda state: state.segments(np.full(1, 1, np.int32)), "runs already"),
        (lambda state: state.end([1]), "still runs"),
        (lambda state: state.advance(1, 3), "3 rows were not running"),
        (lambda state: state.copies(1, 2), "a batch of sequence 1 is open"),
        (lambda state: state.copies(2, 0), "sequence 0 is not clear"),
        (lambda state: state.assume(2, 0), "sequence 0 is not clear"),
        (lambda state: state.copies(2, 2), "onto itself"),
    ],
)
def test_steps_out_of_order_are_refused(wrong: Callable[[RecurrentState], object], match: str):
    with recurrent(2) as state:
        decoded(state, 0, 2)
        state.begin([1])
        state.segments(np.full(2, 1, np.int32))
        before = copy.deepcopy(state._sequences)
        with pytest.raises(AssertionError, match=match):
            wrong(state)
        assert state._sequences == before
        state.abort([1])


def test_a_copy_is_of_the_last_state():
    with recurrent(2) as state:
        assert state.copies(0, 1) == []
        state.assume(0, 1)
        assert state.length(1) == 0
        decoded(state, 0, 2)
        decoded(state, 0, 1)
        state.begin([0])
        source = state.segments(np.zeros(1, np.int32))[0, 3]
        state.abort([0])
        assert state.copies(0, 1) == [(0, source, 1, 0)]
        assert state.length(1) == 0, "until the copies were done"
        state.assume(0, 1)
        assert state.length(1) == 3
        assert not state.can_roll_back(1, 1)
        assert state.can_roll_back(1, 3)


def test_rows_of_one_sequence_that_are_apart_are_refused():
    with recurrent(2) as state, pytest.raises(AssertionError, match="apart"):
        state.segments(np.array([0, 1, 0], np.int32))


@pytest.mark.parametrize(
    ("planes", "length"), [({1: 0}, 2), ({2: 4}, 2), ({2: -1}, 2), ({1: 1, 2: 1}, 2), ({2: 0, 3: 1}, 2), ({0: 1}, 0)]
)  # fmt: skip
def test_damaged_books_do_not_pass(planes: dict[int, int], length: int):
    with recurrent(2) as state:
        decoded(state, 0, 2)
        state.check_integrity()
        state._sequences[0].planes, state._sequences[0].length = planes, length
        with pytest.raises(AssertionError):
            state.check_integrity()
        state.clear(0)


@pytest.mark.parametrize(
    "damage", ["pinned state lost", "plane written twice", "outside a batch", "not newer"]
)
def test_damaged_books_of_an_open_batch_do_not_pass(damage: str):
    with recurrent(2) as state:
        decoded(state, 0, 2)
        state.begin([0])
        state.segments(np.zeros(1, np.int32))
        state.check_integrity()
        held = state._sequences[0]
        if damage == "pinned state lost":
            del held.planes[2]
        elif damage == "plane written twice":
            held.running[3] = held.planes[2]
        elif damage == "outside a batch":
            held.pinned = None
        else:
            held.running = {2: held.running[3]}
        with pytest.raises(AssertionError):
            state.check_integrity()
        held.pinned = None
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
        assert conv.shape == (SEQUENCES, 5, TAPS - 1, CHANNELS)
        assert matrices.shape == (SEQUENCES, 5, HEADS, SIZE * SIZE)


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
