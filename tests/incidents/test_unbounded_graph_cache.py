"""ik_llama.cpp #2288: captured graphs were kept under the address of their first node, and none was ever dropped.

Graphs are built anew for each step, so addresses hardly repeat: the cache grows with each capture, and each
graph holds memory of the device. Elsewhere that ended as an invalid argument of a library in a product of layer
0. Here memory is reserved by name, so the first report is a reservation that fails and names what holds the
memory.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from engines import TARGET, Bench, increment

from instrumentation.reservation import ReservationError

N = 64
STEPS = 60
SHAPES = 3


class Cache:
    """Captured graphs by key, each with a workspace of its own."""

    def __init__(self, bench: Bench, bound: int | None) -> None:
        self.bench = bench
        self.arena = self.bench.arena(16 << 10)
        self.bound = bound
        self.graphs = OrderedDict()

    def run(self, key: object, address: int) -> None:
        if key not in self.graphs:
            if self.bound is not None and len(self.graphs) >= self.bound:
                graph, workspace = self.graphs.popitem(last=False)[1]
                graph.destroy()
                workspace.free()
            self.graphs[key] = self.capture(address)
        self.graphs.move_to_end(key)
        self.bench.stream.replay(self.graphs[key][0])
        self.bench.stream.synchronize()

    def capture(self, address: int):
        name = f"workspace of graph {address:#x}"
        workspace = self.arena.reserve(4 * N, owner=TARGET, name=name).unwrap()
        view = workspace.view(np.float32, N)
        self.bench.stream.fill(view, 0)
        self.bench.stream.begin_capture()
        self.bench.stream.launch(increment, 2, {"y": view})
        return self.bench.stream.end_capture(f"graph {address:#x}"), workspace


def steps():
    """(address of the first node, shape) of each step's graph."""
    return [(0x7F0000000000 + 0x1000 * i, i % SHAPES) for i in range(STEPS)]


def faulty(cache: Cache) -> None:
    for address, _ in steps():
        cache.run(address, address)


def repaired(cache: Cache) -> None:
    for address, shape in steps():
        cache.run(shape, address)


def test_the_first_report_names_the_graphs_that_hold_the_memory(bench):
    cache = Cache(bench, bound=None)
    with pytest.raises(ReservationError) as caught:
        faulty(cache)
    error = caught.value
    assert error.code == "RES002"
    assert error.owner == TARGET
    assert len(cache.graphs) < STEPS
    assert len(error.holders) == 5
    assert all(row.name.startswith("workspace of graph 0x7f") for row in error.holders)
    assert f"largest holders: {error.holders[0].name} of target" in str(error)


def test_a_bound_alone_keeps_memory_flat(bench):
    cache = Cache(bench, bound=4)
    faulty(cache)
    assert len(cache.graphs) == 4
    assert cache.bench.allocator.check_integrity() == []


def test_repaired_a_shape_is_captured_once(bench):
    cache = Cache(bench, bound=4)
    repaired(cache)
    assert list(cache.graphs) == list(range(SHAPES))
    assert [graph.launches for graph, _ in cache.graphs.values()] == [1] * SHAPES
    assert cache.bench.findings.list() == ()
    for graph, workspace in cache.graphs.values():
        graph.destroy()
        np.testing.assert_array_equal(
            cache.bench.get(workspace.view(np.float32, N)), np.full(N, STEPS // SHAPES)
        )
