"""The command group: help, version, what is not there."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from patience import PATIENCE

import refengine
from cli.main import COMMANDS, NOT_BUILT, main


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"refengine {refengine.__version__}\n")


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


def every_command(group=main, path=()):
    """Names of each command that runs, those of groups in groups too."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name)


EVERY_COMMAND = list(every_command())


@pytest.mark.parametrize("command", [("golden",), *EVERY_COMMAND], ids=" ".join)
def test_help_of_a_command_fits_a_screen_and_has_an_example(run, command):
    result = run(*command, "-h")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert f"  refengine {' '.join(command)}" in result.stdout
    assert all(line.strip() for line in lines[lines.index("Options:") :]), "help of an option is empty"


@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_all_of_the_help_has_every_option_once(run, command):
    usual, everything = (run(*command, flag).stdout for flag in ("--help", "--help-all"))
    (more,) = re.findall(r"--help-all +The same with (\d+) more options", usual)
    before, _, rare = everything.partition("\nMore options:\n")
    assert before.split() == usual.split()  # columns may be wider
    names = re.findall(r"^ +(-[^ ,]+)", rare, re.MULTILINE)
    assert len(names) == int(more) == len(set(names) - set(re.findall(r"^ +(-[^ ,]+)", usual, re.MULTILINE)))
    assert {"--log-format", "--config"} <= set(names)


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_imports_nothing_heavy(command):
    args = [command, "--help"] if command else ["--help"]
    heavy = "{'numba', 'numpy', 'gguf', 'tokenizers', 'rich', 'structlog'}"
    program = (
        f"import sys; from cli.main import main; code = main({args}, standalone_mode=False); "
        f"sys.exit(code or sorted({heavy} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_command_help_goes_to_stderr(run):
    result = run()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: refengine" in result.stderr


@pytest.mark.parametrize(
    "args", [["frobnicate"], ["--frobnicate"], ["generate", "--frobnicate"], ["generate", "-m"]]
)
def test_bad_usage_is_one_line_and_2(run, one_line, args):
    line = one_line(run(*args), 2)
    assert line.endswith(f"(see 'refengine{' generate' * ('generate' in args)} --help')")


def test_a_slip_is_told_of_options_that_there_are(run, one_line):
    line = one_line(run("generate", "--chek", "guard"), 2)
    assert "'--check'" in line
    assert "--mlock" not in line  # of another engine, and refused


@pytest.mark.parametrize("command", NOT_BUILT)
def test_commands_to_come_are_refused_by_name(run, one_line, command):
    assert f"command {command} is not built yet" in one_line(run(command), 2)


def test_nothing_is_both_built_and_not():
    assert not set(NOT_BUILT) & set(COMMANDS)


def test_without_standalone_mode_the_exit_code_is_returned(capsys):
    assert main([NOT_BUILT[0]], standalone_mode=False) == 2
    assert main(["--version"], standalone_mode=False) == 0
    assert "not built" in capsys.readouterr().err


def test_python_dash_m_is_the_same_command(spawn):
    process = spawn("--version")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out.decode().strip(), err) == (0, f"refengine {refengine.__version__}", b"")
