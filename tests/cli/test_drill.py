"""``refengine drill``: its table and forms, its exit code, and what it refuses."""

from __future__ import annotations

import csv
import io
import json

import pytest
from engines import DATA

from instrumentation.catalogue import CATALOGUE
from instrumentation.devices.registry import HandleRegistry
from refengine.drill import FAULTS

MODEL = ("-m", DATA / "qwen35.gguf", "--device", "host", "-t", "1")


def named(*names):
    return [part for name in names for part in ("--fault", name)]


@pytest.fixture
def drill(run):
    def invoke(*args):
        return run("drill", *MODEL, *args)

    return invoke


def test_a_row_for_each_fault_and_0_when_all_are_found(drill):
    result = drill(*named("wait-left-out", "freed-twice", "workspace-reset"))
    assert result.exit_code == 0, result.stderr
    header, rule, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines()
    ]
    assert header == ["fault", "code", "planted at", "found at", "check", "level", "distance", "false"]
    assert all(set(cell) <= set("-:") for cell in rule)
    assert [row[:2] for row in rows] == [
        ["freed-twice", "MEM005"], ["wait-left-out", "OWN012"], ["workspace-reset (I1)", "LIB002"]
    ]  # fmt: skip
    assert rows[1][2:] == [
        "wait hidden states on draft left out", "gather_hidden(hidden) on draft", "hand-over not ordered", "audit",
        "0", "0",
    ]  # fmt: skip
    assert rows[2][2:] == ["", "not on this device: it has no cuBLAS", "", "", "", ""]
    assert result.stderr == "3 faults: 2 found, 1 not on this device; 0 false reports\n"


def test_a_miss_ends_it_with_1(drill, monkeypatch):
    monkeypatch.setattr(HandleRegistry, "problem", lambda *_: None)
    result = drill(*named("stream-overwritten"), "--level", "guard")
    assert result.exit_code == 1
    assert "missed: no STR001 at guard" in result.stdout
    assert result.stderr.splitlines() == [
        "stream-overwritten: no STR001 at guard", "1 fault: 1 missed; 0 false reports"
    ]  # fmt: skip


def test_json_is_one_list(drill):
    result = drill(*named("lease-over"), "--level", "audit", "-o", "json", "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    [row] = json.loads(result.stdout)
    assert row == {
        "fault": "lease-over", "code": "OWN010", "incident": None, "status": "found",
        "planted_at": "end of the lease of hidden at wait hidden states on draft",
        "found_at": "gather_hidden(hidden) on draft", "check": "access outside a lease", "level": "audit",
        "tried": ["audit"], "distance": 0, "false_reports": [], "why": None,
    }  # fmt: skip


def test_csv_has_texts_where_json_has_lists(drill):
    result = drill(*named("lease-over"), "-o", "csv", "-q")
    [row] = csv.DictReader(io.StringIO(result.stdout))
    assert (row["tried"], row["false_reports"], row["why"]) == ("off; guard; audit", "", "")


def test_the_list_has_every_code_and_loads_nothing(run):
    result = run("drill", "--list", "-o", "csv", "-m", "no/such/file.gguf")
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["fault"] for row in rows] == [fault.name for fault in FAULTS]
    assert {row["code"] for row in rows} == set(CATALOGUE)
    assert all(row["what"] for row in rows)
    assert {row["level"] for row in rows} == {"off", "guard", "audit", "trap", "off, --check-numerics"}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (named("wait-leftout"), "fault 'wait-leftout' is unknown; near ones are wait-left-out"),
        (named("zzz"), "fault 'zzz' is unknown; known are failed-reservation-dropped, "),
        (["--level", "full"], "check level 'full' is unknown; use one of off, guard, audit, trap"),
        (["-o", "xml"], "'xml' is not one of 'md', 'csv', 'json'"),
        (
            ["-m", DATA / "llama.gguf"],
            "this model (llama) has no MTP head, whose drafts a drill needs; give one",
        ),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_usage_is_one_line_and_2(drill, one_line, args, text):
    result = drill(*args)
    assert text in one_line(result, 2)
    assert result.stdout == ""
