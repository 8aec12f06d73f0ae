"""What shells offer: the protocol of each, and the shells themselves where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text()
COMMAND = [sys.executable, "-c", "from cli.main import main; main()"]


def ask(command, **variables):
    made = subprocess.run(
        command, env={**os.environ, **variables}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return made.stdout


def offered(*words, shell="bash"):
    """(type, value) of what is offered for the last word."""
    at = words[-1] if shell == "fish" else str(len(words))
    out = ask(
        COMMAND,
        _REFENGINE_COMPLETE=f"{shell}_complete",
        COMP_WORDS=" ".join(["refengine", *words]),
        COMP_CWORD=at,
    )
    lines = out.splitlines()
    if shell == "zsh":  # type, value and help on a line each
        return list(zip(lines[::3], lines[1::3], strict=True))
    return [
        (kind, value.partition("\t")[0]) for kind, _, value in (line.partition(",") for line in lines if line)
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
class TestEachShell:
    def test_it_gets_its_script(self, shell):
        assert "_REFENGINE_COMPLETE" in ask(COMMAND, _REFENGINE_COMPLETE=f"{shell}_source")

    def test_it_is_offered_commands_options_and_values(self, shell):
        assert {name for _, name in offered("", shell=shell)} >= set(COMMANDS)
        assert offered("soak", "--cl", shell=shell) == [("plain", "--clients")]
        assert offered("generate", "--check", "gu", shell=shell) == [("plain", "guard")]

    def test_its_line_of_the_page_makes_it_know_refengine(self, shell, tmp_path):
        if shutil.which(shell) is None:
            pytest.skip(f"no {shell} here")
        program = tmp_path / "refengine"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m refengine "$@"\n')
        program.chmod(0o755)
        (line,) = re.findall(rf"^\| {shell} \| `[^`]*` \| `(.*)` \|$", PAGE, re.MULTILINE)
        line = line.replace("\\|", "|")  # as a cell of a table has it
        script = {
            "bash": f"{line}; complete -p refengine",
            "zsh": f"autoload -U compinit; compinit -u -d {tmp_path}/dump; {line}; print $_comps[refengine]",
            "fish": f"{line}; complete -C 'refengine generate --check gu'",
        }[shell]
        flags = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        out = ask([shell, *flags, "-c", script], PATH=path, PYTHONPATH=str(ROOT), HOME=str(tmp_path))
        assert {"bash": "_refengine_completion", "zsh": "_refengine_completion", "fish": "guard"}[
            shell
        ] in out


def values(*words):
    return [value for _, value in offered(*words)]


def test_values_that_have_names_are_offered():
    assert values("generate", "--check", "") == ["off", "guard", "audit", "trap"]
    assert values("generate", "-ctk", "f") == ["f32", "f16"]
    assert values("bench", "--check", "off,g") == ["off,guard"]
    assert values("explain", "MEM01") == ["MEM010", "MEM011", "MEM012", "MEM013"]
    assert values("generate", "--log-format", "c") == ["console"]


def test_files_are_left_to_the_shell():
    for words in (("generate", "-f", ""), ("report", "x"), ("generate", "-m", ""), ("soak", "--config", "a")):
        assert [kind for kind, _ in offered(*words)] == ["file"]
    assert values("generate", "-m", "sm") == ["smollm2"]


def test_flags_of_other_engines_are_not_offered():
    assert values("generate", "--gpu") == []
