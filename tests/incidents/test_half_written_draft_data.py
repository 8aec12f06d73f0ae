"""sglang #22113: the plan stream copied draft tokens and positions that the main stream was still writing.

Planning of the next verification overlaps with the draft on a stream of its own. Nothing put its copies behind the
kernels that build the draft tree, and on hardware that runs both at a time half-written positions ended in a kernel's
illegal access. Waiting after the copies changes nothing. Here the first copy is refused, and names the kernel that may
still write.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import DRAFT, Bench, scale_by

from instrumentation.devices.host import HostDevice
from instrumentation.errors import FindingError
from instrumentation.levels import Level

N = 64
NAMES = ("draft_token", "positions")


class Worker:
    """A draft that is built on one stream and planned with on another."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        device, arena = bench.device, bench.arena(owner=DRAFT)
        self.main, self.plan = (device.create_stream(owner=DRAFT, name=name) for name in ("main", "plan"))
        self.seed = bench.put(arena, np.ones(N, np.float32), "seed", DRAFT)
        self.built = {name: bench.put(arena, np.zeros(N, np.float32), name, DRAFT) for name in NAMES}
        self.planned = {
            name: bench.put(arena, np.zeros(N, np.float32), f"graph.{name}", DRAFT) for name in NAMES
        }
        self.done = device.create_event(owner=DRAFT, name="draft done")

    def build_tree(self, step: int) -> None:
        for name in NAMES:
            launch = {"x": self.seed, "y": self.built[name], "factor": 1.0, "offset": step}
            self.main.launch(scale_by, 2, launch)

    def populate(self) -> None:
        """Copies within the device, into what the captured graph reads."""
        for name in NAMES:
            self.plan.copy(self.planned[name], self.built[name])

    def faulty(self, step: int) -> None:
        self.build_tree(step)
        self.populate()
        # Too late: it puts the verification behind the draft, not the copies.
        self.main.record(self.done)
        self.plan.wait(self.done)

    def repaired(self, step: int) -> None:
        self.build_tree(step)
        self.main.record(self.done)
        self.plan.wait(self.done)
        self.populate()
        self.plan.synchronize()


def read(worker: Worker) -> list[float]:
    return [float(worker.bench.get(worker.planned[name], worker.plan)[0]) for name in NAMES]


def test_the_first_report_names_the_copy_and_the_kernel_that_may_still_write(audited):
    worker = Worker(audited)
    with pytest.raises(FindingError, match="STR011"):
        worker.faulty(1)
    [finding] = audited.findings
    assert (finding.code, finding.buffer.name, finding.stream) == ("STR011", "draft_token", "plan")
    assert "copy of draft on stream plan would read bytes [0, 256) of draft_token" in finding.message
    assert "kernel scale_by" in finding.message
    assert "on stream main may still write" in finding.message
    assert "wait for it on stream plan before copy" in finding.message
    assert "Worker.populate" in {frame.function for frame in finding.access}
    assert "Worker.build_tree" in {frame.function for frame in finding.previous}


def test_repaired_the_copies_are_behind_the_draft(audited):
    worker = Worker(audited)
    for step in range(3):
        worker.repaired(step)
        assert read(worker) == [step + 1, step + 1]
    assert audited.findings.list() == ()


def test_what_it_looks_like_without_the_audit():
    """Some orders take the positions of the step before."""
    found = {"faulty": set(), "repaired": set()}
    for seed in range(12):
        for name, results in found.items():
            worker = Worker(Bench(Level.OFF, device=HostDevice(1, schedule_seed=seed)))
            getattr(worker, name)(4)
            results.add(tuple(read(worker)))
    assert found["repaired"] == {(5, 5)}
    assert found["faulty"] - {(5, 5)}
