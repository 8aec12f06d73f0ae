"""Several requests in one context: each gives what it gives alone, in time, whatever happens to the others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from engines import Array, World, decode, same_bits, world
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter
from slots import (
    LONGEST,
    NO_SPACE,
    TEXTS,
    TOO_LONG,
    ChosenFaults,
    Watch,
    Wish,
    alone,
    check_all,
    expect,
    loaded,
    plain,
)
from structlog.testing import capture_logs

from instrumentation.errors import BadInputError, DeviceError
from refengine.batch import Batch
from refengine.context import Context, DecodeStatus
from refengine.errors import ComputeError, ContextSizeError
from refengine.memory.kv_cache import PAGE

WISHES = st.lists(
    st.builds(
        Wish.of,
        st.integers(0, 2),
        st.integers(1, 60),
        st.sampled_from([1, 2, 5, 12, 30]),
        temperature=st.sampled_from([0.0, 0.8]),
        seed=st.integers(1, 2),
        ignore_eos=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
OPTIONS = st.fixed_dictionaries(
    {
        "n_slots": st.integers(1, 4),
        "n_batch": st.integers(1, 40),
        "n_ubatch": st.integers(1, 40),
        "n_ctx": st.sampled_from([33, 64, 96, 128]),
        "kv_unified": st.booleans(),
        "check": st.sampled_from(["off", "guard"]),
    }
)


def run_all(name: str, wishes: Sequence[Wish], pauses: Sequence[int], options: dict) -> None:
    """Requests arrive in turn, ``pauses`` steps after one another."""
    with loaded(name, **options) as engine:
        fitting = [wish for wish in wishes if len(wish.prompt) <= engine.settings.n_ctx]

        def arrivals() -> Iterator[Wish | None]:
            for i, wish in enumerate(fitting):
                yield wish
                for _ in range(pauses[i % len(pauses)]):
                    yield None

        watch, coming = Watch(engine), arrivals()
        while len(watch.requests) < len(fitting) or not engine.scheduler.is_idle:
            wish = next(coming, None)
            if wish is not None:
                watch.ask(wish)
            if not engine.scheduler.is_idle:
                watch.step()
        check_all(name, watch, fitting)
        engine.drop_prefixes()
        cache = engine.context.cache
        assert cache.free_pages == cache.shape.n_pages


@pytest.mark.parametrize("name", ["llama", "qwen35"])
@settings(max_examples=25)
@given(wishes=WISHES, pauses=st.lists(st.integers(0, 9), min_size=1), options=OPTIONS)
def test_requests_together_give_what_they_give_alone(name: str, wishes: list, pauses: list, options: dict):
    run_all(name, wishes, pauses, options)


@settings(max_examples=6)
@given(wishes=WISHES, pauses=st.lists(st.integers(0, 9), min_size=1), options=OPTIONS)
def test_requests_of_experts_give_what_they_give_alone(wishes: list, pauses: list, options: dict):
    run_all("qwen35moe", wishes, pauses, options)


# --- progress


def test_equal_requests_end_together():
    for n_batch in (4, 7, 64):
        for spec_type in ("none", "draft-mtp"):
            wishes = [Wish.of(text, 25, 30) for text in range(4)]
            with loaded(n_slots=4, n_ctx=320, n_batch=n_batch, n_ubatch=6, spec_type=spec_type) as engine:
                watch, ends = Watch(engine), {}
                for wish in wishes:
                    watch.ask(wish)
                while not engine.scheduler.is_idle:
                    watch.step()
                    for request in watch.requests:
                        if request.ended:
                            ends.setdefault(request.number, engine.scheduler.statistics.steps)
                check_all("qwen35", watch, wishes)
                # Apart by no more than the steps that three other prompts of 25 tokens take.
                spread = max(ends.values()) - min(ends.values())
                assert spread <= 3 * 25 / n_batch + 8, (n_batch, spec_type, ends)
                assert engine.scheduler.statistics.mean_busy_slots > 3


@settings(max_examples=6)
@given(
    n_slots=st.integers(2, 4),
    n_batch=st.integers(2, 24),
    n_ubatch=st.integers(2, 12),
    n_max=st.integers(1, 8),
    prompts=st.lists(st.integers(1, 40), min_size=4, max_size=4),
)
@example(n_slots=3, n_batch=7, n_ubatch=6, n_max=5, prompts=[30, 25, 5, 5])
@example(n_slots=2, n_batch=6, n_ubatch=6, n_max=5, prompts=[30, 25, 5, 5])
def test_no_slot_stands_still_beside_one_that_generates(
    n_slots: int, n_batch: int, n_ubatch: int, n_max: int, prompts: list
):
    """Each slot goes on within as many steps as there are slots, once the oldest request's prompt is through."""
    options = {"n_ctx": LONGEST, "draft_n_max": n_max, "spec_type": "draft-mtp"}
    with loaded(n_slots=n_slots, n_batch=n_batch, n_ubatch=n_ubatch, **options) as engine:
        watch = Watch(engine)
        wishes = [Wish.of(0, prompts[0], 60), *(Wish.of(t, prompts[t], 20) for t in range(1, n_slots))]
        first = watch.ask(wishes[0])
        while not first.tokens:
            watch.step()
        for wish in wishes[1:]:
            watch.ask(wish)
        still = dict.fromkeys(range(n_slots), 0)
        for _ in range(40):
            if engine.scheduler.is_idle:
                break
            running = [slot for slot in engine.scheduler.slots if slot.request is not None]
            watch.step()
            moved = watch.batches[-1]
            for slot in running:
                still[slot.number] = 0 if slot.number in moved else still[slot.number] + 1
            assert max(still.values()) < n_slots, still
        watch.run()
        check_all("qwen35", watch, wishes)


def test_a_long_prompt_does_not_stop_running_generations():
    short = [Wish.of(1, 3, 30), Wish.of(2, 4, 30)]
    long = Wish.of(0, 250, 3)
    with loaded(n_slots=3, n_ctx=LONGEST + 96, n_batch=20, n_ubatch=16) as engine:
        watch = Watch(engine)
        running = [watch.ask(wish) for wish in short]
        watch.step()
        prompt = watch.ask(long)
        while not prompt.tokens:
            before = [len(request.tokens) for request in running]
            watch.step()
            assert [len(request.tokens) for request in running] == [n + 1 for n in before]
            assert watch.batches[-1][2] >= 12, "the prompt has what the others leave"
        watch.run()
        check_all("qwen35", watch, [*short, long])


def test_a_batch_that_is_too_small_for_all_goes_round():
    """The oldest goes on in each step, the others take turns."""
    wishes = [Wish.of(text, 1, 24) for text in range(4)]
    with loaded(n_slots=4, n_batch=2) as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        watch.step()
        for _ in range(12):
            watch.step()
            counts = [len(request.tokens) for request in requests]
            assert max(counts[1:]) - min(counts[1:]) <= 1, counts
        watch.run()
        check_all("qwen35", watch, wishes)


# --- shortage


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_a_shortage_is_logged_and_the_youngest_waits(spec_type: str):
    wishes = [Wish.of(0, 20, 40), Wish.of(1, 20, 40)]
    with loaded(n_slots=2, n_ctx=96, spec_type=spec_type, check="guard") as engine:
        watch = Watch(engine)
        watch.run(iter(wishes))
        check_all("qwen35", watch, wishes)
        counted = engine.scheduler.statistics
        assert counted.preemptions == watch.requests[1].preemptions == 1
        assert watch.requests[1].generation().preemptions == 1
        assert watch.requests[0].preemptions == 0
        lines = [line for line in watch.lines if line["event"] == NO_SPACE]
        assert len(lines) == counted.retries >= 1
        assert all(line["log_level"] == "warning" for line in lines)
        assert all(line["n_tokens"] > 0 for line in lines)
        preempted = [line for line in watch.lines if line["event"] == "preempted"]
        assert [line["tokens"] for line in preempted] == [counted.recomputed_tokens]


def test_parts_of_prompts_become_smaller_before_anything_is_preempted():
    wishes = [Wish.of(0, 30, 30), Wish.of(1, 90, 5)]
    with loaded(n_slots=2, n_ctx=128, n_batch=6) as engine:
        watch = Watch(engine)
        watch.run(iter(wishes))
        check_all("qwen35", watch, wishes)
        counted = engine.scheduler.statistics
        assert counted.preemptions == 1
        assert counted.retries > 2
        # The last page is filled up to its end.
        at = next(i for i, line in enumerate(watch.lines) if line["event"] == "preempted")
        assert watch.lines[at]["tokens"] % PAGE == 0


def test_prefixes_go_before_anything_is_preempted():
    with loaded(n_slots=3, n_ctx=96) as engine:
        watch = Watch(engine)
        done = Wish.of(2, 30, 2)
        watch.ask(done)
        watch.run()
        assert engine.context.length(0) == 31
        wishes = [Wish.of(0, 20, 12), Wish.of(1, 20, 40)]
        watch.run(iter(wishes))
        assert engine.scheduler.statistics.preemptions == 0
        assert engine.scheduler.statistics.retries == 0
        check_all("qwen35", watch, [done, *wishes])


def test_the_prefix_that_was_used_least_lately_goes_first():
    first, second, large = Wish.of(0, 30, 2), Wish.of(1, 30, 2), Wish.of(2, 40, 2)
    again = [Wish((*w.prompt, *alone("qwen35", w).tokens, 5), 2) for w in (second, first)]
    with loaded(n_slots=3, n_ctx=96) as engine:
        watch = Watch(engine)
        for wish, reused in ((first, 0), (second, 0), (large, 0), (again[0], 31), (again[1], 31)):
            watch.ask(wish)
            watch.run()
            assert engine.scheduler.statistics.reused_tokens == reused
        check_all("qwen35", watch, [first, second, large, *again])


def test_what_does_not_fit_alone_ends_with_one_error_and_nobody_else_notices():
    too_long, wishes = Wish.of(0, 40, -1), [Wish.of(1, 20, 30), Wish.of(2, 10, 50), Wish.of(1, 30, 20)]
    endless = replace(too_long, n_predict=60)
    with loaded(n_slots=3, n_ctx=64, check="guard") as engine:
        watch = Watch(engine)
        lost = watch.ask(too_long)
        requests = [watch.ask(wish) for wish in wishes]
        watch.run()
        with pytest.raises(ContextSizeError, match=f"^{TOO_LONG}$"):
            lost.result()
        assert lost.tokens == alone("qwen35", endless).tokens[:25]
        for wish, request in zip(wishes, requests, strict=True):
            expect("qwen35", wish, request, 64)
        watch.check()


def test_the_tail_of_a_sequence_is_never_parted():
    """Neither a draft block nor the last tokens of a prompt are in two micro-batches, or in two batches."""
    wishes = [Wish.of(0, 41, 20), Wish.of(1, 30, 20), Wish.of(2, 3, 20), Wish.of(0, 17, 9)]
    for n_batch, n_ubatch, n_ctx in ((64, 5, 288), (7, 6, 96), (9, 5, 64), (13, 13, 128)):
        with loaded(
            n_slots=3, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, spec_type="draft-mtp", draft_n_max=4
        ) as engine:
            watch = Watch(engine)
            ScriptedDrafter(engine, "qwen35", wishes, lambda p, n: p % (n + 1), check_hidden=False)
            keep = engine.settings.limits.keep_tail
            assert keep == 5
            run, decode_all = engine.context.executor.run, engine.context.decode
            parts: list[Array] = []

            def running(executable, inputs, outputs, run=run, parts=parts):
                parts.append(np.stack([inputs["sequence"], inputs["position"]], axis=1))
                run(executable, inputs, outputs)

            def decoding(batch, engine=engine, decode_all=decode_all, parts=parts, keep=keep):
                parts.clear()
                assert decode_all(batch) == DecodeStatus.OK
                assert sum(len(part) for part in parts) == len(batch)
                for slot in engine.scheduler.slots:
                    positions = batch.position[batch.sequence == slot.number][-keep:].tolist()
                    held = [p[p[:, 0] == slot.number][:, 1].tolist() for p in parts]
                    assert any(positions == part[len(part) - len(positions) :] for part in held)
                    if slot.request is None or not positions:
                        continue
                    n_known = len(slot.request.history)
                    # What is left of its tokens is nothing, or a tail that can stay together.
                    left = n_known - positions[-1] - 1
                    assert left <= 0 or left >= keep, (left, n_known)
                return DecodeStatus.OK

            engine.context.executor.run = running
            engine.context.decode = decoding
            watch.run(iter(wishes))
            for wish, request in zip(wishes, watch.requests, strict=True):
                expect("qwen35", wish, request, n_ctx)


# --- prefixes


KINDS = [("llama", "none"), ("qwen35", "none"), ("qwen35", "draft-mtp")]


@pytest.mark.parametrize(("name", "spec_type"), KINDS)
def test_a_request_that_goes_on_from_another_reuses_its_slot(name: str, spec_type: str):
    first = Wish.of(0, 40, 12)
    text = (*first.prompt, *alone(name, first).tokens)
    further = Wish((*text, 4, 5, 6), 9)
    longer = Wish((*further.prompt, *alone(name, further).tokens, *TEXTS[1][:20]), 9, temperature=0.8)
    with loaded(name, n_slots=2, spec_type=spec_type, check="guard") as engine:
        watch = Watch(engine)
        kept = 0
        for wish, held in ((first, 0), (further, len(text) - 1), (longer, len(text) + 3 + 8)):
            request = watch.ask(wish)
            watch.run()
            again = 1 if spec_type != "none" and held else 0  # for its hidden state
            kept += held - again
            assert engine.scheduler.statistics.reused_tokens == kept
            expect(name, wish, request, 128)
        check_all(name, watch, [first, further, longer])


@pytest.mark.parametrize(("name", "spec_type"), KINDS)
@settings(max_examples=12)
@given(data=st.data())
def test_a_request_that_diverges_from_another_gives_what_it_gives_alone(
    name: str, spec_type: str, data: st.DataObject
):
    options = {"spec_type": spec_type, "n_slots": data.draw(st.integers(1, 3))}
    with loaded(name, **options) as engine:
        watch, wishes = Watch(engine), []
        texts: list[tuple[int, ...]] = [tuple(TEXTS[0][:20])]
        for _ in range(data.draw(st.integers(2, 5))):
            text = data.draw(st.sampled_from(texts))
            cut = data.draw(st.integers(max(1, len(text) - 6), len(text)) | st.integers(1, len(text)))
            prompt = (*text[:cut], *TEXTS[3][: data.draw(st.integers(0, 5))])[:90]
            wishes.append(Wish(prompt, data.draw(st.integers(1, 9)), ignore_eos=data.draw(st.booleans())))
            request = watch.ask(wishes[-1])
            if data.draw(st.booleans()):
                watch.run()
            texts.append((*prompt, *request.tokens))
        watch.run()
        check_all(name, watch, wishes)


def test_a_prefix_is_not_taken_for_more_than_it_is():
    """The same prompt again: its last token is decoded again, as its logits are needed."""
    wish = Wish.of(0, 30, 1)
    with loaded("llama") as engine:
        watch = Watch(engine)
        for held in (0, 29, 58):
            request = watch.ask(wish)
            watch.run()
            assert engine.scheduler.statistics.reused_tokens == held
            expect("llama", wish, request, 128)


# --- sequences of a context


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def made(request: pytest.FixtureRequest) -> Iterator[tuple[str, World]]:
    with world(request.param, threads=1) as built:
        yield request.param, built


def text_logits(name: str, tokens: Sequence[int]) -> Array:
    return plain(name).logits(list(tokens))


def drop(built: World, context: Context) -> None:
    context.check_integrity()
    built.contexts.remove(context)
    context.release()


@settings(max_examples=8)
@given(n=st.integers(1, 70), first=st.integers(1, 40), second=st.integers(1, 40), third=st.integers(1, 40))
def test_copied_sequences_go_on_on_their_own(
    made: tuple[str, World], n: int, first: int, second: int, third: int
):
    name, built = made
    context = built.context(n_sequences=4, n_ctx=320, n_batch=128, n_ubatch=16)
    prompt = TEXTS[0][:n]
    decode(context, prompt, 1)
    free = context.cache.free_pages
    context.copy(1, 3)
    context.copy(1, 1)
    context.copy(3, 0)
    assert [context.length(s) for s in range(4)] == [n, n, 0, n]
    assert context.cache.free_pages == free, "pages are shared"
    tails = {0: TEXTS[1][:first], 3: TEXTS[2][:second], 1: TEXTS[0][n : n + third]}
    for s, tail in tails.items():
        assert same_bits(decode(context, tail, s), text_logits(name, [*prompt, *tail])[n:])
        context.check_integrity()
    context.keep(3)
    assert [context.length(s) for s in range(4)] == [0, 0, 0, n + second]
    more = TEXTS[1][:5]
    assert same_bits(decode(context, more, 3), text_logits(name, [*prompt, *tails[3], *more])[n + second :])
    drop(built, context)


def test_a_copy_of_nothing_is_nothing(made: tuple[str, World]):
    name, built = made
    context = built.context(n_sequences=2, n_ctx=96)
    decode(context, TEXTS[0][:9], 1)
    context.copy(0, 1)
    assert context.length(1) == 0
    assert same_bits(decode(context, TEXTS[1][:9], 1), text_logits(name, TEXTS[1][:9]))
    drop(built, context)


@pytest.mark.parametrize("nth", range(6))
def test_a_copy_that_fails_leaves_its_target_empty(nth: int):
    """6 copies: a convolution history and matrices of each recurrent layer."""
    with world("qwen35", threads=1) as built:
        context = built.context(n_sequences=3, n_ctx=192)
        decode(context, TEXTS[0][:20], 0)
        decode(context, TEXTS[1][:7], 1)
        seen = 0

        def chosen(kind: str, _detail: str) -> bool:
            nonlocal seen
            seen += kind == "copy"
            return kind == "copy" and seen == nth + 1

        built.device.faults = faults = ChosenFaults(chosen)
        with pytest.raises(DeviceError, match="on purpose"):
            context.copy(0, 1)
        built.device.faults = None
        assert len(faults.fired) == 1
        assert [context.length(s) for s in range(3)] == [20, 0, 0]
        context.check_integrity()
        assert same_bits(decode(context, TEXTS[1][:7], 1), text_logits("qwen35", TEXTS[1][:7]))
        context.copy(0, 1)
        more = text_logits("qwen35", TEXTS[0][:30])[20:]
        assert same_bits(decode(context, TEXTS[0][20:30], 1), more)
        assert same_bits(decode(context, TEXTS[0][20:30], 0), more)


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_shared_page_that_cannot_be_copied_fails_the_decode_alone(name: str):
    with world(name, threads=1) as built:
        context = built.context(n_sequences=2, n_ctx=192)
        decode(context, TEXTS[0][:20], 0)
        context.copy(0, 1)
        free = context.cache.free_pages
        built.device.faults = ChosenFaults(lambda kind, detail: kind == "copy" and "kv." in detail)
        batch = Batch.of(TEXTS[1][:5], 20, 1, "all")
        assert context.decode(batch) == DecodeStatus.COMPUTE_FAILED
        assert isinstance(context.error, DeviceError)
        built.device.faults = None
        context.check_integrity()
        assert [context.length(s) for s in range(2)] == [20, 20]
        assert context.cache.free_pages == free
        wanted = text_logits(name, [*TEXTS[0][:20], *TEXTS[1][:5]])[20:]
        assert same_bits(decode(context, TEXTS[1][:5], 1), wanted)
        assert same_bits(decode(context, TEXTS[1][:5], 0), wanted)
        drop(built, context)


# --- failures


def failing(start: int, every: int, kind: str, *parts: str):
    """Sites of a kind that name all of ``parts``: the ``start``-th and each ``every``-th behind it."""
    seen = 0

    def chosen(found: str, detail: str) -> bool:
        nonlocal seen
        if found != kind or not all(part in detail for part in parts):
            return False
        seen += 1
        return seen >= start and (seen - start) % every == 0

    return chosen


SITES = [
    ("reserve", "target/compute"),
    ("copy", "copy_in", "on target"),
    ("copy", "copy_out", "on target"),
    ("graph", "replay on target"),
    ("graph", "end_capture of target"),
]


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
@pytest.mark.parametrize("start", [1, 2, 3])
@pytest.mark.parametrize("site", SITES, ids=" ".join)
def test_a_decode_that_fails_once_ends_nobody(site: tuple[str, ...], start: int, spec_type: str):
    """Three requests run: each is tried alone, and that works."""
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 20, 12), Wish.of(2, 3, 12)]
    faults = ChosenFaults()
    options = {"n_slots": 3, "n_ctx": 192, "worst_case_reserve": False, "check": "guard", "n_ubatch": 16}
    with loaded(faults=faults, spec_type=spec_type, **options) as engine:
        watch = Watch(engine)
        for wish in wishes:
            watch.ask(wish)
        faults.chosen = failing(start, 1 << 30, *site)
        watch.run()
        faults.chosen = None
        assert len(faults.fired) == 1
        assert [line["requests"] for line in watch.lines if "trying each" in line["event"]] == [3]
        check_all("qwen35", watch, wishes, failed=1)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
@pytest.mark.parametrize("status", [DecodeStatus.ALLOC_FAILED, DecodeStatus.COMPUTE_FAILED])
def test_only_the_request_whose_own_decode_fails_ends(status: DecodeStatus, spec_type: str, victim: int):
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 20, 12), Wish.of(2, 3, 12)]
    faults = ChosenFaults()
    options = {"n_slots": 3, "n_ctx": 192, "worst_case_reserve": False, "check": "guard", "n_ubatch": 16}
    with loaded(faults=faults, spec_type=spec_type, **options) as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        for _ in range(4):
            watch.step()
        run = engine.context.executor.run
        slot = next(slot for slot in engine.scheduler.slots if slot.request is requests[victim])

        def running(executable, inputs, outputs):
            if status == DecodeStatus.COMPUTE_FAILED and slot.number in inputs["sequence"]:
                faults.chosen = lambda _kind, detail: "replay on target" in detail
            try:
                run(executable, inputs, outputs)
            finally:
                faults.chosen = None

        decode_all = engine.context.decode

        def decoding(batch):
            if status == DecodeStatus.ALLOC_FAILED and slot.number in batch.sequence:
                faults.chosen = lambda kind, detail: kind == "reserve" and "target" in detail
                # As if the shape had never been seen: its layout must be reserved.
                executor = engine.context.executor
                while executor._executables:
                    executor._executables.popitem()[1].release()
            try:
                return decode_all(batch)
            finally:
                faults.chosen = None

        engine.context.executor.run = running
        engine.context.decode = decoding
        with capture_logs() as lines:
            while not requests[victim].ended:
                engine.drive()
        engine.context.executor.run = run
        engine.context.decode = decode_all
        watch.lines += lines
        with pytest.raises(
            ComputeError, match=rf"^Compute error\. \(decode status {int(status)}\): .*on purpose"
        ):
            requests[victim].result()
        assert engine.scheduler.statistics.failed_decodes == 2
        watch.run()
        for i, (wish, request) in enumerate(zip(wishes, requests, strict=True)):
            if i != victim:
                expect("qwen35", wish, request, 192)
        assert engine.check_integrity() == []
        again = watch.ask(wishes[victim])
        watch.run()
        expect("qwen35", wishes[victim], again, 192)
        assert engine.findings == []


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1 << 20),
    every=st.integers(3, 60),
    spec_type=st.sampled_from(["none", "draft-mtp"]),
    n_ctx=st.sampled_from([64, 96, 192]),
    cuda_graphs=st.booleans(),
)
def test_requests_complete_or_say_why_when_anything_fails_at_any_time(
    seed: int, every: int, spec_type: str, n_ctx: int, cuda_graphs: bool
):
    wishes = [Wish.of(0, 30, 20), Wish.of(1, 20, 12), Wish.of(2, 3, 40), Wish.of(1, 33, 5)]
    faults, random = ChosenFaults(), np.random.default_rng(seed)
    options = {"n_slots": 3, "n_ctx": n_ctx, "worst_case_reserve": False, "check": "guard", "n_ubatch": 16}
    with loaded(faults=faults, spec_type=spec_type, cuda_graphs=cuda_graphs, **options) as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        rate = 1 / (every * (1 if cuda_graphs else 8))
        faults.chosen = lambda _kind, _detail: bool(random.random() < rate)
        for _ in range(400):
            if engine.scheduler.is_idle:
                break
            with capture_logs():
                engine.drive()
            faults.chosen, chosen = None, faults.chosen
            engine.context.check_integrity()
            engine.scheduler.check_integrity()
            faults.chosen = chosen
        assert engine.scheduler.is_idle
        faults.chosen = None
        for wish, request in zip(wishes, requests, strict=True):
            if isinstance(request.error, ComputeError):
                assert str(request.error).startswith("Compute error. (decode status -")
                wanted = alone("qwen35", wish)
                n = len(request.tokens)
                assert request.tokens == wanted.tokens[:n]
                assert n == 0 or same_bits(np.array(request._logits), np.asarray(wanted.logits)[:n])
            else:
                expect("qwen35", wish, request, n_ctx)
        again = watch.ask(wishes[0])
        while not again.ended:
            engine.drive()
        expect("qwen35", wishes[0], again, n_ctx)
        assert engine.check_integrity() == []
        assert engine.findings == []


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_logits_that_are_not_finite_end_one_request(spec_type: str):
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 20, 12), Wish.of(2, 3, 12)]
    with loaded(n_slots=3, n_ctx=192, spec_type=spec_type) as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        for _ in range(3):
            watch.step()
        decode_all = engine.context.decode

        def decoding(batch):
            status = decode_all(batch)
            rows = np.flatnonzero(batch.sequence[batch.outputs] == 1)
            engine.context.logits[rows] = np.nan
            return status

        engine.context.decode = decoding
        engine.drive()
        engine.context.decode = decode_all
        assert [request.status for request in requests] == ["running", "failed", "running"]
        with pytest.raises(ComputeError, match="finite"):
            requests[1].result()
        assert engine.context.length(1) == 0
        watch.run()
        for i in (0, 2):
            expect("qwen35", wishes[i], requests[i], 192)
        engine.check_integrity()


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_an_error_that_is_none_of_ours_reaches_who_drives_and_nothing_is_torn(spec_type: str):
    """Such as one out of ``on_finding``: it passes through a decode; the requests go on behind it."""
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 20, 12)]
    with loaded(n_slots=2, n_ctx=192, spec_type=spec_type, check="guard") as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        run = engine.context.executor.run
        for _ in range(3):
            watch.step()

            def raising(executable, inputs, outputs):
                run(executable, inputs, outputs)
                raise ValueError("out of on_finding")

            engine.context.executor.run = raising
            with pytest.raises(ValueError, match="out of on_finding"):
                engine.drive()
            engine.context.executor.run = run
            assert [request.status for request in requests] == ["running", "running"]
            assert engine.check_integrity() == []
        watch.run()
        for wish, request in zip(wishes, requests, strict=True):
            expect("qwen35", wish, request, 192)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_rollback_that_is_refused_is_computed_again(nth: int, monkeypatch: pytest.MonkeyPatch):
    wishes = [Wish.of(0, 30, 16), Wish.of(1, 7, 16)]
    with loaded(n_slots=2, n_ctx=192, spec_type="draft-mtp", check="guard") as engine:
        watch = Watch(engine)
        ScriptedDrafter(engine, "qwen35", wishes, lambda p, n: p % min(2, n))
        truncate, calls = engine.context.truncate, 0

        def refusing(sequence: int, length: int) -> bool:
            nonlocal calls
            calls += 1
            return calls != nth and truncate(sequence, length)

        monkeypatch.setattr(engine.context, "truncate", refusing)
        watch.run(iter(wishes))
        assert calls > nth
        refused = [line for line in watch.lines if line["event"] == "rollback refused"]
        assert [line["tokens"] for line in refused] == [engine.scheduler.statistics.recomputed_tokens]
        check_all("qwen35", watch, wishes)


def test_a_rollback_that_is_refused_behind_the_end_costs_the_prefix_alone(monkeypatch: pytest.MonkeyPatch):
    said = alone("qwen35", Wish.of(0, 30, 16)).tokens
    wish = Wish.of(0, 30, 16, ignore_eos=False)
    with loaded(spec_type="draft-mtp", override_kv={"tokenizer.ggml.eos_token_id": said[2]}) as engine:
        watch = Watch(engine)
        ScriptedDrafter(engine, "qwen35", [Wish.of(0, 30, 16)], lambda _p, n: n)
        monkeypatch.setattr(engine.context, "truncate", lambda _sequence, _length: False)
        request = watch.ask(wish)
        watch.run()
        assert request.generation().tokens == said[: said.index(said[2]) + 1]
        assert engine.scheduler.statistics.recomputed_tokens == 0, "nobody computes it again"
        assert engine.context.length(0) == 0
        watch.check()


# --- beside requests


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_logits_in_the_middle_of_requests_change_nothing(spec_type: str):
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 20, 12), Wish.of(2, 9, 12)]
    with loaded(n_slots=2, n_ctx=96, spec_type=spec_type, check="guard") as engine:
        watch = Watch(engine)
        requests = [watch.ask(wish) for wish in wishes]
        for n in range(1, 4):
            watch.step()
            watch.step()
            rows = watch.rows
            assert same_bits(engine.logits(TEXTS[1][:90]), text_logits("qwen35", TEXTS[1][:90]))
            if spec_type != "none":
                assert engine.draft_logits(TEXTS[1][:20]).shape == (19, engine.config.n_vocab)
            watch.rows = rows
            assert engine.context.length(0) == 0
            assert [request.status for request in requests] == ["queued"] * 3
            calls = n * (2 if spec_type != "none" else 1)
            assert requests[0].preemptions >= n
            assert engine.scheduler.statistics.preemptions <= 2 * calls
        watch.run()
        for wish, request in zip(wishes, requests, strict=True):
            expect("qwen35", wish, request, 96)
        assert engine.check_integrity() == []


def test_an_idle_engine_has_nothing_to_do():
    with loaded(n_slots=2) as engine:
        assert engine.scheduler.is_idle
        assert not engine.scheduler.step()
        engine.drive()
        assert engine.scheduler.statistics.steps == 0
        assert engine.scheduler.statistics.mean_busy_slots == 0.0


def test_damaged_books_are_found():
    with loaded(n_slots=2) as engine:
        watch = Watch(engine)
        watch.ask(Wish.of(0, 9, 9))
        watch.step()
        slot = engine.scheduler.slots[0]
        slot.held.append(5)
        with pytest.raises(AssertionError, match="slot 0: 10 held"):
            engine.check_integrity()
        slot.held[-2:] = [(slot.held[0] + 1) % 290]
        with pytest.raises(AssertionError, match="slot 0 holds others' tokens"):
            engine.check_integrity()
        slot.held[-1] = watch.requests[0].history[8]
        engine.check_integrity()


# --- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_slots": 65}, "n_slots is 65; give at most as many as positions, n_ctx 64"),
        ({"n_slots": 0}, r"n_slots is 0; give a whole number from 1 to \d+"),
        ({"n_ctx": -1}, r"n_ctx is -1; give a whole number from 0 to \d+"),
        ({"n_ctx": 32769}, "n_ctx is 32769; this model was trained for at most 32768"),
        ({"draft_n_max": 0}, "draft_n_max is 0; give a whole number from 1 to 31"),
        ({"draft_n_max": 10**9}, "draft_n_max is 1000000000; give a whole number from 1 to 31"),
        ({"draft_n_min": 5, "draft_n_max": 4}, "draft_n_min is 5; give at most draft_n_max, which is 4"),
        (
            {"cache_type_k": "q8", "cache_type_v": "q8"},
            "cache_type_k 'q8' is unknown; use one of f32, f16, bf16, q8_0",
        ),
        ({"spec_type": "mtp"}, "spec_type 'mtp' is unknown; use one of none, draft-mtp"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(options: dict, message: str):
    with pytest.raises(BadInputError, match=f"^{message}$"):
        loaded(**({"n_ctx": 64, "spec_type": "draft-mtp"} | options))


def test_slots_of_their_own_share_nothing():
    """kv_unified off: each has its part of the positions, however much the others hold."""
    wishes = [Wish.of(0, 30, 12), Wish.of(1, 33, 12), Wish.of(2, 5, 40)]
    with loaded(n_slots=3, n_ctx=128, kv_unified=False) as engine:
        assert engine.settings.n_ctx == 42
        assert engine.context.cache.shape.n_pages == 3 * 2
        watch = Watch(engine)
        watch.run(iter(wishes))
        assert engine.scheduler.statistics.preemptions == 0
        assert engine.scheduler.statistics.retries == 0
        assert [request.status for request in watch.requests] == ["done", "failed", "failed"]
        check_all("qwen35", watch, wishes)
        with pytest.raises(ContextSizeError, match=r"request \(43 tokens\) exceeds .* \(42 tokens\)"):
            engine.submit([1] * 43)


def test_as_many_slots_as_positions():
    with loaded(n_slots=PAGE, n_ctx=PAGE) as engine:
        wishes = [Wish.of(0, 3, 4), Wish.of(1, 3, 4)]
        watch = Watch(engine)
        watch.run(iter(wishes))
        check_all("qwen35", watch, wishes)
