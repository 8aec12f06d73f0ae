"""The engine at level audit: no finding, the bits of level off, and nothing kept of work that is done."""

from contextlib import suppress

import pytest
from engine_runs import DRAFTS, load, results, tokens_of, wanted
from engines import same_bits
from fake_cuda import fake_device

from instrumentation.errors import DeviceError
from instrumentation.faults import FaultInjector, FaultPlan
from refengine.errors import ComputeError


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
