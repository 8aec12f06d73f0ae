"""A sanitizer for Numba CUDA kernels and the memory that they work on. It knows nothing of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrumentation.sanitizer import Sanitizer

__all__ = ["Sanitizer"]


def __getattr__(name: str) -> Any:
    """``Sanitizer``, imported when it is asked for: with it comes Numba, which takes a second."""
    if name == "Sanitizer":
        from instrumentation.sanitizer import Sanitizer  # noqa: PLC0415

        return Sanitizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
