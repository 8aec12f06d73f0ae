"""Log lines and progress on stderr."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import structlog

from cli.display import display
from instrumentation.errors import BadInputError
from instrumentation.kernel import compile_listeners
from refengine import logs


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal; called by the test, since pytest puts its own in place before each one."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def replace():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replace


@pytest.fixture
def file(monkeypatch):
    def replace():
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return replace


LEVELS = ("error", "warning", "info", "debug")


@pytest.mark.parametrize(("verbosity", "shown"), [(-2, 1), (-1, 1), (0, 2), (1, 3), (2, 4), (9, 4)])
def test_verbosity_chooses_the_levels(file, verbosity, shown):
    stderr = file()
    logs.configure(verbosity)
    for level in LEVELS:
        getattr(structlog.get_logger(), level)("something", n=1)
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert [line["level"] for line in lines] == list(LEVELS[:shown])
    assert all((line["event"], line["n"]) == ("something", 1) for line in lines)


def test_a_file_gets_one_json_object_a_line_even_of_an_exception(file):
    stderr = file()
    logs.configure()
    try:
        int("two\nlines")
    except ValueError:
        structlog.get_logger().exception("failed", path=object)
    [line] = stderr.getvalue().splitlines()
    assert "ValueError" in json.loads(line)["exception"]


def test_a_terminal_gets_keys_and_values_in_colour(terminal):
    stderr = terminal()
    logs.configure()
    structlog.get_logger().warning("something", n=1)
    assert "\x1b[" in stderr.getvalue()
    assert "something" in stderr.getvalue()


def test_no_color_is_respected(terminal, monkeypatch):
    stderr = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    logs.configure()
    structlog.get_logger().warning("something", n=1)
    assert "\x1b" not in stderr.getvalue()
    assert "n=1" in stderr.getvalue()


def test_the_format_can_be_chosen(terminal):
    stderr = terminal()
    logs.configure(log_format="json")
    structlog.get_logger().warning("something")
    assert json.loads(stderr.getvalue())["event"] == "something"


def test_console_lines_in_a_file_have_no_colour(file):
    stderr = file()
    logs.configure(log_format="console")
    structlog.get_logger().warning("something", n=1)
    assert "\x1b" not in stderr.getvalue()
    assert "n=1" in stderr.getvalue()


def test_a_format_that_is_none_is_refused():
    with pytest.raises(BadInputError, match="'xml'"):
        logs.configure(log_format="xml")


def test_using_the_library_configures_nothing():
    program = "import structlog, refengine.engine, refengine.logs, sys; sys.exit(structlog.is_configured())"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_v_logs_weights_and_kernels_as_json_lines(generate, monkeypatch):
    result = generate("-p", "the", "-n", "1", "-v")
    assert result.exit_code == 0
    lines = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    done = [line["done"] for line in lines if line["event"] == "loading weights"]
    assert done == sorted(done)
    assert 1 < len(done) <= 11
    assert lines[len(done) - 1]["total"] == done[-1]


# --- what is drawn


def test_nothing_is_drawn_but_on_a_terminal(file):
    stderr = file()
    with display(quiet=False) as shown:
        shown.weights(1, 2)
        shown.compiling("mul_mat")
    assert "mul_mat" not in stderr.getvalue()


def test_nothing_is_drawn_when_quiet(terminal):
    stderr = terminal()
    with display(quiet=True) as shown:
        shown.weights(1, 2)
        shown.compiling("mul_mat")
    assert "\x1b" not in stderr.getvalue()


def test_weights_and_kernels_are_drawn_and_taken_down(terminal):
    stderr = terminal()
    with display(quiet=False) as shown:
        shown.weights(1 << 20, 2 << 20)
        shown.weights(2 << 20, 2 << 20)
        assert "loading weights" in stderr.getvalue()
        assert shown.drawing is False
        for listener in compile_listeners:
            listener("mul_mat")
        assert shown.drawing is True
        shown.compiling("rope")
        shown.text_follows()
        assert shown.drawing is False
        drawn = stderr.getvalue()
        assert "compiling kernels" in drawn
        shown.compiling("late")
        assert stderr.getvalue() == drawn
        assert shown.compiled == 3


def test_what_is_measured_stands_still_and_is_erased(terminal):
    stderr = terminal()
    with display(quiet=False) as shown:
        shown.compiling("mul_mat")
        shown.measuring("pp512, run 1 of 5")
        assert stderr.getvalue().endswith("pp512, run 1 of 5")
        assert shown._status is None  # a thread would draw it
        assert shown.drawing
        shown.clear()
        assert not shown.drawing
        assert stderr.getvalue().endswith("\r\x1b[2K")


def test_an_interrupt_leaves_the_terminal_and_the_listeners_as_they_were(terminal):
    stderr = terminal()
    before = list(compile_listeners)

    def interrupted():
        with display(quiet=False) as shown:
            shown.weights(1, 2)
            assert shown.drawing
            assert len(compile_listeners) == len(before) + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert compile_listeners == before
    hidden, visible = stderr.getvalue().count("\x1b[?25l"), stderr.getvalue().count("\x1b[?25h")
    assert hidden == visible > 0
