"""Commands of the tutorial run, and print what it says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(
    r"```console\n\$ ([^\n]+)\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL
)


def test_there_are_commands():
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_a_command_prints_what_is_shown(command: str, shown: str):
    program, *arguments = shlex.split(command)
    prefix = [sys.executable] if program == "python" else [sys.executable, "-m", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        [*prefix, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert [line for line in shown.splitlines() if line not in printed] == []
