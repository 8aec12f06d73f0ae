"""What makes compiling fast changes nothing: the passes left out, collections held back, the walk of trees."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import ast
import gc
import inspect
import re

import pytest
from numba import cuda, float32
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from sample_kernels import arg_max, calls, collectives_inside

from instrumentation.kernel import HostOptions, host_pipeline, kernel, lower_host
from instrumentation.kernel.host_compile import compile_host
from instrumentation.kernel.tree import walk
from instrumentation.kernel.types import f32_1d, i32, i32_1d

CHOICE = 3


@kernel(block=32)
def powers(x: f32_1d, n: i32_1d, y: f32_1d, count: i32) -> None:
    """Powers, which a pass rewrites, and branches that another cuts off."""
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < count:
        v = x[i] ** 2 + x[i] ** 3.0 + x[i] ** n[i]
        if CHOICE > 2:
            v = v + float32(n[i] ** 2) if n[i] % CHOICE == 1 else -v
        else:
            y[0] = float32(0)
        y[i] = v


def instructions(made, options, folder, monkeypatch):
    """Machine code of a kernel that is compiled here, without the names of what it calls and jumps to."""
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(folder))
    text = compile_host(made.plan, options, strict_floats=False).assembly()
    lines = [line.partition("#")[0].strip() for line in text.splitlines() if line.startswith("\t")]
    return [re.sub(r"[\w.$]*(_ZN|cfunc|numba|\.L)[\w.$]*", "name", line) for line in lines if line[0] != "."]


@pytest.mark.parametrize("options", [HostOptions(), HostOptions(reverse_lanes=True, poison=True)])
@pytest.mark.parametrize("made", [arg_max, calls, collectives_inside, powers], ids=lambda made: made.name)
def test_the_machine_code_is_that_of_all_of_numbas_passes(made, options, tmp_path, monkeypatch):
    found = instructions(made, options, tmp_path / "few", monkeypatch)
    # LLVM's own passes are less, too, but come out at other machine code with the same bits.
    monkeypatch.setattr(JITCodeLibrary, "_optimize_functions", host_pipeline._Library._optimize_functions)
    monkeypatch.setattr(host_pipeline, "_GeneratedCode", Compiler)
    wanted = instructions(made, options, tmp_path / "all", monkeypatch)
    assert len(wanted) > 20
    assert found == wanted


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_go_on_as_before_whatever_happens(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        seen = []
        with pytest.raises(ZeroDivisionError), host_pipeline.no_collections():
            seen.append(1 / gc.isenabled())
        assert not seen
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_walk_has_the_order_of_pythons():
    tree = ast.parse(inspect.getsource(lower_host))
    wanted = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    assert walk(tree) == wanted
