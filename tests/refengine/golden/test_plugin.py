"""The pytest plugin: found by its entry point, light until a test asks, and quiet in this project's own run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from golden_runs import made

from instrumentation.errors import BadInputError
from refengine.golden import case
from refengine.golden.fixture import Golden, GoldenError

ROOT = Path(__file__).resolve().parent.parent.parent.parent
NAME = "refengine-golden"
TEST = """
import sys

def test_light():
    heavy = {"numba", "numpy", "gguf", "tokenizers", "structlog", "click"} & set(sys.modules)
    assert not heavy, heavy

def test_golden(golden):
    import numpy as np
    assert golden.folder.name == "recorded"
    golden.check("one", {"x-3": np.float32([[1, 2], [3, 4]])})
"""


def entry_point():
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["entry-points"]["pytest11"][NAME]


@pytest.fixture
def project(tmp_path):
    """A project beside an installed refengine: its metadata names the plugin of pyproject.toml."""
    installed = tmp_path / "site" / "golden_plugin_of_checkout-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: golden-plugin-of-checkout\nVersion: 0\n"
    )
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{NAME} = {entry_point()}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ngolden_dir = recorded\n")
    (tmp_path / "test_it.py").write_text(TEST)

    def run(*args):
        path = os.pathsep.join(map(str, (tmp_path / "site", ROOT)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}
        environment.pop("PYTEST_ADDOPTS", None)
        # Whatever the environment of this run has installed stays out of that one.
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *args],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_it_is_found_by_its_entry_point_and_imports_nothing_heavy(project, tmp_path):
    done = project("--golden-update")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "recorded" / "one" / case.CASE).is_file()
    assert project().returncode == 0
    (tmp_path / "test_it.py").write_text(TEST.replace("[3, 4]", "[3, 5]"))
    done = project()
    assert done.returncode == 1
    assert "first: x-3 differs (layer 3, row 1 of 2): worst [1, 1] is 5, want 4" in done.stdout
    (tmp_path / "pytest.ini").unlink()
    assert project("-p", "no:refengine-golden", "-k", "light").returncode == 0


def test_options_are_described(project):
    shown = project("--help").stdout
    assert "--golden-update" in shown
    assert "golden_dir" in shown


def test_this_run_is_as_without_it(pytestconfig):
    plugin = pytestconfig.pluginmanager.get_plugin(NAME)
    assert plugin is None or plugin.__name__ == entry_point()


@pytest.fixture
def update(tmp_path):
    return Golden(tmp_path, update=True)


@pytest.fixture
def golden(tmp_path):
    return Golden(tmp_path)


def test_missing_recordings_and_other_arrays_fail(golden, update):
    with pytest.raises(GoldenError, match=r"golden one is not in .*; record it with --golden-update"):
        golden.check("one", {"x": [1.0]})
    update.check("one", {"x": [1.0, 2.0], "i": [1, 2]}, tokens=[4], tolerance=1e-3)
    golden.check("one", {"x": [1.01, 2.0], "i": [1, 2]}, tokens=[4])
    with pytest.raises(GoldenError, match=r"x differs .*worst \[0\] is 1.00999999, want 1"):
        golden.check("one", {"x": [1.01, 2.0], "i": [1, 2]}, tokens=[4], tolerance=1e-6)
    with pytest.raises(GoldenError, match="x differs"):
        golden.check("one", {"x": [1.01, 2.0], "i": [1, 2]}, tokens=[4], exact=True)
    with pytest.raises(GoldenError, match="i differs"):
        golden.check("one", {"x": [1.0, 2.0], "i": [1, 3]}, tokens=[4], tolerance=9)
    with pytest.raises(GoldenError, match="i is missing"):
        golden.check("one", {"x": [1.0, 2.0]}, tokens=[4])
    with pytest.raises(GoldenError, match="prompt token 0 is 5, want 4"):
        golden.check("one", {"x": [1.0, 2.0], "i": [1, 2]}, tokens=[5])


@pytest.mark.parametrize(
    ("name", "tensors", "wanted"),
    [
        ("../one", {"x": [1.0]}, "want letters"),
        ("one", {}, "there are no tensors"),
        ("one", {"x y": [1.0]}, "want letters"),
        ("one", {"x": ["a"]}, "give an array of numbers"),
        ("one", {"x": 1.0}, "give an array of numbers"),
        ("one", {"x": [2**31]}, "beyond int32"),
    ],
)
def test_what_cannot_be_recorded(update, name, tensors, wanted):
    with pytest.raises(BadInputError, match=wanted):
        update.check(name, tensors)


def test_a_recording_of_the_engine_has_more_than_is_held_against_it(golden, update, tmp_path):
    recording = made("llama", n_tokens=6, n_predict=0)
    case.write(recording, tmp_path / "llama")
    tokens = recording.tokens
    mine = {name: recording.tensors[name][-2:].astype(np.float64) for name in ("l_out-1", "result_output")}
    golden.check("llama", mine, tokens=tokens)
    mine["l_out-1"][1, 3] += 1
    with pytest.raises(GoldenError, match=r"l_out-1 differs \(layer 1, row 5 of 6\): worst \[5, 3\]"):
        golden.check("llama", mine, tokens=tokens)
    with pytest.raises(GoldenError, match="golden llama has none of mine; it has inp_embd, "):
        golden.check("llama", {"mine": [1.0]}, tokens=tokens)
    with pytest.raises(BadInputError, match="is of refengine golden record"):
        update.check("llama", mine)
