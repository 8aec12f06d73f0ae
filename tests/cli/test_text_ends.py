"""Where generated text ends and the rest begins: in a file, in a pipe that both share, on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parent.parent / "data"
ASK = (
    "generate", "-m", DATA / "llama.gguf", "-t", 1, "-c", 256, "-ub", 64, "-ctk", "f32", "-ctv", "f32", "-p", "the",
    "-n", 4, "--temp", 0, "--ignore-eos", "-s", 3,
)  # fmt: skip


def start(*more, stdout, stderr):
    command = [sys.executable, "-m", "refengine", *map(str, (*ASK, *more))]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False)


@pytest.fixture(scope="module")
def text():
    """What is generated; it does not end a line."""
    done = start("-q", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout
    assert not done.stdout.endswith(b"\n")
    return done.stdout


def test_a_pipe_of_its_own_has_the_text_alone(text):
    done = start("--check", "guard", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout == text
    assert done.stderr.startswith(b"0 findings\nseed: 3\n")


def test_what_follows_in_the_same_pipe_begins_a_line(text):
    done = start("--check", "guard", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout.startswith(text + b"\n0 findings\nseed: 3\n")


def test_where_nothing_follows_nothing_is_added(text):
    assert start("-q", stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout == text


def test_a_file_for_both_is_as_a_pipe(text, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        start(stdout=log, stderr=log)
    assert (tmp_path / "log").read_bytes().startswith(text + b"\nseed: 3\n")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals here")
@pytest.mark.parametrize("more", [("-q",), ("-q", "--check", "guard")])
def test_on_a_terminal_the_line_is_ended(text, more):
    ours, theirs = os.openpty()
    done = start(*more, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    seen = b""
    while b"\n" not in seen:
        seen += os.read(ours, 1000)
    os.close(ours)
    assert seen == text + b"\r\n"
    assert done.stderr == b"0 findings\n" * (len(more) > 1)
