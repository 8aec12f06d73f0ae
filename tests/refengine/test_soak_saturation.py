"""A thousand times without room: every request that fits completes, with the bits that it has alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import structlog

from refengine.options import EngineOptions
from refengine.soak import End, Soak, SoakPlan

QWEN35 = Path(__file__).resolve().parent.parent / "data" / "qwen35.gguf"


@pytest.fixture(autouse=True)
def _no_log_line_for_each_retry():
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.mark.slow
def test_saturation_costs_time_and_nothing_else():
    options = EngineOptions(
        device="host", threads=1, check="guard", n_ctx=256, n_slots=4, spec_type="draft-mtp"
    )
    plan = SoakPlan(end=End(1000, "retries"), clients=10)
    with Soak(QWEN35, options, plan) as soak:
        soak.run()
        soak.verify()
    summary = soak.summary()
    assert summary.problems == ()  # no difference, finding or growth, and all that fit completed
    assert summary.finished
    assert summary.retries >= 1000
    assert summary.preemptions > 0
    assert summary.mean_busy_slots >= 2.5
    assert summary.recomputed_part <= 1
    assert summary.requests.completed_part == 1.0
    assert summary.requests.completed > 300
    assert summary.draft.generated > 0
    assert summary.verified > 100
