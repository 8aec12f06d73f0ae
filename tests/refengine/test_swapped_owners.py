"""Every argument, stream, event and graph of a decode of target and draft, exchanged for the other context's.

Each exchange is tried in the middle of a run, before the call as it is: it must be refused and leave nothing in any
queue, so the run goes on as if nothing had happened. A hand-over that is wrong shows at the first access behind it, so
those have a run each.
"""

import functools
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from engines import DATA, DRAFT, TARGET, n_queued
from fake_cuda import fake_device

import refengine
from instrumentation.devices.checked_stream import CheckedStream
from instrumentation.errors import FindingError
from instrumentation.findings import RefusedError
from instrumentation.view import View
from refengine.context import Context

OTHER = {TARGET: DRAFT, DRAFT: TARGET}
N_PREDICT = 8


def load(device: object, *, graphs: bool) -> refengine.Engine:
    return refengine.load(
        DATA / "qwen35.gguf", device=device, threads=1 if device == "host" else None, n_ctx=128, check="audit",
        spec_type="draft-mtp", draft_n_max=3, n_slots=2, cuda_graphs=graphs,
    )  # fmt: skip


@functools.cache
def prompt() -> list[int]:
    with np.load(DATA / "qwen35.npz") as recorded:
        return recorded["tokens"].tolist()[:12]


def generate(engine: refengine.Engine) -> list[int]:
    return engine.generate(prompt(), n_predict=N_PREDICT, temperature=0, ignore_eos=True).tokens


class Exchange:
    """Tries every exchange of every call of a run."""

    def __init__(self, engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.streams = {TARGET: engine.context.stream, DRAFT: engine.draft.stream}
        self.events = {
            owner: engine.device.create_event(owner=owner, name=f"event of {owner}") for owner in OTHER
        }
        self.graphs = {}
        self.wanted, self.refused = Counter(), Counter()
        self.missed = []
        self._busy = False
        for name in ("launch", "copy_in", "copy_out", "copy", "fill", "record", "replay"):
            monkeypatch.setattr(
                CheckedStream, name, self.watching(name, getattr(self, name), getattr(CheckedStream, name))
            )

    def watching(self, name, exchanges, call):
        def watched(stream, *given):
            if not self._busy and stream.owner in OTHER:
                self._busy = True
                try:
                    exchanges(stream, *given)
                    self.attempt(f"{name}: stream", lambda: call(self.streams[OTHER[stream.owner]], *given))
                finally:
                    self._busy = False
            return call(stream, *given)

        return watched

    def queued(self):
        """What is in the queues and captures of both contexts."""
        return [(n_queued(stream), len(stream._capture or ())) for stream in self.streams.values()]

    def attempt(self, what, call) -> None:
        before = self.queued()
        self.wanted[what] += 1
        try:
            call()
        except RefusedError as error:
            if error.finding.code in ("OWN001", "OWN002") and self.queued() == before:
                self.refused[what] += 1
                return
        self.missed.append(what)

    def other(self, view: View, owner) -> View:
        """As much of the other context's memory as there is, at best of the buffer that is called the same."""
        lent = {self.engine.context.kept["hidden"].buffer}
        buffers = [
            buffer
            for buffer in self.engine.allocator.live_buffers()
            if buffer.owner == OTHER[owner] and buffer not in lent
        ]
        same = [buffer for buffer in buffers if buffer.name == view.buffer.name]
        buffer = (same or sorted(buffers, key=lambda buffer: buffer.nbytes))[-1]
        fits = buffer.nbytes >= view.nbytes
        return buffer.view(view.dtype, view.shape if fits else (1,) * view.ndim)

    # --- the exchanges of each call

    def launch(self, stream, kernel, grid, arguments) -> None:
        for name, value in arguments.items():
            if isinstance(value, View):
                exchanged = {**arguments, name: self.other(value, stream.owner)}
                self.attempt(
                    "launch: argument", lambda exchanged=exchanged: stream.launch(kernel, grid, exchanged)
                )

    def copy_in(self, stream, target, _source) -> None:
        other = self.other(target, stream.owner)
        self.attempt("copy_in: target", lambda: stream.copy_in(other, np.zeros(other.nbytes, np.uint8)))

    def copy_out(self, stream, _target, source) -> None:
        other = self.other(source, stream.owner)
        self.attempt("copy_out: source", lambda: stream.copy_out(np.zeros(other.nbytes, np.uint8), other))

    def copy(self, stream, target, source) -> None:
        for view in (target, source):
            other = self.other(view, stream.owner)
            pair = (other, source) if view is target else (target, other)
            nbytes = min(part.nbytes for part in pair)
            flat = [part.buffer.view(np.uint8, nbytes) for part in pair]
            self.attempt("copy: view", lambda flat=flat: stream.copy(*flat))

    def fill(self, stream, target, value) -> None:
        other = self.other(target, stream.owner)
        self.attempt("fill: target", lambda: stream.fill(other, value))

    def record(self, stream, _event) -> None:
        self.attempt("record: event", lambda: stream.record(self.events[OTHER[stream.owner]]))

    def replay(self, stream, graph) -> None:
        self.graphs[stream.owner] = graph
        other = self.graphs.get(OTHER[stream.owner])
        if other is not None:
            self.attempt("replay: graph", lambda: stream.replay(other))


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("graphs", [True, False])
def test_every_exchange_is_refused_before_it_is_queued(graphs: bool, kind: str, monkeypatch):
    with load(fake_device() if kind == "cuda" else "host", graphs=graphs) as engine:
        wanted = generate(engine)
        engine.drop_prefixes()
        assert engine.findings == []
        if graphs:  # so that launches are captured under the exchange
            for context in (engine.context, engine.draft):
                for executable in context.executor._executables.values():
                    executable.release()
                context.executor._executables.clear()
        with monkeypatch.context() as patched:
            exchange = Exchange(engine, patched)
            assert generate(engine) == wanted, "nothing of an exchange was queued"
        assert exchange.missed == []
        assert exchange.refused == exchange.wanted
        kinds = {
            "launch: argument",
            "launch: stream",
            "copy_in: target",
            "copy_in: stream",
            "copy_out: source",
        }
        kinds |= {"copy_out: stream", "record: event", "record: stream"}
        assert kinds | ({"replay: graph", "replay: stream"} if graphs else set()) <= exchange.wanted.keys()
        assert exchange.wanted["launch: argument"] > 3 * exchange.wanted["launch: stream"] > 300
        assert {finding.code for finding in engine.findings} == {"OWN001", "OWN002"}
        assert all(finding.actor in ("target", "draft") for finding in engine.findings)
        assert engine.check_integrity() == []


# --- hand-overs


@contextmanager
def handing_over(self, to, *, event, waiter, waited):
    """``Context.lend_hidden`` with what it names given from outside."""
    self.stream.record(self._handed)
    with self.kept["hidden"].buffer.lend(to=to.owner, mode="read", after=event, by=self.owner):
        if waiter is not None:
            waiter.wait(waited)
        yield


#: what refuses each, and what takes which place: the draft's event, or the target's stream
HANDOVERS = {
    "another event is lent behind": ("OWN011", "event", "other"),
    "another event is waited for": ("OWN012", "waited", "other"),
    "another stream waits": ("OWN012", "waiter", "own"),
    "nobody waits": ("OWN012", "waiter", "none"),
}


@pytest.mark.parametrize(("kind", "graphs"), [("host", True), ("host", False), ("cuda", True)])
@pytest.mark.parametrize("name", HANDOVERS)
def test_an_exchange_in_a_hand_over_is_refused_at_the_first_access(
    name: str, graphs: bool, kind: str, monkeypatch
):
    code, place, taker = HANDOVERS[name]
    lend = Context.lend_hidden
    with load(fake_device() if kind == "cuda" else "host", graphs=graphs) as engine:
        other = engine.device.create_event(owner=DRAFT, name="other")
        takers = {"other": other, "own": engine.context.stream, "none": None}
        wanted = generate(engine)
        count = [0]

        def counting(self, to):
            count[0] += 1
            return lend(self, to)

        engine.drop_prefixes()
        with monkeypatch.context() as patched:
            patched.setattr(Context, "lend_hidden", counting)
            assert generate(engine) == wanted
        handovers = count[0]
        assert handovers > 3
        for nth in range(1, handovers + 1, 1 if kind == "host" else handovers - 1):
            count[0] = 0

            def exchanged(self, to, nth=nth):
                count[0] += 1
                if count[0] != nth:
                    return lend(self, to)
                given = {"event": self._handed, "waiter": to.stream, "waited": self._handed}
                return handing_over(self, to, **(given | {place: takers[taker]}))

            engine.drop_prefixes()
            with monkeypatch.context() as patched:
                patched.setattr(Context, "lend_hidden", exchanged)
                with pytest.raises(FindingError, match=code):
                    generate(engine)
            [finding] = engine.findings
            assert (finding.code, finding.buffer.name) == (code, "hidden")
            assert (finding.buffer.owner, finding.actor, finding.stream) == ("target", "draft", "draft")
            assert finding.argument is not None
            assert finding.previous, "where it was lent"
            engine._log.clear()
        engine.drop_prefixes()
        assert generate(engine) == wanted
        assert engine.findings == []
