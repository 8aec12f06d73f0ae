"""docs/golden.md: every command gives what stands below it, and its test runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from click.testing import CliRunner

from cli.main import main

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "golden.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def steps():
    """(command, lines below it) of the whole page, in order."""
    for block in BLOCKS:
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, wanted = step.partition("\n")
            yield command, wanted


def as_pattern(wanted):
    """``...`` stands for anything."""
    return ".*".join(re.escape(part) for part in wanted.split("..."))


def run_python(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run(command, folder):
    """Exit code, stdout and stderr of a line of the page."""
    program, *arguments = shlex.split(command)
    if program == "refengine":
        result = CliRunner().invoke(main, arguments)
        return result.exit_code, result.stdout, result.stderr
    if program == "echo":
        text, to, file = arguments
        assert to == ">"
        (folder / file).write_text(f"{text}\n")
        return 0, "", ""
    assert program == "python", command
    done = run_python(arguments, folder)
    return done.returncode, done.stdout, done.stderr


def test_commands_give_what_stands_below_them(tmp_path, monkeypatch):
    for name in ("tests", "examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    commands = list(steps())
    assert len(commands) == 13
    for command, wanted in commands:
        code, stdout, stderr = run(command, tmp_path)
        assert (code, stderr) == (int("differ" in wanted), ""), (command, stdout)
        assert re.fullmatch(as_pattern(wanted), stdout, re.DOTALL), (command, stdout)


def test_the_test_of_another_engine_records_then_passes_then_fails(tmp_path):
    (source,) = PYTHON
    file = tmp_path / "test_engine.py"
    file.write_text(source)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_engine.py"]
    if not entry_points(group="pytest11", name="refengine-golden"):
        # A checkout that was installed before it had a plugin.
        command += ["-p", "refengine.golden.pytest_plugin"]
    assert "record it with --golden-update" in run_python(command, tmp_path).stdout
    assert run_python([*command, "--golden-update"], tmp_path).returncode == 0
    assert run_python(command, tmp_path).returncode == 0
    file.write_text(source.replace("+ 1e-6", "+ 1e-1"))
    done = run_python(command, tmp_path)
    assert done.returncode == 1
    assert "first: result_norm differs (row 0 of 3)" in done.stdout
