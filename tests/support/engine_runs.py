"""Runs of whole engines on small models, for tests that compare their bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DATA

import refengine

if TYPE_CHECKING:
    from engines import Array

#: two slots with drafts of the model's own
DRAFTS = {"spec_type": "draft-mtp", "draft_n_max": 3, "n_slots": 2}


def tokens_of(name: str) -> list[int]:
    with np.load(DATA / f"{name}.npz") as recorded:
        return recorded["tokens"].tolist()  # type: ignore[no-any-return]


def load(name: str, device: object = "host", **options: Any) -> refengine.Engine:
    threads = 1 if device == "host" else None
    return refengine.load(DATA / f"{name}.gguf", device=device, threads=threads, n_ctx=128, **options)


def results(engine: refengine.Engine, tokens: list[int]) -> list[Array]:
    """Logits of a prompt, then of continuations that run at once where there are slots for it."""
    logits: list[Array] = [engine.logits(tokens)]
    wishes = [(cut, temperature) for cut in (0, 7) for temperature in (0.0, 0.8)]
    requests = [
        engine.submit(tokens[: len(tokens) - cut], n_predict=24, temperature=t, seed=cut, return_logits=True)
        for cut, t in wishes
    ]
    for request in requests:
        found = request.result().logits
        assert found is not None
        logits.append(found)
    return logits


@functools.cache
def wanted(name: str, options: tuple[tuple[str, object], ...]) -> list[Array]:
    """Those of level ``off``."""
    with load(name, check="off", **dict(options)) as engine:
        return results(engine, tokens_of(name))
