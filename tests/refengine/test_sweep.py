"""Every device call fails once, and nothing is lost; an engine that loses something is caught."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import structlog
from dying_sweep import DyingSweep
from engines import DATA, increment
from structlog.testing import capture_logs

import refengine.sweep.runs
from instrumentation.allocator import Allocator
from instrumentation.devices import checked_stream
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.faults import FaultPlan, Site
from instrumentation.findings import FindingLog
from instrumentation.heap import Heap
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from refengine.architectures import BUILDERS
from refengine.context import Context, DecodeStatus
from refengine.engine import Engine
from refengine.errors import ComputeError, RequestError
from refengine.executor import Executor
from refengine.scheduler import Scheduler
from refengine.speculative import MtpDrafter
from refengine.sweep import (
    MODES,
    Journal,
    Run,
    Sweep,
    SweepError,
    Workload,
    disturbed,
    plan_of,
    reference,
    run_all,
)
from refengine.sweep.counting import SWEPT_KINDS, CountingDevice, Recorder, first_failure, owner_of

SMALL = {"n_ctx": 128, "n_batch": 32, "n_ubatch": 16, "threads": 1, "check": "guard", "device": "host"}


def workload(name="llama", **options):
    return Workload.of(DATA / f"{name}.gguf", **{**SMALL, **options})


@pytest.fixture(scope="module")
def llama():
    return workload()


@pytest.fixture(scope="module")
def wanted(llama):
    return reference(llama)


@pytest.fixture(scope="module")
def drafting():
    """A target and a draft context."""
    return workload("qwen35", spec_type="draft-mtp")


@pytest.fixture(scope="module")
def drafted(drafting):
    return reference(drafting)


@pytest.fixture(scope="module")
def sharing():
    """Both contexts with two slots that share a cache which is too small."""
    return workload("qwen35", spec_type="draft-mtp", n_slots=2, n_ctx=64)


@pytest.fixture(scope="module")
def shared(sharing):
    return reference(sharing)


def lengths(work):
    return [list(map(len, prompts)) for prompts in work.rounds]


def sweep_all(work, kinds, modes=MODES, sample=None):
    """The reference and every run, or a sample of them, none of which misbehaved."""
    found = reference(work, kinds)
    assert found.uncounted() == []
    sweep = Sweep(work, kinds, modes, random_runs=5)
    keys = sweep.keys(found)
    if sample is not None:
        keys = random.Random(1).sample(keys, sample)
    runs = list(run_all(sweep, found, keys))
    assert [(run.mode, run.number) for run in runs] == keys
    assert [run for run in runs if run.wrong] == []
    return found, runs


def fail(work, wanted, matching, nth=0, mode="nth"):
    """What is wrong with the run that fails the ``nth`` site whose text has ``matching``."""
    site = [site for site in wanted.passed if matching in str(site)][nth]
    run = disturbed(work, wanted, mode, site.number, SWEPT_KINDS)
    assert run.site == str(site)
    return run


# --- the engine as it is


@pytest.mark.parametrize("architecture", sorted(BUILDERS))
def test_every_reservation_of_every_architecture_in_every_mode(architecture):
    found, runs = sweep_all(workload(architecture), ("reserve",))
    # 7 at loading: weights, cache and tables, an arena and its buffers each, and compute; then one for each layout.
    assert len(found.passed) >= 11
    assert Counter(run.mode for run in runs) == {
        "nth": len(found.passed),
        "from": len(found.passed),
        "random": 5,
    }
    assert {run.outcome for run in runs} == {"load failed", "request failed"}


def test_every_call_fails_once():
    found, runs = sweep_all(workload(n_predict=2, n_batch=8, n_ubatch=4), SWEPT_KINDS, ("nth",))
    assert len(runs) == found.calls.total() > 280
    assert found.calls == {"reserve": 10, "copy": 114, "launch": 151, "event": 0, "graph": 13}
    assert all(run.fired == 1 for run in runs)
    assert {run.outcome for run in runs} == {"load failed", "request failed"}


@pytest.mark.parametrize(
    "options",
    [{"cuda_graphs": False}, {"worst_case_reserve": False}, {"check": "off"}, {"n_batch": 8}],
    ids=["no graphs", "growing", "off", "small batches"],
)
def test_calls_of_other_options(options):
    found, _runs = sweep_all(workload(**options), SWEPT_KINDS, sample=20)
    assert (found.calls["graph"] == 0) == (options == {"cuda_graphs": False})


def test_reservations_that_replace_a_smaller_arena():
    growing, usual = workload(worst_case_reserve=False), workload()
    found, _runs = sweep_all(growing, ("reserve",))
    assert len(found.passed) == len(reference(usual, ("reserve",)).passed) + 1
    assert found.books[0].reserved < found.books[1].reserved


def test_random_runs_fail_something_and_get_as_far_as_requests(llama, wanted):
    runs = [disturbed(llama, wanted, "random", number, SWEPT_KINDS, seed=3) for number in range(1, 16)]
    assert [run for run in runs if run.wrong] == []
    assert min(run.fired for run in runs) >= 1
    assert max(run.fired for run in runs) > 1
    assert {run.outcome for run in runs} == {"load failed", "request failed"}
    assert runs[4] == disturbed(llama, wanted, "random", 5, SWEPT_KINDS, seed=3)


def test_a_failure_that_costs_nothing_must_be_counted_all_the_same(llama, wanted, monkeypatch):
    captured = Executor._captured

    def or_not(self, executable):
        try:
            return captured(self, executable)
        except DeviceError:
            return None

    monkeypatch.setattr(Executor, "_captured", or_not)
    run = fail(llama, wanted, "begin_capture")
    assert run.outcome == "identical"
    assert run.wrong == (
        f"1 calls for the target context failed in round 1, the first {run.site}, and it counted 0 failed decodes",
    )


# --- a draft context, several slots


def test_calls_of_target_and_draft_fail(drafting, drafted):
    found, runs = sweep_all(drafting, SWEPT_KINDS, sample=30)
    assert found == drafted
    assert min(found.calls[kind] for kind in SWEPT_KINDS) > 30
    assert found.verifications > 0
    assert {owner_of(site) for site in found.passed} == {"load", "target", "draft", "model", ""}
    assert {run.outcome for run in runs} == {"load failed", "request failed", "identical"}


@pytest.mark.parametrize(
    "matching",
    ["(event record", "(event wait", "copy_in of compute.inputs on draft", "copy_out of result_output on draft",
     "(launch rms_norm on draft", "(graph replay on draft", "(reserve draft/compute 1"],
)  # fmt: skip
def test_a_failure_for_drafts_costs_no_request_anything(drafting, drafted, matching):
    run = fail(drafting, drafted, matching)
    assert (run.outcome, run.wrong) == ("identical", ())


def test_hidden_states_that_are_never_handed_over_cost_no_request_anything(drafting):
    found = reference(drafting, ("event",))
    first = next(site for site in found.passed if "record" in site.detail)
    run = disturbed(drafting, found, "from", first.number, ("event",))
    assert (run.outcome, run.wrong) == ("identical", ())
    assert run.fired > 1


@pytest.mark.parametrize("options", [{"cuda_graphs": True}, {"cuda_graphs": False}], ids=str)
def test_at_level_audit_nothing_more_is_found(options):
    """Whatever fails, nothing that comes later meets what was left under way."""
    work = workload("qwen35", spec_type="draft-mtp", n_slots=2, n_ctx=64, check="audit", **options)
    sweep_all(work, SWEPT_KINDS, sample=8)


def test_slots_that_share_a_cache(sharing, shared):
    assert shared.preemptions > 0
    assert shared.verifications > 0
    _found, runs = sweep_all(sharing, SWEPT_KINDS, sample=15)
    assert "request failed" in {run.outcome for run in runs}


def test_a_decode_of_two_requests_that_fails_ends_neither(sharing, shared):
    run = fail(sharing, shared, "copy_in of compute.inputs on target")
    assert (run.outcome, run.wrong) == ("identical", ())


# --- engines that lose something


def test_a_failure_of_the_draft_context_that_nobody_counts_is_caught(drafting, drafted, monkeypatch):
    decode = MtpDrafter._decode

    def uncounted(self, batch):
        status = decode(self, batch)
        self.failures = 0
        return status

    monkeypatch.setattr(MtpDrafter, "_decode", uncounted)
    run = fail(drafting, drafted, "copy_in of compute.inputs on draft")
    assert run.outcome == "identical"
    assert run.wrong == (
        f"1 calls for the draft context failed in round 1, the first {run.site}, and it counted 0 failed decodes",
    )


def test_a_failure_of_the_draft_context_that_ends_a_request_is_caught(drafting, drafted, monkeypatch):
    decode = MtpDrafter._decode

    def strict(self, batch):
        status = decode(self, batch)
        self.context.require(status)
        return status

    monkeypatch.setattr(MtpDrafter, "_decode", strict)
    run = fail(drafting, drafted, "copy_in of compute.inputs on draft")
    assert run.outcome == "request failed"
    words = f"request 1 failed although no call that may end it did, only {run.site}: Compute error."
    assert any(wrong.startswith(words) for wrong in run.wrong)


@pytest.mark.parametrize("matching", ["(event wait", "copy_in of compute.inputs on draft"])
def test_a_lease_that_is_left_active_is_caught(drafting, drafted, monkeypatch, matching):
    @contextmanager
    def careless(self, to):
        self.stream.record(self._handed)
        lease = self.kept["hidden"].buffer.lend(to=to.owner, mode="read", after=self._handed, by=self.owner)
        to.stream.wait(self._handed)
        yield
        if to.error is None:
            lease.end()

    monkeypatch.setattr(Context, "lend_hidden", careless)
    run = fail(drafting, drafted, matching)
    assert "after round 1 hidden of target is still lent to draft" in run.wrong


def test_a_draft_cache_that_is_not_emptied_is_caught(drafting, drafted, monkeypatch):
    remove = MtpDrafter.remove

    def forgetful(self, sequence):
        if not self.failures:
            remove(self, sequence)

    monkeypatch.setattr(MtpDrafter, "remove", forgetful)
    run = fail(drafting, drafted, "copy_in of compute.inputs on draft", nth=3)
    assert any(wrong.startswith("after round 1 the KV cache of draft holds ") for wrong in run.wrong)
    assert any("positions of the KV cache of draft are free" in wrong for wrong in run.wrong)


def test_a_recurrent_state_that_is_not_emptied_is_caught(drafting, drafted, monkeypatch):
    remove = Context.remove

    def forgetful(self, sequence):
        if self.error is None:
            remove(self, sequence)
        else:
            self.cache.remove(sequence)

    monkeypatch.setattr(Context, "remove", forgetful)
    run = fail(drafting, drafted, "copy_in of compute.inputs on target", nth=-1)
    assert any(
        wrong.startswith("after round 2 the recurrent state of target has seen ") for wrong in run.wrong
    )


def test_a_bit_that_a_lost_draft_changes_is_caught(drafting, drafted, monkeypatch):
    settle = Scheduler._settle

    def flipping(self, blocks, logits):
        if self.drafter.failures and len(logits):
            logits.view(np.uint32)[0, 0] ^= 1
        settle(self, blocks, logits)

    monkeypatch.setattr(Scheduler, "_settle", flipping)
    run = fail(drafting, drafted, "copy_in of compute.inputs on draft")
    assert run.outcome == "identical"
    assert "request 1 gave other tokens or logits and no error" in run.wrong


def test_an_error_that_names_another_request_s_call_is_caught(llama, wanted, monkeypatch):
    failed, first = Scheduler._fail, []
    monkeypatch.setattr(
        Scheduler,
        "_fail",
        lambda self, slot, error: failed(self, slot, (first or first.append(error) or first)[0]),
    )
    run = fail(llama, wanted, "copy_in of compute.inputs", mode="from")
    assert any(wrong.startswith("the error of request 2 does not name fault site ") for wrong in run.wrong)


def test_a_request_that_is_left_running_is_caught(llama, wanted, monkeypatch):
    monkeypatch.setattr(Scheduler, "cancel", lambda *_: None)

    def broken(self, status):
        if status != DecodeStatus.OK:
            raise ValueError("no error of ours")

    monkeypatch.setattr(Context, "require", broken)
    run = fail(llama, wanted, "copy_in of compute.inputs", nth=-1)
    assert "after round 2 requests wait or run" in run.wrong


def test_a_layout_that_no_executable_has_is_caught(llama, wanted, monkeypatch):
    captured = Executor._captured

    def dropping(self, executable):
        try:
            return captured(self, executable)
        except DeviceError:
            del self._executables[executable.graph.shape]
            raise

    monkeypatch.setattr(Executor, "_captured", dropping)
    run = fail(llama, wanted, "(launch rms_norm")
    assert any(
        wrong.startswith("after round 1 check_integrity: AssertionError: layouts") for wrong in run.wrong
    )


def test_a_decode_that_swallows_failures_is_caught(llama, wanted, monkeypatch):
    decode = Context.decode

    def swallowing(self, batch):
        if decode(self, batch) != DecodeStatus.OK:
            self.logits = np.zeros((int(batch.outputs.sum()), self.config.n_vocab), np.float32)
        return DecodeStatus.OK

    monkeypatch.setattr(Context, "decode", swallowing)
    for matching in (
        "copy_in of compute.inputs",
        "(launch rms_norm",
        "(graph replay",
        "(reserve target/compute 1",
    ):
        run = fail(llama, wanted, matching)
        assert "request 1 gave other tokens or logits and no error" in run.wrong


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (
            lambda context, allocator: allocator.reserve_arena(
                4096, owner=context.owner, name="lost"
            ).unwrap(),
            "MEM006: arena lost of target (4096 bytes) was never given back",
        ),
        (
            lambda context, _: context.stream.device.allocate(4096),
            "4096 bytes of device memory in 1 pieces is left",
        ),
        (
            lambda context, _: context.stream.device.create_stream(owner=context.owner, name="lost"),
            "stream lost is left",
        ),
    ],
    ids=["arena", "driver", "stream"],
)
def test_a_load_that_fails_and_leaks_is_caught(llama, wanted, monkeypatch, leak, words):
    load_rotary = Context._load_rotary

    def leaking(self, allocator, weights, undo):
        try:
            return load_rotary(self, allocator, weights, undo)
        except DeviceError:
            leak(self, allocator)
            raise

    monkeypatch.setattr(Context, "_load_rotary", leaking)
    run = fail(llama, wanted, "rotary.sine on")
    assert run.outcome == "load failed"
    assert words in run.wrong


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        ("copy_out", "copy: 111 fault sites for 120 calls"),
        ("rope", "launch: 186 fault sites for 202 calls"),
        ("end_capture", "graph: 14 fault sites for 18 calls"),
    ],
)
def test_a_call_without_a_fault_site_is_caught(llama, monkeypatch, skipped, words):
    pass_site = checked_stream.pass_site

    def missing(faults, kind, detail):
        if not detail.startswith(skipped):
            pass_site(faults, kind, detail)

    monkeypatch.setattr(checked_stream, "pass_site", missing)
    assert reference(llama).uncounted() == [words]


def test_a_reservation_without_a_fault_site_is_caught(llama, monkeypatch):
    asked = Heap.injected_failure

    def missing(self, owner, name, nbytes, where):
        return None if name.startswith("kv.") else asked(self, owner, name, nbytes, where)

    monkeypatch.setattr(Heap, "injected_failure", missing)
    assert reference(llama).uncounted() == ["reserve: 10 fault sites for 11 calls"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ComputeError("Compute error."), "the error of request 1 does not name {site}: Compute error."),
        (ValueError("{site}"), "request 1 raised what no failed call may become: ValueError: "),
        (RequestError("it broke"), "request 1 raised what no failed call may become: RequestError: it broke"),
    ],
    ids=["nameless", "not ours", "another of ours"],
)
def test_a_blanket_except_is_caught(llama, wanted, monkeypatch, error, words):
    def blanket(self, status):
        if status != DecodeStatus.OK:
            raise error

    monkeypatch.setattr(Context, "require", blanket)
    run = fail(llama, wanted, "copy_in of compute.inputs")
    assert any(words.format(site=run.site) in wrong for wrong in run.wrong), run.wrong


def test_positions_left_in_the_cache_are_caught(llama, wanted, monkeypatch):
    forget = Scheduler._forget

    def forgetful(self, slot):
        if self.context.error is None:
            forget(self, slot)
        slot.held.clear()

    monkeypatch.setattr(Scheduler, "_forget", forgetful)
    run = fail(llama, wanted, "copy_in of compute.inputs", nth=-1)
    held = len(llama.rounds[1][0]) + llama.n_predict - 2
    assert f"after round 2 the KV cache of target holds {held} positions of sequence 0" in run.wrong
    assert "after round 2 96 of 128 positions of the KV cache of target are free" in run.wrong
    # The next request finds them there.
    assert any(
        wrong.startswith("afterwards request 1 fails: Compute error. (decode status -1)")
        for wrong in run.wrong
    )


def test_lost_pages_are_caught(llama, wanted, monkeypatch):
    failed = Context._failed

    def losing(self, *given):
        self.cache._free.pop()
        return failed(self, *given)

    monkeypatch.setattr(Context, "_failed", losing)
    run = fail(llama, wanted, "copy_in of compute.inputs")
    lost = "after round 1 check_integrity: AssertionError: pages lost, or held and free"
    assert any(wrong.startswith(lost) for wrong in run.wrong)  # pytest may say more of an assertion


def test_work_left_on_a_stream_is_caught(llama, wanted, monkeypatch):
    def run_and_leave(self, executable, inputs, outputs):
        executable.overlay.activate()
        executable.fill(inputs)
        self.stream.copy_in(executable.inputs, executable.host_inputs)
        self._queue_launches(executable)
        for name, array in outputs.items():
            self.stream.copy_out(array, executable.views[name])
        self.stream.synchronize()

    monkeypatch.setattr(Executor, "run", run_and_leave)
    # The next request would wait for them, so it is the last one that fails.
    assert fail(llama, wanted, "copy_out of result_output", nth=-1).wrong == (
        "after round 2 2 operations wait on stream target",
    )


def test_memory_given_back_under_queued_work_is_caught(llama, wanted, monkeypatch):
    load_rotary = Context._load_rotary

    class Unsynchronised:
        """An undo that forgets to wait."""

        def __init__(self, undo):
            self.undo = undo

        def callback(self, action):
            if action.__name__ != "synchronize":
                self.undo.callback(action)

    monkeypatch.setattr(
        Context,
        "_load_rotary",
        lambda self, allocator, weights, undo: load_rotary(self, allocator, weights, Unsynchronised(undo)),
    )
    run = fail(llama, wanted, "copy_in of rotary.sine")
    assert any("bytes were given back with 1 operations queued" in wrong for wrong in run.wrong)


def test_a_poisoned_executable_is_caught(llama, wanted, monkeypatch):
    captured = Executor._captured

    def poisoning(self, executable):
        try:
            return captured(self, executable)
        except DeviceError:
            self.stream.begin_capture()
            executable.captured = self.stream.end_capture("empty")
            raise

    monkeypatch.setattr(Executor, "_captured", poisoning)
    run = fail(llama, wanted, "(launch rms_norm", nth=1)
    assert "afterwards request 1 gives other tokens or logits" in run.wrong


def test_memory_that_stays_after_a_failed_request_is_caught(llama, wanted, monkeypatch):
    failed = Context._failed

    def hoarding(self, *given):
        self.executor.allocator.reserve_arena(256, owner=self.owner, name="hoard").unwrap()
        return failed(self, *given)

    monkeypatch.setattr(Context, "_failed", hoarding)
    run = fail(llama, wanted, "copy_in of compute.inputs")
    assert any("bytes are reserved; undisturbed they are" in wrong for wrong in run.wrong)
    assert any(wrong.startswith("afterwards the engine holds") for wrong in run.wrong)
    assert "MEM006: arena hoard of target (256 bytes) was never given back" in run.wrong


def test_an_unload_that_gives_nothing_back_is_caught(llama, monkeypatch):
    monkeypatch.setattr(Engine, "close", lambda _: None)
    with pytest.raises(
        SweepError, match=r"undisturbed run went wrong: \d+ bytes of device memory in 4 pieces"
    ):
        reference(llama)


def test_a_fault_that_never_fires_or_fires_elsewhere_is_caught(llama, wanted, monkeypatch):
    beyond = Site(len(wanted.passed) + 1, "launch", "of another engine")
    longer = replace(wanted, passed=(*wanted.passed, beyond))
    run = disturbed(llama, longer, "nth", beyond.number, SWEPT_KINDS)
    assert run.wrong == (
        "the fault fired 0 times, not once",
        f"the first call that failed is none; in the undisturbed run it is {beyond}",
    )
    other = replace(wanted, passed=(Site(1, "launch", "of another engine"), *wanted.passed[1:]))
    assert any("of another engine" in wrong for wrong in disturbed(llama, other, "nth", 1, SWEPT_KINDS).wrong)


def test_an_injector_that_fires_twice_is_caught(llama, wanted, monkeypatch):
    fails = FaultPlan.fails
    monkeypatch.setattr(
        FaultPlan, "fails", lambda self, number, draw: fails(self, number, draw) or number > 150
    )
    assert any("times, not once" in wrong for wrong in fail(llama, wanted, "copy_in of compute.inputs").wrong)


# --- workloads and plans


def test_prompts_fit_any_model(llama):
    (long, again), (short,) = llama.rounds
    assert len(long) > SMALL["n_ubatch"] > len(short) >= 1
    assert again[:-1] == long
    assert reference(llama).reused == len(long)
    assert max(again) < 320
    assert lengths(workload(n_ctx=32, n_ubatch=1)) == [[2, 3], [1]]
    assert lengths(workload(n_batch=8)) == [[13, 14], [3]]
    # With several slots: all pages but a cell of each slot, unless each slot has its own.
    assert lengths(workload(n_slots=2)) == [[63, 63, 64], [3]]
    assert lengths(workload(n_slots=3)) == [[31, 31, 31, 32], [3]]
    assert lengths(workload(n_slots=2, kv_unified=False)) == [[25, 25, 26], [3]]
    assert len({prompt[:2] for prompt in workload(n_slots=3).rounds[0]}) == 3
    with pytest.raises(
        RequestError, match=r"a prompt of 50 tokens .* do not fit n_ctx 48; give a smaller n_ubatch"
    ):
        workload(n_ctx=48, n_batch=32, n_ubatch=32)


def test_plans_of_random_runs_hit_something_and_follow_the_seed():
    sites = tuple(Site(i, "copy", "x") for i in range(1, 6))
    hits = [
        first_failure(plan_of("random", n, ("copy",), sites, seed), sites)
        for seed in (0, 1)
        for n in range(1, 30)
    ]
    assert None not in hits
    assert hits[:29] != hits[29:]
    assert {site.number for site in hits} == {1, 2, 3, 4, 5}


# --- many runs


def test_log_lines_of_failures_on_purpose_are_not_shown_unless_asked_for(llama, wanted, capsys):
    site = next(site for site in wanted.passed if "copy_in of compute.inputs" in site.detail)
    before = structlog.get_config()
    run_of = Sweep(llama, SWEPT_KINDS).run
    assert run_of(wanted, ("nth", site.number)).wrong == ()
    assert capsys.readouterr() == ("", "")
    assert structlog.get_config() == before
    assert replace(Sweep(llama, SWEPT_KINDS), log=(1, "json")).run(wanted, ("nth", site.number)).wrong == ()
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], str(site) in line["error"]) == ("failed to compute graph", True)
    with capture_logs() as lines:
        run_of(wanted, ("nth", site.number))
    assert lines == []


def test_a_process_that_dies_is_named():
    work = workload()
    found = reference(work, ("reserve",))
    sweep = DyingSweep(work, ("reserve",), ("nth",))
    with pytest.raises(SweepError, match=r"a process of the sweep died in one of the runs .*\bnth 3\b"):
        list(run_all(sweep, found, sweep.keys(found), processes=2))


# --- the file of a sweep


HEADER = {"version": "1", "option n_ctx": 128, "prompts": [[1, 2]], "seed": 0}
RUNS = [
    Run(
        "nth",
        number,
        "reserve",
        f"fault site {number} (reserve x)",
        1,
        "request failed",
        ("\u2028é",) * number,
    )
    for number in (1, 2)
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "runs.jsonl"
    with Journal(path, HEADER) as journal:
        for run in RUNS:
            journal.write(run)
    return path


def test_a_file_has_its_runs_again(file):
    whole = file.read_bytes()
    with Journal(file, HEADER) as journal:
        assert list(journal.done.values()) == RUNS
    assert file.read_bytes() == whole


@pytest.mark.parametrize("kept", range(1, 160, 13))
def test_a_line_that_was_cut_off_is_done_again(file, kept):
    whole = file.read_bytes()
    head = whole.index(b"\n") + 1
    file.write_bytes(whole[: head + kept])
    with Journal(file, HEADER) as journal:
        finished = whole[head : head + kept].count(b"\n")
        assert list(journal.done.values()) == RUNS[:finished]
        for run in RUNS[finished:]:
            journal.write(run)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"option n_ctx": 64}, "option n_ctx is 128 there and 64 here"),
        ({"prompts": [[1, 3]]}, r"prompts is \[\[1, 2\]\] there and \[\[1, 3\]\] here"),
        ({"option new": True}, "option new is null there and true here"),
    ],
)
def test_a_file_of_another_sweep_is_refused_by_name_and_left_alone(file, change, words):
    whole = file.read_bytes()
    with pytest.raises(BadInputError, match=f"{file.name} is of another sweep: {words}"):
        Journal(file, HEADER | change)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "content", [b"GGUF\x00\xff", b"{}\n", b"[" * 100_000 + b"\n", b"\n", b'{"sweep": 1}\n']
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"model\.gguf is no file of a sweep; give a new name"):
        Journal(path, HEADER)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "change",
    [{"mode": "zth"}, {"number": "1"}, {"number": True}, {"wrong": "x"}, {"wrong": [1]}, {"outcome": []}, {"more": 1},
     {"site": None}],
)  # fmt: skip
def test_a_damaged_line_is_named(file, change):
    lines = file.read_bytes().splitlines(keepends=True)
    lines[1] = json.dumps(json.loads(lines[1]) | change).encode() + b"\n"
    file.write_bytes(b"".join(lines))
    with pytest.raises(BadInputError, match=r"runs\.jsonl:2: this line is no run; remove it"):
        Journal(file, HEADER)


def test_the_header_names_everything_that_a_run_depends_on(llama, wanted):
    sweep = Sweep(llama, SWEPT_KINDS)
    header = sweep.header(wanted)
    assert header == json.loads(json.dumps(header))
    assert {f"option {name}" for name in SMALL} < set(header)
    assert header["sites"] == len(wanted.passed)
    for other in (replace(sweep, seed=1), replace(sweep, kinds=("copy",)),
                  replace(sweep, workload=replace(llama, n_predict=4))):  # fmt: skip
        assert other.header(wanted) != header
    assert replace(sweep, modes=("nth",), random_runs=1).header(wanted) == header
    assert refengine.sweep.runs.MAX_CHUNK >= 1


# --- the second count


def test_every_kind_of_call_has_a_site_and_is_counted_where_it_arrives():
    device, injector = CountingDevice(1), Recorder()
    allocator = Allocator(device, level=Level.GUARD, findings=FindingLog(), faults=injector)
    device.watch(allocator)
    device.faults = injector
    owner = Owner("target")
    first, second = (device.create_stream(owner=owner, name=name) for name in ("first", "second"))
    arena = allocator.reserve_arena(8192, owner=owner, name="test").unwrap()
    one, two = (arena.reserve(64, owner=owner, name=name).unwrap() for name in ("one", "two"))
    views = [buffer.view(np.float32, (16,)) for buffer in (one, two)]
    host = np.ones(16, np.float32)
    event = device.create_event(owner=owner, name="done")
    first.copy_in(views[0], host)
    first.fill(views[1], 0)
    first.launch(increment, 1, {"y": views[0]})
    first.copy(views[1], views[0])
    first.record(event)
    second.wait(event)
    second.copy_out(host, views[1])
    second.begin_capture()
    second.launch(increment, 1, {"y": views[0]})
    graph = second.end_capture("pair")
    second.replay(graph)
    second.synchronize()
    np.testing.assert_array_equal(host, 2)
    assert device.calls == injector.counts
    assert device.calls == {"reserve": 3, "copy": 4, "launch": 2, "event": 3, "graph": 3}
    assert [site.number for site in injector.passed] == list(range(1, 16))
    assert device.left() == [
        "8192 bytes of device memory in 1 pieces", "stream first", "stream second", "event done"
    ]  # fmt: skip
    graph.destroy()
    event.destroy()
    for buffer in (one, two):
        buffer.free()
    arena.release()
    for stream in (first, second):
        stream.destroy()
    assert device.left() == []
    assert device.too_early == []
