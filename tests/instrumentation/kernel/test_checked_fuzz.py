"""Random kernels in their checked form: a GPU's machine code finds what the host finds, and gives the same bits."""

import os
import random

import numpy as np
import pytest
from checked_fuzz import LENGTH, Program
from kernel_source import load_module
from ptx_cuda import ptx_device
from trap_world import World

DEEP = int(os.environ.get("REFENGINE_FUZZ_CHECKED", "0"))
FIRST = int(os.environ.get("REFENGINE_FUZZ_FIRST", "0"))
LAUNCHES = 6


def written(rng, array):
    """An array of which some last bytes may be unwritten."""
    some = rng.choice([array.itemsize * rng.randrange(array.size + 1), rng.randrange(array.nbytes + 1)])
    return array, array.nbytes if rng.random() < 0.7 else some


def arguments(rng):
    bound = {}
    for name, kind in {"x": np.int64, "u": np.uint8, "v": np.uint16, "w": np.int32}.items():
        size = LENGTH if rng.random() < 0.95 else rng.choice([1, 5])
        bound[name] = written(rng, (np.arange(size) * 3 + 1).astype(kind))
    bound |= {"z": written(rng, np.arange(27).reshape(3, 9)), "y": np.full(4, -1)}
    first = rng.choice([0, 0, 1, 2, -1, 5])
    if rng.random() < 0.05:
        first = rng.choice([2**31 - 4, -(2**31) + 2])
    return bound | {
        "first": first, "end": first + rng.choice([0, 1, 2, 3, -2] if abs(first) > 5 else [0, 1, 2, 3, 4, 6, -2]),
        "at": rng.choice([0, 1, 2, 3, 5, 9, -1, 20] * 3 + [2**31 - 1, -(2**31), 2**30]),
        "row": rng.choice([0, 1, 2, -1, 3]), "cap": rng.choice([0, 3, 8, 12, 28, 40, -3]),
        "mask": rng.choice([31, 31, 15, 0, 23, 8, 30]), "hole": rng.choice([-1, -1, -1, 0, 3, 7, 12]),
        "h": rng.choice([0, 3, 5, 2**32 - 1]), "g": rng.choice([0, 2, 5, 7]),
    }  # fmt: skip


def launched(world, kernel, given):
    bound = world.bind(given)
    world.stream.launch(kernel, 1, bound)
    world.stream.synchronize()
    found = sorted((f.code, f.argument, f.access[0].line, f.count) for f in world.findings)
    found = [each for each in found if each[0].startswith("MEM")]
    # Values of elements that nothing wrote may differ.
    same = all(code == "MEM010" for code, *_ in found)
    return found, world.read(bound["y"]).tolist() if same else None


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (DEEP or 8)))
def test_findings_and_bits_are_those_of_the_host(seed, tmp_path):
    program = Program(seed)
    made = load_module(tmp_path / f"checked_{seed}.py", program.source).made
    rng = random.Random(seed)
    for _ in range(LAUNCHES):
        given = arguments(rng)
        here, there = (launched(World(**on), made, given) for on in ({"device": ptx_device()}, {}))
        assert here == there, f"{given}\n{program.source}"


def both(path, body, numbers):
    """What both devices make of a kernel of these statements."""
    text = f"""
@kernel(block=4)
def made(x: i64_1d, f: f32_1d, z: f64_1d, y: i64_1d, n: i32) -> None:
    t = cuda.threadIdx.x
{body}
"""
    made = load_module(path, text).made
    given = {
        "x": np.arange(LENGTH),
        "f": (np.arange(4) / 7).astype(np.float32),
        "z": np.zeros(4),
        "y": np.full(4, -1),
    }
    found = []
    for world in (World(device=ptx_device()), World()):
        bound = world.bind(given | numbers)
        world.stream.launch(made, 1, bound)
        world.stream.synchronize()
        lines = sorted((f.code, f.access[0].line, f.count) for f in world.findings)
        found.append((lines, world.read(bound["y"]).tolist(), world.read(bound["z"]).tolist()))
    return found


def test_each_of_many_faults_is_told(tmp_path):
    """None is lost because others lie where it would be kept."""
    faults = 40
    lines = "".join(f"    total = total + x[n * {i + 1} + t]\n" for i in range(faults))
    here, there = both(tmp_path / "many.py", f"    total = t\n{lines}    y[t] = total", {"n": LENGTH})
    assert len(here[0]) == faults
    assert here == there


@pytest.mark.parametrize("body", [
    "    s = 6364136223846793005\n    s = s * 6364136223846793005\n    y[t] = s + t",
    "    s = 1000003\n    y[t] = s * s * s * s + t",
    ("    own = cuda.local.array(2, int64)\n    for k in range(3037000500, 3037000502):\n"
    "        own[k - 3037000500] = k * k * k + t\n    y[t] = own[0] ^ own[1]"),
], ids=["named", "in one expression", "of a loop"])  # fmt: skip
def test_constants_that_wrap_around(tmp_path, body):
    here, there = both(tmp_path / "wraps.py", body, {"n": 1})
    assert here == there


def test_a_loop_whose_end_its_turns_assign(tmp_path):
    body = (
        "    total = t\n    m = n + 1\n    for k in range(m):\n        m = k * 2\n"
        "        total = total * 3 + x[m] + x[k + t]\n    y[t] = total"
    )
    here, there = both(tmp_path / "ends.py", body, {"n": 3})
    assert here == there


@pytest.mark.xfail(
    strict=True, reason="the first turn of a loop that is written out has the type from before it"
)
def test_a_name_that_turns_of_a_loop_make_wider(tmp_path):
    """A float32 that each turn makes a float64: in a loop it is one from the first turn on."""
    body = (
        "    own = cuda.local.array(4, float64)\n    m = f[t]\n    for k in range(4):\n        own[k] = m * m\n"
        "        m = m + 0.1\n    z[t] = own[0] + own[1]"
    )
    here, there = both(tmp_path / "wider.py", body, {"n": 1})
    assert here == there
