"""A plan that needs more than the worst case that was reserved is a finding, and costs nobody a request."""

from __future__ import annotations

import pytest
from engine_runs import load, tokens_of

from refengine.batch import Batch
from refengine.context_plan import ContextSettings
from refengine.graph import BatchShape


@pytest.fixture
def short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextSettings, "reserved_shapes", [BatchShape(1, 1, 1)])


@pytest.mark.usefixtures("short_sighted")
@pytest.mark.parametrize("check", ["off", "guard"])
def test_it_is_reported_once_for_each_place_and_more_is_reserved(check: str):
    tokens = tokens_of("llama")
    with load("llama", check=check) as engine:
        before = engine.context.executor.arena.nbytes
        logits = engine.logits(tokens)
        [finding] = engine.findings
        assert (finding.code, finding.actor, finding.device) == ("RES003", "target", "host")
        grown = engine.context.executor.arena
        assert finding.size == grown.nbytes - before > 0
        assert f"and arena compute was reserved with {before} for the largest plan" in finding.message
        assert finding.message.startswith("plan compute 32x32x1 of target needs ")
        assert finding.allocation, "where it was reserved"
        assert (engine.logits(tokens) == logits).all()
        assert len(engine.findings) == 1
        assert engine.check_integrity() == []


@pytest.mark.usefixtures("short_sighted")
def test_memory_that_may_grow_promises_nothing():
    with load("llama", worst_case_reserve=False) as engine:
        engine.logits(tokens_of("llama"))
        assert engine.findings == []


def test_a_tap_asks_for_more_than_any_decode():
    tokens = tokens_of("llama")
    with load("llama", check="guard") as engine, engine.exclusive() as context:
        reserved = context.executor.arena.nbytes
        with context.tapped(lambda *_: None):
            engine.context.require(context.decode(Batch.of(tokens, 0, 0, "all")))
            assert engine.findings == []
        assert context.executor.arena.nbytes >= reserved
