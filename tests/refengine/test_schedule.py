"""The engine's work in random orders that are legal: the same bits, and a wait that is missing is noticed."""

import pytest
from engine_runs import DRAFTS, load, results, tokens_of, wanted
from engines import same_bits

from instrumentation.errors import BadInputError

SEEDS = range(8)
FUZZED = {"check": "off", "spec_type": "draft-mtp"}


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("name", "options"), [("llama", {"n_slots": 2}), ("qwen35", DRAFTS)])
def test_bits_are_the_same_in_every_order(name: str, options: dict, graphs: bool, seed: int):
    # Level audit, as nothing may be found either.
    with load(name, check="audit", schedule_seed=seed, cuda_graphs=graphs, **options) as engine:
        found = results(engine, tokens_of(name))
        assert engine.check_integrity() == []
        assert engine.findings == []
        assert all(stream.pending == 0 for stream in engine.device.streams)
    assert all(same_bits(a, b) for a, b in zip(found, wanted(name, tuple(options.items())), strict=True))


def drafts(seed: int | None, graphs: bool, waits: bool):
    """Logits of the MTP block, whose hidden states come from the target's stream."""
    with load("qwen35", schedule_seed=seed, cuda_graphs=graphs, **FUZZED) as engine:
        if not waits:
            engine.draft.stream.wait = lambda _: None
        # Twice: the second time all is captured, and the hidden states that lie there are of other tokens.
        tokens = tokens_of("qwen35")
        engine.draft_logits(tokens[::-1])
        return engine.draft_logits(tokens)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_wait_of_the_hand_over_is_missed_by_some_order(graphs: bool):
    right = drafts(None, graphs, waits=True)
    assert all(same_bits(drafts(seed, graphs, waits=True), right) for seed in SEEDS)
    same = [same_bits(drafts(seed, graphs, waits=False), right) for seed in SEEDS]
    assert not all(same), "no order shows that nobody waits"


@pytest.mark.parametrize("seed", [-1, 0.5, "1", True])
def test_bad_seeds_are_refused_before_anything_is_loaded(seed: object):
    with pytest.raises(BadInputError, match=r"schedule_seed is .*; give a whole number"):
        load("llama", schedule_seed=seed)


def test_another_device_is_refused():
    with pytest.raises(BadInputError, match="schedule_seed is of the host device, not of cuda"):
        load("llama", device="cuda", schedule_seed=1)
