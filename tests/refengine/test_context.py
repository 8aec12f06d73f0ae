"""``Context.decode``: the same bits however tokens are batched, and a status for everything that goes wrong."""

import functools

import numpy as np
import pytest
from engines import Array, FailNth, World, decode, same_bits, world
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.devices import host_stream
from instrumentation.errors import DeviceError, OutOfMemoryError
from instrumentation.levels import Level
from refengine.batch import Batch
from refengine.context import Context, DecodeStatus
from refengine.context_plan import MAX_OUTPUTS
from refengine.kernels.kv_types import PAGE

N_VOCAB = 320
N_PROMPT = 40
PROMPTS = np.random.default_rng(7).integers(0, N_VOCAB, (3, N_PROMPT)).astype(np.int32)


@functools.cache
def reference(model: str, cache_type: str) -> list[Array]:
    """Logits of each prompt, decoded alone in one batch on one thread, nothing checked."""
    with world(model, Level.OFF, threads=1) as alone:
        context = alone.context(n_ctx=64, cache_type_k=cache_type, cache_type_v=cache_type)
        rows = []
        for prompt in PROMPTS:
            rows.append(decode(context, prompt))
            context.cache.remove(0)
    return rows


@pytest.fixture(scope="module")
def guarded():
    with world("llama") as made:
        yield made


@pytest.fixture
def context(guarded: World):
    made = guarded.context(n_ctx=64)
    yield made
    guarded.contexts.remove(made)
    made.release()


def lengths(context: Context) -> list[int]:
    context.cache.check_integrity()
    return [context.cache.length(s) for s in range(context.settings.n_sequences)]


def mixed(parts: dict[int, tuple[int, int]], rng: np.random.Generator) -> Batch:
    """Tokens of several sequences, in each one's own order: parts[sequence] = (first position, count)."""
    sequence = np.repeat(list(parts), [count for _, count in parts.values()]).astype(np.int32)
    rng.shuffle(sequence)
    position = np.empty(len(sequence), np.int32)
    for s, (start, count) in parts.items():
        position[sequence == s] = np.arange(start, start + count)
    return Batch(PROMPTS[sequence, position], position, sequence, rng.random(len(sequence)) < 0.7)


STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.integers(0, 2), st.integers(1, 20), min_size=1),
        st.tuples(st.integers(0, 2), st.floats(0, 1)),
    ),
    min_size=1,
    max_size=10,
)


@pytest.fixture(
    scope="module",
    params=[
        ("llama", Level.GUARD, 2, True), ("llama", Level.OFF, 1, False), ("qwen3", Level.GUARD, 1, False),
        ("qwen3", Level.OFF, 2, True),
    ],
    ids=str,
)  # fmt: skip
def setting(request):
    """A model with its weights, and whether contexts capture."""
    model, level, threads, capture = request.param
    with world(model, level, threads=threads) as made:
        yield model, made, capture


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@settings(max_examples=12)
@given(
    steps=STEPS,
    n_ctx=st.sampled_from([96, 192]),
    n_ubatch=st.integers(1, 32),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_has_the_same_bits_in_every_batch(
    setting: tuple[str, World, bool], cache_type: str, steps: list, n_ctx: int, n_ubatch: int, seed: int
):
    """Sequences side by side, interleaved, cut back and decoded again in other pages: nothing changes a row."""
    model, made, capture = setting
    wanted = reference(model, cache_type)
    rng = np.random.default_rng(seed)
    context = made.context(
        n_ctx=n_ctx,
        n_sequences=3,
        n_batch=64,
        n_ubatch=n_ubatch,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        capture=capture,
    )
    held = [0, 0, 0]
    for step in steps:
        if isinstance(step, tuple):
            sequence, part = step
            held[sequence] = int(part * held[sequence])
            context.cache.truncate(sequence, held[sequence])
            continue
        parts = {s: (held[s], min(n, N_PROMPT - held[s])) for s, n in step.items() if held[s] < N_PROMPT}
        if not parts:
            continue
        batch = mixed(parts, rng)
        status = context.decode(batch)
        after = [held[s] + parts[s][1] if s in parts else held[s] for s in range(3)]
        if sum(-(-n // PAGE) for n in after) * PAGE <= n_ctx:
            assert status == DecodeStatus.OK
            rows = [wanted[s][p] for s, p in zip(batch.sequence, batch.position, strict=True)]
            assert same_bits(context.logits, np.array(rows)[batch.outputs])
            held = after
        else:
            assert status == DecodeStatus.NO_KV_SLOT
        assert lengths(context) == held
    made.contexts.remove(context)
    context.release()
    assert made.findings.list() == ()


def test_every_position_asked_for_has_a_row_in_order(context: Context):
    wanted = reference("llama", "f32")[0]
    outputs = np.arange(N_PROMPT) % 3 == 1
    sequence = np.zeros(N_PROMPT, np.int32)
    batch = Batch(PROMPTS[0], np.arange(N_PROMPT, dtype=np.int32), sequence, outputs)
    assert context.decode(batch) == DecodeStatus.OK
    assert same_bits(context.logits, wanted[outputs])


@pytest.mark.parametrize(("outputs", "rows"), [("all", N_PROMPT), ("last", 1), ("none", 0)])
def test_more_outputs_than_a_micro_batch_has_are_split(guarded: World, outputs: str, rows: int):
    assert N_PROMPT > MAX_OUTPUTS
    context = guarded.context(n_ubatch=64)
    logits = decode(context, PROMPTS[1], outputs=outputs)
    assert same_bits(logits, reference("llama", "f32")[1][N_PROMPT - rows :])


def invalid(**changes) -> Batch:
    good = Batch.of(PROMPTS[0][:4], 3, 0, "all")
    arrays = {name: getattr(good, name).copy() for name in ("tokens", "position", "sequence", "outputs")}
    for name, (at, value) in changes.items():
        arrays[name][at] = value
    return Batch(**arrays)


@pytest.mark.parametrize(
    "batch",
    [
        Batch.of([], 3, 0, "all"),
        Batch.of(np.zeros(65), 3, 0, "all"),
        invalid(tokens=(2, -1)),
        invalid(tokens=(2, N_VOCAB)),
        invalid(tokens=(0, 2**31 - 1)),
        invalid(sequence=(1, -1)),
        invalid(sequence=(1, 1)),
        invalid(position=(0, 2)),
        invalid(position=(3, 7)),
        invalid(position=(3, 3)),
        invalid(position=(0, -1)),
        Batch.of(PROMPTS[0][:4], 0, 0, "all"),
        Batch.of(PROMPTS[0][:4], 4, 0, "all"),
        Batch.of(np.zeros(62), 3, 0, "all"),
    ],
    ids=[
        "empty", "beyond n_batch", "negative token", "token beyond the vocabulary", "token far beyond",
        "negative sequence", "unknown sequence", "position again", "gap", "position twice", "negative position",
        "from the start", "not where it ends", "beyond n_ctx",
    ],
)  # fmt: skip
def test_a_batch_that_makes_no_sense_changes_nothing(context: Context, batch: Batch):
    decode(context, PROMPTS[0][:3])
    before = context.logits
    assert context.decode(batch) == DecodeStatus.INVALID_BATCH
    assert lengths(context) == [3]
    assert context.logits is before
    assert context.error is None
    assert same_bits(decode(context, PROMPTS[0][3:]), reference("llama", "f32")[0][3:])


@pytest.mark.parametrize("name", ["position", "sequence", "outputs"])
def test_arrays_of_a_batch_have_one_length(name: str):
    good = Batch.of(PROMPTS[0][:4], 0, 0, "all")
    arrays = {part: getattr(good, part) for part in ("tokens", "position", "sequence", "outputs")}
    with pytest.raises(AssertionError):
        Batch(**(arrays | {name: arrays[name][:3]}))
    with pytest.raises(AssertionError):
        Batch(**(arrays | {name: arrays[name].astype(np.float32)}))


def test_without_room_the_state_is_as_before(guarded: World):
    context = guarded.context(n_ctx=64, n_sequences=2)
    wanted = reference("llama", "f32")
    decode(context, PROMPTS[0][:33], 0)
    for _ in range(2):
        assert context.decode(Batch.of(PROMPTS[1][:1], 0, 1, "all")) == DecodeStatus.NO_KV_SLOT
        assert lengths(context) == [33, 0]
    assert same_bits(decode(context, PROMPTS[0][33:], 0), wanted[0][33:])
    context.cache.remove(0)
    assert same_bits(decode(context, PROMPTS[1], 1), wanted[1])


@pytest.mark.parametrize("n_fine", [0, 1])
def test_a_failed_allocation_rolls_back_and_can_be_tried_again(guarded: World, n_fine: int):
    # 20 tokens are micro-batches of 8, 8 and 4: two layouts, of which the first or the second fails.
    context = guarded.context(n_ubatch=8)
    decode(context, PROMPTS[0][:3])
    faults = guarded.allocator._heap.faults = FailNth(n_fine)
    held = guarded.allocator.snapshot().reserved
    assert context.decode(Batch.of(PROMPTS[0][3:23], 3, 0, "last")) == DecodeStatus.ALLOC_FAILED
    assert isinstance(context.error, OutOfMemoryError)
    assert "compute" in str(context.error)
    assert "on purpose" in str(context.error)
    guarded.allocator._heap.faults = None
    assert faults.seen == n_fine + 1
    assert lengths(context) == [3]
    assert guarded.allocator.snapshot().reserved == held
    assert guarded.findings.list() == ()
    assert same_bits(decode(context, PROMPTS[0][3:]), reference("llama", "f32")[0][3:])
    assert context.error is None


def test_a_failed_device_rolls_back(guarded: World, monkeypatch: pytest.MonkeyPatch):
    context = guarded.context()

    def fail(graph):
        raise DeviceError("the device is gone")

    decode(context, PROMPTS[0][:3])
    with monkeypatch.context() as patch:
        patch.setattr(context.stream, "replay", fail)
        assert context.decode(Batch.of(PROMPTS[0][3:9], 3, 0, "all")) == DecodeStatus.COMPUTE_FAILED
    assert str(context.error) == "the device is gone"
    assert lengths(context) == [3]
    assert same_bits(decode(context, PROMPTS[0][3:]), reference("llama", "f32")[0][3:])


@pytest.mark.parametrize("nth", range(3))
def test_an_interrupt_leaves_a_context_that_goes_on(
    guarded: World, monkeypatch: pytest.MonkeyPatch, nth: int
):
    """The n-th queued operation is interrupted: a copy in, the graph, a copy out."""
    context = guarded.context()
    decode(context, PROMPTS[0][:3])
    seen = 0

    def interrupted(function):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == nth + 1:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(host_stream, "_copy_host", interrupted(host_stream._copy_host))
        patch.setattr(context.stream, "_run_batch", interrupted(context.stream._run_batch))
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.of(PROMPTS[0][3:9], 3, 0, "all"))
    assert context.stream.pending == 0
    assert lengths(context) == [3]
    # Another shape: its memory is laid out in another way, and nothing of the interrupted run may reach it.
    assert same_bits(decode(context, PROMPTS[0][3:]), reference("llama", "f32")[0][3:])
    assert guarded.allocator.check_integrity() == []
    assert guarded.findings.list() == ()


def test_an_interrupted_context_can_be_released(guarded: World, monkeypatch: pytest.MonkeyPatch):
    context = guarded.context()

    def interrupt(batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context.stream, "_run_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.of(PROMPTS[0], 0, 0, "all"))
    guarded.contexts.remove(context)
    context.release()
    assert guarded.allocator.check_integrity() == []
    assert guarded.findings.list() == ()


def test_work_that_was_queued_before_an_interrupt_does_not_reach_another_layout(
    guarded: World, monkeypatch: pytest.MonkeyPatch
):
    context = guarded.context(n_ctx=128, n_batch=128, n_ubatch=128)

    def interrupt(graph):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context.stream, "replay", interrupt)
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch.of(np.zeros(128), 0, 0, "last"))
    assert context.stream.pending == 1
    assert lengths(context) == [0]
    # Its inputs are larger than those of the next batch, and must not run into what lies behind them there.
    assert same_bits(decode(context, PROMPTS[0]), reference("llama", "f32")[0])
    assert guarded.allocator.check_integrity() == []
    assert guarded.findings.list() == ()


@pytest.mark.parametrize("nth", range(10))
def test_a_context_that_cannot_be_made_leaves_nothing(guarded: World, nth: int):
    before = guarded.allocator.table(), guarded.allocator.snapshot().reserved, len(guarded.device.streams)
    faults = guarded.allocator._heap.faults = FailNth(nth)
    try:
        context = guarded.context()
    except OutOfMemoryError as error:
        assert "on purpose" in str(error)  # noqa: PT017 - whether it fails depends on how many reservations there are
        assert faults.seen == nth + 1
    else:
        assert faults.seen <= nth
        guarded.contexts.remove(context)
        context.release()
    guarded.allocator._heap.faults = None
    after = guarded.allocator.table(), guarded.allocator.snapshot().reserved, len(guarded.device.streams)
    assert after == before
    assert guarded.findings.list() == ()
