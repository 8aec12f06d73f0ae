"""vllm-ascend #13501: a block of the KV cache was freed while a step that had been sent off still used it.

The scheduler runs ahead of the device: it moves the window of a request when it sends a step off, and frees the
block that has left the window, but an earlier step is still queued that has it in its block table. The queued
step's write is found in the poison of the freed block, whose report says where it was freed. Its reads leave no trace
in memory; at level audit the free itself is refused, and names the step that may still read.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, scale_by, write_from

from instrumentation.errors import FindingError

BLOCK = 8


@pytest.fixture
def bench():
    """The host device alone: on a GPU the step may end before the poison is there, and then it overwrites nothing."""
    return Bench()


class Scheduler:
    """A request whose KV cache is a list of blocks, one token a step, the newest ``window`` blocks kept."""

    def __init__(self, bench: Bench, window: int = 2) -> None:
        self.bench = bench
        self.window = window
        self.arena = self.bench.arena(1 << 14)
        arena = self.bench.arena(1 << 12)
        self.token = self.bench.put(arena, np.ones(1, np.float32), "token")
        self.scores = self.bench.put(arena, np.zeros(BLOCK, np.float32), "scores")
        self.processed = bench.device.create_event(owner=TARGET, name="step processed")
        self.blocks, self.made = [], 0

    def new_block(self) -> None:
        name = f"kv.block.{self.made}"
        self.made += 1
        self.blocks.append(self.arena.reserve(4 * BLOCK, owner=TARGET, name=name).unwrap())

    def send_off(self) -> None:
        """Queue a step that writes into every block of its table."""
        for block in self.blocks:
            view = block.view(np.float32, BLOCK)
            self.bench.stream.launch(write_from, 1, {"x": self.token, "y": view, "first": 0, "count": BLOCK})

    def send_off_reads(self) -> None:
        """Queue a step that only reads the blocks of its table."""
        for block in self.blocks:
            view = block.view(np.float32, BLOCK)
            launch = {"x": view, "y": self.scores, "factor": 1.0, "offset": 0}
            self.bench.stream.launch(scale_by, 1, launch)

    def slide(self) -> None:
        """Free what has left the window by the count of tokens that were sent off."""
        while len(self.blocks) > self.window:
            self.blocks.pop(0).free()

    def faulty(self, n_blocks: int) -> None:
        for _ in range(n_blocks):
            self.new_block()
            self.send_off()
            self.slide()
        self.bench.stream.synchronize()

    def faulty_reads(self, n_blocks: int) -> None:
        """Blocks that were written long ago, and that queued steps read."""
        for _ in range(n_blocks):
            self.new_block()
            self.bench.stream.fill(self.blocks[-1].view(np.float32, BLOCK), 0)
        self.bench.stream.synchronize()
        self.send_off_reads()
        self.slide()

    def repaired_reads(self, n_blocks: int) -> None:
        """An event behind each step; what it read is freed when it has passed."""
        for _ in range(n_blocks):
            self.new_block()
            self.bench.stream.fill(self.blocks[-1].view(np.float32, BLOCK), 0)
            self.send_off_reads()
            self.bench.stream.record(self.processed)
            self.processed.synchronize()
            self.slide()

    def repaired(self, n_blocks: int) -> None:
        """The window moves by the count of tokens that were processed."""
        for _ in range(n_blocks):
            self.new_block()
            self.send_off()
            self.bench.stream.synchronize()
            self.slide()


def test_the_first_report_names_the_block_and_where_it_was_freed(bench):
    scheduler = Scheduler(bench)
    scheduler.faulty(3)
    found = scheduler.bench.allocator.check_integrity()
    assert [finding.code for finding in found] == ["MEM003"]
    [finding] = found
    assert (finding.buffer.name, finding.buffer.owner) == ("kv.block.0", "target")
    assert (finding.offset, finding.size) == (0, 4 * BLOCK)
    assert finding.free[0].function == "Scheduler.slide"
    assert finding.allocation[0].function == "Scheduler.new_block"


def test_a_step_that_is_sent_off_after_the_free_is_refused(bench):
    """The other order: a table that was made before the window moved."""
    scheduler = Scheduler(bench)
    for _ in range(3):
        scheduler.new_block()
    table = list(scheduler.blocks)
    scheduler.slide()
    views = {"x": scheduler.token, "y": None, "first": 0, "count": 1}
    with pytest.raises(FindingError, match="MEM004"):
        scheduler.bench.stream.launch(write_from, 1, views | {"y": table[0].view(np.float32, BLOCK)})
    [finding] = scheduler.bench.findings
    assert finding.buffer.name == "kv.block.0"
    assert finding.free[0].function == "Scheduler.slide"


def test_repaired_blocks_are_freed_behind_the_steps_that_use_them(bench):
    scheduler = Scheduler(bench)
    scheduler.repaired(6)
    assert scheduler.bench.allocator.check_integrity() == []
    assert scheduler.bench.findings.list() == ()
    assert [block.name for block in scheduler.blocks] == ["kv.block.4", "kv.block.5"]


def test_at_level_audit_the_free_is_refused_and_names_the_step_that_may_still_read(audited):
    scheduler = Scheduler(audited)
    with pytest.raises(FindingError, match="STR012"):
        scheduler.faulty_reads(3)
    [finding] = audited.findings
    assert (finding.code, finding.buffer.name, finding.buffer.owner) == ("STR012", "kv.block.0", "target")
    assert "would give up bytes [0, 32) of kv.block.0" in finding.message
    assert "kernel scale_by" in finding.message
    assert "on stream target may still read" in finding.message
    assert finding.access[0].function == "Scheduler.slide"
    assert finding.previous[0].function == "Scheduler.send_off_reads"
    audited.stream.synchronize()
    assert audited.allocator.check_integrity() == []


def test_at_level_audit_repaired_blocks_are_freed_behind_the_steps_that_read_them(audited):
    scheduler = Scheduler(audited)
    scheduler.repaired_reads(6)
    assert audited.findings.list() == ()
    assert [block.name for block in scheduler.blocks] == ["kv.block.4", "kv.block.5"]
