"""Lowering ``cuda``: the kernel's own function, handed to ``numba.cuda`` unchanged.

Only what its names stand for changes: device functions and intrinsics become their CUDA halves.
"""

from __future__ import annotations

import types as python_types
from typing import Any

from instrumentation.kernel.intrinsics import Intrinsic
from instrumentation.kernel.types import signature_of


def cuda_function(function: Any) -> Any:
    """Copy of a Python function whose captured device functions and intrinsics are their CUDA halves."""
    code = function.__code__
    names = {name: _half(value) for name, value in function.__globals__.items() if name in _names(code)}
    cells = tuple(python_types.CellType(_half(cell.cell_contents)) for cell in function.__closure__ or ())
    return python_types.FunctionType(code, {**function.__globals__, **names}, function.__name__, None, cells)


def _names(code: Any) -> set[str]:
    return set(code.co_names)


def _half(value: Any) -> Any:
    if isinstance(value, Intrinsic):
        return value.cuda
    if hasattr(value, "parsed") and hasattr(value, "cuda_device"):
        return value.cuda_device()
    return value


def cuda_signature(function: Any) -> Any:
    """``void(...)`` signature from a kernel's annotations."""
    from numba.core import types  # noqa: PLC0415

    return types.void(*signature_of(function).values())


def compile_ptx(function: Any, signature: Any, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel, without a GPU: needs the toolkit wheels of the ``cu12`` or ``cu13`` extra."""
    from numba import cuda  # noqa: PLC0415
    from numba.cuda import dispatcher  # noqa: PLC0415

    # A device function asks the current device which code it shall become; without a GPU we answer.
    stand_in = python_types.SimpleNamespace(compute_capability=compute_capability)
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: stand_in
    try:
        text, _ = cuda.compile_ptx(cuda_function(function), signature, cc=compute_capability)
    finally:
        dispatcher.get_current_device = asked
    return str(text)
