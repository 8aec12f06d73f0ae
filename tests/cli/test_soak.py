"""``refengine soak``: its table, its exit code, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from refengine.engine import Engine
from refengine.request import Request
from refengine.soak import running

LLAMA = Path(__file__).resolve().parent.parent / "data" / "llama.gguf"
SMALL = ("-m", LLAMA, "-c", "256", "-t", "1", "--check", "guard")


@pytest.fixture
def soak(run):
    def invoke(*args):
        return run("soak", *SMALL, *args)

    return invoke


@pytest.fixture
def differing(monkeypatch):
    """What is computed alone differs from what was answered."""
    compute = running.compute_alone

    def other(engine, planned):
        output = compute(engine, planned)
        return type(output)(output.tokens, bytes(len(output.digests)))

    monkeypatch.setattr(running, "compute_alone", other)


def rows(stdout):
    """The first block as a dict, and the lines of the others."""
    blocks = [block.splitlines() for block in stdout.split("\n\n")]
    pairs = (line.split("  ", 1) for line in blocks[0] if "  " in line)
    return {name: value.strip() for name, value in pairs}, blocks[1:]


def test_the_table_says_how_requests_ended_and_what_it_cost(soak):
    result = soak("--requests", "25", "--kv-unified")
    assert (result.exit_code, result.stderr) == (0, "")
    table, (memory, end) = rows(result.stdout)
    assert table["asked"] == "25"
    numbers = [
        int(table[name].split(",")[0]) for name in ("completed", "refused, cannot fit", "cancelled", "failed")
    ]
    assert sum(numbers) == 25
    assert numbers[0] > 15
    assert table["unfinished"] == "0"
    assert table["completed of those that fit"] == "100.00 %"
    assert (table["differences"], table["findings"]) == ("0", "0")
    assert int(table["tokens generated"]) > 500
    assert memory[0].split() == ["bytes", "reserved", "used", "explained", "device", "process"]
    assert [line.split()[0] for line in memory[1:]] == ["load", "warm-up", "end", "warm-up:"]
    assert end == ["0 problems"]


def test_acceptance_is_printed_as_other_engines_do(run):
    result = run(
        "soak", *SMALL, "-m", LLAMA.parent / "qwen35.gguf", "--spec-type", "draft-mtp", "--requests", "8"
    )
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("draft acceptance = "))
    assert " accepted / " in line
    assert " generated), mean len = " in line


def test_json_goes_to_a_file_beside_the_table_or_to_stdout_in_its_place(soak, tmp_path):
    file = tmp_path / "soak.json"
    result = soak("--requests", "10", "-o", file)
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(file.read_text())
    assert found["ok"]
    assert found["requests"]["asked"] == 10
    assert rows(result.stdout)[0]["steps"] == str(found["steps"])
    again = json.loads(soak("--requests", "10", "--json", "-").stdout)
    timed = ("seconds", "tokens_per_second", "warm_up", "memory")
    assert {key: value for key, value in again.items() if key not in timed} == {
        key: value for key, value in found.items() if key not in timed
    }
    assert list(found["memory"]) == ["load", "warm-up", "end"]


def test_a_file_that_cannot_be_written_at_the_end_does_not_cost_the_table(
    soak, one_line, monkeypatch, tmp_path
):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = soak("--requests", "3", "-o", tmp_path / "out.json")
    assert "out.json: cannot be written: No space left on device" in one_line(result, 2)
    assert "completed" in result.stdout


def test_a_difference_ends_it_with_1(soak, differing):
    result = soak("--requests", "30")
    assert result.exit_code == 1
    _, (_, end) = rows(result.stdout)
    assert end[0].startswith("difference: request ")
    assert "beside others the logits of token 1 of " in end[0]
    # The rest is in the JSON.
    assert end[-2].startswith("and ")
    assert int(end[-1].removesuffix(" problems")) == 20 + int(end[-2].split()[1])


def test_failures_on_purpose_are_counted_and_no_problem(soak):
    result = soak("--requests", "30", "--fail-rate", "0.6", "--no-worst-case-reserve")
    assert (result.exit_code, result.stderr) == (0, "")
    table, _ = rows(result.stdout)
    failed, hit = table["failed"].split(", ")
    assert hit == f"{failed} of them by injected failures"
    assert int(table["injected failures"]) >= int(failed) > 0


def test_a_request_that_fails_without_them_ends_it_with_1(soak, monkeypatch):
    fail = Request.fail
    monkeypatch.setattr(
        Request, "fail", lambda self, error: fail(self, type(error)(str(error).replace("fault site", "site")))
    )
    result = soak("--requests", "30", "--fail-rate", "0.05", "--fail-kinds", "copy, launch")
    assert result.exit_code == 1
    _, (_, end) = rows(result.stdout)
    assert end[0].startswith("incomplete: request ")
    assert "Compute error." in end[0]


def test_an_interrupted_soak_prints_what_it_has(soak, monkeypatch, tmp_path):
    drive, steps = Engine.drive, []

    def interrupted(self, timeout=None):
        steps.append(self)
        if len(steps) == 60:
            raise KeyboardInterrupt
        drive(self, timeout)

    monkeypatch.setattr(Engine, "drive", interrupted)
    file = tmp_path / "soak.json"
    result = soak("--requests", "30", "-o", file)
    assert (result.exit_code, result.stderr) == (130, "refengine: interrupted\n")
    table, (memory, end) = rows(result.stdout)
    assert table["steps"] == "59"
    assert int(table["unfinished"]) > 0
    assert memory[3].split() == ["end", "-", "-", "-", "-", "-"]
    assert end == ["0 problems, not finished"]
    assert json.loads(file.read_text())["finished"] is False


def test_interrupted_while_it_compares_it_is_not_finished(soak, monkeypatch):
    compute, made = running.compute_alone, []

    def interrupted(*args):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(args)
        return compute(*args)

    monkeypatch.setattr(running, "compute_alone", interrupted)
    result = soak("--requests", "20")
    assert (result.exit_code, result.stderr) == (130, "refengine: interrupted\n")
    table, (_, end) = rows(result.stdout)
    assert table["unfinished"] == "0"
    assert table["compared with alone"].startswith("3 of ")
    assert end == ["0 problems, not finished"]


def test_a_bug_that_ends_it_is_one_line_behind_what_was_found(soak, monkeypatch):
    def broken(self):
        raise AssertionError("books do not agree")

    monkeypatch.setattr(Engine, "check_integrity", broken)
    result = soak("--requests", "5")
    assert result.exit_code == 1
    assert rows(result.stdout)[0]["asked"] == "5"
    assert (
        result.stderr
        == "refengine: error: AssertionError: books do not agree; this is a bug (-v shows where)\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_a_long_soak_in_order(spawn, tmp_path):
    process = spawn("soak", *SMALL, "--duration", "1h", "-v")
    line = b""
    while b"preempted" not in line:
        line = process.stderr.readline()
        assert line, "it ended"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "refengine: interrupted"
    assert out.decode().splitlines()[-1] == "0 problems, not finished"


def test_each_retry_is_logged_with_v_alone(soak):
    lines = [json.loads(line) for line in soak("--requests", "20", "-v").stderr.splitlines()]
    assert {"preempted", "failed to find free space in the KV cache, retrying with smaller batch size"} <= {
        line["event"] for line in lines
    }
    assert soak("--requests", "20").stderr == ""


def test_how_it_goes_is_a_log_line_now_and_then_and_nothing_with_q(soak, monkeypatch):
    monkeypatch.setattr("cli.soak._LOG", 0.05)
    lines = [json.loads(line) for line in soak("--requests", "20").stderr.splitlines()]
    assert {line["event"] for line in lines} == {"soaking"}
    assert lines[-1].keys() >= {
        "elapsed",
        "requests",
        "busy_slots",
        "cells_free",
        "retries",
        "ledger",
        "process",
    }
    assert soak("--requests", "20", "-q").stderr == ""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals for tests")
def test_on_a_terminal_a_table_is_live_and_gone_at_the_end(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "refengine", "soak", *map(str, SMALL), "--requests", "100"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while part := os.read(ours, 65536):
                drawn += part
        out = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0
    assert rows(out)[0]["asked"] == "100"
    for name in (b"busy slots", b"cells free", b"preemptions", b"acceptance", b"ledger"):
        assert drawn.count(name) > 1, name
    # Drawn over itself, and wiped when it ends.
    assert drawn.count(b"\x1b[1A") > drawn.count(b"elapsed")
    assert drawn.rstrip().endswith((b"\x1b[2K", b"\x1b[?25h"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--clients", "0"), "clients is 0; give a whole number from 1 to 1024"),
        (("--pool", "0"), "pool is 0"),
        (("--seed", "-1"), "seed is -1"),
        (("-np", "0"), "n_slots is 0"),
        (("--duration", "fast"), "--duration 'fast': want a positive number with s, m or h, for example 60s"),
        (("--duration", "10"), "--duration '10': want"),
        (("--duration", "0s"), "--duration '0s': want"),
        (("--duration", "-5s"), "--duration '-5s': want"),
        (("--duration", "999999999h"), "a soak of"),
        (("--retries", "0"), "--retries is 0; give a positive number"),
        (("--requests", "-3"), "--requests is -3; give a positive number"),
        (("--requests", "x"), "'--requests'"),
        (("--requests", "3", "--retries", "3"), "--retries and --requests: a soak has one end"),
        (("--requests", "3", "--duration", "3s"), "--duration and --requests: a soak has one end"),
        (("--retries", "3", "-np", "1"), "--retries with -np 1: nobody takes another's room"),
        (
            ("--retries", "3", "--no-kv-unified"),
            "--retries with --no-kv-unified: nobody takes another's room",
        ),
        (("--fail-rate", "1.5"), "fail_rate is 1.5; give a probability from 0 to 1"),
        (("--fail-rate", "nan"), "fail_rate is nan"),
        (("--fail-kinds", "reserve,gemm"), "give one or more of reserve, copy, launch, event, graph"),
        (("--fail-kinds", ""), "give one or more of reserve"),
        (("-c", "16"), "n_ctx is 16 for a sequence; a soak wants at least 32"),
        (("-no-kvu", "-np", "16"), "n_ctx is 16 for a sequence"),
        (("--spec-type", "draft-mtp"), "has no MTP head"),
        (("-o", LLAMA), "that is the model; give another file"),
        (("-o", LLAMA.parent), "cannot be written"),
        (("-o", LLAMA.parent / "nowhere" / "x"), "cannot be written: No such file or directory"),
        (("-o", "a\0b"), "cannot be written"),
        (("-ngl", "99"), "-ngl/--gpu-layers/--n-gpu-layers: the whole model runs on one device"),
    ],
)
def test_bad_arguments_are_one_line(soak, one_line, args, words):
    before = LLAMA.stat().st_mtime_ns
    result = soak(*args)
    assert words in one_line(result, 2)
    assert result.stdout == ""
    assert LLAMA.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "options", [(), ("--schedule-seed", "3"), ("--no-cuda-graphs", "--schedule-seed", "4")]
)
def test_at_level_audit_nothing_is_found_in_any_order(run, options):
    drafting = ("-m", LLAMA.with_name("qwen35.gguf"), "-c", "256", "-t", "1", "--spec-type", "draft-mtp")
    result = run("soak", *drafting, "--check", "audit", "-dev", "host", "--requests", "8", *options)
    assert result.exit_code == 0, result.output
    table, _ = rows(result.stdout)
    assert (table["findings"], table["differences"]) == ("0", "0")
    assert int(table["completed"]) > 0
