import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from kernel_runner import run
from kernel_source import load_module
from patience import PATIENCE
from sample_kernels import arg_max
from structlog.testing import capture_logs

from instrumentation.kernel import HostOptions, compile_listeners, host_cache
from instrumentation.kernel.host_compile import compile_host

ROOT = Path(__file__).resolve().parents[3]
SOURCE = """
STEP = 3
@device_function
def add(v):
    return v + STEP
@kernel(block=32)
def λ_step(x: i32_1d, y: i32_1d) -> None:
    t = cuda.threadIdx.x
    y[t] = add(x[t])
"""
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {support!r})
import numpy as np
from kernel_source import load_module
from kernel_runner import run
from instrumentation.kernel import compile_listeners
compiled = []
compile_listeners.append(compiled.append)
module = load_module(Path({path!r}), {source!r})
y = np.zeros(32, np.int32)
run(module.λ_step, 1, np.arange(32, dtype=np.int32), y)
assert (y == np.arange(32) + 3).all(), y
print(len(compiled))
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Names of the kernels that are compiled, with an empty cache folder."""
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(tmp_path / "cache"))
    names = []
    compile_listeners.append(names.append)
    yield names
    compile_listeners.remove(names.append)


def step(module):
    y = np.zeros(32, np.int32)
    run(module.λ_step, 1, np.arange(32, dtype=np.int32), y)
    return int(y[0])


def test_a_second_start_compiles_nothing(tmp_path, compiled):
    assert step(load_module(tmp_path / "k.py", SOURCE)) == 3
    assert compiled == ["λ_step"]
    assert step(load_module(tmp_path / "other.py", "\n\n# moved\n" + SOURCE)) == 3
    assert compiled == ["λ_step"], "a kernel that moved in its file is the same kernel"


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("STEP = 3", "STEP = 4", 4),
        ("v + STEP", "v - STEP", -3),
        ("block=32", "block=64", None),
        ("y[t] =", "y[t] = 1 +", 4),
    ],
)
def test_what_changes_a_kernel_compiles_it_again(tmp_path, compiled, old, new, value):
    step(load_module(tmp_path / "k.py", SOURCE))
    module = load_module(tmp_path / "changed.py", SOURCE.replace(old, new))
    if value is None:
        module.λ_step.host()
    else:
        assert step(module) == value
    assert compiled == ["λ_step", "λ_step"]


def test_file_names_are_plain():
    stem = host_cache.file_stem("λ" * 300 + '<>:"/\\|?*', "text")
    assert stem.isascii()
    assert len(stem) < 80
    assert stem.replace("_", "").isalnum()


def test_a_damaged_entry_is_compiled_again(tmp_path, compiled):
    module = load_module(tmp_path / "k.py", SOURCE)
    path = module.λ_step.host().path
    index = next((path.parent / "__pycache__").glob(f"{path.stem}.entry-*.nbi"))
    data = next((path.parent / "__pycache__").glob(f"{path.stem}.entry-*.nbc"))
    data.write_bytes(b"damaged")
    with capture_logs() as logs:
        assert step(load_module(tmp_path / "again.py", SOURCE)) == 3
    assert [entry["event"] for entry in logs] == ["kernel cache entry is damaged, compiling again"]
    assert compiled == ["λ_step", "λ_step"]
    assert index.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="a folder's mode says nothing there")
def test_a_folder_that_cannot_be_written_is_replaced(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(blocked))
    with capture_logs() as logs:
        module = load_module(tmp_path / "k.py", SOURCE)
        assert step(module) == 3
        first = module.λ_step.host().path.parent
        assert host_cache.cache_folder() == first, "one folder for the whole process"
    assert [entry["event"] for entry in logs] == ["kernel cache is not writable"]
    assert str(blocked) in logs[0]["folder"]
    assert not first.is_relative_to(blocked)


def test_two_processes_compile_the_same_kernel(tmp_path):
    program = PROGRAM.format(
        support=str(ROOT / "tests" / "support"), path=str(tmp_path / "k.py"), source=SOURCE
    )
    environment = {**os.environ, "REFENGINE_CACHE_DIR": str(tmp_path / "cache"), "PYTHONUTF8": "1"}
    command = [sys.executable, "-c", program]

    def start():
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    both = [start(), start()]
    for process in both:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    third = start()
    out, errors = third.communicate(timeout=PATIENCE)
    assert (third.returncode, out.strip()) == (0, "0"), errors
    assert not list((tmp_path / "cache" / "kernels").glob("*.tmp"))


def test_two_threads_compile_the_same_kernel(tmp_path, compiled):
    module = load_module(tmp_path / "k.py", SOURCE)
    addresses = []
    threads = [
        threading.Thread(target=lambda: addresses.append(module.λ_step.host().address)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(addresses)) == 1
    assert compiled == ["λ_step"]


@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_source_that_was_cut_short_is_written_again(tmp_path, monkeypatch, keep):
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(tmp_path))
    plan = arg_max.plan
    path = compile_host(plan, HostOptions(), strict_floats=False).path
    text = path.read_text()
    path.write_text(text[: int(len(text) * keep)])
    assert compile_host(plan, HostOptions(), strict_floats=False).address
    assert path.read_text() == text


INLINED = """
@device_function
def turn(v):
    return cuda.shfl_xor_sync(0xFFFFFFFF, v, {offset})
def made(step):
    @device_function
    def shift(x, y):
        y[cuda.threadIdx.x] = turn(x[cuda.threadIdx.x]) + step
    @kernel(block=32)
    def shifted(x: i32_1d, y: i32_1d) -> None:
        shift(x, y)
    return shifted
"""


def test_what_an_inlined_function_is_and_captures_is_part_of_the_name(compiled, tmp_path):
    found = {}
    for offset in (1, 2):
        module = load_module(tmp_path / f"inlined_{offset}.py", INLINED.format(offset=offset))
        for step in (10, 20):
            y = np.zeros(32, np.int32)
            run(module.made(step), 1, np.arange(32, dtype=np.int32), y)
            found[offset, step] = int(y[0])
    assert found == {(1, 10): 11, (1, 20): 21, (2, 10): 12, (2, 20): 22}
    assert compiled == ["shifted"] * 4
