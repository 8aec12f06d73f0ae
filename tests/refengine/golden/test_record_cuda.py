"""Recordings on the CUDA device's code, over a driver on host memory: tensors come through its staging ring."""

from __future__ import annotations

import pytest
from engine_runs import tokens_of
from engines import DATA
from fake_cuda import fake_device
from golden_runs import ANY_MODEL, made, same_tensors

import refengine
from refengine.golden.compare import compare
from refengine.golden.record import Request, device_id, record


@pytest.mark.parametrize("check", ["off", "audit"])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_each_tensor_has_the_host_s_bits(name, check):
    wanted = made(name, n_tokens=20, n_predict=4, tensors=("*",))
    request = Request(name, tuple(tokens_of(name)[:20]), None, 4, tensors=("*",))
    device = fake_device()
    spec_type = str(wanted.settings["spec_type"])
    with refengine.load(
        DATA / f"{name}.gguf", device=device, n_ctx=128, spec_type=spec_type, check=check
    ) as engine:
        found = record(engine, request, ANY_MODEL)
        assert str(device_id(engine)).startswith("cuda sm_")
        assert same_tensors(found, wanted)
        assert (found.greedy, found.generated) == (wanted.greedy, wanted.generated)
        again = record(engine, request, ANY_MODEL)
        assert compare(again, found, exact=True).same
        assert engine.check_integrity() == []
        assert engine.findings == []
