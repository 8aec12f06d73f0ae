"""``refengine sweep``: its table, its exit code, and how it goes on."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

import refengine.sweep.runs
from refengine.context import Context, DecodeStatus
from refengine.errors import ComputeError

LLAMA = Path(__file__).resolve().parent.parent / "data" / "llama.gguf"
MODEL = ("-m", LLAMA)


@pytest.fixture
def sweep(run):
    def invoke(*args):
        return run("sweep", *MODEL, *args)

    return invoke


@pytest.fixture
def blanket(monkeypatch):
    """An engine whose errors say nothing."""

    def nameless(self, status):
        if status != DecodeStatus.OK:
            raise ComputeError("Compute error.")

    monkeypatch.setattr(Context, "require", nameless)


def _runs(pid):
    """Whether there is such a process, and not only its exit code that nobody has asked for."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def table(stdout):
    """The rows by kind, each a dict by column; then what follows the table."""
    lines = stdout.splitlines()
    empty = lines.index("")
    split = [line.replace(" failed", "_failed").split() for line in lines[:empty]]
    return {row[0]: dict(zip(split[0][1:], map(int, row[1:]), strict=True)) for row in split[1:]}, lines[
        empty + 1 :
    ]


def test_the_table_counts_sites_calls_runs_and_outcomes(sweep):
    result = sweep("--runs-random", "5")
    assert (result.exit_code, result.stderr) == (0, "")
    rows, rest = table(result.stdout)
    own = rows["reserve"]
    assert own == rows["all"]
    assert own["sites"] == own["calls"] == own["nth"] == own["from"] == 11
    assert own["random"] == 5
    assert own["load_failed"] + own["request_failed"] + own["identical"] == 27
    assert own["misbehaved"] == 0
    assert rest == ["11 sites, 27 runs, 0 misbehaved"]


def test_kinds_and_modes_are_chosen(sweep):
    result = sweep("--sites", "graph, reserve", "--modes", "nth")
    rows, rest = table(result.stdout)
    assert list(rows) == ["reserve", "graph", "all"]
    assert rows["all"]["nth"] == rows["reserve"]["nth"] + rows["graph"]["nth"] == 29
    assert "random" not in rows["all"]
    assert rest == ["29 sites, 29 runs, 0 misbehaved"]


def test_a_run_that_misbehaves_is_named_and_ends_it_with_1(sweep, blanket):
    result = sweep("--modes", "nth")
    assert result.exit_code == 1
    rows, rest = table(result.stdout)
    assert rows["reserve"]["misbehaved"] == rows["reserve"]["request_failed"] == len(rest) - 1 > 0
    assert rest[0].startswith("nth 8, fault site 8 (reserve target/compute ")
    assert "the error of request 1 does not name fault site 8 " in rest[0]
    assert rest[-1].endswith(f"11 runs, {len(rest) - 1} misbehaved")


def test_a_call_without_a_site_ends_it_with_1(sweep, monkeypatch):
    monkeypatch.setattr("instrumentation.heap.Heap.injected_failure", lambda *_: None)
    result = sweep("--modes", "nth")
    assert result.exit_code == 1
    assert table(result.stdout)[1] == ["reserve: 0 fault sites for 11 calls", "0 sites, 0 runs, 0 misbehaved"]


def test_json_has_everything(sweep, blanket):
    result = sweep("--modes", "nth", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert (found["sites"], found["calls"], found["runs"], found["uncounted"]) == (11, 11, 11, [])
    assert [row["kind"] for row in found["kinds"]] == ["reserve", "all"]
    assert len(found["misbehaved"]) == found["kinds"][0]["misbehaved"]
    assert found["misbehaved"][0]["site"].startswith("fault site 8 (reserve ")
    assert found["options"]["check"] == "guard"


def test_slots_and_drafts_are_swept_and_counted(run):
    model = LLAMA.parent / "qwen35.gguf"
    args = (
        "-m",
        model,
        "--sites",
        "event",
        "--modes",
        "random",
        "--runs-random",
        "3",
        "-c",
        "64",
        "-np",
        "2",
    )
    result = run("sweep", *args, "--spec-type", "draft-mtp")
    # Nor is it shown that the engine runs out of cells.
    assert (result.exit_code, result.stderr) == (0, "")
    assert table(result.stdout)[0]["event"]["identical"] == 3
    assert table(result.stdout)[1][0] == (
        "undisturbed, requests were preempted 1 times and drafts verified 8 times"
    )
    found = json.loads(run("sweep", *args, "--spec-type", "draft-mtp", "--json").stdout)
    assert (found["preemptions"], found["verifications"]) == (1, 8)
    assert found["options"]["n_slots"] == 2
    assert [len(prompts) for prompts in found["prompts"]] == [3, 1]
    result = run("sweep", *args, "--no-kv-unified")
    assert result.exit_code == 2
    assert "the workload makes no such calls" in result.stderr


def test_two_processes_find_what_one_finds(sweep):
    args = ("--sites", "graph", "--modes", "nth,random", "--runs-random", "4", "--json")
    alone, together = sweep(*args), sweep(*args, "-j", "2")
    assert (alone.exit_code, alone.stderr) == (together.exit_code, together.stderr) == (0, "")
    assert alone.stdout == together.stdout


def test_an_interrupted_sweep_goes_on(sweep, monkeypatch, tmp_path):
    file = tmp_path / "runs.jsonl"
    args = ("--modes", "nth,random", "--runs-random", "5")
    wanted = sweep(*args, "--json").stdout
    disturbed, made = refengine.sweep.runs.disturbed, []

    def interrupted(*args):
        made.append(args)
        if len(made) == 8:
            raise KeyboardInterrupt
        return disturbed(*args)

    monkeypatch.setattr(refengine.sweep.runs, "disturbed", interrupted)
    result = sweep(*args, "--resume", file)
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [
        f"7 of 16 runs are in {file}; the same command goes on", "refengine: interrupted"
    ]  # fmt: skip
    assert len(file.read_text().splitlines()) == 8
    result = sweep(*args, "--resume", file, "--json")
    assert (result.exit_code, result.stdout) == (0, wanted)
    assert len(made) == 8 + 16 - 7
    # Nothing is left to do, and fewer modes are a part of the same sweep.
    assert sweep(*args, "--resume", file, "--json").stdout == wanted
    assert table(sweep("--resume", file, "--modes", "nth").stdout)[1] == ["11 sites, 11 runs, 0 misbehaved"]
    assert len(made) == 8 + 16 - 7


def test_a_file_of_another_sweep_is_refused_by_name(sweep, one_line, tmp_path):
    file = tmp_path / "runs.jsonl"
    assert sweep("--modes", "nth", "--resume", file).exit_code == 0
    for args, words in (
        (("-s", "1"), "seed is 0 there and 1 here"),
        (("-n", "4"), "n_predict is 3 there and 4 here"),
        (("--no-cuda-graphs",), "option cuda_graphs is true there and false here"),
        (("--sites", "graph"), 'kinds is ["reserve"] there and ["graph"] here'),
    ):
        assert f"is of another sweep: {words}" in one_line(sweep("--resume", file, *args), 2)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_all_processes_and_leaves_a_file_that_goes_on(spawn, sweep, tmp_path):
    file = tmp_path / "runs.jsonl"
    process = spawn("sweep", *MODEL, "--sites", "all", "--modes", "nth", "-j", "2", "--resume", file)
    for _ in range(10 * PATIENCE):
        if file.exists() and file.read_bytes().count(b"\n") > 1:
            break
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, b"")
    done = file.read_bytes().count(b"\n") - 1
    where, end = err.decode().splitlines()
    assert re.fullmatch(rf"{done} of \d+ runs are in {file}; the same command goes on", where)
    assert end == "refengine: interrupted"
    for _ in range(10 * PATIENCE):
        left = [pid for pid in started if _runs(pid)]
        if not left:
            break
        time.sleep(0.1)
    assert left == []
    lines = file.read_bytes().splitlines(keepends=True)
    assert all(json.loads(line)["wrong"] == [] for line in lines[1:])


def test_log_lines_of_failures_come_with_v(sweep):
    lines = sweep("--modes", "nth", "-v").stderr.splitlines()
    failures = [line for line in map(json.loads, lines) if line["event"] == "failed to reserve graph"]
    assert len(failures) == 4
    assert all("fault site" in line["error"] for line in failures)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--sites", "reserve,gemm"),
            "--sites 'reserve,gemm': 'gemm' is unknown; give some of reserve, copy, launch",
        ),
        (("--sites", ""), "--sites '': '' is unknown"),
        (("--sites", "event"), "--sites event: the workload makes no such calls; give others, or all"),
        (("--modes", "nth,all"), "--modes 'nth,all': 'all' is unknown; give some of nth, from, random"),
        (("-j", "0"), "'-j'"),
        (("-s", "-1"), "'-s'"),
        (("-n", "1"), "'-n'"),
        (("--runs-random", "-1"), "'--runs-random'"),
        (("-c", "16"), "a prompt of 26 tokens (more than n_ubatch 16) and 3 to predict do not fit n_ctx 16"),
        (("-ub", "0"), "n_ubatch is 0"),
        (("-t", "0"), "threads is 0"),
        (("--check", "all"), "all"),
        (("--resume", LLAMA), "llama.gguf is no file of a sweep"),
        (("--resume", LLAMA.parent), "data"),
        (("--resume", LLAMA.parent / "nowhere" / "x"), "No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(sweep, one_line, args, words):
    before = LLAMA.stat().st_mtime_ns
    assert words in one_line(sweep(*args), 2)
    assert LLAMA.stat().st_mtime_ns == before


def test_a_model_that_is_not_there_is_one_line(run, one_line):
    assert "no such file" in one_line(run("sweep", "-m", "nowhere.gguf"), 2)
