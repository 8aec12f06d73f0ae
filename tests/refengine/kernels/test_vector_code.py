"""The products' inner loops are vector code. A change that makes them scalar costs a factor of ten and no result."""

from __future__ import annotations

import platform
import re

import pytest

from refengine.kernels.mul_mat import TILE, mul_mat
from refengine.kernels.quants import FORMATS


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86-64 assembly")
@pytest.mark.parametrize("tile", [1, TILE])
@pytest.mark.parametrize("quantisation", FORMATS, ids=lambda q: q.name)
def test_multiply_adds_are_packed(quantisation, tile):
    code = mul_mat(quantisation, tile).host().assembly()
    packed = len(re.findall(r"\bvfmadd\d+ps\b", code))
    single = len(re.findall(r"\bvfmadd\d+ss\b", code))
    assert packed > 0, "no packed multiply-add: the lane loop was not vectorised"
    assert single <= packed, f"{single} single and {packed} packed multiply-adds"
