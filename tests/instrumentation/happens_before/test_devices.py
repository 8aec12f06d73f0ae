"""Random programs on both devices: refused like on the detector alone, and what is left is as if run one by one."""

import numpy as np
import pytest
from fake_cuda import fake_device
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import NBYTES, CorePlayer, Player, Step, parse_range

BUFFERS, ARRAYS = ("x", "x[0:8]", "x[7:20]", "y"), ("h", "h[0:8]", "h[7:20]", "i")


def steps():
    def step(who, verb, *words):
        return st.builds(lambda *parts: Step(parts[0], parts[1], tuple(parts[2:])), who, verb, *words)

    just, either = st.just, st.sampled_from
    stream, event, where = either("abc"), either("ef"), either(BUFFERS)
    # Arrays and buffers of one size.
    pair = either([("h", "x"), ("h", "y"), ("i", "x"), ("h[0:8]", "x[0:8]"), ("h[7:20]", "x[7:20]")])
    copies = st.builds(
        lambda who, verb, names: Step(who, verb, names if verb == "put" else names[::-1]),
        stream, either(["put", "get"]), pair,
    )  # fmt: skip
    return st.one_of(
        step(stream, either(["read", "write"]), where), step(stream, either(["read", "write"]), where), copies,
        step(stream, either(["record", "wait"]), event), step(stream, either(["record", "wait"]), event),
        step(just("host"), just("waits"), event), step(just("host"), just("syncs"), either(["a", "b", "c", "all"])),
        step(just("host"), either(["reads", "writes"]), either(ARRAYS)),
    )  # fmt: skip


class InOrder:
    """Runs each step at once."""

    def __init__(self) -> None:
        self.memory = {name: np.zeros(NBYTES, np.uint8) for name in "xyhi"}

    def part(self, text: str) -> np.ndarray:
        name, start, stop = parse_range(text)
        return self.memory[name][start:stop]

    def do(self, step: Step, value: int) -> None:
        if step.verb in ("write", "writes"):
            self.part(step.words[0])[:] = value
        elif step.verb in ("put", "get"):
            self.part(step.words[1])[:] = self.part(step.words[0])


@pytest.mark.parametrize("kind", ["host", "cuda"])
@settings(max_examples=60)
@given(program=st.lists(steps(), max_size=25))
def test_what_is_accepted_runs_as_if_one_by_one(program: list[Step], kind: str):
    player, core, wanted = Player(fake_device() if kind == "cuda" else None), CorePlayer(), InOrder()
    for name in "xy":
        player.stream("a").fill(player.view(name), 0)
    player.stream("a").synchronize()
    # A staged copy has read its array when the call returns; the detector's ``put`` reads late.
    staged = player.bench.device.stages_copies
    for number, step in enumerate(program):
        player.value = number + 1
        finding = player.refusal(step)
        if not staged:
            conflict = core.do(step)
            assert (finding and finding.code) == (conflict and conflict.code), (number, step)
        if finding is None:
            wanted.do(step, number + 1)
    player.bench.device.synchronize()
    for name in "xy":
        found = player.bench.get(player.view(name))
        np.testing.assert_array_equal(found, wanted.memory[name], name)
    for name in player.arrays:
        np.testing.assert_array_equal(player.arrays[name], wanted.memory[name], name)
