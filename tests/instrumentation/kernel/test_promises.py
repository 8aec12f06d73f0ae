"""Values that a block's threads share by promise: what may stand under them, and what is refused without one."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run, run_all
from kernel_source import load_module, marked_line

from instrumentation.errors import KernelDialectError
from instrumentation.kernel import HostOptions
from instrumentation.kernel.divergence import DivergenceError
from instrumentation.reports.text import render

PARAMETERS = "x: f32_1d, n: i32_1d, y: f32_1d"


def in_kernel(body, block="64"):
    """A kernel around a body; ``t`` is the thread and ``s`` a shared array that holds ``n``."""
    start = f"""\
@device_function
def most(s, v):
    t = cuda.threadIdx.x
    cuda.syncthreads()
    s[t] = v
    cuda.syncthreads()
    return max(s[0], s[32])
@kernel(block={block})
def k({PARAMETERS}) -> None:
    s = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    s[t] = n[t]
    v = float32(0)
"""
    return start + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"


def made(tmp_path, body, **more):
    return load_module(tmp_path / "promised.py", in_kernel(body, **more)).k


_WHILE = "while c > 0:\n    cuda.{barrier}()\n    c -= 1\n    v += 1"
# What threads meet under, and what y holds then where every element of n is 5 and of x 2.
KEPT = [
    ("count", "c = s[t]  # uniform: promised\nfor k in range(c):\n    cuda.syncthreads()\n    v += k", 10),
    ("range", "for k in range(1, s[t], 2):  # uniform: promised\n    cuda.syncthreads()\n    v += k", 4),
    ("branch", "if s[t] > 4 and t >= 0:  # uniform: promised\n    v += cuda.shfl_xor_sync(FULL, v + 1, 1)", 1),
    ("else", "if s[t] > 5:  # uniform: promised\n    v = 9\nelse:\n    cuda.syncthreads()\n    v = 3", 3),
    ("return", "y[t] = 8\nif s[t] == 5:  # uniform: promised\n    return\ncuda.syncthreads()\nv = 4", 8),
    ("function", "c = most(s, n[t])  # uniform: promised\n" + _WHILE.format(barrier="syncthreads"), 5),
    ("float", "c = x[t] * float32(2)  # uniform: promised\n" + _WHILE.format(barrier="syncwarp"), 4),
    ("nan", "c = x[t] * float32(math.nan)  # uniform: promised\nif c != c:\n    cuda.syncwarp()\n    v = 1", 1),
    ("again", ("for k in range(3):\n    c = s[t] + k  # uniform: promised\n    cuda.syncthreads()\n"
              "    for m in range(c):\n        cuda.syncthreads()\n        v += 1\n    s[t] = n[t]\n"
              "    cuda.syncthreads()"), 18),
    ("what is uniform anyway", ("c = n.shape[0] // 32  # uniform: promised\nfor k in range(c):\n"
                               "    cuda.syncthreads()\n    v += 1"), 2),
    ("thread", "c = t // 64 + 2  # uniform: promised\nfor k in range(c):\n    cuda.syncthreads()\n    v += 1", 2),
    ("of one thread alone", "if t == 3:\n    c = s[t]  # uniform: promised\n    v = c\nelse:\n    v = 5", 5),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_barriers_may_stand_under_a_promise(tmp_path, body, wanted):
    ends = body if "return" in body else f"{body}\ny[t] = v"
    kernel = made(tmp_path, ends)
    arguments = np.full(64, 2, np.float32), np.full(64, 5, np.int32), np.zeros(64, np.float32)
    plain = run_all(kernel, 1, *arguments)[-1]
    assert plain.tolist() == [wanted] * 64
    # The runner asserts that nothing is found.
    run(kernel, 1, *arguments, options=HostOptions(checked=True))
    assert arguments[-1].tobytes() == plain.tobytes()


def test_blocks_of_more_axes(tmp_path):
    body = "c = s[t] + cuda.threadIdx.y // 2  # uniform: promised\n" + _WHILE.format(barrier="syncthreads")
    kernel = made(tmp_path, f"{body}\ny[t + 32 * cuda.threadIdx.y] = v", block="(32, 2)")
    arguments = np.zeros(64, np.float32), np.full(64, 5, np.int32), np.zeros(64, np.float32)
    assert run_all(kernel, 1, *arguments)[-1].tolist() == [5] * 64


BROKEN = {
    "count": "c = s[t]  # uniform: promised\nfor k in range(c):\n    cuda.syncthreads()\n    v += k",
    "branch": "if s[t] > 4:  # uniform: promised\n    cuda.syncthreads()",
}


@pytest.fixture(scope="module", params=BROKEN)
def broken(request, tmp_path_factory):
    return made(tmp_path_factory.mktemp("broken"), BROKEN[request.param] + "\ny[t] = v")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(4, 6), min_size=64, max_size=64) | st.integers(4, 6).map(lambda n: [n] * 64))
def test_a_promise_is_kept_exactly_where_all_values_are_one(broken, values):
    arguments = np.zeros(64, np.float32), np.array(values, np.int32), np.zeros(64, np.float32)
    decided = {value > 4 for value in values} if "if s[t]" in broken.parsed.source else set(values)
    run_it = lambda: run(broken, 1, *arguments, options=HostOptions(checked=True))  # noqa: E731
    if len(decided) == 1:
        run_it()
    else:
        with pytest.raises(AssertionError, match="kind=4, count=1, block=0"):
            run_it()


WAITS = """
@device_function
def waits(v):
    cuda.syncthreads()
    return v
"""
# Refused as SYN001; #! marks the line that decides, and where the barrier stands elsewhere #? marks it.
DIVERGENT = [
    ("branch", "if t > 3:  #!\n    v = 1\n    cuda.syncthreads()  #?", "branch that differs"),
    ("else", "if t > 3:  #!\n    v = 1\nelse:\n    cuda.syncthreads()  #?", "branch that differs"),
    ("early return", "if t > 3:  #!\n    return\nv = 1\ncuda.syncthreads()  #?", "branch that differs"),
    ("shared value", "if s[0] > 3:  #!\n    cuda.syncwarp()  #?", "branch that differs"),
    ("written value", "y[t] = v\nif y[0] > 3:  #!\n    v = cuda.shfl_xor_sync(FULL, v, 1)  #?", "branch that differs"),
    ("loop", "for k in range(t):  #!\n    v += k\n    cuda.syncthreads()  #?", "count differs between threads"),
    ("left alone", "for k in range(9):  #!\n    if k > t:\n        break\n    cuda.syncthreads()  #?", "count differs"),
    ("mask of a shuffle", "v = cuda.shfl_sync(15, v, 0)  #!", "full mask"),
    ("mask of a barrier", "cuda.syncwarp(15)  #!", "waits for all threads"),
    ("promised too late", "c = s[t]\nif c > 1:  #!\n    d = c  # uniform: promised\n    cuda.syncthreads()  #?",
     "branch that differs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"), [case[1:] for case in DIVERGENT], ids=[case[0] for case in DIVERGENT]
)
def test_what_is_refused_is_a_finding_as_well(tmp_path, body, reason):
    source = in_kernel(body)
    with pytest.raises(DivergenceError, match=reason) as caught:
        load_module(tmp_path / "divergent.py", source)
    finding = caught.value.finding
    line = marked_line(source)
    assert (finding.code, finding.kernel, finding.source.line) == ("SYN001", "k", line)
    assert str(caught.value).startswith(f"{tmp_path / 'divergent.py'}:{line}: k: ")
    assert finding.access == (finding.source,)
    text = (tmp_path / "divergent.py").read_text(encoding="utf-8").splitlines()
    marked = [i + 1 for i, row in enumerate(text) if row.endswith("#?")]
    assert [frame.line for frame in finding.previous] == marked
    assert all(f"at line {found}" in finding.message for found in marked)
    assert "SYN001 barrier or shuffle that part of a block misses: kernel k" in render(finding)


def test_a_shuffle_in_part_of_a_warp(tmp_path):
    with pytest.raises(DivergenceError, match="blocks of 48 threads: a multiple of 32") as caught:
        made(tmp_path, "v = cuda.shfl_sync(FULL, v, 0)", block="48")
    assert caught.value.finding.code == "SYN001"


@pytest.mark.parametrize(
    "body",
    [
        "while s[t] > 0:  # uniform: promised #!\n    v += 1",
        "v += 1  # uniform: promised #!",
        "s[t] = 1  # uniform: promised #!",
        "cuda.syncthreads()  # uniform: promised #!",
        "for k in (1, 2):  # uniform: promised #!\n    v += k",
        "a, b = cuda.grid(2)  # uniform: promised #!\nv = a + b",
    ],
)
def test_a_promise_stands_where_there_is_one_value(tmp_path, body):
    source = in_kernel(body)
    with pytest.raises(KernelDialectError, match=f":{marked_line(source)}: k: .* name the value there"):
        load_module(tmp_path / "promised.py", source)
