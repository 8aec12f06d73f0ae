"""Every way to fail: one line, one exit code."""

from __future__ import annotations

import signal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cli.command import EngineCommand, count_bytes, parse_size
from cli.failures import one_interrupt
from cli.failures import one_line as to_one_line
from cli.main import Commands
from instrumentation.errors import BadInputError, DeviceError, FindingError, OutOfMemoryError
from refengine.errors import ComputeError, ContextSizeError, ModelFileError


@pytest.fixture
def fail():
    def run(error, *args):
        @click.command(cls=EngineCommand)
        def command():
            raise error

        group = Commands("refengine")
        group.add_command(command, "fail")
        return CliRunner().invoke(group, ["fail", *args])

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (BadInputError("no"), 2, "no"),
        (ModelFileError("a.gguf: magic"), 2, "a.gguf: magic"),
        (DeviceError("cuLaunchKernel"), 1, "cuLaunchKernel"),
        (OutOfMemoryError("kv"), 3, "kv"),
        (ContextSizeError("long"), 3, "long"),
        (ComputeError("Compute error."), 3, "Compute error."),
        (FindingError("MEM002 canary\n  more\n\nSeen at:"), 1, "MEM002 canary"),
        (BadInputError("two\nlines and \x1b[31m red"), 2, "two lines and \\x1b[31m red"),
        (MemoryError(), 3, "out of memory: this process cannot get more memory"),
        (MemoryError("of 3 GiB"), 3, "out of memory: of 3 GiB"),
        (PermissionError(13, "Permission denied", "x.txt"), 2, "x.txt: Permission denied"),
        (OSError("disk"), 2, "disk"),
        (KeyError("where"), 1, "KeyError: 'where'; this is a bug (-v shows where)"),
        (AssertionError(), 1, "AssertionError; this is a bug"),
        (SystemExit(7), 1, "SystemExit: 7; this is a bug"),
        (click.BadParameter("worse"), 2, "Invalid value: worse"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(fail, one_line, error, code, text):
    result = fail(error)
    assert one_line(result, code).startswith(f"refengine: error: {text}")
    assert result.stdout == ""


def test_a_bug_shows_where_when_asked(fail):
    result = fail(ZeroDivisionError("by zero"), "-v")
    assert result.exit_code == 1
    assert result.stderr.startswith("refengine: error: ZeroDivisionError: by zero; this is a bug\n")
    assert "Traceback" in result.stderr
    assert "raise error" in result.stderr


def test_an_error_on_purpose_has_no_traceback_ever(fail, one_line):
    assert one_line(fail(BadInputError("no"), "-vv"), 2) == "refengine: error: no"


def test_an_interrupt_is_130(fail):
    result = fail(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "refengine: interrupted\n")


def test_a_broken_pipe_is_quiet(fail):
    result = fail(BrokenPipeError(32, "Broken pipe"))
    assert (result.exit_code, result.stdout, result.stderr) == (141, "", "")


@given(st.text())
def test_a_line_is_printable_whatever_is_in_it(text):
    assert to_one_line(text).isprintable()


def test_a_first_interrupt_unwinds_and_a_second_one_kills():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with one_interrupt():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with one_interrupt():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1), ("4096", 4096), ("12B", 12), ("64MiB", 64 << 20), ("64 mib", 64 << 20), ("1.5GiB", 3 << 29),
        ("2KiB", 2048), ("1TiB", 1 << 40), (" 7 ", 7),
    ],
)  # fmt: skip
def test_sizes(text, nbytes):
    assert parse_size(text, "--limit") == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "64M", "64MB", "1e9", "GiB", "1.GiB", "nan", "0.1", "9" * 30]
)
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(BadInputError, match=r"^--limit "):
        parse_size(text, "--limit")


@given(st.integers(1, 2**60))
def test_a_size_that_is_printed_names_its_unit(nbytes):
    number, unit = count_bytes(nbytes).split()
    assert unit in ("B", "KiB", "MiB", "GiB", "TiB")
    assert parse_size(f"{number} {unit}", "--limit") == pytest.approx(nbytes, rel=0.06)
