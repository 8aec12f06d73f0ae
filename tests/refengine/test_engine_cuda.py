"""The whole engine on the CUDA device's code, over a driver on host memory: the host device's bits, sites and books."""

import functools

import numpy as np
import pytest
from engines import DATA, same_bits
from fake_cuda import fake_device

import refengine
from instrumentation.devices.host import HostDevice
from instrumentation.errors import DeviceError
from instrumentation.faults import FaultInjector, FaultPlan, InjectedFaultError
from refengine.errors import ComputeError
from refengine.sweep.counting import Recorder

OPTIONS = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128}
DRAFTS = {"spec_type": "draft-mtp", "draft_n_max": 3, "n_slots": 2}


def load(name: str, device: object, **options) -> refengine.Engine:
    threads = 1 if device == "host" else None
    return refengine.load(DATA / f"{name}.gguf", device=device, threads=threads, **(OPTIONS | options))


def tokens_of(name: str) -> tuple[list[int], list[int]]:
    with np.load(DATA / f"{name}.npz") as recorded:
        return recorded["tokens"].tolist(), recorded["greedy"].tolist()


def results(name: str, device: object, **options):
    """Logits of a prompt, and of two continuations that run at once where there are slots for it."""
    tokens, greedy = tokens_of(name)
    with load(name, device, **options) as engine:
        logits = engine.logits(tokens)
        requests = [
            engine.submit(tokens[: len(tokens) - cut], n_predict=32, temperature=0, return_logits=True)
            for cut in (0, 7)
        ]
        texts = [request.result() for request in requests]
        assert texts[0].tokens == greedy
        assert engine.check_integrity() == []
        assert engine.findings == []
    return [logits, *(text.logits for text in texts)], [text.tokens for text in texts]


@functools.cache
def host_results(name: str, options: tuple[tuple[str, object], ...]):
    return results(name, "host", **dict(options))


@pytest.mark.parametrize("check", ["off", "guard"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("llama-Q4_K_M", {"n_slots": 2}), ("qwen35", DRAFTS)]
)
def test_bits_are_those_of_the_host_device(name, options, graphs, check):
    device = fake_device()
    found, tokens = results(name, device, check=check, cuda_graphs=graphs, **options)
    wanted, wanted_tokens = host_results(name, tuple(options.items()))
    assert tokens == wanted_tokens
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
    driver = device.context.driver
    assert (driver.calls["replay"] > 0) == graphs
    # What remains is the scratch memory of the context.
    assert (len(driver.memory), len(driver.pinned), len(driver.streams)) == (1, 1, 1)
    assert (driver.events, driver.graphs) == (set(), [])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), pytest.param("qwen35", DRAFTS, marks=pytest.mark.slow)]
)
def test_bits_are_the_same_at_level_trap(name, options, graphs):
    device = fake_device()
    found, tokens = results(name, device, check="trap", cuda_graphs=graphs, **options)
    wanted, wanted_tokens = host_results(name, tuple(options.items()))
    assert tokens == wanted_tokens
    assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
    # Every launch had a report, and few had to: rooms go from one to the next.
    reports = [name for _, name, _ in device.context.account.rows if name == "reports of checked launches"]
    assert len(device.context.driver.memory) == 1 + len(reports)


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen35", DRAFTS)])
def test_fault_sites_are_those_of_the_host_device(name, options, monkeypatch):
    monkeypatch.setattr(HostDevice, "wide_loads", True)  # the same graphs and kernels
    monkeypatch.setattr(HostDevice, "behind_bus", True)
    tokens, _ = tokens_of(name)
    passed = []
    for device in ("host", fake_device()):
        sites = Recorder()
        with load(name, device, check="guard", faults=sites, **options) as engine:
            engine.generate(tokens, n_predict=8, temperature=0)
        passed.append([(site.kind, site.detail.replace("cuda:0", "host")) for site in sites.passed])
    assert passed[0] == passed[1]
    assert {kind for kind, _ in passed[0]} >= {"reserve", "copy", "launch", "graph"}


@pytest.mark.parametrize("kind", ["copy", "launch", "graph"])
def test_a_fault_ends_its_request_and_nothing_else(kind):
    tokens, greedy = tokens_of("llama")
    injector = FaultInjector(FaultPlan(kinds=(kind,), first=1))
    injector.enabled = False
    device = fake_device()
    with load("llama", device, check="guard", faults=injector) as engine:
        injector.enabled = True
        with pytest.raises(ComputeError) as caught:
            engine.generate(tokens, n_predict=4, temperature=0)
        assert isinstance(caught.value.__cause__, InjectedFaultError)
        assert engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy
        assert engine.findings == []
    assert len(device.context.driver.memory) == 1


@pytest.mark.parametrize("check", ["off", "guard"])
@pytest.mark.parametrize("call", ["launch", "synchronize_stream", "copy_in", "replay", "end_capture"])
def test_a_driver_call_that_fails_ends_its_request_and_nothing_else(call, check):
    tokens, greedy = tokens_of("llama")
    device = fake_device()
    with load("llama", device, check=check) as engine:
        device.context.driver.fail(call, "INVALID_HANDLE", nth=2 if call == "launch" else 1)
        if call == "synchronize_stream":
            # At level guard the first wait may be for fills: then reserving the graph's memory fails.
            with pytest.raises((ComputeError, DeviceError), match="INVALID_HANDLE"):
                engine.generate(tokens, n_predict=4, temperature=0)
        else:
            with pytest.raises(ComputeError, match=rf"{call} failed with CUDA_ERROR_INVALID_HANDLE"):
                engine.generate(tokens, n_predict=4, temperature=0)
        assert engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy
        assert engine.findings == []
    assert len(device.context.driver.memory) == 1


@pytest.mark.parametrize("check", ["off", "guard"])
@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen35", DRAFTS)])
def test_a_lost_device_fails_every_request_and_the_engine_closes_quietly(name, options, check):
    tokens, _ = tokens_of(name)
    device = fake_device()
    driver = device.context.driver
    engine = load(name, device, check=check, **options)
    engine.generate(tokens, n_predict=4, temperature=0)
    norms = {launch.name for graph in driver.graphs for launch in graph if "norm" in launch.name}
    driver.broken = dict.fromkeys(norms, "ILLEGAL_ADDRESS")
    with pytest.raises(ComputeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*the last launch was graph"):
        engine.generate(tokens, n_predict=4, temperature=0)
    calls = driver.calls.total()
    for _ in range(2):
        with pytest.raises((ComputeError, DeviceError), match="device lost"):
            engine.generate(tokens, n_predict=4, temperature=0)
    engine.close()
    assert engine.findings == []
    assert engine.allocator.table() == ()
    assert driver.calls.total() == calls


def test_memory_is_flat_over_changing_shapes():
    device = fake_device()
    driver = device.context.driver
    with load("llama", device, check="guard", n_slots=2) as engine:
        seen = set()
        for turn in range(40):
            engine.logits(list(range(1, 2 + turn % 24)))
            if turn >= 24:
                seen.add((driver.used, len(driver.pinned)))
        # Graphs come and go with their tables; what is there besides does not grow.
        used = [bytes_used for bytes_used, _ in seen]
        assert max(used) - min(used) < 64 * 1024
        assert len({pinned for _, pinned in seen}) == 1
    assert len(driver.memory) == 1
