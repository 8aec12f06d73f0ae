"""llama.cpp #27817: the ``bool`` of a reservation was discarded, and a graph ran on an allocator that was half set up.

The caller grows its compute buffer for a longer prompt and goes on as if that had worked. Elsewhere that was a
segmentation fault some calls later; here the first report is the reservation itself.
"""

from __future__ import annotations

import pytest
from engines import TARGET, Bench, increment

from instrumentation.errors import FindingError, OutOfMemoryError
from instrumentation.levels import Level

SHORT, LONG = 4096, 1 << 20


class Scheduler:
    """Reserves what a graph needs, then runs it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.arena = bench.arena(1 << 16)
        self.compute = self.arena.reserve(SHORT, owner=TARGET, name="compute").unwrap()

    def alloc_splits(self, nbytes: int) -> None:
        """As it was: nobody asks whether there is memory."""
        if nbytes > self.compute.nbytes:
            self.arena.reserve(nbytes, owner=TARGET, name="compute")

    def alloc_splits_repaired(self, nbytes: int) -> None:
        """Raises what the reservation failed with; then the old buffer is there as before."""
        if nbytes > self.compute.nbytes:
            self.compute = self.arena.reserve(nbytes, owner=TARGET, name="compute").unwrap()

    def run(self) -> None:
        view = self.compute.view("float32", self.compute.nbytes // 4)
        self.bench.stream.fill(view, 0)
        self.bench.stream.launch(increment, SHORT // 128, {"y": view})
        self.bench.stream.synchronize()


@pytest.fixture(params=[Level.OFF, Level.GUARD], ids=str)
def bench(request):
    return Bench(request.param)


def test_the_first_report_is_the_reservation_that_nobody_looked_at(bench):
    scheduler = Scheduler(bench)
    scheduler.alloc_splits(LONG)
    [finding] = bench.findings
    assert finding.code == "RES001"
    assert finding.actor == "target"
    assert f"{LONG} bytes for compute failed, and it was dropped" in finding.message
    assert finding.allocation[0].function == "Scheduler.alloc_splits"
    scheduler.run()
    assert len(bench.findings) == 1, "the allocator is as it was"


def test_a_dropped_success_is_found_too(bench):
    Scheduler(bench).alloc_splits(2 * SHORT)
    [finding] = bench.findings
    assert finding.code == "RES001"
    assert "compute succeeded, and it was dropped" in finding.message
    assert bench.allocator.snapshot().used.current == SHORT


def test_taking_the_memory_unchecked_is_refused(bench):
    arena = Scheduler(bench).arena
    with pytest.raises(
        FindingError, match=r"RES001 .*\n.*its value was taken before its result was looked at"
    ):
        arena.reserve(LONG, owner=TARGET, name="compute").value.view("float32", 1)


def test_repaired_the_failure_is_the_callers_and_a_shorter_prompt_runs(bench):
    scheduler = Scheduler(bench)
    with pytest.raises(OutOfMemoryError, match=r"target cannot reserve .* for compute in arena"):
        scheduler.alloc_splits_repaired(LONG)
    scheduler.run()
    scheduler.alloc_splits_repaired(2 * SHORT)
    scheduler.run()
    assert bench.findings.list() == ()
