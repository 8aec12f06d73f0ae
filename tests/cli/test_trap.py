"""Commands at level trap: each takes it, with CUDA graphs on and off, finds nothing and changes nothing."""

from __future__ import annotations

import json
import os

import pytest
from engines import DATA, PAIRS

#: with the deep profile all, else one of each family that stays quick
NAMES = PAIRS if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else ["llama", "qwen3"]
HOST = ("-dev", "host", "-t", 1, "-c", 64)
GRAPHS = pytest.mark.parametrize("graphs", [(), ("--no-cuda-graphs",)], ids=["graphs", "launches"])


@pytest.mark.parametrize("name", NAMES)
@GRAPHS
def test_generate_over_every_model(run, name, graphs):
    given = (
        "generate",
        "-m",
        DATA / f"{name}.gguf",
        *HOST,
        "-p",
        "the in an",
        "-n",
        8,
        "-s",
        3,
        "--ignore-eos",
        *graphs,
    )
    plain, checked = run(*given), run(*given, "--check", "trap", "--check-numerics")
    assert (plain.exit_code, checked.exit_code) == (0, 0), checked.stderr
    assert checked.stdout_bytes == plain.stdout_bytes
    assert checked.stdout_bytes
    assert checked.stderr.splitlines()[0] == "0 findings"


@GRAPHS
def test_soak(run, graphs):
    result = run(
        "soak", "-m", DATA / "llama.gguf", *HOST, "-np", 2, "--clients", 2, "--pool", 3, "--requests", 4,
        "--check", "trap", "--check-numerics", "-o", "-", "-q", *graphs,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["problems"] == []
    assert summary["requests"]["completed"] > 0


@GRAPHS
def test_sweep(run, graphs):
    result = run(
        "sweep", "-m", DATA / "llama.gguf", "-c", 128, "--sites", "graph" if not graphs else "launch", "--modes",
        "random", "--runs-random", 2, "--check", "trap", "--check-numerics", "--json", *graphs,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made["ok"], made
    assert made["runs"] == 2
    assert made["options"]["check"] == "trap"


def test_some_kernels_and_some_buffers(run):
    given = (
        "generate",
        "-m",
        DATA / "llama.gguf",
        *HOST,
        "-p",
        "the in an",
        "-n",
        8,
        "-s",
        3,
        "--ignore-eos",
    )
    plain = run(*given)
    checked = run(
        *given, "--check", "trap", "--trap-kernels", "attention*,rms_norm", "--trap-buffers", "kv.*"
    )
    assert checked.exit_code == 0
    assert checked.stdout_bytes == plain.stdout_bytes
    assert "0 findings" in checked.stderr
    # Shadows of keys and values alone.
    used = [int(result.stderr.partition(" used (")[2].split()[0]) for result in (plain, checked)]
    whole = run(*given, "--check", "trap")
    assert used[0] < used[1] < int(whole.stderr.partition(" used (")[2].split()[0])


def test_patterns_that_match_nothing_are_told(run):
    given = ("generate", "-m", DATA / "llama.gguf", *HOST, "-p", "the", "-n", 2, "--check", "trap")
    result = run(*given, "--trap-kernels", "atention*")
    assert result.exit_code == 0
    assert "nothing has a name that the patterns match" in result.stderr
    assert "trap_kernels" in result.stderr
    assert "atention*" in result.stderr


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (
            ("--trap-kernels", "a*"),
            "trap_kernels 'a*' at check level off; only level trap has checked kernels",
        ),
        (("--trap-buffers", "kv.*", "--check", "audit"), "trap_buffers 'kv.*' at check level audit"),
        (("--trap-buffers", "kv.*,", "--check", "trap"), "trap_buffers is 'kv.*,'; give patterns of names"),
    ],
)
@pytest.mark.parametrize(
    "command", [("generate", "-p", "a"), ("soak",), ("sweep",)], ids=lambda command: command[0]
)
def test_patterns_are_refused_without_the_level(run, one_line, command, flags, wanted):
    given = flags if "--check" in flags else (*flags, "--check", "off")
    assert wanted in one_line(run(*command, "-m", DATA / "llama.gguf", *given), 2)
