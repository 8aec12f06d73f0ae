"""Incident I1: target and draft under a saturated cache. Elsewhere: 1 of 562 requests, memory that grows, then an abort
in a library that was handed a stream which was none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import refengine
from instrumentation.errors import FindingError
from refengine.errors import ContextSizeError
from refengine.executor import MAX_EXECUTABLES

MODEL = Path(__file__).resolve().parents[1] / "data" / "qwen35.gguf"
#: -c 256 -np 4 --kv-unified --spec-type draft-mtp, incident I1 at a quarter of its size
OPTIONS = {"n_ctx": 256, "n_slots": 4, "spec_type": "draft-mtp", "check": "guard"}
CLIENTS = 10


@pytest.fixture
def engine():
    with refengine.load(MODEL, **OPTIONS) as made:
        yield made


class Clients:
    """Ten clients that ask again as soon as they were answered."""

    def __init__(self, engine: refengine.Engine) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(26558)
        self.open: list[tuple[refengine.Request, bool]] = []
        self.ended: list[tuple[refengine.Request, bool]] = []

    def ask(self) -> None:
        n_prompt, n_predict = int(self.rng.integers(12, 64)), int(self.rng.integers(5, 80))
        if self.rng.random() < 0.03:
            n_predict += 256
        prompt = self.rng.integers(0, 256, n_prompt).tolist()
        request = self.engine.submit(
            prompt, n_predict=n_predict, ignore_eos=True, temperature=0, background=False
        )
        self.open.append((request, n_prompt + n_predict <= 257))

    def run(self, retries: int) -> None:
        """Until the cache was found full that many times more, and everything asked by then has ended."""
        seen = self.engine.scheduler.statistics
        stop = seen.retries + retries
        while seen.retries < stop or self.open:
            while seen.retries < stop and len(self.open) < CLIENTS:
                self.ask()
            self.engine.drive()
            self.ended += [pair for pair in self.open if pair[0].ended]
            self.open = [pair for pair in self.open if not pair[0].ended]


def test_whoever_fits_alone_completes_and_memory_stays_as_it_is(engine):
    clients = Clients(engine)
    clients.run(100)
    engine.drop_prefixes()
    warm = engine.allocator.snapshot()
    table = engine.allocator.table()
    clients.run(200)
    seen = engine.scheduler.statistics
    assert seen.preemptions > 20
    assert seen.mean_busy_slots > 2.3
    assert seen.recomputed_tokens < seen.generated_tokens
    fitting = [request for request, fits in clients.ended if fits]
    others = [request for request, fits in clients.ended if not fits]
    assert len(fitting) > 20
    assert others, "some cannot fit alone"
    assert {request.status for request in fitting} == {"done"}
    for request in others:
        with pytest.raises(ContextSizeError, match=r"^Context size has been exceeded\.$"):
            request.result()
    engine.drop_prefixes()
    assert engine.check_integrity() == []
    assert engine.findings == []
    assert engine.allocator.snapshot().reserved == warm.reserved
    assert {row.name for row in engine.allocator.table()} >= {
        row.name for row in table if "compute" not in row.name
    }
    for context in (engine.context, engine.draft):
        assert len(context.executor._executables) <= MAX_EXECUTABLES, "captured launches are bounded"
        assert [context.length(s) for s in range(4)] == [0] * 4


def test_a_stream_that_is_none_any_more_is_named_at_its_first_use(engine):
    request = engine.submit(list(range(20)), n_predict=40, ignore_eos=True, background=False)
    engine.drive()
    engine.drive()
    engine.draft.stream.destroy()
    engine.context.stream.destroy()
    with pytest.raises(FindingError, match=r"(?s)STR001.*stream target of target was destroyed"):
        request.result()
    assert [finding.code for finding in engine.findings] == ["STR001"]
    with pytest.raises(FindingError, match="STR001"):
        engine.close()
    assert engine.allocator.snapshot().reserved == 0, "and everything is given back all the same"


def test_the_draft_context_reads_the_targets_memory_by_lease_alone(engine, monkeypatch):
    buffer = engine.context.kept["hidden"].buffer
    lend = type(buffer).lend
    monkeypatch.setattr(
        type(buffer), "lend", lambda self, **kw: lend(self, **(kw | {"to": type(kw["to"])("other")}))
    )
    with pytest.raises(FindingError, match=r"(?s)OWN001.*of draft would read hidden.* owned by target"):
        engine.generate(list(range(20)), n_predict=10, ignore_eos=True)
    assert buffer.leases == (), "a lease ends with what it was given for"
