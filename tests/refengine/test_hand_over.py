"""Hidden states on their way from the target to the draft, whose stream alone waits for them, and must."""

import pytest
from engine_runs import load, tokens_of

from instrumentation.errors import FindingError
from refengine.batch import Batch


@pytest.mark.parametrize("graphs", [True, False])
def test_the_wait_of_the_hand_over_is_missed_by_the_audit(graphs: bool):
    tokens = tokens_of("qwen35")
    with load("qwen35", check="audit", cuda_graphs=graphs, spec_type="draft-mtp") as engine:
        wait = engine.draft.stream.wait
        engine.draft.stream.wait = lambda _: None
        with pytest.raises(FindingError, match=r"STR011|OWN012"):
            engine.draft_logits(tokens)
        found = engine.findings[0]
        assert (found.stream, found.actor) == ("draft", "draft")
        assert found.buffer is not None
        assert (found.buffer.name, found.buffer.owner) == ("hidden", "target")
        assert found.kernel == "gather_hidden"
        engine.draft.stream.wait = wait
        engine.draft_logits(tokens)
        assert len(engine.findings) == 1


def test_the_targets_outputs_are_there_before_its_hidden_states():
    """What makes the hand-over worth a wait: the host goes on while they are on their way."""
    with load("qwen35", check="audit", spec_type="draft-mtp") as engine, engine.exclusive() as context:
        context.require(context.decode(Batch.of(tokens_of("qwen35"), 0, 0, "last")))
        assert context.logits.any()
        assert context.stream.pending == 1
        with context.lend_hidden(engine.draft):
            assert context.stream.pending == 2
            engine.draft.stream.synchronize()
            assert context.stream.pending == 0
