"""llama.cpp #28433 and vllm #57941: a draft context whose size was not its target's.

In the first the draft took the cells of all the target's sequences for the positions of one; the program here
mixes the two up the other way round, which leaves the draft too few cells. In the second the draft's rotary
tables were as long as its own model had been trained for, so that a longer request read past their end. Both
were found out in the middle of a request. Here a draft context that is smaller in anything is refused before
memory is reserved for it, and the report names both contexts and both sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines import World, world
from hypothesis import given
from hypothesis import strategies as st

import refengine
from instrumentation.errors import FindingError
from instrumentation.following import require_room
from instrumentation.levels import Level
from refengine.batch import Batch
from refengine.context import Context, ContextPlan, DecodeStatus
from refengine.kernels.kv_types import PAGE
from refengine.options import EngineOptions
from refengine.speculative import DraftSettings, MtpDrafter

MODEL = Path(__file__).resolve().parents[1] / "data" / "qwen35.gguf"
N_CTX, N_SEQUENCES = 2 * PAGE, 2
OPTIONS = EngineOptions(
    n_ctx=N_SEQUENCES * N_CTX,
    n_slots=N_SEQUENCES,
    n_batch=16,
    n_ubatch=16,
    kv_unified=False,
    spec_type="draft-mtp",
)


@pytest.fixture(scope="module")
def made():
    with world("qwen35", Level.GUARD, draft=True) as guarded:
        yield guarded


@pytest.fixture
def plans(made):
    return OPTIONS.context_plans(made.config)


@pytest.fixture
def target(made: World, plans):
    context = Context(made.device, made.allocator, made.weights, plans[0])
    yield context
    context.release()
    made.findings.clear()


class TrainedLength(ContextPlan):
    """Rotary tables as long as the draft's own model was trained for."""

    @property
    def rotary(self):
        own = ContextPlan(self.config, replace(self.settings, n_ctx=N_CTX // 2), self.role)
        return own.rotary


def draft_of(made: World, plan: ContextPlan, target: Context) -> Context:
    return Context(made.device, made.allocator, made.weights, plan, follows=target)


def from_the_wrong_size(plan: ContextPlan) -> ContextPlan:
    """Cells for one sequence, where the target has them for all (#28433)."""
    return replace(plan, settings=replace(plan.settings, n_cells=plan.settings.n_ctx))


def with_its_own_tables(plan: ContextPlan) -> ContextPlan:
    """Rotary tables of the draft's own length (#57941)."""
    return TrainedLength(plan.config, plan.settings, plan.role)


def shorter(plan: ContextPlan) -> ContextPlan:
    return replace(plan, settings=replace(plan.settings, n_ctx=N_CTX - 1))


def of_one_sequence(plan: ContextPlan) -> ContextPlan:
    return replace(plan, settings=replace(plan.settings, n_sequences=1))


def with_short_batches(plan: ContextPlan) -> ContextPlan:
    return replace(plan, settings=replace(plan.settings, n_batch=15))


@pytest.mark.parametrize(
    ("mistake", "sizes"),
    [
        (from_the_wrong_size, f"cells {N_CTX} of {N_SEQUENCES * N_CTX}"),
        (with_its_own_tables, f"rows of the rotary tables {N_CTX // 2} of {N_CTX}"),
        (shorter, f"positions {N_CTX - 1} of {N_CTX}, rows of the rotary tables {N_CTX - 1} of {N_CTX}"),
        (of_one_sequence, "sequences 1 of 2"),
        (with_short_batches, "rows of a batch 15 of 16"),
    ],
)
def test_the_first_report_names_both_contexts_and_both_sizes(made, plans, target, mistake, sizes):
    before, streams = made.allocator.snapshot(), len(made.device.streams)
    with pytest.raises(FindingError, match="OWN003"):
        draft_of(made, mistake(plans[1]), target)
    [finding] = made.findings
    assert finding.code == "OWN003"
    assert finding.message == f"draft follows target and is smaller: {sizes}"
    assert finding.actor == "draft"
    assert "draft_of" in {frame.function for frame in finding.access}
    assert made.allocator.snapshot() == before, "nothing was reserved, not even for a moment"
    assert len(made.device.streams) == streams


def test_repaired_the_draft_is_sized_by_its_target_and_follows_it(made, plans, target):
    draft = draft_of(made, plans[1], target)
    try:
        drafter = MtpDrafter(draft, target, DraftSettings())
        tokens = list(range(16))
        for sequence in range(N_SEQUENCES):
            for start in range(0, N_CTX, 16):
                assert target.decode(Batch.of(tokens, start, sequence, "none")) == DecodeStatus.OK
                assert np.isfinite(drafter.logits(tokens, range(16), sequence)).all()
            assert draft.length(sequence) == target.length(sequence) == N_CTX
        assert made.findings.list() == ()
    finally:
        draft.release()


@given(
    n_ctx=st.integers(4, 256),
    n_slots=st.integers(1, 4),
    n_batch=st.integers(2, 300),
    kv_unified=st.booleans(),
)
def test_every_engine_sizes_its_draft_by_its_target(made, n_ctx, n_slots, n_batch, kv_unified):
    options = EngineOptions(
        n_ctx=n_ctx, n_slots=n_slots, n_batch=n_batch, kv_unified=kv_unified, spec_type="draft-mtp"
    )
    target, draft = options.context_plans(made.config)
    require_room(draft.extents, target.extents, made.findings)
    assert target.extents.sizes["rows of the rotary tables"] == target.settings.n_ctx


@pytest.mark.parametrize("check", ["off", "guard"])
def test_an_engine_with_such_a_draft_does_not_load(monkeypatch, check):
    right = EngineOptions.context_plans
    monkeypatch.setattr(
        EngineOptions,
        "context_plans",
        lambda self, config, **given: [
            plan if plan.role == "target" else shorter(plan) for plan in right(self, config, **given)
        ],
    )
    seen = []
    with pytest.raises(
        FindingError, match=rf"(?s)OWN003.*draft follows target.*positions {N_CTX - 1} of 256"
    ):
        refengine.load(
            MODEL, n_ctx=256, n_slots=4, spec_type="draft-mtp", check=check, on_finding=seen.append, threads=1
        )
    assert [finding.code for finding in seen] == ["OWN003"], "and what was reserved was given back"


def test_repaired_an_engine_drafts_up_to_its_last_position():
    with refengine.load(MODEL, n_ctx=64, spec_type="draft-mtp", check="guard", threads=1) as engine:
        made = engine.generate(list(range(40)), n_predict=25, temperature=0, ignore_eos=True)
        assert len(made.tokens) == 25
        assert engine.findings == []
