"""The drill on the host device: every fault is found at its level, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from engines import DATA

from instrumentation.catalogue import CATALOGUE
from instrumentation.devices.monitor import AccessMonitor
from instrumentation.devices.registry import HandleRegistry
from instrumentation.errors import BadInputError
from instrumentation.happens_before.detector import RaceDetector
from instrumentation.levels import Level
from refengine.drill import FAULTS, Drill, Fault, fault_of, faults_of, running
from refengine.errors import ComputeError, UnsupportedModelError

if TYPE_CHECKING:
    from refengine.drill.scene import Call, Scene

MODEL = DATA / "qwen35.gguf"
#: faults that nothing looks for before the run ends
LATE = {"write-after-free": "check_integrity", "layout-forgotten": "close"}
NOT_ON_HOST = {"library-on-the-other-stream", "workspace-reset", "memory-beside-the-ledger"}


def planned(*names: str, **options: object) -> Drill:
    return Drill(MODEL, faults_of(names), device="host", threads=1, **options)


def run(*names: str, **options: object) -> list:
    return list(planned(*names, **options).run())


@pytest.fixture(scope="module")
def rows() -> dict:
    """The whole drill, once."""
    return {row.fault: row for row in run()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found_at_its_level_and_nothing_else(rows: dict, fault: Fault):
    row = rows[fault.name]
    assert row.false_reports == ()
    if fault.name in NOT_ON_HOST:
        assert (row.status, row.why) == ("not on this device", fault.not_on["host"])
        return
    assert (row.status, row.level) == ("found", fault.found_at), row.why
    assert row.tried == tuple(str(level) for level in Level if fault.safe_from <= level <= fault.level)
    assert row.planted
    assert row.check
    assert row.ok
    if fault.name in LATE:
        assert row.distance > 0
        assert row.found == LATE[fault.name]
    else:
        assert row.distance == 0


def test_every_code_has_a_fault_and_both_incidents_have():
    assert {fault.code for fault in FAULTS} == set(CATALOGUE)
    assert {fault.incident for fault in FAULTS} == {"", "I1", "I2"}
    assert [fault.code for fault in FAULTS] == sorted(
        (fault.code for fault in FAULTS), key=list(CATALOGUE).index
    )


def test_a_report_names_where_it_happened(rows: dict):
    wait = rows["wait-left-out"]
    assert wait.planted == "wait hidden states on draft left out"
    assert wait.found == "gather_hidden(hidden) on draft"
    token = rows["token-out-of-range"]
    assert token.planted == "tokens[0] of copy_in compute.inputs on target"
    assert token.found.startswith("get_rows_f32(")


class TestWhatIsNotFound:
    def test_a_check_that_is_gone_is_a_miss(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(HandleRegistry, "problem", lambda *_: None)
        [row] = run("stream-overwritten")
        assert row.status == "missed"
        assert (row.tried, row.why) == (("guard",), "no STR001 at guard")
        assert not row.ok

    def test_an_engine_that_crashes_is_a_miss(self):
        def plant(scene: object) -> None:
            raise ZeroDivisionError("planted")

        fault = replace(fault_of("wait-left-out"), plant=plant)
        [row] = Drill(MODEL, [fault], device="host", threads=1).run()
        assert (row.status, row.why, row.tried) == ("missed", "ZeroDivisionError: planted", ("off",))

    @pytest.mark.parametrize(
        ("of", "check", "name"),
        [
            (AccessMonitor, "check", "view-of-an-evicted-layout"),
            (AccessMonitor, "_require_in_place", "replay-of-another-plan"),
            (RaceDetector, "check_host", "logits-read-early"),
        ],
    )
    def test_so_is_any_other(self, monkeypatch: pytest.MonkeyPatch, of: type, check: str, name: str):
        monkeypatch.setattr(of, check, lambda *_: None)
        [row] = run(name)
        assert (row.status, row.found) == ("missed", "")
        assert row.tried[-1] == fault_of(name).found_at

    def test_a_level_that_must_find_it_and_does_not_is_a_miss(self):
        fault = replace(fault_of("wait-left-out"), level=Level.GUARD)
        [row] = Drill(MODEL, [fault], device="host", threads=1).run()
        assert (row.status, row.tried, row.why) == ("missed", ("off", "guard"), "no OWN012 at off, guard")

    def test_what_is_reported_without_a_cause_is_a_false_report(self):
        def plant(scene: Scene) -> None:
            event = scene.engine.device.create_event(owner=scene.target.owner, name="other")
            event.destroy()
            scene.target.stream.record(event)

        fault = replace(fault_of("event-destroyed"), plant=plant)
        [row] = Drill(MODEL, [fault], device="host", threads=1).run()
        assert row.status == "missed"
        assert row.false_reports == ("off: STR001 bad stream or event, record other on target",)

    def test_an_error_that_is_no_requests_own_is_a_miss(self):
        usual = fault_of("event-destroyed").plant

        def plant(scene: Scene) -> None:
            usual(scene)
            raise BadInputError("planted")

        fault = replace(fault_of("event-destroyed"), plant=plant)
        [row] = Drill(MODEL, [fault], device="host", threads=1).run()
        assert (row.status, row.why) == ("missed", "the step behind the plant: planted")

    def test_an_interrupt_ends_the_drill_and_gives_everything_back(self):
        engines = []

        def plant(scene: Scene) -> None:
            def interrupt(_call: Call) -> None:
                raise KeyboardInterrupt

            engines.append(scene.engine)
            scene.before("replay", "target", interrupt)

        fault = replace(fault_of("wait-left-out"), plant=plant)
        with pytest.raises(KeyboardInterrupt):
            list(Drill(MODEL, [fault], device="host", threads=1).run())
        assert engines[0].allocator.snapshot().reserved == 0

    def test_another_code_is_a_false_report(self):
        fault = replace(fault_of("event-destroyed"), code="STR010", level=Level.AUDIT)
        [row] = Drill(MODEL, [fault], device="host", threads=1, only=Level.AUDIT).run()
        assert row.status == "missed"
        assert {text.partition(" bad")[0] for text in row.false_reports} == {"audit: STR001"}

    def test_an_unexplained_consequence_is_a_false_report(self):
        fault = replace(fault_of("failed-reservation-dropped"), consequences=frozenset())
        [row] = Drill(MODEL, [fault], device="host", threads=1).run()
        assert (row.status, row.ok) == ("found", False)
        assert row.false_reports == (
            "off: RES002 error of the request, reservation of compute 17x1x1 of target",
        )


class TestTwins:
    def test_a_finding_without_the_fault_is_a_false_report(self, monkeypatch: pytest.MonkeyPatch):
        usual = running.warm_up

        def noisy(engine):
            stream = engine.context.stream
            stream.begin_capture()
            stream.synchronize()
            stream.abandon_capture()
            return usual(engine)

        monkeypatch.setattr(running, "warm_up", noisy)
        [row] = run("wait-left-out", only=Level.AUDIT)
        assert row.status == "found"
        assert row.false_reports[0].startswith("audit, without the fault: GRA003 ")
        assert not row.ok

    def test_a_text_that_the_level_changes_is_one_as_well(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(running, "warm_up", lambda engine: [[int(engine.level)]])
        [row] = run("wait-left-out", only=Level.AUDIT)
        assert "audit, without the fault: another text than at level off" in row.false_reports

    def test_one_that_fails_is_one_as_well(self, monkeypatch: pytest.MonkeyPatch):
        def fails(_engine):
            raise ComputeError("logits are not finite")

        monkeypatch.setattr(running, "warm_up", fails)
        [row] = run("wait-left-out", only=Level.AUDIT)
        assert row.false_reports == ("audit, without the fault: warm-up: logits are not finite",)
        assert row.status == "missed"

    def test_faults_of_the_same_options_share_them(self, monkeypatch: pytest.MonkeyPatch):
        made = []
        usual = Drill._ran

        def counting(self, fault, level, *, planted):
            made.append((level, planted))
            return usual(self, fault, level, planted=planted)

        monkeypatch.setattr(Drill, "_ran", counting)
        run("wait-left-out", "record-left-out")
        assert len(made) == len(set(made)) + 3 == 9


class TestLevels:
    def test_one_level_alone(self):
        rows = {
            row.fault: row for row in run("lease-over", "freed-twice", "token-out-of-range", only=Level.AUDIT)
        }
        assert rows["lease-over"].tried == rows["freed-twice"].tried == ("audit",)
        assert rows["freed-twice"].level == "audit"
        assert rows["token-out-of-range"].status == "not at this level"
        assert rows["token-out-of-range"].why == "found from trap on"
        assert all(row.ok for row in rows.values())

    def test_a_higher_level_may_have_another_code_for_it(self):
        [row] = run("write-left", only=Level.TRAP)
        assert (row.status, row.level, row.check) == ("found", "trap", "store out of bounds")


class TestNames:
    def test_near_ones_are_offered(self):
        with pytest.raises(
            BadInputError, match="fault 'wait-leftout' is unknown; near ones are wait-left-out"
        ):
            fault_of("wait-leftout")
        with pytest.raises(BadInputError, match="fault '' is unknown; known are failed-reservation-dropped,"):
            fault_of("")

    def test_each_once_in_the_order_of_the_catalogue(self):
        chosen = faults_of(["wait-left-out", "freed-twice", "wait-left-out"])
        assert [fault.name for fault in chosen] == ["freed-twice", "wait-left-out"]
        assert faults_of([]) == FAULTS


def test_a_model_without_drafts_is_refused():
    with pytest.raises(UnsupportedModelError, match="has no MTP head"):
        list(Drill(DATA / "llama.gguf", faults_of(["freed-twice"]), device="host").run())


def test_the_page_lists_the_faults():
    page = (DATA.parents[1] / "docs" / "drill.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        assert f"| `{fault.name}` | {fault.code} | {fault.found_at} | {fault.what} |" in page
