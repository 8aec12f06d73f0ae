"""llama.cpp #26738: a memory pool gave its buffers back to the driver, and a replayed graph wrote to one of them.

A launch takes scratch memory from a pool and returns it, while the graph that is being captured keeps its
address. The pool is flushed when memory runs short: elsewhere the next replay is a page fault. Here the flush
is refused, and names the graph that is in its way.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, increment, scale_by

from instrumentation.errors import FindingError

N = 64


class Pool:
    """Scratch memory in an arena of its own, kept until it is flushed."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.open()

    def open(self) -> None:
        self.arena = self.bench.arena(1 << 12)
        self.scratch = self.arena.reserve(4 * N, owner=TARGET, name="pool.scratch").unwrap()

    def flush(self) -> None:
        """Give the memory back to the driver."""
        self.arena.release()


class Decoder:
    """One captured step: y = scratch = 2 x, plus 1."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        arena = self.bench.arena(1 << 12)
        self.x, self.y = (self.bench.put(arena, np.ones(N, np.float32), name) for name in "xy")
        self.pool = Pool(self.bench)
        self.graph = self.capture()

    def capture(self):
        stream, scratch = self.bench.stream, self.pool.scratch.view(np.float32, N)
        stream.begin_capture()
        stream.launch(scale_by, 2, {"x": self.x, "y": scratch, "factor": 2.0, "offset": 0})
        stream.launch(increment, 2, {"y": scratch})
        stream.launch(scale_by, 2, {"x": scratch, "y": self.y, "factor": 1.0, "offset": 0})
        return stream.end_capture("decode")

    def step(self):
        self.bench.stream.replay(self.graph)
        return self.bench.get(self.y)

    def faulty_shrink(self) -> None:
        """Memory runs short: what the pool holds is nobody's."""
        self.pool.flush()

    def repaired_shrink(self) -> None:
        """Graphs go first, and are captured again with what the pool gives then."""
        self.graph.destroy()
        self.pool.scratch.free()
        self.pool.flush()
        self.pool.open()
        self.graph = self.capture()


def test_the_first_report_names_the_graph_and_nothing_is_flushed(bench):
    decoder = Decoder(bench)
    np.testing.assert_array_equal(decoder.step(), np.full(N, 3))
    with pytest.raises(FindingError, match="GRA001"):
        decoder.faulty_shrink()
    [finding] = decoder.bench.findings
    assert finding.code == "GRA001"
    assert finding.buffer.name == "pool.scratch"
    assert finding.message == "pool.scratch of target cannot be freed while it is pinned by graph decode"
    assert finding.access[0].function == "Pool.flush"
    np.testing.assert_array_equal(decoder.step(), np.full(N, 3))


def test_repaired_the_graph_is_captured_anew(bench):
    decoder = Decoder(bench)
    decoder.step()
    decoder.repaired_shrink()
    np.testing.assert_array_equal(decoder.step(), np.full(N, 3))
    assert decoder.bench.findings.list() == ()
    assert decoder.bench.allocator.check_integrity() == []
