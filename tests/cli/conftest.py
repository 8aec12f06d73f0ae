"""Running the command line in this process, and as users do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

import refengine
from cli.main import main

DATA = Path(__file__).resolve().parent.parent / "data"
LLAMA = DATA / "llama.gguf"
#: a context that loads at once, and exact caches; more threads than free cores wait for each other
SMALL = ("-t", "1", "-c", "256", "-ub", "64", "-ctk", "f32", "-ctv", "f32")


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    yield
    structlog.reset_defaults()


@pytest.fixture
def run():
    """Run ``refengine ARGS`` in this process; the result has exit_code, stdout, stdout_bytes and stderr."""

    def invoke(*args, stdin=None):
        return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)

    return invoke


@pytest.fixture
def generate(run):
    """Run ``refengine generate`` over the small llama."""

    def invoke(*args, model=LLAMA, stdin=None):
        return run("generate", "-m", model, *SMALL, *args, stdin=stdin)

    return invoke


@pytest.fixture(scope="session")
def engine():
    """The engine that ``generate`` loads, for what its output should be."""
    with refengine.load(
        LLAMA, threads=1, n_ctx=256, n_ubatch=64, cache_type_k="f32", cache_type_v="f32"
    ) as engine:
        yield engine


@pytest.fixture
def spawn(tmp_path):
    """Start ``python -m refengine ARGS`` away from the checkout; killed at the end if it still runs."""
    started = []

    def start(*args, **options):
        # A shell that starts tests in the background lets them ignore Ctrl-C, and their children too.
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "refengine", *map(str, args)],
                cwd=tmp_path,
                env={**os.environ, "PYTHONWARNINGS": "error"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **options,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def one_line():
    """Assert that a result is a failure of one line on stderr, and return the line."""

    def check(result, exit_code):
        lines = result.stderr.splitlines()
        assert result.exit_code == exit_code, result.stderr
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("refengine: error: ")
        assert lines[0].isprintable()
        return lines[0]

    return check
