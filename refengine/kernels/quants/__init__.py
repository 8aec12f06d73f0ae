"""Weight formats of GGUF files, a module each: how they are packed in memory, how a kernel reads a weight."""

from __future__ import annotations

from typing import Any

from refengine.errors import UnsupportedModelError
from refengine.kernels.quants import (
    bf16,
    f16,
    f32,
    iq4_nl,
    iq4_xs,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
)
from refengine.kernels.quants.layout import Packed, PackedShapes, QuantFormat

__all__ = ["FORMATS", "Packed", "PackedShapes", "QuantFormat", "format_of"]

_MODULES = (f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs)
#: by GGMLQuantizationType, which is Any: the gguf package has no types that mypy follows
FORMATS: dict[Any, QuantFormat] = {module.FORMAT.type: module.FORMAT for module in _MODULES}


def format_of(type: Any) -> QuantFormat:  # noqa: A002
    """Format of a GGMLQuantizationType. Raises UnsupportedModelError for one that no kernel reads."""
    found = FORMATS.get(type)
    if found is None:
        known = ", ".join(known.name for known in FORMATS.values())
        name = getattr(type, "name", type)
        raise UnsupportedModelError(f"weights of type {name} are not built; want one of {known}")
    return found
