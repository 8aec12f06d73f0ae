"""Verdicts beside those of PyTorch's stream sanitizer, where it is installed, on programs of the kinds that it knows.

It knows whole tensors, launches, events, and waits of streams and the host. No GPU takes part.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from racing import CorePlayer, Step

sanitizer = pytest.importorskip("torch.cuda._sanitizer", reason="pip install torch")

STREAMS = {"a": 1, "b": 2, "c": 3}
EVENTS = {"e": 11, "f": 12}
TENSORS = {"x": 101, "y": 102}


def steps():
    stream, event, tensor = (st.sampled_from(list(names)) for names in (STREAMS, EVENTS, TENSORS))

    def step(who, verb, *words):
        return st.builds(lambda *parts: Step(parts[0], parts[1], tuple(parts[2:])), who, verb, *words)

    just, either = st.just, st.sampled_from
    access = step(stream, either(["read", "write"]), tensor)
    order = step(stream, either(["record", "wait"]), event)
    return st.one_of(
        access, access, access, order, order, order,
        step(just("host"), just("waits"), event), step(just("host"), just("syncs"), stream),
        step(just("host"), just("syncs"), just("all")), step(event, just("destroy")),
    )  # fmt: skip


class Theirs:
    """PyTorch's checks; its log says of what it was not told before, which is no verdict."""

    def __init__(self) -> None:
        self.handler = sanitizer.EventHandler()
        self.events: set[str] = set()

    def do(self, step: Step) -> bool:
        """Whether the step is an error."""
        who, verb, words = step
        handler = self.handler
        if verb in ("read", "write"):
            pointers = {TENSORS[words[0]]}
            reads, writes = (pointers, set()) if verb == "read" else (set(), pointers)
            aliases = {pointer: [] for pointer in pointers}
            return bool(handler._handle_kernel_launch(STREAMS[who], reads, writes, set(), verb, aliases))
        event = words[0] if words and words[0] in EVENTS else who
        if verb == "destroy":
            if event in self.events:
                self.events.discard(event)
                handler._handle_event_deletion(EVENTS[event])
        elif verb == "record":
            self.events.add(event)
            handler._handle_event_record(EVENTS[event], STREAMS[who])
        elif verb == "syncs":
            if words[0] == "all":
                handler._handle_device_synchronization()
            else:
                handler._handle_stream_synchronization(STREAMS[words[0]])
        elif event in self.events:  # what was never recorded orders nothing
            if verb == "wait":
                handler._handle_event_wait(EVENTS[event], STREAMS[who])
            else:
                handler._handle_event_synchronization(EVENTS[event])
        return False


@given(program=st.lists(steps(), max_size=40))
@example([Step("a", "write", ("x",)), Step("a", "record", ("e",)), Step("a", "record", ("e",)),
          Step("b", "wait", ("e",)), Step("b", "write", ("x",))])  # fmt: skip
def test_verdicts_are_those_of_pytorch_up_to_the_first_error(program: list[Step]):
    ours, theirs = CorePlayer(), Theirs()
    for number, step in enumerate(program):
        refused, error = ours.do(step) is not None, theirs.do(step)
        assert refused == error, (number, step)
        if error:
            return
