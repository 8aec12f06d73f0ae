"""Every damaged model file is refused by every command that reads one: exit code 2, one line, no traceback."""

from __future__ import annotations

import pytest
from malformed_gguf import CASES


@pytest.mark.parametrize("name", CASES)
def test_generate_refuses(generate, one_line, tmp_path, name):
    path = tmp_path / "bad.gguf"
    path.write_bytes(CASES[name]())
    result = generate("-p", "a", model=path)
    line = one_line(result, 2)
    assert CASES[name].culprit in line
    assert "bad.gguf" in line
    assert result.stdout == ""


@pytest.mark.parametrize("name", CASES)
def test_inspect_refuses(run, one_line, tmp_path, name):
    path = tmp_path / "bad.gguf"
    path.write_bytes(CASES[name]())
    result = run("inspect", "-m", path)
    assert CASES[name].culprit in one_line(result, 2)
    # What can be read of it is shown all the same.
    assert bool(result.stdout) == CASES[name].needs_config
