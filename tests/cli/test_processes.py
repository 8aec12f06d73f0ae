"""What only a process of its own shows: streaming, Ctrl-C, a reader that goes away."""

from __future__ import annotations

import codecs
import os
import signal
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

LLAMA = Path(__file__).resolve().parent.parent / "data" / "llama.gguf"
ENDLESS = (
    "generate", "-m", LLAMA, "-p", "the", "--ignore-eos", "-c", "32768", "-s", "1", "--temp", "2", "--top-k", "0",
    "--min-p", "0", "-ctk", "f32", "-ctv", "f32", "-ub", "64",
    "-t", "1",
)  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_text_streams_as_valid_utf8_and_no_piece_ends_inside_a_character(spawn):
    process = spawn(*ENDLESS, "--check", "guard")
    # What has no end cannot come at once.
    pieces = [os.read(process.stdout.fileno(), 65536) for _ in range(60)]
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in (*pieces, rest):
        decoder.decode(piece)
        # Reads may join pieces, never cut them: a piece is one write.
        assert decoder.getstate()[0] == b""
    assert all(pieces)
    assert not b"".join(pieces).isascii()
    assert b"0 findings" in err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("level", ["off", "guard"])
def test_ctrl_c_ends_with_130_and_no_traceback(spawn, level):
    process = spawn(*ENDLESS, "--check", level)
    assert os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    expected = ["refengine: interrupted"]
    assert err.decode().splitlines() == (["0 findings"] if level == "guard" else []) + expected


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break in another way on Windows")
def test_a_reader_that_goes_away_ends_it_quietly(spawn):
    process = spawn(*ENDLESS)
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(PATIENCE) == 141
    assert process.stderr.read() == b""


def test_text_is_utf8_whatever_the_locale_says(spawn, monkeypatch):
    args = (*ENDLESS, "-n", "20", "-q")
    expected, _ = spawn(*args).communicate(timeout=PATIENCE)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    got, err = spawn(*args).communicate(timeout=PATIENCE)
    assert (got, err) == (expected, b"")
    assert not got.isascii()


@pytest.mark.skipif(sys.platform == "win32", reason="command lines are UTF-16 on Windows")
def test_a_prompt_on_a_command_line_may_be_any_bytes(spawn):
    process = spawn(*ENDLESS[:3], "-p", os.fsdecode(b"th\xff"), "-n", "2", "-c", "64", "-q")
    _out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, b"")
