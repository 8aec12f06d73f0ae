"""The engine at level audit: no finding, the bits of level off, and nothing kept of work that is done."""

import functools
from contextlib import suppress

import numpy as np
import pytest
from engines import DATA, same_bits
from fake_cuda import fake_device

import refengine
from instrumentation.errors import DeviceError
from instrumentation.faults import FaultInjector, FaultPlan
from refengine.errors import ComputeError

DRAFTS = {"spec_type": "draft-mtp", "draft_n_max": 3, "n_slots": 2}


def tokens_of(name: str) -> list[int]:
    with np.load(DATA / f"{name}.npz") as recorded:
        return recorded["tokens"].tolist()


def load(name: str, device: object = "host", **options) -> refengine.Engine:
    threads = 1 if device == "host" else None
    return refengine.load(DATA / f"{name}.gguf", device=device, threads=threads, n_ctx=128, **options)


def results(engine: refengine.Engine, tokens: list[int]):
    """Logits of a prompt, then of continuations that run at once where there are slots for it."""
    logits = [engine.logits(tokens)]
    wishes = [(cut, temperature) for cut in (0, 7) for temperature in (0.0, 0.8)]
    requests = [
        engine.submit(tokens[: len(tokens) - cut], n_predict=24, temperature=t, seed=cut, return_logits=True)
        for cut, t in wishes
    ]
    return logits + [request.result().logits for request in requests]


@functools.cache
def wanted(name: str, options: tuple[tuple[str, object], ...]):
    with load(name, check="off", **dict(options)) as engine:
        return results(engine, tokens_of(name))


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen35", DRAFTS)])
def test_bits_are_those_of_level_off_and_nothing_is_found(name: str, options: dict, graphs: bool, kind: str):
    device = fake_device() if kind == "cuda" else "host"
    with load(name, device, check="audit", cuda_graphs=graphs, **options) as engine:
        found = results(engine, tokens_of(name))
        detector = engine.device.audit.shared.detector
        assert not detector.order.in_flight()
        assert len(detector) == 0
        assert engine.check_integrity() == []
        assert engine.findings == []
    assert all(same_bits(a, b) for a, b in zip(found, wanted(name, tuple(options.items())), strict=True))


@pytest.mark.parametrize("kind", ["copy", "launch", "event", "graph"])
def test_what_fails_half_way_is_waited_for(kind: str):
    """A call that fails leaves others queued; nothing that comes later may meet them."""
    tokens = tokens_of("qwen35")
    with load("qwen35", check="audit", cuda_graphs=kind != "launch", **DRAFTS) as engine:
        clean = engine.generate(tokens[:20], n_predict=6, temperature=0).tokens
        fired = 0
        for nth in range(1, 60, 9):
            injector = FaultInjector(FaultPlan.nth(nth, kind))
            engine.device.faults = injector
            with suppress(ComputeError, DeviceError):
                engine.generate(tokens[:20], n_predict=6, temperature=0)
            engine.device.faults = None
            fired += len(injector.fired)
            assert engine.findings == []
        assert fired
        assert engine.generate(tokens[:20], n_predict=6, temperature=0).tokens == clean
        assert not engine.device.audit.shared.detector.order.in_flight()
        assert engine.findings == []
