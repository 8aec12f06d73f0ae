"""Kernels from text: each written to a file of its own, since a kernel's source must be a real file."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HEADER = """import math
import sys
import numpy as np
from numba import cuda, float32, float64, int32, int64, uint8
from instrumentation.kernel import device_function, intrinsics, kernel
from instrumentation.kernel.types import *

FULL = 0xFFFFFFFF
TABLE = [1, 2, 3]
"""


def load_module(path: Path, source: str) -> Any:
    """Import ``source`` under ``HEADER`` from a file at ``path``."""
    path.write_text(HEADER + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def marked_line(source: str) -> int:
    """Line of the comment ``#!`` in the file that ``load_module`` writes."""
    lines = (HEADER + source).splitlines()
    return next(n for n, text in enumerate(lines, 1) if text.rstrip().endswith("#!"))
