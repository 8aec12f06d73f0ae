"""Recordings of the small models, for tests that compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from engine_runs import tokens_of
from engines import DATA

from refengine.golden.case import ModelId, Recording
from refengine.golden.record import Request, drafts_if_it_can, record
from refengine.golden.session import Session

if TYPE_CHECKING:
    from pathlib import Path

ANY_MODEL = ModelId("any.gguf", "0" * 64)
OPTIONS = {"device": "host", "threads": 1}
N_PREDICT = 6


def made(
    name: str,
    *,
    path: Path | None = None,
    n_tokens: int = 48,
    n_predict: int = N_PREDICT,
    n_rows: int = 0,
    tensors: tuple[str, ...] | None = None,
    **options: Any,
) -> Recording:
    """Of a small model's own tokens, on an engine that has no finding and nothing left at its end."""
    path = path or DATA / f"{name}.gguf"
    request = {} if tensors is None else {"tensors": tensors}
    settings = {"n_ctx": 128, "spec_type": drafts_if_it_can(path), **options}
    with Session(**OPTIONS) as session:
        engine = session.engine(path, **settings)
        found = record(
            engine,
            Request(name, tuple(tokens_of(name)[:n_tokens]), None, n_predict, n_rows, **request),
            ANY_MODEL,
        )
        assert engine.check_integrity() == []
        assert engine.findings == []
    return found


def same_tensors(a: Recording, b: Recording) -> bool:
    """Names, order, types, shapes and bits."""
    return list(a.tensors) == list(b.tensors) and all(
        found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
        for found, wanted in zip(a.tensors.values(), b.tensors.values(), strict=True)
    )


def of(tensors: dict[str, Any], name: str = "one", **fields: Any) -> Recording:
    """A recording without an engine."""
    arrays = {key: np.asarray(value) for key, value in tensors.items()}
    return Recording(name, "test", arrays, **fields)
