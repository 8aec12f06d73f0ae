"""``refengine golden``: its commands, their exit codes, and what they say of files that are wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from instrumentation.ownership import Owner
from refengine.golden import case
from refengine.golden.compare import Comparison
from refengine.golden.kld_base import KldBase
from refengine.golden.session import Session

DATA = Path(__file__).resolve().parent.parent / "data"
LLAMA, QWEN = DATA / "llama.gguf", DATA / "qwen35.gguf"
SMALL = ("-t", "1", "-dev", "host")
COMMANDS = ("record", "check", "diff", "dump", "kld", "kld-base")


@pytest.fixture
def golden(run):
    def invoke(*args):
        return run("golden", *args)

    return invoke


@pytest.fixture
def recorded(golden, tmp_path):
    """A directory of two cases."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"name": "a", "tokens": [1, 9, 250, 33, 8, 41]}\n{"prompt": "hi", "n_predict": 0}\n')
    result = golden(
        "record", "-m", LLAMA, "--prompts", prompts, "-o", tmp_path / "out", "-n", "3", "-c", "64", *SMALL
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "a: 6 tokens, 11 tensors\ncase-002: 1 tokens, 11 tensors\n"
    return tmp_path / "out"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_has_an_example(golden, command):
    result = golden(command, "--help")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 80
    assert f"  refengine golden {command} " in result.stdout


def test_a_group_without_a_command_shows_its_help(golden):
    result = golden()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert all(f"  {command} " in result.stderr for command in COMMANDS)


def test_recordings_are_found_again(golden, recorded, tmp_path):
    made = case.read(recorded / "a")
    assert made.model.name == "llama.gguf"
    assert (len(made.greedy), made.n_predict, made.settings["n_ctx"]) == (3, 3, 64)
    assert case.read(recorded / "case-002").prompt == "hi"
    result = golden("check", recorded, "-m", LLAMA, *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "a: ok, 11 tensors (bits)\ncase-002: ok, 11 tensors (bits)\n"
    result = golden("check", recorded / "a", "-m", LLAMA, "--tolerance", "0", "--check", "guard", *SMALL)
    assert (result.exit_code, result.stderr) == (0, "0 findings\n")
    assert result.stdout == "a: ok, 11 tensors (NMSE)\n"
    assert golden("check", recorded, "-m", LLAMA, "-q", *SMALL).stdout == ""
    shutil.copy(LLAMA, tmp_path / "llama.gguf")
    assert golden("check", recorded, *SMALL).exit_code == 0


def test_what_is_recorded_is_chosen(golden, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello there\n")
    common = ("record", "-m", QWEN, "--prompts", prompts, "-n", "0", "-c", "64", *SMALL)
    assert golden(*common, "-o", tmp_path / "all", "--all").exit_code == 0
    assert golden(*common, "-o", tmp_path / "none", "--no-drafts", "--rows", "1").exit_code == 0
    assert (
        golden(*common, "-o", tmp_path / "few", "--tensors", "l_out-*", "--tensors", "mtp_concat*").exit_code
        == 0
    )
    all_of, none, few = (case.read(tmp_path / name / "case-001") for name in ("all", "none", "few"))
    assert {"attn_norm-0", "mtp_attn_norm-4"} <= set(all_of.tensors)
    assert list(few.tensors) == ["l_out-0", "l_out-1", "l_out-2", "l_out-3", "mtp_concat-4"]
    assert not any(name.startswith("mtp_") for name in none.tensors)
    assert "h_nextn" not in none.tensors
    assert len(none.tensors["l_out-0"]) == 1
    assert len(few.tensors["l_out-0"]) > 1


def test_a_difference_ends_with_1_and_is_named(golden, recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "other")
    made = case.read(recorded / "a")
    tensors = {name: array.copy() for name, array in made.tensors.items()}
    tensors["l_out-2"][3, 5] += 1
    other = case.Recording(**{**vars(made), "tensors": tensors})
    case.write(other, tmp_path / "other" / "a", overwrite=True)
    wanted = "  first: l_out-2 differs (layer 2, row 3 of 6): worst [3, 5] is "
    result = golden("diff", recorded, tmp_path / "other")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "a: 1 of 11 tensors differ (bits)"
    assert lines[1].startswith(wanted)
    assert lines[2] == "  agrees before it: attn_out-2"
    assert "ffn_up-2 (mul_mat)" in lines[3]
    assert lines[4] == "case-002: ok, 11 tensors (bits)"
    result = golden("check", tmp_path / "other", "-m", LLAMA, "--json", *SMALL)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["same"], [each["same"] for each in found["cases"]]) == (False, [False, True])
    difference = found["cases"][0]["differences"][0]
    assert (difference["tensor"], difference["layer"], difference["row"]) == ("l_out-2", 2, 3)
    assert difference["index"] == [3, 5]
    assert golden("diff", recorded, tmp_path / "other", "--tolerance", "1").exit_code == 0
    assert golden("diff", recorded, recorded, "--exact").exit_code == 0


def test_another_model_is_refused_unless_asked_for(golden, recorded, one_line):
    line = one_line(golden("check", recorded, "-m", QWEN, *SMALL), 2)
    assert "has SHA-256" in line
    assert "a was recorded with" in line
    assert golden("check", recorded, "-m", QWEN, "--any-model", *SMALL).exit_code == 1


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda folder: (folder / "case.json").write_text("{"), "is no JSON"),
        (lambda folder: (folder / "tensors.npz").write_bytes(b"PK"), "is damaged"),
        (lambda folder: np.savez(folder / "tensors.npz", x=np.array([{}])), "elements of |O"),
        (lambda folder: (folder / "tensors.npz").unlink(), "No such file"),
        (lambda folder: _edit(folder, schema=99), "use a newer refengine"),
        (lambda folder: _edit(folder, settings={"n_ctx": 10**9}), "n_ctx is 1000000000"),
        (lambda folder: _edit(folder, settings={"cache_type_k": "f7"}), "cache_type_k"),
        (lambda folder: _edit(folder, tokens=[10**6]), "token 1000000 is out of range"),
        (lambda folder: _edit(folder, tokens=[]), "the prompt is empty"),
    ],
)
def test_damaged_recordings_are_one_line_and_2(golden, recorded, one_line, damage, wanted):
    damage(recorded / "a")
    assert wanted in one_line(golden("check", recorded, "-m", LLAMA, *SMALL), 2)


def _edit(folder, **changes):
    file = folder / "case.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_bad_usage_is_one_line_and_2(golden, recorded, one_line, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    common = ("record", "-m", LLAMA, "--prompts", prompts, *SMALL)
    assert "is there already" in one_line(golden(*common, "-o", recorded), 2)
    assert golden(*common, "-o", recorded, "--overwrite", "-c", "64").exit_code == 0
    assert "no tensor has a name like q" in one_line(
        golden(*common, "-o", tmp_path / "x", "--tensors", "q"), 2
    )
    assert "exceeds the available context" in one_line(golden(*common, "-o", tmp_path / "y", "-c", "4"), 3)
    assert "6 tokens and 8 to predict exceed" in one_line(golden(*common, "-o", tmp_path / "y", "-c", "9"), 3)
    assert "cannot be read" in one_line(golden("check", tmp_path / "none", "-m", LLAMA), 2)
    assert "no such file" in one_line(golden("check", recorded, "-m", tmp_path / "none"), 2)
    assert "is not here nor beside it" in one_line(golden("check", recorded), 2)
    assert "exclude each other" in one_line(
        golden("diff", recorded, recorded, "--exact", "--tolerance", "1"), 2
    )
    assert "the second has no case a; it has case-002" in one_line(
        golden("diff", recorded, recorded / "case-002"), 2
    )


@pytest.mark.parametrize(
    ("command", "limit", "bad"),
    [("diff", "--tolerance", "nan"), ("diff", "--tolerance", "inf"), ("check", "--tolerance", "nan"),
     ("kld", "--max-kld", "nan"), ("kld", "--min-same-top", "nan")],
)  # fmt: skip
def test_a_limit_that_is_no_number_is_refused(golden, one_line, tmp_path, command, limit, bad):
    given = ("--base", tmp_path) if command == "kld" else (tmp_path,) * (1 + (command == "diff"))
    assert f"{bad} is not finite" in one_line(golden(command, *given, limit, bad), 2)


def test_findings_of_the_engine_end_with_1(golden, recorded, monkeypatch):
    def leaking(self, wanted, model, **options):
        engine = self.engine(model, n_ctx=64)
        self.leak = engine.allocator.reserve_arena(64, owner=Owner("target"), name="left").unwrap()
        return Comparison(wanted.name, True, 1, ())

    monkeypatch.setattr(Session, "check", leaking)
    result = golden("check", recorded / "a", "-m", LLAMA, "--check", "guard", *SMALL)
    assert result.exit_code == 1
    assert result.stdout == "a: ok, 1 tensors (bits)\n"
    assert "MEM006" in result.stderr
    assert result.stderr.endswith("1 finding\n")


def test_a_dump_of_nothing_is_refused(golden, recorded, one_line):
    text = one_line(golden("dump", recorded / "a", "--tensors", "l_oot-*"), 2)
    assert "no tensor has a name like l_oot-*; there are inp_embd, " in text


def test_dumps_can_be_diffed(golden, recorded):
    result = golden("dump", recorded / "a", "--tensors", "l_out-*")
    assert result.exit_code == 0
    headers = [line for line in result.stdout.splitlines() if line.startswith("common_debug_cb_eval:")]
    assert [line.split()[1] for line in headers] == ["l_out-0", "l_out-1", "l_out-2", "l_out-3"]


def test_divergence_of_a_base(golden, one_line, tmp_path):
    text, base = tmp_path / "text.txt", tmp_path / "base"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 8)
    result = golden("kld-base", "-m", LLAMA, "-f", text, "-o", base, "-c", "24", "--chunks", "3", *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{base}: 3 chunks of 24 tokens, {base.stat().st_size} bytes\n"
    assert KldBase.open(base).layout.n_chunk == 3
    limits = ("--max-kld", "0.001", "--min-same-top", "0.99")
    result = golden("kld", "-m", LLAMA, "--base", base, *limits, *SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("positions       33\nmean KLD ")
    found = json.loads(golden("kld", "-m", LLAMA, "--base", base, "--json", "--chunks", "1", *SMALL).stdout)
    assert found["n"] == 11
    other = golden("kld", "-m", DATA / "qwen3.gguf", "--base", base, *limits, *SMALL)
    assert other.exit_code == 1
    assert [line.partition(" is ")[0] for line in other.stderr.splitlines()] == ["mean KLD", "same top"]
    base.write_bytes(base.read_bytes()[:-2])
    assert "is it complete?" in one_line(golden("kld", "-m", LLAMA, "--base", base, *SMALL), 2)
    text.write_text("a")
    assert "want at least one chunk of 24" in one_line(
        golden("kld-base", "-m", LLAMA, "-f", text, "-o", base, "-c", "24", *SMALL), 2
    )
