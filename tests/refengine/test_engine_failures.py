"""Failures end one request or one load, say why, and leave nothing behind."""

import gc
import threading

import numpy as np
import pytest
from engines import DATA, FailNth, same_bits
from patience import PATIENCE

import refengine
from instrumentation.errors import BadInputError, DeviceError, FindingError, OutOfMemoryError
from instrumentation.faults import FaultInjector, FaultPlan
from refengine.context import DecodeStatus
from refengine.errors import ComputeError, ContextSizeError, RequestError

LLAMA = DATA / "llama.gguf"
N_CTX = 64
TOKENS = np.random.default_rng(5).integers(0, 320, 100).tolist()


def loaded(**options) -> refengine.Engine:
    defaults = {
        "n_ctx": N_CTX,
        "check": "guard",
        "device": "host",
        "threads": 1,
        "n_batch": 64,
        "n_ubatch": 32,
    }
    return refengine.load(LLAMA, **(defaults | options))


@pytest.fixture(scope="module")
def wanted():
    """Logits of an engine that never failed."""
    with loaded() as engine:
        return engine.logits(TOKENS[:40])


@pytest.fixture
def engine(wanted):
    made = loaded()
    made.logits(TOKENS[:1])
    yield made
    assert held(made) == [0]
    assert same_bits(made.logits(TOKENS[:40]), wanted)
    assert made.check_integrity() == []
    assert made.findings == []
    made.close()
    assert made.allocator.table() == ()
    assert made.allocator.arenas == ()


def held(engine: refengine.Engine) -> list[int]:
    """Positions that the sequence of an idle engine holds without prefixes, and a check of the books."""
    engine.check_integrity()
    assert engine.scheduler.is_idle
    engine.drop_prefixes()
    assert engine.context.cache.free_positions == N_CTX
    return [engine.context.cache.length(0)]


# --- requests that make no sense


@pytest.mark.parametrize("call", ["logits", "generate", "stream"])
@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], RequestError, "the prompt is empty; give at least one token"),
        ([3, 320], RequestError, "token 320 is out of range; this model has tokens 0 to 319"),
        ([-1], RequestError, "token -1 is out of range"),
        ([2**70], RequestError, "out of range"),
        ([1.5], RequestError, "tokens are not whole numbers"),
        ([None], RequestError, "tokens are not whole numbers"),
        (None, RequestError, "tokens are not whole numbers"),
        (
            [1] * (N_CTX + 1),
            ContextSizeError,
            r"request \(65 tokens\) exceeds the available context size \(64 tokens\), try increasing it",
        ),
    ],
    ids=["empty", "too large", "negative", "huge", "a fraction", "nothing", "no sequence", "too long"],
)
def test_prompts_that_make_no_sense_are_refused(engine, call, prompt, error, message):
    with pytest.raises(error, match=message):
        getattr(engine, call)(prompt)


def test_errors_have_the_exit_codes_of_the_command_line():
    assert (RequestError.exit_code, ContextSizeError.exit_code, ComputeError.exit_code) == (2, 3, 3)
    assert OutOfMemoryError.exit_code == 3


def test_unknown_sampling_is_named(engine):
    with pytest.raises(RequestError, match=r"unknown argument temprature; sampling knows .*temperature"):
        engine.generate([1], temprature=0)
    with pytest.raises(RequestError, match="top_p is 2; wanted 0 to 1"):
        engine.generate([1], top_p=2)


# --- the end of the context


@pytest.mark.parametrize("n_predict", [1, 16, 17])
def test_what_fits_the_context_completes(engine, n_predict):
    # The last token is never decoded, so one more than n_ctx - n_prompt fits.
    generation = engine.generate(TOKENS[:48], n_predict=n_predict, temperature=0, ignore_eos=True)
    assert len(generation.tokens) == n_predict
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("n_predict", [18, 1000, -1])
def test_what_does_not_fit_says_so_at_the_end_of_the_context(engine, n_predict):
    pieces = []
    stream = engine.stream(TOKENS[:48], n_predict=n_predict, temperature=0, ignore_eos=True)
    with pytest.raises(ContextSizeError, match=r"^Context size has been exceeded\.$"):
        pieces.extend(stream)
    assert pieces
    with pytest.raises(ContextSizeError, match=r"^Context size has been exceeded\.$"):
        engine.generate(TOKENS[:48], n_predict=n_predict, temperature=0, ignore_eos=True)


def test_a_prompt_may_fill_the_context(engine):
    assert engine.logits(TOKENS[:N_CTX]).shape == (N_CTX, 320)
    assert len(engine.generate(TOKENS[:N_CTX], n_predict=1, temperature=0).tokens) == 1


# --- interruptions


def test_an_abandoned_stream_gives_its_pages_back(engine):
    before = engine.allocator.table()
    stream = engine.stream(TOKENS[:40], n_predict=20, temperature=0, ignore_eos=True)
    next(stream)
    assert engine.context.cache.length(0) >= 40
    del stream
    gc.collect()
    assert held(engine) == [0]
    assert engine.allocator.table() != ()
    engine.logits(TOKENS[:1])
    assert engine.allocator.table() == before


def test_a_stream_that_was_never_begun_holds_nothing(engine):
    stream = engine.stream(TOKENS[:4], n_predict=3)
    engine.generate(TOKENS[:3], n_predict=1)
    del stream


def test_requests_of_the_same_thread_while_a_stream_runs_wait_for_the_slot(engine, wanted):
    alone = engine.generate(TOKENS[:4], n_predict=5, temperature=0, ignore_eos=True)
    stream = engine.stream(TOKENS[:4], n_predict=5, temperature=0, ignore_eos=True)
    pieces = [next(stream)]
    assert same_bits(engine.logits(TOKENS[:40]), wanted), "the stream's request is preempted meanwhile"
    second = engine.stream(TOKENS[:4], n_predict=5, temperature=0, ignore_eos=True)
    assert "".join(second) == alone.text
    pieces += list(stream)
    assert "".join(pieces) == alone.text


def test_a_stream_that_is_collected_in_the_middle_of_a_step_ends_behind_it(engine, monkeypatch):
    streams = [engine.stream(TOKENS[:4], n_predict=50, ignore_eos=True)]
    next(streams[0])
    decode = engine.context.decode

    def collecting(batch):
        if streams:
            streams.pop()
            gc.collect()
            assert not engine.scheduler.is_idle, "the slot is not taken away under the step"
        return decode(batch)

    monkeypatch.setattr(engine.context, "decode", collecting)
    engine.drive()
    assert not streams
    assert held(engine) == [0]


def test_another_thread_waits_for_its_turn(engine, wanted):
    stream = engine.stream(TOKENS[:4], n_predict=5, temperature=0, ignore_eos=True)
    next(stream)
    found = []
    other = threading.Thread(target=lambda: found.append(engine.logits(TOKENS[:40])))
    other.start()
    rest = list(stream)
    other.join(timeout=PATIENCE)
    assert rest
    assert same_bits(found[0], wanted)


def test_a_stream_may_end_in_another_thread(engine):
    stream = engine.stream(TOKENS[:4], n_predict=50, temperature=0, ignore_eos=True)
    next(stream)
    other = threading.Thread(target=stream.close)
    other.start()
    other.join(timeout=PATIENCE)
    assert held(engine) == [0]


def test_an_error_in_on_end_reaches_the_caller(engine):
    def fail(generation):
        raise ValueError(f"{len(generation.tokens)} tokens")

    pieces = []
    with pytest.raises(ValueError, match="3 tokens"):
        pieces.extend(engine.stream(TOKENS[:4], n_predict=3, temperature=0, ignore_eos=True, on_end=fail))
    assert held(engine) == [0]


@pytest.mark.parametrize("nth", [0, 1, 5])
def test_an_interrupt_ends_a_generation_and_nothing_else(engine, monkeypatch, nth):
    decoded = 0
    decode = engine.context.decode

    def interrupted(batch):
        nonlocal decoded
        decoded += 1
        if decoded > nth:
            raise KeyboardInterrupt
        return decode(batch)

    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.generate(TOKENS[:40], n_predict=20, temperature=0, ignore_eos=True)
    # The next request goes through although the traceback still holds the frames of this one.
    assert engine.generate(TOKENS[:40], n_predict=2, temperature=0, ignore_eos=True).tokens
    del caught


def test_an_interrupt_within_the_device_ends_a_generation(engine, monkeypatch):
    replay = engine.context.stream.replay
    replays = 0

    def interrupted(graph):
        nonlocal replays
        replays += 1
        replay(graph)
        if replays == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.context.stream, "replay", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(TOKENS[:40], n_predict=20, temperature=0, ignore_eos=True)


# --- failed computations


def test_a_failed_allocation_ends_the_request(engine, wanted):
    engine.allocator._heap.faults = FailNth(0)
    with pytest.raises(ComputeError, match=r"^Compute error\. \(decode status -2\): .*compute.* on purpose"):
        engine.logits(TOKENS[:7])
    engine.allocator._heap.faults = None
    assert same_bits(engine.logits(TOKENS[:7]), wanted[:7])


def test_a_failed_device_ends_the_request(engine, monkeypatch):
    def fail(graph):
        raise DeviceError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.context.stream, "replay", fail)
        with pytest.raises(ComputeError, match=r"^Compute error\. \(decode status -3\): the device is gone$"):
            engine.generate(TOKENS[:7])


def test_no_room_in_the_cache_ends_the_request(engine, monkeypatch):
    monkeypatch.setattr(engine.context, "decode", lambda _batch: DecodeStatus.NO_KV_SLOT)
    with pytest.raises(ContextSizeError, match=r"^Context size has been exceeded\.$"):
        engine.generate(TOKENS[:7])


# --- the end


def test_a_closed_engine_refuses_by_name():
    engine = loaded()
    stream = engine.stream(TOKENS[:4], n_predict=20, ignore_eos=True)
    begun = engine.stream(TOKENS[:4], n_predict=20, ignore_eos=True)
    next(begun)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.logits([1]),
        lambda: engine.generate([1]),
        lambda: next(stream),
        lambda: list(begun),
    ):
        with pytest.raises(RequestError, match="the engine is closed; load the model again"):
            call()
    assert engine.findings == []
    assert engine.check_integrity() == []


def test_a_leak_is_raised_at_close_but_not_at_level_off():
    for check in ("guard", "off"):
        engine = loaded(check=check)
        engine.allocator.reserve_arena(4096, owner=engine.context.owner, name="forgotten").unwrap()
        if check == "guard":
            with pytest.raises(FindingError, match=r"(?s)MEM006.*forgotten"):
                engine.close()
        else:
            engine.close()
        assert [finding.code for finding in engine.findings] == ["MEM006"]


# --- loading


def n_reservations() -> int:
    faults = FailNth()
    with loaded(faults=faults):
        pass
    return faults.seen


def test_a_load_that_fails_at_any_reservation_leaves_nothing(monkeypatch):
    seen = []
    allocators = []
    made = refengine.engine.Allocator

    def remembered(*args, **kwargs):
        allocators.append(made(*args, **kwargs))
        return allocators[-1]

    monkeypatch.setattr(refengine.engine, "Allocator", remembered)
    count = n_reservations()
    assert count >= 7
    for nth in range(count):
        with pytest.raises(OutOfMemoryError, match="failed on purpose"):
            loaded(faults=FailNth(nth), on_finding=seen.append)
        allocator = allocators[-1]
        assert allocator.table() == ()
        assert allocator.arenas == ()
        assert allocator.snapshot().reserved == 0
        assert not allocator.memory._blocks
        assert not allocator.memory.streams
    assert seen == []


def test_a_device_that_is_too_small_is_named_and_nothing_leaks():
    with loaded() as engine:
        needed = engine.allocator.snapshot().reserved
    seen = []
    for part in (0.01, 0.3, 0.7, 0.99):
        with pytest.raises(OutOfMemoryError, match=rf"limit .* the smallest limit that works is {needed}$"):
            loaded(device_memory_limit=int(needed * part), on_finding=seen.append)
    assert seen == []
    with loaded(device_memory_limit=needed) as engine:
        assert engine.logits(TOKENS[:40]).shape == (40, 320)


def test_a_load_that_is_interrupted_leaves_nothing():
    seen = []

    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loaded(progress=interrupt, on_finding=seen.append)
    assert seen == []


def test_progress_counts_the_bytes_of_the_file():
    calls = []
    with loaded(progress=lambda done, total: calls.append((done, total))):
        pass
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] <= LLAMA.stat().st_size


def test_overrides_reach_the_model():
    with pytest.raises(BadInputError, match="n_ctx is 64; this model was trained for at most 32"):
        loaded(override_kv={"llama.context_length": 32})


# --- requests that nobody works on, hidden states that nobody takes


def test_requests_without_background_go_on_while_somebody_waits_for_one(engine):
    asked = {"background": False, "n_predict": 2, "temperature": 0, "ignore_eos": True}
    first, second = (engine.submit(TOKENS[i : i + 5], **asked) for i in range(2))
    assert engine._service.pump is None
    assert (first.status, second.status) == ("queued", "queued")
    assert len(first.result().tokens) == 2
    assert (first.status, second.status) == ("done", "queued")
    # A thread that works for another request works for this one too.
    third = engine.submit(TOKENS[3:8], **{**asked, "background": True})
    third.result(timeout=PATIENCE)
    assert second.status == "done"


def test_a_hand_over_that_fails_leaves_no_lease_and_an_empty_queue():
    faults = FaultInjector()
    with refengine.load(
        DATA / "qwen35.gguf", n_ctx=64, n_batch=32, n_ubatch=16, device="host", threads=1, check="guard",
        spec_type="draft-mtp", faults=faults,
    ) as engine:  # fmt: skip
        # The record succeeds, the draft's wait fails.
        faults.plan = FaultPlan.nth(2, "event")
        faults.counts.clear()
        with pytest.raises(DeviceError, match="event wait"), engine.context.lend_hidden(engine.draft):
            pytest.fail("it was lent")
        assert engine.context.stream.pending == 0
        assert engine.context.kept["hidden"].buffer.leases == ()
