"""A soak draws what it says, ends when it says, and sees everything that may not happen."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import fake_device
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.errors import BadInputError
from instrumentation.memory_watch import MemoryWatch
from instrumentation.ownership import Owner
from refengine.context import Context, DecodeStatus
from refengine.options import EngineOptions
from refengine.request import Request
from refengine.scheduler import Scheduler
from refengine.soak import End, Soak, SoakPlan, memory, running
from refengine.soak.memory import MemoryPoint, growth
from refengine.soak.verification import Output
from refengine.soak.workload import MIN_CONTEXT, Workload

DATA = Path(__file__).resolve().parent.parent / "data"
OPTIONS = EngineOptions(device="host", threads=1, check="guard", n_ctx=256, n_slots=4)
MIB = 1 << 20


def soaked(model="llama", *, amount=30, unit="requests", watch=None, options=OPTIONS, **plan):
    """Summary of a whole soak; ``watch(soak)`` is called after each step."""
    made = SoakPlan(end=End(amount, unit), **plan)
    with Soak(DATA / f"{model}.gguf", options, made) as soak:
        soak.run((lambda: watch(soak)) if watch else lambda: None)
        soak.verify()
        return soak.summary()


def kinds(summary):
    return {problem.kind for problem in summary.problems}


# --- the workload


@given(
    n_ctx=st.integers(MIN_CONTEXT, 5000), n_vocab=st.integers(1, 100_000), size=st.integers(1, 120),
    seed=st.integers(0, 1 << 40),
)  # fmt: skip
def test_requests_are_of_the_kind_they_say(n_ctx, n_vocab, size, seed):
    workload = Workload(n_ctx, n_vocab, size=size, seed=seed)
    assert [planned.number for planned in workload.pool] == list(range(size))
    for planned in workload.pool:
        n_prompt, n_total = len(planned.prompt), len(planned.prompt) + planned.n_predict
        assert 0 <= min(planned.prompt) <= max(planned.prompt) < n_vocab
        # The last token takes no position.
        assert {
            "fits": n_total <= n_ctx,
            "too big": n_prompt <= n_ctx < n_total - 1,
            "too long": n_prompt > n_ctx,
        }[planned.kind]
    by_kind = [planned.kind for planned in workload.pool]
    assert (by_kind.count("too big"), by_kind.count("too long")) == (round(0.02 * size), round(0.02 * size))


@given(seed=st.integers(0, 1 << 40))
def test_a_seed_draws_the_same_requests_in_the_same_order(seed):
    first, second = (Workload(256, 64, size=40, seed=seed) for _ in range(2))
    assert first.pool == second.pool
    assert [first.next() for _ in range(50)] == [second.next() for _ in range(50)]
    other = Workload(256, 64, size=40, seed=seed + 1)
    assert first.pool != other.pool


def test_proportions_are_those_of_the_documentation():
    pool = Workload(1000, 64, size=200, seed=5).pool
    fits = [planned for planned in pool if planned.kind == "fits"]
    assert len(fits) == 192
    prompts, answers = [len(p.prompt) for p in fits], [p.n_predict for p in fits]
    assert (min(prompts) // 10, max(prompts) // 10) == (5, 19)
    assert (min(answers) // 10, max(answers) // 10) == (2, 30)
    assert sum(planned.temperature == 0 for planned in pool) == 100
    assert {planned.temperature for planned in pool} == {0.0, 0.8}
    assert 8 <= sum(planned.cancel_after is not None for planned in pool) <= 10
    beginnings = [planned.prompt[:50] for planned in pool]
    assert max(map(beginnings.count, beginnings)) == 40


def test_a_context_that_cannot_be_shared_is_refused():
    with pytest.raises(BadInputError, match="n_ctx is 31 for a sequence; a soak wants at least 32"):
        Workload(31, 64, size=1, seed=0)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"clients": 0}, "clients is 0; give a whole number from 1"),
        ({"clients": True}, "clients is True"),
        ({"pool": 0}, "pool is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"fail_rate": 1.01}, "fail_rate is 1.01; give a probability"),
        ({"fail_rate": math.nan}, "fail_rate is nan"),
        ({"fail_kinds": ()}, "fault kinds are"),
        ({"fail_kinds": ("reserve", "gemm")}, "fault kinds are"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan, words):
    with pytest.raises(BadInputError, match=words):
        SoakPlan(end=End(1, "requests"), **plan)


@pytest.mark.parametrize("amount", [0, -1, math.inf, math.nan, 1e10])
def test_an_end_that_never_comes_is_refused(amount):
    with pytest.raises(BadInputError, match="give more than 0"):
        End(amount, "seconds")


# --- undisturbed


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("llama", {"kv_unified": False, "n_ctx": 512}),
        ("llama", {"n_batch": 16, "n_ubatch": 8}),
        ("qwen3", {"worst_case_reserve": False}),
        ("qwen35", {"spec_type": "draft-mtp"}),
    ],
    ids=["llama", "parts", "small batches", "qwen3", "qwen35 with drafts"],
)
def test_every_request_that_fits_completes_with_the_bits_that_it_has_alone(model, options):
    summary = soaked(model, options=replace(OPTIONS, **options))
    assert summary.problems == ()
    assert summary.finished
    requests = summary.requests
    assert requests.asked == requests.ended == 30
    assert requests.completed == requests.due > 20
    assert requests.failed == 0
    assert 20 < summary.verified <= requests.completed
    assert summary.mean_busy_slots > 2
    assert summary.generated_tokens > 500
    if options.get("kv_unified", True):
        assert 0 < summary.preemptions <= summary.retries
    assert (summary.draft.generated > 0) == (model == "qwen35")
    points = list(summary.memory.values())
    assert points[2].reserved <= points[1].reserved_peak
    assert points[2].device is None


def test_a_seed_reproduces_a_run():
    first, second = (soaked(pool=12, seed=3) for _ in range(2))
    timed = {"seconds": 0, "warm_up": "", "memory": first.memory}
    assert replace(first, **timed) == replace(second, **timed)
    assert first.verified < first.requests.completed  # the same request, again


def test_requests_that_cannot_fit_are_refused_and_no_problem():
    summary = soaked(amount=100, pool=50, seed=1)
    assert summary.ok
    assert summary.requests.refused > 0
    assert summary.requests.cancelled > 0
    assert summary.requests.completed_part == 1.0


@pytest.mark.parametrize(("amount", "unit"), [(7, "retries"), (3, "requests"), (0.2, "seconds")])
def test_it_ends_when_it_was_told_to(amount, unit):
    summary = soaked(amount=amount, unit=unit)
    assert summary.ok
    assert summary.finished
    assert summary.requests.ended == summary.requests.asked > 0
    assert summary.end == f"{amount:g} {unit}"
    reached = {"retries": summary.retries, "requests": summary.requests.asked, "seconds": summary.seconds}
    assert reached[unit] >= amount
    if unit == "requests":
        assert summary.requests.asked == amount


def test_nothing_is_asked_after_the_end():
    asked = {}

    def watch(soak):
        if soak.part >= 1:
            asked.setdefault("at the end", soak.counts.asked)

    summary = soaked(amount=5, unit="retries", watch=watch)
    assert asked["at the end"] <= summary.requests.asked <= asked["at the end"] + 10
    # Ten clients were waiting then; those who got their answer did not ask again.
    assert summary.requests.ended == summary.requests.asked


# --- what it must see


def test_a_difference_from_alone_is_named(monkeypatch):
    compute = running.compute_alone

    def other(engine, planned):
        output = compute(engine, planned)
        if planned.number % 2:
            return output
        return Output((*output.tokens[:-1], output.tokens[-1] ^ 1), output.digests)

    monkeypatch.setattr(running, "compute_alone", other)
    summary = soaked()
    assert kinds(summary) == {"difference"}
    assert 1 <= summary.count("difference") < summary.verified
    assert "beside others token " in summary.problems[0].text
    assert "of the same logits" in summary.problems[0].text


def test_logits_that_differ_beside_others_are_a_difference(monkeypatch):
    take = Request.take

    def disturbed(self, row):
        if self.number == 7 and len(self._driver.scheduler.slots) > 1 and len(self.tokens) == 2:
            row = row.copy()
            row[row.argmin()] = np.nextafter(row.min(), np.float32(-np.inf))
        return take(self, row)

    monkeypatch.setattr(Request, "take", disturbed)
    summary = soaked()
    assert [problem.kind for problem in summary.problems] == ["difference"]
    assert summary.problems[0].text.startswith("request 7: beside others the logits of token 3 of ")


def test_two_answers_to_the_same_request_that_differ_are_seen_while_it_runs(monkeypatch):
    take, seen = Request.take, []

    def disturbed(self, row):
        return take(self, row + np.float32(self.number == 9))

    monkeypatch.setattr(Request, "take", disturbed)
    soaked(pool=1, watch=lambda soak: seen.extend(soak.problems))
    assert seen[0].kind == "difference"
    assert seen[0].text.startswith("request 9 asks the same as request 1 did, and the logits of token 1 of ")


def test_a_request_that_fails_and_should_not_have_is_a_problem(monkeypatch):
    decode = Context.decode

    def failing(self, batch):
        fails = self.settings.n_sequences > 1 and batch.position.max() == 60
        return DecodeStatus.COMPUTE_FAILED if fails else decode(self, batch)

    monkeypatch.setattr(Context, "decode", failing)
    summary = soaked()
    assert kinds(summary) == {"incomplete"}
    assert summary.requests.failed == summary.count("incomplete") > 0
    assert summary.requests.completed_part < 1
    assert "Compute error. (decode status -3)" in summary.problems[0].text


def test_a_damaged_guard_byte_is_a_finding():
    def damage(soak):
        if soak.statistics.steps == 5:
            buffer = soak.engine.context.cache.buffers[0]
            soak.engine.device.fill_bytes(buffer.address + buffer.nbytes, 4, 0)

    summary = soaked(watch=damage)
    assert kinds(summary) == {"finding"}
    assert "MEM002" in summary.problems[0].text


def test_memory_that_is_reserved_after_warm_up_is_growth_and_then_a_leak():
    taken = []

    def grow(soak):
        if soak._points["warm-up"] is not None and not taken:
            taken.append(
                soak.engine.allocator.reserve_arena(4096, owner=Owner("target"), name="more").unwrap()
            )

    summary = soaked(watch=grow)
    assert kinds(summary) == {"growth", "finding"}
    growths = [problem.text for problem in summary.problems if problem.kind == "growth"]
    assert len(growths) == 1
    assert "more than warm-up needed" in growths[0]


def test_a_scheduler_that_does_nothing_is_a_livelock(monkeypatch):
    step = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self: self.statistics.steps < 40 and step(self))
    monkeypatch.setattr(running, "STALLED_STEPS", 50)
    summary = soaked(options=replace(OPTIONS, n_ctx=32))
    assert "livelock" in kinds(summary)
    assert not summary.finished
    assert "no token was generated and none of a prompt decoded in 50 steps" in summary.problems[0].text
    assert summary.requests.ended == summary.requests.asked


def test_computing_the_same_again_for_ever_is_a_livelock(monkeypatch):
    step = Scheduler.step

    def stepped(self):
        step(self)
        if self.statistics.steps >= 40:
            self.clear()
        return True

    monkeypatch.setattr(Scheduler, "step", stepped)
    monkeypatch.setattr(running, "STALLED_STEPS", 60)
    # Two tokens a step for a prompt of several never reach its end.
    summary = soaked(options=replace(OPTIONS, n_ctx=32, n_batch=2, n_ubatch=2), clients=1)
    assert "livelock" in kinds(summary)


# --- failures on purpose


@pytest.mark.parametrize(
    ("model", "rate", "fail_kinds", "options"),
    [
        ("llama", 0.6, ("reserve",), {"worst_case_reserve": False}),
        ("qwen35", 0.5, ("reserve",), {"worst_case_reserve": False, "spec_type": "draft-mtp"}),
        ("qwen35", 0.01, ("copy", "launch", "event", "graph"), {"spec_type": "draft-mtp"}),
    ],
)
def test_only_requests_that_a_failure_hits_end_with_it(model, rate, fail_kinds, options):
    summary = soaked(
        model, amount=40, fail_rate=rate, fail_kinds=fail_kinds, options=replace(OPTIONS, **options)
    )
    assert summary.problems == ()
    requests = summary.requests
    assert requests.failed == requests.hit > 0
    assert requests.completed == requests.due > 0
    assert summary.injected_failures >= requests.hit


def test_an_injected_failure_that_ends_a_request_in_other_words_is_a_problem(monkeypatch):
    fail = Request.fail
    monkeypatch.setattr(
        Request, "fail", lambda self, error: fail(self, type(error)(str(error).replace("Compute", "Some")))
    )
    summary = soaked(fail_rate=0.05, fail_kinds=("copy",))
    assert kinds(summary) == {"injection"}
    assert "ended with no Compute error. but: Some error. (decode status -3)" in summary.problems[0].text


def test_an_error_that_names_no_injected_call_is_not_taken_for_one(monkeypatch):
    fail = Request.fail
    monkeypatch.setattr(
        Request, "fail",
        lambda self, error: fail(self, type(error)(str(error).replace("fault site ", "fault site 9"))),
    )  # fmt: skip
    summary = soaked(amount=10, fail_rate=0.05, fail_kinds=("copy",))
    assert kinds(summary) == {"incomplete"}
    assert summary.requests.hit == 0


# --- growth


def point(**changes):
    at = {"reserved": 100, "reserved_peak": 120, "used": 80, "device": 1000 * MIB, "resident": 200 * MIB}
    return MemoryPoint(**(at | changes))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({}, None),
        ({"reserved": 120}, None),
        ({"reserved": 121}, "the ledger has 121 bytes reserved, 1 more than warm-up needed"),
        ({"device": 1016 * MIB}, None),
        ({"device": 1016 * MIB + 1}, "the device has 16777217 bytes more in use"),
        ({"device": None}, None),
        ({"resident": 226 * MIB}, None),
        ({"resident": 226 * MIB + 1}, "the process has"),
        ({"resident": None}, None),
    ],
)
def test_growth_is_what_goes_beyond_warm_up_and_tolerance(end, words):
    found = list(growth(point(), point(**end)))
    assert len(found) == (words is not None)
    assert all(words in text for text in found)


def test_before_warm_up_is_over_the_ledger_alone_is_judged():
    much = {"device": 1 << 40, "resident": 1 << 40}
    assert list(growth(point(), point(**much), warmed_up=False)) == []
    assert len(list(growth(point(), point(reserved=1 << 40, **much), warmed_up=False))) == 1


def test_compute_memory_that_follows_the_batch_may_reach_its_worst_case():
    assert list(growth(point(), point(reserved=500), may_reserve=500)) == []
    assert len(list(growth(point(), point(reserved=501), may_reserve=500))) == 1


def test_resident_memory_is_none_where_the_system_does_not_say(monkeypatch):
    monkeypatch.setattr(memory, "Path", lambda _: Path("/nowhere/statm"))
    assert memory.resident() is None


# --- interrupted


def test_an_interrupted_soak_has_a_summary():
    def interrupt(soak):
        if soak.statistics.steps == 100:
            raise KeyboardInterrupt

    plan = SoakPlan(end=End(30, "requests"))
    with pytest.raises(KeyboardInterrupt), Soak(DATA / "llama.gguf", OPTIONS, plan) as soak:
        soak.run(lambda: interrupt(soak))
    summary = soak.summary()
    assert not summary.finished
    assert summary.steps == 100
    assert 0 <= summary.requests.ended < summary.requests.asked
    assert summary.memory["end"] is None
    assert summary.verified == 0
    assert summary.ok


# --- device memory against the ledger


@pytest.mark.parametrize("leak", [0, MIB])
def test_a_device_that_leaks_while_it_is_soaked_is_a_finding(leak):
    device = fake_device()
    plan = SoakPlan(end=End(60, "requests"), pool=12)

    def step():
        device.context.driver.hidden += leak

    with Soak(DATA / "llama.gguf", replace(OPTIONS, device=device, check="audit"), plan) as soak:
        assert device.memory_watch is not None
        often = {"every": 0, "spacing": 0, "every_waits": 1, "warm_waits": None}
        device.memory_watch = MemoryWatch(soak.engine.allocator, **often)
        soak.run(step)
        rows = {row.name for row in soak.engine.allocator.table()}
        summary = soak.summary()
    assert device.memory_watch.watching
    assert any(name.startswith("graph target ") for name in rows)
    assert {finding.code for finding in soak.engine.findings} == ({"ACC001"} if leak else set())
    assert kinds(summary) == ({"finding", "growth"} if leak else set())
    assert soak.engine.allocator.table() == ()
