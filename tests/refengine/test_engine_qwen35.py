"""Models with recurrent states: the same bits however a sequence is cut, whatever lies in memory or failed before."""

import functools

import numpy as np
import pytest
from engines import DATA, Array, World, decode, nmse, same_bits, world
from hypothesis import given, settings
from hypothesis import strategies as st

import refengine
from instrumentation.errors import DeviceError
from instrumentation.faults import FaultInjector, FaultPlan
from instrumentation.levels import Level
from refengine.batch import Batch
from refengine.context import Context, DecodeStatus
from refengine.errors import ComputeError
from refengine.gguf_file import GGUFFile

NAMES = ("qwen35", "qwen35-tied", "qwen35-Q4_K_M", "qwen35moe")
N_PROMPT = 40
PROMPTS = np.random.default_rng(9).integers(0, 320, (3, N_PROMPT)).astype(np.int32)


def loaded(name: str, **options) -> refengine.Engine:
    defaults = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128, "device": "host", "threads": 1}
    return refengine.load(DATA / f"{name}.gguf", **(defaults | options))


@functools.cache
def reference(name: str) -> list[Array]:
    """Logits of each prompt, decoded alone in one batch on one thread, nothing checked."""
    with world(name, Level.OFF, threads=1) as alone:
        context = alone.context()
        rows = []
        for prompt in PROMPTS:
            rows.append(decode(context, prompt))
            context.remove(0)
    return rows


@pytest.fixture(scope="module", params=[Level.OFF, Level.GUARD], ids=["off", "guard"])
def level(request):
    return request.param


@pytest.fixture(scope="module")
def dense(level: Level):
    with world("qwen35", level, threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def experts(level: Level):
    with world("qwen35moe", level, threads=2) as made:
        yield made


def drop(made: World, context: Context) -> None:
    context.check_integrity()
    made.contexts.remove(context)
    context.release()
    assert made.findings.list() == ()


def joined(parts: dict[int, tuple[int, int]]) -> Batch:
    """Tokens of several sequences one after the other: parts[sequence] = (first position, count)."""
    sequence = np.repeat(list(parts), [count for _, count in parts.values()]).astype(np.int32)
    position = np.concatenate([np.arange(start, start + n) for start, n in parts.values()]).astype(np.int32)
    return Batch(PROMPTS[sequence, position], position, sequence, np.ones(len(sequence), np.bool_))


# --- what is computed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_batch", [2048, 13])
def test_hidden_states_are_those_recorded_and_give_the_logits(name: str, n_batch: int):
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens, wanted = recorded["tokens"].tolist(), recorded["h_nextn"]
    with loaded(name, n_batch=n_batch, check="guard") as engine:
        hidden = engine.hidden(tokens)
        assert hidden.shape == (len(tokens), engine.config.n_embd)
        assert hidden.dtype == np.float32
        assert nmse(hidden, wanted) < 1e-10
        logits = engine.logits(tokens)
        assert engine.context.hidden.shape == (0, engine.config.n_embd), "not copied unless asked for"
        assert same_bits(engine.hidden(tokens), hidden)
        assert same_bits(engine.logits(tokens), logits)
        assert engine.findings == []


def test_hidden_states_of_a_model_without_recurrent_layers():
    with GGUFFile.open(DATA / "llama.gguf") as gguf:
        head = gguf.raw("output.weight").view(np.float32).reshape(gguf.tensor("output.weight").shape)
        with loaded("llama") as engine:
            hidden, logits = engine.hidden(PROMPTS[0]), engine.logits(PROMPTS[0])
        assert nmse(hidden.astype(np.float64) @ head.T.astype(np.float64), logits) < 1e-11


STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.integers(0, 2), st.integers(1, 20), min_size=1),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


def run_steps(made: World, name: str, steps: list, **options) -> None:
    """Decode parts of prompts side by side; a number forgets that sequence, which then begins anew."""
    wanted = reference(name)
    context = made.context(n_sequences=3, n_ctx=192, **options)
    held = [0, 0, 0]
    for step in steps:
        if isinstance(step, int):
            context.remove(step)
            held[step] = 0
        else:
            parts = {s: (held[s], min(n, N_PROMPT - held[s])) for s, n in step.items() if held[s] < N_PROMPT}
            if not parts:
                continue
            batch = joined(parts)
            assert context.decode(batch) == DecodeStatus.OK, context.error
            rows = [wanted[s][p] for s, p in zip(batch.sequence, batch.position, strict=True)]
            assert same_bits(context.logits, np.array(rows))
            for s, (start, n) in parts.items():
                held[s] = start + n
        context.check_integrity()
        assert [context.cache.length(s) for s in range(3)] == held
    drop(made, context)


@settings(max_examples=12)
@given(steps=STEPS, n_ubatch=st.integers(1, 32), capture=st.booleans())
def test_a_row_has_the_same_bits_in_every_batch(dense: World, steps: list, n_ubatch: int, capture: bool):
    run_steps(dense, "qwen35", steps, n_ubatch=n_ubatch, capture=capture)


@settings(max_examples=6)
@given(steps=STEPS, n_ubatch=st.integers(1, 32))
def test_rows_of_experts_have_the_same_bits_in_every_batch(experts: World, steps: list, n_ubatch: int):
    run_steps(experts, "qwen35moe", steps, n_ubatch=n_ubatch)


@pytest.mark.parametrize("cut", range(1, N_PROMPT))
def test_a_prompt_cut_anywhere_gives_the_same_bits(dense: World, cut: int):
    context = dense.context()
    rows = [decode(context, part) for part in (PROMPTS[0][:cut], PROMPTS[0][cut:])]
    assert same_bits(np.concatenate(rows), reference("qwen35")[0])
    drop(dense, context)


@pytest.mark.parametrize("fill", [0x3E, 0xFF])
@pytest.mark.parametrize("name", NAMES)
def test_what_lay_in_memory_does_not_matter(name: str, fill: int):
    with world(name, threads=1) as made:
        context = made.context(n_sequences=3, n_ctx=192)
        views = [v for layer in context.cache.layers for v in layer]
        assert context.states is not None
        views += [v for layer in context.states.layers.values() for v in layer]
        for view in views:
            context.stream.fill(view, fill)
        batch = joined({1: (0, 30), 0: (0, 3)})
        assert context.decode(batch) == DecodeStatus.OK
        wanted = [reference(name)[s][p] for s, p in zip(batch.sequence, batch.position, strict=True)]
        assert same_bits(context.logits, np.array(wanted))
        assert same_bits(decode(context, PROMPTS[0][3:]), reference(name)[0][3:])


# --- what is refused


def test_rows_of_a_sequence_that_are_apart_are_refused(dense: World):
    context = dense.context(n_sequences=2)
    decode(context, PROMPTS[0][:3])
    tokens = np.array([1, 2, 3], np.int32)
    apart = Batch(tokens, np.array([3, 0, 4], np.int32), np.array([0, 1, 0], np.int32), np.ones(3, np.bool_))
    assert context.decode(apart) == DecodeStatus.INVALID_BATCH
    assert [context.cache.length(s) for s in range(2)] == [3, 0]
    assert same_bits(decode(context, PROMPTS[0][3:]), reference("qwen35")[0][3:])
    drop(dense, context)


def test_a_state_goes_back_to_nothing_or_not_at_all(dense: World):
    context = dense.context()
    decode(context, PROMPTS[0][:9])
    assert not context.truncate(0, 8)
    assert not context.truncate(0, 1)
    assert context.cache.length(0) == 9
    assert context.truncate(0, 9)
    assert same_bits(decode(context, PROMPTS[0][9:20]), reference("qwen35")[0][9:20])
    assert context.truncate(0, 0)
    context.check_integrity()
    assert same_bits(decode(context, PROMPTS[0]), reference("qwen35")[0])
    drop(dense, context)


@pytest.mark.parametrize("n_rs_seq", [1, 3])
@pytest.mark.parametrize("n_ubatch", [1, 2, 32])
def test_a_state_goes_back_as_far_as_states_are_kept(dense: World, n_rs_seq: int, n_ubatch: int):
    wanted = reference("qwen35")[0]
    context = dense.context(n_rs_seq=n_rs_seq, n_ubatch=n_ubatch)
    held = 0
    for stop in (11, 20, 30):
        assert same_bits(decode(context, PROMPTS[0][held:stop]), wanted[held:stop])
        # What a draft proposed and the model did not take, given back token by token.
        drafted = decode(context, PROMPTS[1][:n_rs_seq])
        assert not same_bits(drafted, wanted[stop : stop + n_rs_seq])
        assert not context.truncate(0, stop - 1)
        assert context.cache.length(0) == stop + n_rs_seq
        for length in range(stop + n_rs_seq - 1, stop - 1, -1):
            assert context.truncate(0, length)
            context.check_integrity()
        held = stop
    assert same_bits(decode(context, PROMPTS[0][held:]), wanted[held:])
    drop(dense, context)


def test_no_room_in_the_cache_changes_nothing(dense: World):
    context = dense.context(n_sequences=2, n_ctx=32)
    decode(context, PROMPTS[0][:9])
    assert context.decode(joined({1: (0, 5)})) == DecodeStatus.NO_KV_SLOT
    context.check_integrity()
    assert same_bits(decode(context, PROMPTS[0][9:20]), reference("qwen35")[0][9:20])
    drop(dense, context)


# --- what fails


def fail_decode(made: World, context: Context, batch: Batch, plan: FaultPlan) -> DecodeStatus:
    faults = FaultInjector(plan)
    made.device.faults = faults
    try:
        return context.decode(batch)
    finally:
        made.device.faults = None
        assert len(faults.fired) == 1


@pytest.mark.parametrize(
    ("kinds", "nth"),
    [
        *[(("copy",), nth) for nth in (1, 2, 3, 7, 8, 15)],
        *[(("launch",), nth) for nth in (1, 2, 7, 12, 13, 30, 51)],
    ],
    ids=str,
)
def test_a_failed_batch_leaves_its_sequences_as_they_were(dense: World, kinds: tuple, nth: int):
    """Micro-batches of 4 rows: states of the first ones are written when a later one fails."""
    wanted = reference("qwen35")
    context = dense.context(n_sequences=3, n_ctx=192, n_ubatch=4, capture=False)
    assert context.decode(joined({0: (0, 10), 1: (0, 12), 2: (0, 5)})) == DecodeStatus.OK
    batch = joined({0: (10, 9), 1: (12, 20)})
    status = fail_decode(dense, context, batch, FaultPlan.nth(nth, *kinds))
    assert status == DecodeStatus.COMPUTE_FAILED
    assert context.error is not None
    context.check_integrity()
    assert [context.cache.length(s) for s in range(3)] == [10, 12, 5]
    assert same_bits(decode(context, PROMPTS[2][5:], 2), wanted[2][5:])
    assert context.decode(batch) == DecodeStatus.OK
    assert context.error is None
    assert same_bits(context.logits, np.concatenate([wanted[0][10:19], wanted[1][12:32]]))
    assert same_bits(decode(context, PROMPTS[0][19:], 0), wanted[0][19:])
    drop(dense, context)


def test_a_layout_that_fails_before_anything_runs_changes_nothing(dense: World):
    context = dense.context(n_ubatch=32)
    decode(context, PROMPTS[0][:9])
    dense.allocator._heap.faults = FaultInjector(FaultPlan.nth(1, "reserve"))
    assert context.decode(Batch.of(PROMPTS[0][9:30], 9, 0, "last")) == DecodeStatus.ALLOC_FAILED
    dense.allocator._heap.faults = None
    context.check_integrity()
    assert same_bits(decode(context, PROMPTS[0][9:]), reference("qwen35")[0][9:])
    drop(dense, context)


def test_a_layout_that_fails_between_micro_batches_changes_nothing(dense: World):
    context = dense.context(n_ubatch=8)
    decode(context, PROMPTS[0][:9])
    faults = dense.allocator._heap.faults = FaultInjector(FaultPlan.nth(2, "reserve"))
    # 8 rows, then 3: two layouts of two shapes.
    assert context.decode(Batch.of(PROMPTS[0][9:20], 9, 0, "none")) == DecodeStatus.ALLOC_FAILED
    dense.allocator._heap.faults = None
    assert len(faults.fired) == 1
    context.check_integrity()
    assert same_bits(decode(context, PROMPTS[0][9:]), reference("qwen35")[0][9:])
    drop(dense, context)


def test_an_interrupt_changes_nothing(dense: World, monkeypatch: pytest.MonkeyPatch):
    context = dense.context(n_sequences=2, n_ctx=128)
    assert context.decode(joined({0: (0, 9), 1: (0, 7)})) == DecodeStatus.OK

    def interrupted(graph):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(context.stream, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode(joined({0: (9, 4)}))
    context.check_integrity()
    assert same_bits(decode(context, PROMPTS[1][7:], 1), reference("qwen35")[1][7:])
    assert same_bits(decode(context, PROMPTS[0][9:], 0), reference("qwen35")[0][9:])
    drop(dense, context)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_an_engine_answers_as_if_nothing_had_failed(name: str, monkeypatch: pytest.MonkeyPatch):
    prompt = PROMPTS[0].tolist()
    with loaded(name, check="guard", n_ubatch=16) as engine:
        wanted = engine.generate(prompt, n_predict=8, temperature=0, ignore_eos=True, return_logits=True)
    with loaded(name, check="guard", n_ubatch=16) as engine:
        replay, replays = engine.context.stream.replay, 0

        def fails_late(graph):
            nonlocal replays
            replays += 1
            if replays in (2, 6):
                raise DeviceError("the device is gone")
            replay(graph)

        with monkeypatch.context() as patch:
            patch.setattr(engine.context.stream, "replay", fails_late)
            for _ in range(2):
                with pytest.raises(ComputeError, match="the device is gone"):
                    engine.generate(prompt, n_predict=8, temperature=0, ignore_eos=True)
        assert replays == 6
        assert engine.check_integrity() == []
        again = engine.generate(prompt, n_predict=8, temperature=0, ignore_eos=True, return_logits=True)
        assert again.tokens == wanted.tokens
        assert same_bits(again.logits, wanted.logits)
        assert engine.findings == []


@settings(max_examples=8)
@given(
    n_batch=st.integers(1, 60),
    n_ubatch=st.integers(1, 60),
    check=st.sampled_from(["off", "guard"]),
    threads=st.sampled_from([1, 2]),
    cuda_graphs=st.booleans(),
    worst_case_reserve=st.booleans(),
)
def test_options_do_not_change_a_bit(**options):
    with loaded("qwen35", **options) as engine:
        engine.generate(PROMPTS[1].tolist(), n_predict=2, temperature=0)
        assert same_bits(engine.logits(PROMPTS[0].tolist()), reference("qwen35")[0])


def test_experts_lie_one_under_the_other_and_short_rows_are_filled_up(experts: World):
    matrix = experts.weights.matrices["blk.0.ffn_down_exps.weight"]
    assert (matrix.n_out, matrix.n_in) == (6 * 64, 64)  # rows of 48 weights in the file
    gate = experts.weights.matrices["blk.0.ffn_gate_inp_shexp.weight"]
    assert (gate.n_out, gate.n_in) == (1, 64)
    assert experts.weights.vectors["blk.0.ssm_conv1d.weight"].shape == (128, 4)
    assert not any(name.startswith("blk.4.") for name in experts.weights.matrices | experts.weights.vectors)
