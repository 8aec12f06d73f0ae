"""The products' inner loops are vector code. A change that makes them scalar costs a factor of ten and no result."""

from __future__ import annotations

import platform
import re

import llvmlite.binding as llvm
import pytest

from instrumentation.kernel import HostOptions
from instrumentation.kernel.host_compile import compile_host
from refengine.kernels.mul_mat import TILE, mul_mat
from refengine.kernels.quants import FORMATS

HAS_FMA = platform.machine() in ("x86_64", "AMD64") and dict(llvm.get_host_cpu_features()).get("fma", False)


@pytest.mark.skipif(not HAS_FMA, reason="reads the assembly of x86-64 with FMA")
@pytest.mark.parametrize("tile", [1, TILE])
@pytest.mark.parametrize("quantisation", FORMATS, ids=lambda q: q.name)
def test_multiply_adds_are_packed(quantisation, tile, tmp_path, monkeypatch):
    # Numba shows no code that came from its cache: compile into a folder of this test's own.
    monkeypatch.setenv("REFENGINE_CACHE_DIR", str(tmp_path))
    code = compile_host(mul_mat(quantisation, tile).plan, HostOptions(), strict_floats=True).assembly()
    packed = len(re.findall(r"\bvfmadd\d+ps\b", code))
    single = len(re.findall(r"\bvfmadd\d+ss\b", code))
    assert packed > 0, "no packed multiply-add: the lane loop was not vectorised"
    assert single <= packed, f"{single} single and {packed} packed multiply-adds"
