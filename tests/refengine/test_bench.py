"""What ``bench`` measures: tests, bytes of a token, the copy, and how it ends."""

from __future__ import annotations

import gc
from contextlib import closing

import numpy as np
import pytest
from engines import DATA, FailNth

import refengine
import refengine.bench_memory
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, OutOfMemoryError
from refengine.bench import BenchPlan, BenchTest, Result, UnrepeatableError, run
from refengine.bench_memory import CopyRate, TokenBytes, bytes_per_token, copy_rate
from refengine.context import Context, DecodeStatus
from refengine.errors import ComputeError

LLAMA = DATA / "llama.gguf"
F32 = 4


@pytest.fixture(autouse=True)
def _small_copy(monkeypatch):
    monkeypatch.setattr(refengine.bench_memory, "COPY_BYTES", 1 << 20)


def plan(model=LLAMA, **given):
    defaults = {"n_prompt": [16], "n_gen": [8], "repetitions": 2, "threads": 1}
    return BenchPlan.of(model, **(defaults | given))


def loaded(name, **options):
    return refengine.load(DATA / f"{name}.gguf", threads=1, n_ctx=64, **options)


# --- tests and rows


def test_each_level_and_test_gives_a_result_in_order():
    planned = plan(n_prompt=[16, 40], n_gen=[0, 8], levels=["off", "guard"])
    results = list(run(planned))
    names = [(result.check, result.test.name) for result in results]
    assert names == [(level, test) for level in ("off", "guard") for test in ("pp16", "pp40", "tg8")]
    for result in results:
        assert len(result.samples) == 2
        assert min(result.samples) > 0
        assert result.device == "host"
        assert (result.token_bytes is None) == (result.percent_of_copy is None) == (result.test.kind == "pp")


def test_mean_deviation_and_percent():
    moved, copy = TokenBytes(900, 60.0, 40), CopyRate(1, 100_000.0)
    result = Result(BenchTest("tg", 4), "off", "host", (9.0, 10.0, 11.0), moved, copy)
    assert (result.mean, result.stdev, result.percent_of_copy) == (10.0, 1.0, 10.0)
    assert Result(BenchTest("tg", 4), "off", "host", (9.0,), moved, None).stdev == 0.0
    assert Result(BenchTest("tg", 4), "off", "host", (9.0,), moved, None).percent_of_copy is None


def test_the_model_is_described():
    facts = plan(DATA / "llama-Q4_0.gguf").model
    assert facts.type == "llama Q4_0"
    assert facts.n_params == 320 * 256 + 2 * 256 + 256 + 2 * 128 * 256 + 5 * 256 * 256
    assert facts.nbytes == 67200 + 3 * 1024 + 2 * 18432 + 5 * 36864


def test_the_context_is_as_long_as_the_longest_test_needs():
    assert plan(n_prompt=[16, 300], n_gen=[8]).options["n_ctx"] == 512
    assert plan(n_prompt=[16], n_gen=[32768]).options["n_ctx"] == 32768
    assert plan(n_ctx=20).options["n_ctx"] == 20


@pytest.mark.parametrize("kind", ["pp", "tg"])
def test_batches_are_what_is_timed(kind):
    batches = BenchTest(kind, 20).batches(320, 8)
    assert [len(batch) for batch in batches] == ([8, 8, 4] if kind == "pp" else [1] * 20)
    assert all(batch.outputs.tolist() == [False] * (len(batch) - 1) + [True] for batch in batches)
    assert {batch.n_best for batch in batches} == {0 if kind == "pp" else 1}
    assert np.concatenate([batch.position for batch in batches]).tolist() == list(range(20))
    tokens = np.concatenate([batch.tokens for batch in batches])
    assert 0 <= tokens.min() <= tokens.max() < 320
    assert len(set(tokens.tolist())) > 10


@pytest.mark.parametrize("model", ["llama", "qwen35"])
@pytest.mark.parametrize("level", ["off", "guard"])
def test_what_is_timed_is_the_model(model, level, monkeypatch):
    """Each run decodes all tokens from an empty cache, and gives the logits that the engine gives for them."""
    seen = []
    decode = Context.decode

    def watched(self, batch):
        before = self.length(0)
        status = decode(self, batch)
        seen.append((batch, before, self.logits.copy()))
        return status

    monkeypatch.setattr(Context, "decode", watched)
    list(run(plan(DATA / f"{model}.gguf", n_prompt=[20], n_gen=[6], n_batch=8, levels=[level])))
    monkeypatch.undo()
    calls = {"pp": 3, "tg": 6}
    assert len(seen) == 3 * (3 + 6)  # a warm-up and two repetitions
    with loaded(model) as engine:
        for kind, n in (("pp", 20), ("tg", 6)):
            for _ in range(3):
                part, seen = seen[: calls[kind]], seen[calls[kind] :]
                tokens = [token for batch, _, _ in part for token in batch.tokens.tolist()]
                assert len(tokens) == n
                assert part[0][1] == 0
                wanted = engine.logits(tokens)
                for batch, _, logits in part:
                    assert logits.tobytes() == wanted[batch.position[-1]].tobytes()


# --- bytes


LLAMA_LAYER = (64 * 64 * 2 + 32 * 64 * 2 + 96 * 64 * 3 + 64 * 2) * F32


@pytest.mark.parametrize(
    ("types", "position"),
    [
        # Two heads of 16 keys and 16 values.
        (("f32", "f32"), 2 * 16 * 4 * 2),
        (("f16", "bf16"), 2 * 16 * 2 * 2),
        (("f32", "f16"), 2 * 16 * (4 + 2)),
    ],
)
def test_bytes_of_a_token_of_llama(types, position):
    with loaded("llama", cache_type_k=types[0], cache_type_v=types[1]) as engine:
        found = bytes_per_token(engine.context.plan, engine.weights, 8)
    head = (320 * 64 + 64) * F32
    assert found.weights == 64 * F32 + 4 * LLAMA_LAYER + head
    # Tokens see 1, 2, ... 8 positions, their own included; each writes one.
    assert found.cache == 4 * position * (sum(range(1, 9)) / 8 + 1)
    assert found.states == 0
    assert found.total == found.weights + found.cache


def test_bytes_of_a_quantised_token_with_q8_0_cache_and_tied_embeddings():
    with loaded("llama-Q4_0", cache_type_k="q8_0", cache_type_v="q8_0") as engine:
        found = bytes_per_token(engine.context.plan, engine.weights, 1)
    # The embeddings are the head too: one row is read of the first, all of the second. Q6_K has 210 bytes a row.
    assert found.weights == 210 + 320 * 210 + 3 * 1024 + 2 * 18432 + 5 * 36864
    # Two heads of 64 codes and two scales of two bytes.
    assert found.cache == 2 * (2 * (64 + 4)) * (1 + 1)


QWEN_RECURRENT = 128 * 64 + 2 * 64 * 64 + 2 * 4 * 64 + 128 * 4 + 4 + 4 + 16
QWEN_ATTENTION = 128 * 64 + 2 * 32 * 64 + 64 * 64 + 16 + 16
QWEN_NORMS = 2 * 64
DENSE = 3 * 96 * 64
#: two of six experts; rows of 48 are filled up to 64. Then the router and the shared expert with its gate.
EXPERTS = 2 * (48 * 64 * 2 + 64 * 64) + 6 * 64 + 3 * 96 * 64 + 64


@pytest.mark.parametrize(("model", "feed_forward"), [("qwen35", DENSE), ("qwen35moe", EXPERTS)])
def test_bytes_of_a_token_of_a_hybrid(model, feed_forward):
    with loaded(model) as engine:
        found = bytes_per_token(engine.context.plan, engine.weights, 5)
    layers = 3 * QWEN_RECURRENT + QWEN_ATTENTION + 4 * (QWEN_NORMS + feed_forward)
    assert found.weights == (64 + layers + 64 + 320 * 64) * F32
    assert found.cache == 2 * 16 * 2 * 2 * (3 + 1)
    # Three columns of 128 channels, and four heads of 16 x 16: in and out, in three layers.
    assert found.states == 3 * 2 * (3 * 128 + 4 * 16 * 16) * F32


# --- the copy


@pytest.mark.parametrize("check", ["off", "guard"])
def test_a_copy_is_measured_and_leaves_nothing(check):
    with loaded("llama", check=check) as engine:
        before, streams = engine.allocator.snapshot(), set(engine.device.streams)
        found = copy_rate(engine)
        after = engine.allocator.snapshot()
        assert found.nbytes == 1 << 20
        assert found.per_second > 0
        assert (after.reserved, after.used.current) == (before.reserved, before.used.current)
        assert after.reserved_peak >= before.reserved + 2 * found.nbytes
        assert engine.check_integrity() == []
        assert engine.device.streams == streams


def test_a_copy_takes_a_part_of_what_a_limit_leaves():
    with loaded("llama") as engine:
        needed = engine.allocator.snapshot().reserved
    with loaded("llama", device_memory_limit=needed + (1 << 19)) as engine:
        assert copy_rate(engine).nbytes == 1 << 17
        assert engine.allocator.snapshot().reserved_peak <= needed + (1 << 19)
    with loaded("llama", device_memory_limit=needed) as engine:
        assert copy_rate(engine) is None


def test_without_memory_for_a_copy_the_rest_is_measured():
    with refengine.load(LLAMA, threads=1, n_ctx=256) as engine:
        needed = engine.allocator.snapshot().reserved
    (result,) = run(plan(n_prompt=[0], device_memory_limit=needed))
    assert result.copy is None
    assert result.percent_of_copy is None
    assert result.token_bytes.total > 0


def test_no_copy_without_a_generation(monkeypatch):
    monkeypatch.setattr("refengine.bench.copy_rate", None)
    assert [result.copy for result in run(plan(n_gen=[0]))] == [None]


def test_a_copy_that_is_refused_leaves_nothing():
    faults = FailNth(None)
    with loaded("llama", check="guard", faults=faults) as engine:
        before = engine.allocator.snapshot()
        for behind in (0, 1):
            faults.nth = faults.seen + behind
            with pytest.raises(OutOfMemoryError, match="copy"):
                copy_rate(engine)
            assert engine.allocator.snapshot().reserved == before.reserved
        faults.nth = None
        assert copy_rate(engine) is not None


# --- ends


class Engines:
    """Closes engines as ``run`` asks, and remembers them."""

    def __init__(self):
        self.closed = []

    def __call__(self, engine):
        engine.close()
        self.closed.append(engine)


def assert_nothing_is_left(engines):
    for engine in engines:
        assert engine.allocator.table() == ()
        assert engine.allocator.arenas == ()
        assert engine.findings == []


def test_an_engine_is_closed_when_its_level_fails(monkeypatch):
    decode = Context.decode

    def failing(self, batch):
        status = decode(self, batch)
        if self.executor.allocator.level > 0 and self.length(0) == 5:
            self.error = RuntimeError("on purpose")
            return DecodeStatus.COMPUTE_FAILED
        return status

    monkeypatch.setattr(Context, "decode", failing)
    engines, results = Engines(), []
    with pytest.raises(ComputeError, match="on purpose"):
        results.extend(run(plan(levels=["off", "guard"]), close=engines))
    assert [engine.options.check for engine in engines.closed] == ["off", "guard"]
    assert_nothing_is_left(engines.closed)


def test_an_engine_is_closed_when_nobody_wants_more():
    engines = Engines()
    with closing(run(plan(levels=["off", "guard"]), close=engines)) as results:
        assert next(results).test == BenchTest("pp", 16)
        assert engines.closed == []
    assert [engine.options.check for engine in engines.closed] == ["off"]
    assert_nothing_is_left(engines.closed)


def test_a_level_is_closed_before_the_next_is_loaded(monkeypatch):
    events = []
    load = refengine.bench.load
    monkeypatch.setattr("refengine.bench.load", lambda *a, **k: (events.append(k["check"]), load(*a, **k))[1])

    def close(engine):
        events.append("close")
        engine.close()

    list(run(plan(levels=["guard", "off"]), close=close))
    assert events == ["guard", "close", "off", "close"]


@pytest.mark.parametrize(("level", "run_number"), [("off", "run 2 of 2"), ("guard", "warm-up")])
def test_runs_that_differ_are_refused(level, run_number, monkeypatch):
    """One flipped bit of the logits, in one repetition or at another check level."""
    decode, steps = Context.decode, []

    def flipping(self, batch):
        status = decode(self, batch)
        if steps[-1] == f"check {level}: pp16, {run_number}":
            self.logits.view(np.uint32)[-1, 7] ^= 1
        return status

    monkeypatch.setattr(Context, "decode", flipping)
    engines = Engines()
    with pytest.raises(UnrepeatableError, match=f"pp16 at check level {level}, {run_number}: "):
        list(run(plan(levels=["off", "guard"]), step=steps.append, close=engines))
    assert_nothing_is_left(engines.closed)


def test_a_device_behind_a_bus_gives_the_best_token_alone(monkeypatch):
    """Its tokens are those of the logits; a best token that is another one in one run is refused."""
    monkeypatch.setattr(HostDevice, "behind_bus", True)
    seen, decode = [], Context.decode

    def watched(self, batch):
        status = decode(self, batch)
        seen.append((batch.tokens[-1], self.logits.shape[0], self.best))
        return status

    monkeypatch.setattr(Context, "decode", watched)
    list(run(plan(n_prompt=[9], n_gen=[6], repetitions=1)))
    with loaded("llama") as engine:
        prompts, tokens = seen[:2], seen[2:8]
        assert [(n_logits, best) for _, n_logits, best in prompts] == [(1, None)] * 2
        wanted = engine.logits([token for token, _, _ in tokens])
        for row, (_, n_logits, (best,)) in zip(wanted, tokens, strict=True):
            assert n_logits == 0
            assert (best.ids.tolist(), best.logits.tolist()) == ([row.argmax()], [row.max()])

    steps = []

    def changing(self, batch):
        status = decode(self, batch)
        if steps[-1] == "check off: tg6, run 1 of 2" and self.length(0) == 3:
            self.best[0].ids[0] += 1
        return status

    monkeypatch.setattr(Context, "decode", changing)
    with pytest.raises(UnrepeatableError, match="tg6 at check level off, run 1 of 2: logits differ"):
        list(run(plan(n_prompt=[0], n_gen=[6]), step=steps.append))


def test_steps_are_named():
    steps = []
    list(run(plan(repetitions=1), step=steps.append))
    runs = ["pp16, warm-up", "pp16, run 1 of 1", "tg8, warm-up", "tg8, run 1 of 1"]
    assert steps == [f"check off: {step}" for step in ("copy", *runs)]


def test_an_open_device_serves_all_levels():
    device = HostDevice(1)
    results = list(run(plan(device=device, threads=None, levels=["off", "guard"])))
    assert len(results) == 4
    del results
    gc.collect()
    assert device.streams == set()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_prompt": [16, -1]}, "n_prompt is -1; give 0 or more tokens"),
        ({"n_gen": [-8]}, "n_gen is -8; give 0 or more tokens"),
        ({"n_prompt": [0], "n_gen": [0, 0]}, "nothing to measure"),
        ({"repetitions": 0}, "repetitions is 0; give 1 or more"),
        ({"levels": []}, "no check level"),
        ({"levels": ["off", "most"]}, "check level 'most' is unknown"),
        ({"spec_type": "draft-mtp"}, "spec_type draft-mtp: plain decoding is measured"),
        ({"n_prompt": [32769]}, "test pp32769 has 32769 tokens; the model was trained for at most 32768"),
        ({"n_gen": [32769]}, "test tg32769 has 32769 tokens; the model was trained for at most 32768"),
        ({"n_ctx": 15}, "test pp16 has 16 tokens; n_ctx is 15: give fewer tokens or a longer context"),
        ({"n_ctx": 40000}, "n_ctx is 40000; this model was trained for at most 32768"),
        ({"cache_type_k": "q8_0"}, "q8_0"),
        ({"n_ubatch": 0}, "n_ubatch is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(given, words):
    with pytest.raises(BadInputError, match=words) as refused:
        plan(**given)
    assert "\n" not in str(refused.value)
