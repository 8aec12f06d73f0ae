"""llama.cpp #18310 and #8897: an array of the host was used while a copy that had been queued for it was not done.

#18310: ``decode`` queues the copy of the logits and returns, and the caller takes them without waiting. #8897: inputs
go from one backend to the next by copies that are queued, through a ring of arrays, and the first backend wrote an
array anew before its copy had run. Both are reads of what lies there by chance. Here whoever uses the array says so,
and is refused as long as the copy is under way.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import Bench, increment, scale_by

from instrumentation.errors import FindingError

N = 64


class Decoder:
    """Logits that are copied to the host as soon as they are computed."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.logits = np.zeros(N, np.float32)
        self.result = bench.put(bench.arena(), np.ones(N, np.float32), "result_output")

    def decode(self) -> None:
        self.bench.stream.launch(increment, 2, {"y": self.result})
        self.bench.stream.copy_out(self.logits, self.result)

    def sample(self) -> float:
        self.device.host_access(self.logits, "read")
        return float(self.logits[0])

    def faulty(self) -> float:
        self.decode()
        return self.sample()

    def repaired(self) -> float:
        self.decode()
        self.bench.stream.synchronize()
        return self.sample()


def test_the_first_report_names_the_copy_that_brings_the_logits(audited):
    decoder = Decoder(audited)
    with pytest.raises(FindingError, match="STR013"):
        decoder.faulty()
    [finding] = audited.findings
    assert finding.code == "STR013"
    assert "the host would read bytes [0, 256) of the host array float32 (64,)" in finding.message
    assert "copy_out of target on stream target may still fill" in finding.message
    assert finding.access[0].function == "Decoder.sample"
    assert finding.previous[0].function == "Decoder.decode"
    assert finding.notes[1].endswith("is there when the host has waited for it")


def test_repaired_the_logits_are_those_of_each_step(audited):
    decoder = Decoder(audited)
    assert [decoder.repaired() for _ in range(3)] == [2, 3, 4]
    assert audited.findings.list() == ()


class Backends:
    """The first backend is the host. What it computes goes to the second through two arrays in turn."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        arena = bench.arena()
        self.copies = [np.zeros(N, np.float32) for _ in range(2)]
        self.consumed = [
            bench.device.create_event(owner=bench.stream.owner, name=f"copy {i}") for i in range(2)
        ]
        self.x, self.y = (bench.put(arena, np.zeros(N, np.float32), name) for name in ("input", "sum"))

    def compute(self, batch: int) -> None:
        """The first backend's part."""
        copy = self.copies[batch % 2]
        self.bench.device.host_access(copy, "write")
        copy[:] = batch

    def send(self, batch: int) -> None:
        self.bench.stream.copy_in(self.x, self.copies[batch % 2])
        self.bench.stream.launch(scale_by, 2, {"x": self.x, "y": self.y, "factor": 1.0, "offset": batch * 10})

    def faulty(self) -> None:
        for batch in range(5):
            self.compute(batch)
            self.send(batch)

    def repaired(self) -> None:
        """An event for each array, waited for before it is written anew."""
        for batch in range(5):
            self.consumed[batch % 2].synchronize()
            self.compute(batch)
            self.send(batch)
            self.bench.stream.record(self.consumed[batch % 2])


def test_an_array_that_is_written_anew_is_reported_with_the_copy_that_reads_it(audited_host):
    backends = Backends(audited_host)
    with pytest.raises(FindingError, match="STR013"):
        backends.faulty()
    [finding] = audited_host.findings
    assert "the host would write bytes [0, 256) of the host array" in finding.message
    assert "copy_in of target on stream target may still read" in finding.message
    assert finding.access[0].function == "Backends.compute"
    assert finding.previous[0].function == "Backends.send"


def test_repaired_each_array_waits_for_its_copy(audited):
    backends = Backends(audited)
    backends.repaired()
    assert (audited.get(backends.y) == 44).all()
    assert audited.findings.list() == ()
