"""``refengine report``, and ``--report`` of the commands that find something."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import DATA
from gguf import GGUFReader

from cli.main import main
from instrumentation import catalogue_source
from instrumentation.findings import Finding, Frame
from instrumentation.reports.jsonlines import dump, load, write
from instrumentation.reports.text import render


@pytest.fixture(scope="module")
def findings():
    return [catalogue_source.run(code, "bad").findings[0] for code in ("MEM002", "STR010", "NUM001")]


@pytest.fixture
def file(findings, tmp_path):
    path = tmp_path / "found.jsonl"
    with path.open("w", encoding="utf-8") as lines:
        write(findings, lines)
    return path


def run(*arguments):
    return main([str(argument) for argument in arguments], standalone_mode=False)


def test_text_is_what_was_printed_when_it_was_found(findings, file, capsys):
    assert run("report", file) == 0
    assert capsys.readouterr().out == "".join(f"{render(each)}\n\n" for each in findings) + "3 findings\n"


def test_json_is_the_same_lines(file, capsys):
    assert run("report", file, "--format", "json") == 0
    assert capsys.readouterr().out == file.read_text("utf-8")


def test_sarif_is_one_file(findings, file, capsys):
    assert run("report", file, "--format", "sarif") == 0
    made = json.loads(capsys.readouterr().out)
    assert [each["ruleId"] for each in made["runs"][0]["results"]] == [each.code for each in findings]


def test_some_codes(file, capsys):
    assert run("report", file, "--code", "num001", "--code", "MEM002", "--format", "json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [load(line).finding.code for line in lines] == ["MEM002", "NUM001"]
    assert run("report", file, "--code", "OWN001") == 0
    assert capsys.readouterr().out == "0 findings\n"


def test_stdin(file, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert run("report", "-", "--code", "MEM002") == 0
    assert capsys.readouterr().out.endswith("\n\n1 finding\n")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["missing.jsonl"], "missing.jsonl: cannot be read: No such file or directory"),
        (["a\0b"], "cannot be read"),
        (["."], "cannot be read"),
        (["{file}", "--code", "MEM999"], "finding code 'MEM999' is unknown"),
        (["{file}", "--format", "html"], "'html' is not one of"),
        ([], "Missing argument 'FILE'"),
    ],
)
def test_bad_usage_is_one_line(arguments, wanted, file, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("report", *(each.format(file=file) for each in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refengine: error: ")
    assert wanted in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_a_bad_line_is_one_line_and_nothing_is_printed(form, file, capsys):
    with file.open("a") as lines:
        lines.write('{"schema": "refengine.finding/1", "code": "MEM001"}\n')
    assert run("report", file, "--format", form) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"refengine: error: {file}, line 4: kind is None; want text that is not empty\n"


def test_what_a_terminal_would_act_on_is_escaped(tmp_path, capsys):
    path = tmp_path / "found.jsonl"
    finding = Finding(code="MEM006", message="\x1b[2J\u202egone", access=(Frame("\x07.py", 1, "f"),))
    path.write_text(dump(finding, lambda *_: "\x1b]0;x"))
    assert run("report", path) == 0
    out = capsys.readouterr().out
    assert "\\x1b[2J\\u202egone" in out
    assert all(c.isprintable() or c == "\n" for c in out)


# --- what keeps findings


@pytest.fixture
def poisoned(tmp_path):
    """A model of which one number is NaN."""
    source = DATA / "llama.gguf"
    data = bytearray(source.read_bytes())
    (info,) = [each for each in GGUFReader(source).tensors if each.name == "blk.1.ffn_norm.weight"]
    np.frombuffer(data, np.float32, 1, info.data_offset)[...] = np.nan
    model = tmp_path / "poisoned.gguf"
    model.write_bytes(data)
    return model


NUMERICS = (Path(__file__).resolve().parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
SMALL = ("-c", 64, "-dev", "host", "-t", 1, "-ctk", "f32", "-ctv", "f32")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("generate", "-p", "a", "-n", 2), 1),
        (("bench", "-p", 4, "-n", 2, "-r", 1, "--check", "off,guard"), 1),
        (("soak", "--requests", 3, "--pool", 2, "-np", 2, "--clients", 2), 1),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_keep_what_they_find(command, code, poisoned, tmp_path, capsys):
    kept = tmp_path / "found.jsonl"
    kept.write_text("from before\n")
    assert run(*command, "-m", poisoned, *SMALL, "--check-numerics", "--report", kept) == code
    found = [load(line).finding for line in kept.read_text("utf-8").splitlines()]
    # Each engine of a command reports its own first.
    assert {each.code for each in found} == {"NUM001"}
    assert all("ffn_norm-1" in each.message for each in found)
    assert len(found) == (2 if command[0] == "bench" else 1)
    capsys.readouterr()
    assert run("report", kept) == 0
    printed = capsys.readouterr().out
    assert "NUM001 first NaN: 4 bytes" in printed
    # The page shows this report: of the same kernel, at the same line.
    shown = re.search(r"kernel rms_norm \(refengine/(kernels/norm\.py:\d+)\)", NUMERICS)[1]
    assert f"{shown})\n" in printed


def test_nothing_found_is_an_empty_file(tmp_path, capsys):
    kept = tmp_path / "found.jsonl"
    given = ("-m", DATA / "llama.gguf", *SMALL, "--check-numerics", "--report", kept)
    assert run("generate", "-p", "a", "-n", 2, *given) == 0
    assert kept.read_text() == ""
    assert "0 findings" in capsys.readouterr().err
    assert run("report", kept) == 0
    assert capsys.readouterr().out == "0 findings\n"


@pytest.mark.parametrize("command", ["generate -p a", "bench -p 4 -n 2", "soak"])
def test_a_report_that_cannot_be_kept_is_refused_at_once(command, tmp_path, capsys):
    model = tmp_path / "model.gguf"
    model.write_bytes((DATA / "llama.gguf").read_bytes())
    before = model.read_bytes()
    for name, wanted in ((model, "that is the model"), (tmp_path / "no" / "file", "cannot be written")):
        assert run(*command.split(), "-m", model, "-c", 64, "-dev", "host", "--report", name) == 2
        err = capsys.readouterr().err
        assert f"--report {name}: {wanted}" in err
        assert err.count("\n") == 1
    assert model.read_bytes() == before
