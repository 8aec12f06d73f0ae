"""``refengine explain``: text, tables and JSON of the catalogue, and programs that run."""

from __future__ import annotations

import io
import json
import re

import pytest

from cli import explain as module
from cli.main import main
from instrumentation import catalogue_source
from instrumentation.catalogue import CATALOGUE, NOT_REPORTED


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_is_explained(run, code):
    result = run("explain", code.lower())
    assert (result.exit_code, result.stderr) == (0, "")
    found = CATALOGUE[code]
    shown = " ".join(result.stdout.split())
    assert shown.startswith(f"{code} {found.title}: found at {found.found_by} {found.meaning}")
    assert f"Cure: {found.cure}" in shown
    assert ("This version does not report it yet." in shown) == (code in NOT_REPORTED)
    for line in catalogue_source.source(code, "bad").splitlines():
        assert f"    {line}".rstrip() in result.stdout
    assert "\x1b" not in result.stdout


def test_prose_fits_a_screen(run):
    prose = [line for line in run("explain", *CATALOGUE).stdout.splitlines() if not line.startswith("    ")]
    assert max(map(len, prose)) <= 100


def test_several_codes_come_in_the_order_asked(run):
    lines = run("explain", "STR001", "mem005").stdout.splitlines()
    heads = [line for line in lines if line[:6] in CATALOGUE]
    assert [head.partition(" ")[0] for head in heads] == ["STR001", "MEM005"]


def test_without_a_code_all_are_listed(run):
    result = run("explain")
    lines = result.stdout.splitlines()
    assert [line[:6] for line in lines] == list(CATALOGUE)
    assert all(CATALOGUE[line[:6]].title in line and CATALOGUE[line[:6]].found_by in line for line in lines)
    assert {line[:6] for line in lines if line.endswith("not reported yet")} == NOT_REPORTED
    assert max(map(len, lines)) <= 100


def test_json_has_everything(run):
    every = json.loads(run("explain", "--json").stdout)
    assert [each["code"] for each in every] == list(CATALOGUE)
    for each in every:
        found = CATALOGUE[each["code"]]
        assert (each["title"], each["meaning"], each["cure"]) == (found.title, found.meaning, found.cure)
        assert each["reported"] == (each["code"] not in NOT_REPORTED)
        for kind in ("bad", "fixed"):
            assert each["program"][kind] == catalogue_source.source(each["code"], kind)
        assert "report" not in each
    [one] = json.loads(run("explain", "num001", "--json").stdout)
    assert (one["level"], one["found_by"]) == (None, "--check-numerics")
    [one] = json.loads(run("explain", "mem003", "--json").stdout)
    assert one["level"] == "guard"
    assert one["program"] == {kind: catalogue_source.source("MEM003", kind) for kind in ("bad", "fixed")}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("MEM003", "MEM003 memory written after free: 400 bytes, kv.k.0 of target"),
        ("OWN003", "draft follows target and is smaller: positions 512 of 1024"),
        ("RES002", "target cannot reserve 1049088 bytes"),
    ],
)
def test_run_prints_what_the_program_gives(run, code, text):
    result = run("explain", code, "--run")
    assert result.exit_code == 0
    assert text in result.stdout.partition("What this version reports:")[2]
    [one] = json.loads(run("explain", code, "--run", "--json", "-q").stdout)
    assert text in one["report"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["MEM1"], "finding code 'MEM1' is unknown; near ones are MEM001"),
        (["MEM001", "own"], "finding code 'own' is unknown; near ones are OWN001, OWN002"),
        (["nonsense"], "finding code 'nonsense' is unknown; known are RES001, RES002"),
        (["\x1b[2J"], "is unknown; known are"),
        (["--run"], "--run: name the codes"),
    ],
)
def test_what_cannot_be_explained_is_one_line_and_2(run, one_line, args, text):
    result = run("explain", *args)
    assert text in one_line(result, 2)
    assert result.stdout == ""


def test_what_is_not_reported_yet_cannot_be_run(run, one_line, monkeypatch):
    monkeypatch.setattr("instrumentation.catalogue.NOT_REPORTED", frozenset({"RES003"}))
    result = run("explain", "--run", "res003", "mem001")
    assert "--run: this version does not report RES003 yet" in one_line(result, 2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_gets_the_same_words_at_its_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["explain", "MEM005", "num001"], standalone_mode=False) == 0
    shown = re.sub(r"\x1b\[[014]m", "", terminal.getvalue())  # no colours
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) <= min(columns, 100)
    for code in ("MEM005", "NUM001"):
        assert CATALOGUE[code].meaning in " ".join(shown.split())
        assert f"{code} {CATALOGUE[code].title}" in shown
    assert module._plain(CATALOGUE["NUM001"], None).split()[-3:] == shown.split()[-3:]
