"""README.md: its table of faults is what the script prints, its Python runs, its outputs are those of its commands."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import found_by
import pytest
from planted_faults import PLANTED
from planted_order import FAULTS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


def rows(text: str) -> list[list[str]]:
    """Cells of the table of faults, whose first head is its name."""
    _, _, table = text.partition("| planted fault |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="faults below level trap run in forked processes")
def test_the_table_of_faults_is_what_is_measured():
    done = subprocess.run(
        [sys.executable, "tests/support/found_by.py"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown, measured = rows(README), rows(done.stdout)
    assert len(shown) == len(measured) >= 14
    # Without PyTorch its column, the last, is not measured.
    assert [row[: len(measured[0])] for row in shown] == measured
    assert "repaired twins: 0" in done.stdout
    n_faults = sum(int(row[1]) for row in measured)
    assert f"\n{n_faults} faults were planted" in README
    assert f"On the {n_faults} repaired twins no level reports anything" in README
    assert (
        f"3 of the {sum(int(row[1]) for row in measured if re.match('stream|host array|memory given', row[0]))}"
        in README
    )
    ((n_theirs, n_twins),) = re.findall(r"; compute-sanitizer: (\d+) on the (\d+) of kernels", done.stdout)
    assert f"racecheck reported {n_theirs} of the {n_twins} twins" in README


def test_what_the_readme_says_of_compute_sanitizer_is_what_it_said():
    held = json.loads(found_by.ANSWERS.read_text(encoding="utf-8"))
    (version,) = re.findall(r"compute-sanitizer (\d[\d.]*)", README)
    assert held["version"].startswith(f"Version {version} ")
    said = found_by.answers(found_by.ANSWERS, "bad")
    outside = [each.name for each in PLANTED if each.codes[0] in ("MEM010", "MEM011")]
    by_tool = {tool: sum(said[name][tool] != "-" for name in outside) for tool in ("memcheck", "initcheck")}
    assert f"memcheck reported {by_tool['memcheck']} of the {len(outside)} accesses out of bounds" in README
    assert f"initcheck reported {by_tool['initcheck']} more" in README
    assert not any(said[name]["memcheck"] != "-" != said[name]["initcheck"] for name in outside)
    assert f"the {len(PLANTED)} faults of memory" in README
    assert f"the {len(FAULTS)} of order" in README


@pytest.mark.parametrize("kind", ["bad", "fixed"])
def test_a_fault_of_a_kernel_that_compute_sanitizer_was_not_asked_is_no_empty_cell(kind, tmp_path):
    held = json.loads(found_by.ANSWERS.read_text(encoding="utf-8"))
    held[kind]["renamed since"] = held[kind].pop("both axes")
    changed = tmp_path / "compute_sanitizer.json"
    changed.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(
        AssertionError, match=rf"no answer on {kind} of \['both axes'\]; run .* --twins -o .* on a GPU"
    ):
        found_by.answers(changed, kind)
    held[kind]["both axes"] = held[kind]["a range"]
    changed.write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(AssertionError, match=rf"on {kind} of \['renamed since'\], which are no faults; run "):
        found_by.answers(changed, kind)


def test_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    (source,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "model.gguf").symlink_to(ROOT / "refengine" / "default_model" / "model.gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "README.md", "exec"), {})  # noqa: S102 - a file of this project
    text, findings, requests = capsys.readouterr().out.rsplit("\n", 3)[:3]
    assert text
    assert findings == "[]"
    assert len(ast.literal_eval(requests)) == 2


def blocks() -> list[str]:
    """Indented blocks."""
    found = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", README, re.MULTILINE)
    return [re.sub("^ {4}", "", block, flags=re.MULTILINE).strip("\n") for block in found]


def test_the_first_output_is_what_the_command_prints():
    (prompt,) = (block for block in blocks() if block.startswith("class Point"))
    (shown,) = (block for block in blocks() if "0 findings" in block)
    (command,) = re.findall(r"`make run` is `refengine (.*?)`", README)
    done = subprocess.run(
        [sys.executable, "-m", "refengine", *command.split(), "-p", prompt],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

    def steady(text: str) -> list[str]:
        """Lines without what differs from run to run: times, rates, the seed."""
        return [
            re.sub(r"(?<=[:=(,]) *[0-9.]+(?= ms| tokens per|$)", "", line)
            for line in text.strip("\n").splitlines()
        ]

    assert steady(done.stdout) == steady(shown)


def test_the_report_is_what_the_example_prints():
    (shown,) = (block for block in blocks() if block.startswith("MEM011"))
    done = subprocess.run(
        [sys.executable, "examples/check_kernel.py"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown in done.stdout
