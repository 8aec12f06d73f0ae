"""refengine: a reference LLM inference engine whose memory can be trusted.

``refengine.load(path)`` returns an ``Engine``, ``refengine.load()`` that of the model that comes with it. Names are
looked up on first use, so that importing the package costs nothing before a model is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instrumentation.errors import Error, OutOfMemoryError

if TYPE_CHECKING:
    from refengine.engine import Engine, load
    from refengine.generation import Generation
    from refengine.request import Request

__version__ = "0.1.0"
__all__ = ["Engine", "Error", "Generation", "OutOfMemoryError", "Request", "__version__", "load"]

_HOMES = {
    "Engine": "refengine.engine",
    "load": "refengine.engine",
    "Generation": "refengine.generation",
    "Request": "refengine.request",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib  # noqa: PLC0415

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'refengine' has no attribute {name!r}")
