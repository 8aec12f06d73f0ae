"""llama.cpp #27572: inputs of the next micro-batch were copied over those that a queued graph had yet to read.

With several slots and prompts of more than one micro-batch, drafts were accepted never. Inputs live in one tensor,
written by a stream of its own while the graph of the micro-batch before is queued on another. Each is in order with
itself, and nothing puts the second copy behind the first graph. Here that copy is refused, and names the graph's
kernel.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, scale_by

from instrumentation.devices.host import HostDevice
from instrumentation.errors import FindingError
from instrumentation.levels import Level

N = 64


class Decoder:
    """Micro-batches whose inputs come on one stream and whose graphs run on another: y = 2 x."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        arena = bench.arena()
        self.x = bench.put(arena, np.zeros(N, np.float32), "inp_hidden")
        self.y = [bench.put(arena, np.zeros(N, np.float32), f"h_nextn.{i}") for i in range(3)]
        self.transfer = bench.device.create_stream(owner=TARGET, name="transfer")
        self.consumed = bench.device.create_event(owner=TARGET, name="inputs consumed")

    def set_inputs(self, value: int) -> None:
        """Returns when the bytes are there, as far as the transfer stream knows."""
        self.transfer.copy_in(self.x, np.full(N, value, np.float32))
        self.transfer.synchronize()

    def compute(self, i: int) -> None:
        launch = {"x": self.x, "y": self.y[i], "factor": 2.0, "offset": 0}
        self.bench.stream.launch(scale_by, 2, launch)

    def faulty(self) -> None:
        for i in range(3):
            self.set_inputs(i)
            self.compute(i)

    def repaired(self) -> None:
        """A copy waits for the graph that reads what it writes over."""
        for i in range(3):
            self.transfer.wait(self.consumed)
            self.set_inputs(i)
            self.compute(i)
            self.bench.stream.record(self.consumed)

    def results(self) -> list[float]:
        return [float(self.bench.get(y)[0]) for y in self.y]


def test_the_first_report_names_the_copy_and_the_kernel_whose_input_it_is(audited):
    decoder = Decoder(audited)
    with pytest.raises(FindingError, match="STR011"):
        decoder.faulty()
    [finding] = audited.findings
    assert (finding.code, finding.buffer.name, finding.stream) == ("STR011", "inp_hidden", "transfer")
    assert (finding.offset, finding.size) == (0, 4 * N)
    assert "kernel scale_by" in finding.message
    assert "on stream target may still read" in finding.message
    assert "Decoder.set_inputs" in {frame.function for frame in finding.access}
    assert "Decoder.compute" in {frame.function for frame in finding.previous}


def test_repaired_each_graph_reads_its_own_inputs(audited):
    decoder = Decoder(audited)
    decoder.repaired()
    assert decoder.results() == [0, 2, 4]
    assert audited.findings.list() == ()


def test_what_it_looks_like_without_the_audit():
    """Orders that a device may choose give other results, and never once it is repaired."""
    found = {"faulty": set(), "repaired": set()}
    for seed in range(8):
        for name, results in found.items():
            decoder = Decoder(Bench(Level.OFF, device=HostDevice(1, schedule_seed=seed)))
            getattr(decoder, name)()
            results.add(tuple(decoder.results()))
    assert found["repaired"] == {(0, 2, 4)}
    assert found["faulty"] - {(0, 2, 4)}
