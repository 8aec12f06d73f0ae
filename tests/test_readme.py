"""README.md: its table of faults is what the script prints, its Python runs, its outputs are those of its commands."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
