"""Streams that the caller closed, and prompts that do not end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "llama.gguf"
GENERATE = f"{sys.executable} -m refengine generate -q -t 1 -c 64 -n 2 --temp 0 -m {MODEL}"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's way to close a stream")
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (f"{GENERATE} -p hello >&-", 0, ""),
        (f"{GENERATE} -p hello 2>&-", 0, ""),
        (f"{GENERATE} -p - <&-", 2, "prompt is empty"),
        (f"{GENERATE} -p - </dev/zero", 2, "stdin: more than 67108864 bytes"),
        (f"{GENERATE} -f /dev/zero", 2, "more than 67108864 bytes"),
        (f"{sys.executable} -m refengine doctor 2>&-", 0, ""),
    ],
)
def test_one_line_at_most_and_the_right_code(command, code, message):
    done = subprocess.run(
        ["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 1
