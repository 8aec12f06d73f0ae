"""``refengine bench``: its formats, its exit codes, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import statistics
from pathlib import Path

import pytest

import refengine.bench_memory
from instrumentation.errors import DeviceError
from instrumentation.findings import Finding
from refengine.context import Context, DecodeStatus

LLAMA = Path(__file__).resolve().parent.parent / "data" / "llama.gguf"


@pytest.fixture
def bench(run, monkeypatch):
    """Run ``refengine bench`` over the small llama."""
    monkeypatch.setattr(refengine.bench_memory, "COPY_BYTES", 1 << 20)

    def invoke(*args):
        return run("bench", "-m", LLAMA, "-p", "16", "-n", "8", "-r", "2", "-t", "1", *args)

    return invoke


@pytest.fixture
def damaged(monkeypatch):
    """An engine that finds something at level guard."""
    decode = Context.decode

    def finding(self, batch):
        allocator = self.executor.allocator
        if allocator.level > 0 and not list(allocator.findings):
            allocator.findings.append(Finding(code="MEM002", message="planted", device="host"))
        return decode(self, batch)

    monkeypatch.setattr(Context, "decode", finding)


def table(stdout):
    """Cells of each line."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in stdout.splitlines()]


def test_the_table_is_aligned_and_has_a_row_for_each_level_and_test(run, monkeypatch):
    monkeypatch.setattr(refengine.bench_memory, "COPY_BYTES", 1 << 20)
    result = run(
        "bench", "-m", LLAMA, "-p", "16,24", "-p", "32", "-n", "0,8", "-r", "2", "--check", "off, guard", "-t", "1"
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    header, ruler, *rows = table(result.stdout)
    assert header == [
        "model", "size", "params", "device", "check", "test", "t/s", "bytes/token", "% of copy"
    ]  # fmt: skip
    assert all(set(cell) <= set("-:") for cell in ruler)
    tests = ["pp16", "pp24", "pp32", "tg8"]
    assert [row[4:6] for row in rows] == [[level, test] for level in ("off", "guard") for test in tests]
    assert len({tuple(i for i, c in enumerate(line) if c == "|") for line in result.stdout.splitlines()}) == 1
    for row in rows:
        assert row[:4] == ["llama F32", "642.2 KiB", "0.16 M", "host"]
        mean, sign, deviation = row[6].split()
        assert float(mean) > 0 <= float(deviation)
        assert sign == "±"
        assert (row[7] == "", row[8] == "") == (row[5] != "tg8",) * 2
    lines = result.stderr.splitlines()
    assert lines[0] == "0 findings"
    assert [line.partition(" bandwidth")[0] for line in lines[1:]] == ["check off: copy", "check guard: copy"]


def test_csv_is_a_header_and_plain_numbers(bench):
    result = bench("-o", "csv", "-q")
    assert (result.exit_code, result.stderr) == (0, "")
    pp, tg = csv.DictReader(io.StringIO(result.stdout))
    assert len(result.stdout.splitlines()) == 3
    assert (pp["test"], pp["n_prompt"], pp["n_gen"], pp["bytes_per_token"]) == ("pp16", "16", "0", "")
    assert (tg["test"], tg["n_prompt"], tg["n_gen"]) == ("tg8", "0", "8")
    assert (tg["model_type"], tg["model_size"], tg["check"]) == ("llama F32", "657664", "off")
    share = float(tg["bytes_per_token"]) * float(tg["avg_ts"]) / float(tg["copy_bytes_per_second"])
    assert float(tg["percent_of_copy"]) == pytest.approx(100 * share)


def test_json_has_all_numbers_and_the_samples(bench):
    result = bench("-o", "json", "-q", "--check", "off,off")
    assert (result.exit_code, result.stderr) == (0, "")
    pp, tg = json.loads(result.stdout)
    for row in (pp, tg):
        assert len(row["samples_ts"]) == 2
        assert row["avg_ts"] == pytest.approx(statistics.fmean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(statistics.stdev(row["samples_ts"]))
        assert row["model_filename"] == str(LLAMA)
        assert row["model_n_params"] == 657664 // 4
    assert [pp[key] for key in ("bytes_per_token", "copy_bytes_per_second", "percent_of_copy")] == [None] * 3
    assert tg["percent_of_copy"] > 0
    assert pp.keys() == tg.keys()


def test_a_test_of_0_tokens_is_left_out(bench):
    assert [row[5] for row in table(bench("-n", "0").stdout)[2:]] == ["pp16", "tg8"]


def test_findings_are_shown_and_end_it_with_1(bench, damaged):
    result = bench("--check", "off,guard")
    assert result.exit_code == 1
    assert len(table(result.stdout)) == 2 + 4
    assert "MEM002" in result.stderr
    assert "planted" in result.stderr
    assert "1 finding" in result.stderr.splitlines()


@pytest.mark.parametrize("output", ["md", "csv", "json"])
def test_a_level_that_fails_keeps_what_was_measured(bench, monkeypatch, output):
    decode = Context.decode

    def failing(self, batch):
        if self.executor.allocator.level > 0:
            self.error = DeviceError("on purpose")
            return DecodeStatus.COMPUTE_FAILED
        return decode(self, batch)

    monkeypatch.setattr(Context, "decode", failing)
    result = bench("--check", "off,guard", "-o", output)
    assert result.exit_code == 3
    if output == "json":
        assert [row["check"] for row in json.loads(result.stdout)] == ["off", "off"]
    else:
        assert len(result.stdout.splitlines()) == {"md": 4, "csv": 3}[output]
    first, last = result.stderr.splitlines()
    assert first == "0 findings"
    assert last == "refengine: error: Compute error. (decode status -3): on purpose"


def test_an_interrupt_ends_it_with_130(bench, monkeypatch):
    def interrupted(_self, _batch):
        raise KeyboardInterrupt

    monkeypatch.setattr(Context, "decode", interrupted)
    result = bench("--check", "guard", "-o", "json")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines() == ["0 findings", "refengine: interrupted"]


def test_steps_are_logged_with_v(bench):
    lines = [json.loads(line) for line in bench("-v").stderr.splitlines() if line.startswith("{")]
    steps = [line["step"] for line in lines if line["event"] == "measuring"]
    assert steps[:3] == ["check off: copy", "check off: pp16, warm-up", "check off: pp16, run 1 of 2"]


def test_options_of_the_engine_and_metadata_are_taken(bench):
    options = ("-c", "64", "-b", "8", "-ub", "4", "-ctk", "f32", "-ctv", "bf16", "--no-cuda-graphs")
    assert bench(*options, "--no-worst-case-reserve", "--device", "host").exit_code == 0
    result = bench("--override-kv", "llama.context_length=int:12")
    assert result.exit_code == 2
    assert "test pp16 has 16 tokens; the model was trained for at most 12" in result.stderr


def test_help_says_that_drafts_are_not_part_of_it(run):
    text = " ".join(run("bench", "--help").stdout.split())
    assert "speculative decoding (--spec-type draft-mtp) are not part of it" in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "-5"), "n_prompt is -5; give 0 or more tokens"),
        (("-n", "-1"), "n_gen is -1; give 0 or more tokens"),
        (("-p", "many"), "want numbers of tokens with commas between"),
        (("-p", "16,"), "-p/--n-prompt '16,': want numbers"),
        (("-n", ""), "-n/--n-gen ''"),
        (("-n", "9" * 5000), "-n/--n-gen"),
        (("-p", "40000"), "test pp40000 has 40000 tokens; the model was trained for at most 32768"),
        (("-n", "40000"), "test tg40000 has 40000 tokens; the model was trained for at most 32768"),
        (("-c", "127"), "test pp512 has 512 tokens; n_ctx is 127: give fewer tokens or a longer context"),
        (("-c", "-1"), "n_ctx is -1"),
        (("-r", "0"), "repetitions is 0; give 1 or more"),
        (("-r", "few"), "'-r'"),
        (("-o", "sql"), "'-o'"),
        (("--check", ""), "check level '' is unknown"),
        (("--check", "off,all"), "check level 'all' is unknown"),
        (("--device", "tpu"), "device 'tpu' is unknown"),
        (("--device-memory-limit", "lots"), "--device-memory-limit 'lots'"),
        (("-t", "0"), "threads is 0"),
        (("--spec-type", "draft-mtp"), "plain decoding is measured, without drafts; leave it out"),
        (("-ngl", "99"), "choose it with --device"),
        (("-pg", "16,8"), "not built yet; give prompts with -p"),
        (("-d", "128"), "not built yet; give prompts with -p"),
    ],
)
def test_bad_arguments_are_one_line(run, one_line, args, words):
    result = run("bench", "-m", LLAMA, *args)
    assert words in one_line(result, 2)
    assert result.stdout == ""


def test_nothing_to_measure_is_one_line(run, one_line):
    assert "nothing to measure" in one_line(run("bench", "-m", LLAMA, "-p", "0", "-n", "0"), 2)


def test_a_limit_that_is_too_small_is_one_line_and_3(bench, one_line):
    line = one_line(bench("--device-memory-limit", "64KiB"), 3)
    assert "smallest limit that works is" in line


def test_a_model_that_is_not_there_is_one_line(run, one_line):
    assert "no such file" in one_line(run("bench", "-m", "nowhere.gguf"), 2)
