"""ggml #1178: a copy to the host was queued into a buffer that was freed before the copy ran.

The buffer is a local variable of the function that asks for the bytes. Whoever gets its memory next finds it
overwritten at some later time, far from the cause. Here the function says that it gives the array up, and is refused
while a copy is to fill it.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import Bench, increment

from instrumentation.errors import FindingError

N = 64


class Reader:
    """Takes rows of a tensor to the host."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.tensor = bench.put(bench.arena(), np.zeros(N, np.float32), "tensor")

    def step(self) -> None:
        self.bench.stream.launch(increment, 2, {"y": self.tensor})

    def faulty_peek(self) -> None:
        """Asks for the first element and goes away before it is there."""
        local = np.zeros(N, np.float32)
        self.bench.stream.copy_out(local, self.tensor)
        self.bench.device.host_access(local, "free")

    def repaired_peek(self) -> float:
        local = np.zeros(N, np.float32)
        self.bench.stream.copy_out(local, self.tensor)
        self.bench.stream.synchronize()
        self.bench.device.host_access(local, "free")
        return float(local[0])


def test_the_first_report_names_the_buffer_and_the_copy_that_is_to_fill_it(audited):
    reader = Reader(audited)
    reader.step()
    with pytest.raises(FindingError, match="STR013"):
        reader.faulty_peek()
    [finding] = audited.findings
    assert finding.code == "STR013"
    assert "the host would give up bytes [0, 256) of the host array float32 (64,)" in finding.message
    assert "copy_out of target on stream target may still fill" in finding.message
    assert finding.access[0].function == "Reader.faulty_peek"
    assert finding.previous[0].function == "Reader.faulty_peek"
    assert finding.access[0].line > finding.previous[0].line


def test_waiting_for_another_stream_does_not_help(audited):
    reader = Reader(audited)
    reader.step()
    other = audited.device.create_stream(owner=audited.stream.owner, name="other")
    local = np.zeros(N, np.float32)
    audited.stream.copy_out(local, reader.tensor)
    other.synchronize()
    with pytest.raises(FindingError, match="STR013"):
        audited.device.host_access(local, "free")


def test_repaired_the_buffer_lives_until_the_copy_is_done(audited):
    reader = Reader(audited)
    for step in range(3):
        reader.step()
        assert reader.repaired_peek() == step + 1
    assert audited.findings.list() == ()
