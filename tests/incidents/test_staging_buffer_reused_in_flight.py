"""vllm #25279: page-locked arrays of the host were filled for the next step while their copies were queued.

Inputs of each step are written into the same arrays and copied without waiting, and the scheduler runs a step ahead of
the device. A wait at the start of the step was there; the arrays that were filled before it, such as those of sampling,
were not covered. Here filling an array whose copy is under way is refused, and the report says which copy.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, scale_by

from instrumentation.devices.host import HostDevice
from instrumentation.errors import FindingError
from instrumentation.levels import Level

N = 32


class Runner:
    """Steps with two inputs in arrays that are used again; y = x * 1 + step."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        arena = bench.arena()
        self.staging = {name: np.zeros(N, np.float32) for name in ("temperature", "positions")}
        self.inputs = {name: bench.put(arena, array, name) for name, array in self.staging.items()}
        self.out = [bench.put(arena, np.zeros(N, np.float32), f"step {i}") for i in range(4)]
        self.prepared = bench.device.create_event(owner=TARGET, name="inputs prepared")

    def fill(self, name: str, step: int) -> None:
        array = self.staging[name]
        self.bench.device.host_access(array, "write")
        array[:] = step
        self.bench.stream.copy_in(self.inputs[name], array)

    def update_states(self, step: int) -> None:
        self.fill("temperature", step)

    def execute(self, step: int) -> None:
        self.fill("positions", step)
        for name in self.staging:
            launch = {"x": self.inputs[name], "y": self.out[step], "factor": 1.0, "offset": 0}
            self.bench.stream.launch(scale_by, 1, launch)
        self.bench.stream.launch(
            scale_by, 1, {"x": self.inputs["temperature"], "y": self.out[step], "factor": 1.0, "offset": step}
        )
        self.bench.stream.record(self.prepared)

    def faulty(self) -> None:
        """The wait stands behind what is written first."""
        for step in range(4):
            self.update_states(step)
            self.prepared.synchronize()
            self.execute(step)

    def repaired(self) -> None:
        for step in range(4):
            self.prepared.synchronize()
            self.update_states(step)
            self.execute(step)

    def results(self) -> list[float]:
        return [float(self.bench.get(out)[0]) for out in self.out]


def test_the_first_report_names_the_array_that_is_filled_too_early(audited_host):
    runner = Runner(audited_host)
    with pytest.raises(FindingError, match="STR013"):
        runner.faulty()
    [finding] = audited_host.findings
    assert finding.code == "STR013"
    assert "the host would write bytes [0, 128) of the host array float32 (32,)" in finding.message
    assert "copy_in of target on stream target may still read" in finding.message
    for stack in (finding.access, finding.previous):
        assert {"Runner.fill", "Runner.update_states"} <= {frame.function for frame in stack}


def test_repaired_nothing_is_filled_before_the_wait(audited):
    runner = Runner(audited)
    runner.repaired()
    assert runner.results() == [0, 2, 4, 6]
    assert audited.findings.list() == ()


def test_what_it_looks_like_without_the_audit():
    """A device that is behind reads what is meant for the next step."""
    found = {"faulty": set(), "repaired": set()}
    for seed in range(8):
        for name, results in found.items():
            runner = Runner(Bench(Level.OFF, device=HostDevice(1, schedule_seed=seed)))
            getattr(runner, name)()
            results.add(tuple(runner.results()))
    assert found["repaired"] == {(0, 2, 4, 6)}
    assert found["faulty"] - {(0, 2, 4, 6)}
