"""A memory limit: the smallest that works loads and runs, one byte less is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import refengine
from instrumentation.errors import OutOfMemoryError

DATA = Path(__file__).resolve().parents[1] / "data"
DRAFTS = {"spec_type": "draft-mtp", "n_slots": 3}


@pytest.mark.parametrize("check", ["off", "guard"])
@pytest.mark.parametrize("worst_case_reserve", [True, False])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama", {}),
        ("llama", {"n_slots": 3, "kv_unified": False}),
        ("qwen35", DRAFTS),
        ("qwen35moe", DRAFTS | {"draft_n_max": 8, "cache_type_k": "bf16"}),
    ],
)
def test_the_smallest_limit_that_works_is_named_and_works(check, worst_case_reserve, model, more):
    model = DATA / f"{model}.gguf"
    options = {
        "check": check,
        "n_ctx": 300,
        "n_ubatch": 32,
        "threads": 1,
        "worst_case_reserve": worst_case_reserve,
        **more,
    }
    with pytest.raises(OutOfMemoryError) as refused:
        refengine.load(model, device_memory_limit=4096, **options)
    assert refused.value.exit_code == 3
    assert "weights of model" in str(refused.value)
    smallest = int(re.search(r"smallest limit that works is (\d+)", str(refused.value))[1])
    with pytest.raises(OutOfMemoryError, match=f"smallest limit that works is {smallest}"):
        refengine.load(model, device_memory_limit=smallest - 1, **options)
    with refengine.load(model, device_memory_limit=smallest, **options) as engine:
        assert engine.allocator.snapshot().reserved == smallest
        if worst_case_reserve:
            assert engine.logits(list(range(90))).shape[0] == 90
            assert engine.generate(list(range(70)), n_predict=30, ignore_eos=True).finish_reason == "length"
            assert engine.allocator.snapshot().reserved_peak == smallest
