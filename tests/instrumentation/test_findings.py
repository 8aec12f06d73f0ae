from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import structlog
from fake_memory import FakeMemory
from patience import PATIENCE

import instrumentation
from instrumentation.allocator import Allocator
from instrumentation.catalogue import CATALOGUE, entry
from instrumentation.catalogue_entry import Entry
from instrumentation.errors import BadInputError, Error
from instrumentation.findings import BufferFacts, Finding, FindingLog, Frame, MemoryWindow, capture_stack
from instrumentation.levels import Level
from instrumentation.ownership import Owner

# The table of codes in the design, level by level: a contract.
CODES = {
    Level.OFF: "RES001 RES002 RES003 MEM005 MEM006",
    Level.GUARD: "MEM001 MEM002 MEM003 MEM004 OWN001 OWN002 OWN003 STR001",
    Level.AUDIT: "OWN010 OWN011 OWN012 STR010 STR011 STR012 STR013 GRA001 GRA002 GRA003 LIB001 LIB002 ACC001",
    Level.TRAP: "MEM010 MEM011 MEM012 MEM013 RAC001 SYN001",
    None: "NUM001",
}


def finding(code="MEM002", **fields):
    return Finding(code=code, message="m", **fields)


class TestLevels:
    def test_order(self):
        assert Level.OFF < Level.GUARD < Level.AUDIT < Level.TRAP

    @pytest.mark.parametrize("level", Level, ids=str)
    def test_parse_reads_what_str_writes(self, level):
        assert Level.parse(str(level)) is level
        assert Level.parse(str(level).upper()) is level
        assert f"{level}" == level.name.lower()

    @pytest.mark.parametrize("text", ["", "1", "guards", "parse", None, 1])
    def test_parse_refuses_the_rest(self, text):
        with pytest.raises(BadInputError, match="off, guard, audit, trap"):
            Level.parse(text)


class TestCatalogue:
    def test_has_exactly_the_codes_of_the_contract(self):
        assert set(CATALOGUE) == set(" ".join(CODES.values()).split())

    @pytest.mark.parametrize("level", CODES, ids=str)
    def test_levels(self, level):
        assert {code for code in CATALOGUE if CATALOGUE[code].level is level} == set(CODES[level].split())

    @pytest.mark.parametrize("code", CATALOGUE)
    def test_entries_are_complete(self, code):
        found = entry(code.lower())
        assert found.code == code
        for sentence in (found.meaning, found.cure):
            assert sentence.endswith(".")
            assert "  " not in sentence
        assert found.title[-1] != "."

    def test_found_by(self):
        assert entry("MEM002").found_by == "level guard"
        assert entry("NUM001").found_by == "--check-numerics"

    def test_entry_is_held_to_its_form(self):
        with pytest.raises(AssertionError):
            Entry("MEM1", "t", Level.OFF, "m", "c")
        with pytest.raises(AssertionError):
            Entry("MEM001", "t", None, "m", "c")


class TestFinding:
    def test_code_must_be_known(self):
        with pytest.raises(Error):
            finding("XYZ001")

    def test_kind_is_the_catalogues_title_unless_given(self):
        assert finding().kind == "canary right of a buffer damaged"
        assert finding(kind="other").kind == "other"

    @pytest.mark.parametrize(
        "fields",
        [{"size": -1}, {"count": 0}, {"reached_neighbour": True}],
        ids=lambda fields: next(iter(fields)),
    )
    def test_invariants(self, fields):
        with pytest.raises(AssertionError):
            finding(**fields)

    @pytest.mark.parametrize(
        "arguments", [(16, b"abcd", 15, 17), (16, b"abcd", 18, 18), (16, b"abcd", 20, 21)]
    )
    def test_window_holds_its_damage(self, arguments):
        with pytest.raises(AssertionError):
            MemoryWindow(*arguments)


class TestLog:
    def test_findings_of_one_site_are_counted(self):
        log = FindingLog()
        for launch in range(3):
            log.append(finding(launch=launch))
        log.append(finding("MEM001"))
        first, second = log.list()
        assert (first.code, first.count, first.launch) == ("MEM002", 3, 0)
        assert (second.code, second.count) == ("MEM001", 1)
        assert (len(log), log.total) == (2, 4)
        assert log.of("MEM001") == (second,)

    @pytest.mark.parametrize(
        "fields",
        [
            {"kernel": "axpy"},
            {"argument": "x"},
            {"buffer": BufferFacts("x", "target", 256, 1)},
            {"actor": "draft"},
            {"access": (Frame("a.py", 1, "f"),)},
            {"source": Frame("a.py", 1, "f")},
            {"kind": "other"},
        ],
        ids=lambda fields: next(iter(fields)),
    )
    def test_sites_differ_by(self, fields):
        log = FindingLog()
        log.append(finding())
        log.append(finding(**fields))
        assert len(log) == 2

    def test_sites_are_bounded_and_the_rest_is_counted(self):
        log = FindingLog()
        log.max_sites = 2
        for kernel in "abcab":
            log.append(finding(kernel=kernel))
        assert [(each.kernel, each.count) for each in log] == [("a", 2), ("b", 2)]
        assert (log.omitted, log.total) == (1, 5)

    def test_callback_sees_each_finding(self):
        seen = []
        log = FindingLog(on_finding=seen.append)
        log.append(finding())
        log.append(finding())
        assert [each.count for each in seen] == [1, 1]

    def test_what_the_callback_raises_reaches_the_caller_and_the_finding_is_kept(self):
        def stop(found):
            raise KeyError(found.code)

        log = FindingLog(on_finding=stop)
        with pytest.raises(KeyError):
            log.append(finding())
        assert len(log) == 1

    def test_a_sites_first_finding_is_logged(self):
        log = FindingLog()
        with structlog.testing.capture_logs() as events:
            log.append(finding(buffer=BufferFacts("x", "target", 256, 1)))
            log.append(finding(buffer=BufferFacts("x", "target", 256, 1)))
        (event,) = events
        assert event["event"] == "finding"
        assert event["log_level"] == "error"
        assert (event["code"], event["buffer"], event["owner"]) == ("MEM002", "x", "target")

    def test_clear(self):
        log = FindingLog()
        log.append(finding())
        log.clear()
        assert (len(log), log.total, log.list()) == (0, 0, ())

    def test_threads_lose_nothing(self):
        log = FindingLog()

        def work(kernel):
            for _ in range(200):
                log.append(finding(kernel=kernel))

        threads = [threading.Thread(target=work, args=("ab"[index % 2],)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE)
        assert log.total == 800


class TestStack:
    def test_innermost_first(self):
        def inner():
            return capture_stack()

        stack = inner()
        assert stack[0].function.endswith("inner")
        assert stack[1].function.endswith("test_innermost_first")
        assert stack[0].file == __file__
        line = Path(__file__).read_text("utf-8").splitlines()[stack[0].line - 1]
        assert line.strip() == "return capture_stack()"

    def test_depth_is_limited(self):
        def deep(level):
            return deep(level - 1) if level else capture_stack(5)

        stack = deep(100)
        assert len(stack) == 5
        assert all(frame.function.endswith("deep") for frame in stack)

    def test_frames_of_the_package_are_left_out(self):
        allocator = Allocator(FakeMemory(), level=Level.OFF, findings=FindingLog())
        arena = allocator.reserve_arena(100, owner=Owner("target"), name="arena").unwrap()
        package = str(Path(instrumentation.__file__).parent)
        assert arena.allocation[0].file == __file__
        assert not any(frame.file.startswith(package) for frame in arena.allocation)


def test_codes_in_the_catalogue_are_unique_and_well_formed():
    assert all(re.fullmatch(r"[A-Z]{3}\d{3}", code) for code in CATALOGUE)
