"""PyTorch #192061: a graph was captured in a thread whose end freed the workspace that the graph names.

Workspaces of a library became thread-local. A short-lived worker captured a product, ended, and took the
workspace with it; the replay then faulted inside the library's kernel, which was not at fault. Here a captured
graph pins its workspace: the free is refused in the thread that tries it, and the replay is right.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engines import TARGET, Bench, increment, scale_by
from fake_cublas import blas_device

from instrumentation.blas import product
from instrumentation.errors import FindingError
from instrumentation.handles import LibraryHandle
from instrumentation.levels import Level

N = 64


class Engine:
    """A product that works in a workspace: y = workspace = 3 x, plus 1."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.arena = self.bench.arena(1 << 14)
        self.x, self.y = (self.bench.put(self.arena, np.ones(N, np.float32), name) for name in "xy")
        self.graph = None
        self.errors = []

    def workspace(self):
        return self.arena.reserve(4 * N, owner=TARGET, name="gemm workspace").unwrap()

    def capture(self, workspace) -> None:
        stream, view = self.bench.stream, workspace.view(np.float32, N)
        stream.begin_capture()
        stream.launch(scale_by, 2, {"x": self.x, "y": view, "factor": 3.0, "offset": 0})
        stream.launch(increment, 2, {"y": view})
        stream.launch(scale_by, 2, {"x": view, "y": self.y, "factor": 1.0, "offset": 0})
        self.graph = stream.end_capture("gemm")

    def faulty_worker(self) -> None:
        """Its workspace is as old as the thread."""
        workspace = self.workspace()
        try:
            self.capture(workspace)
        finally:
            try:
                workspace.free()
            except FindingError as error:
                self.errors.append(error)

    def in_thread(self, work, *arguments) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        thread.join()

    def replay(self):
        self.bench.stream.replay(self.graph)
        return self.bench.get(self.y)


def test_the_first_report_names_workspace_and_graph_in_the_thread_that_frees(bench):
    engine = Engine(bench)
    engine.in_thread(engine.faulty_worker)
    [error] = engine.errors
    assert str(error).startswith("GRA001 free of a pinned buffer")
    [finding] = engine.bench.findings
    assert finding.buffer.name == "gemm workspace"
    assert finding.message.endswith("pinned by graph gemm")
    assert finding.access[0].function == "Engine.faulty_worker"
    np.testing.assert_array_equal(engine.replay(), np.full(N, 4))


def test_repaired_the_workspace_is_as_old_as_the_graph(bench):
    engine = Engine(bench)
    workspace = engine.workspace()
    engine.in_thread(engine.capture, workspace)
    np.testing.assert_array_equal(engine.replay(), np.full(N, 4))
    engine.graph.destroy()
    workspace.free()
    assert engine.bench.findings.list() == ()
    assert engine.bench.allocator.check_integrity() == []


class TestWithALibrary:
    """The same by a handle of a library, whose workspace it is."""

    def captured(self):
        bench = Bench(Level.AUDIT, device=blas_device())
        arena = bench.arena(1 << 18)
        x, weight, y = (bench.put(arena, np.ones((8, 8), np.float32), name) for name in ("x", "weight", "y"))
        handle = LibraryHandle(bench.device, bench.device.blas(), TARGET, "gemm")
        workspace = arena.reserve(1 << 16, owner=TARGET, name="gemm workspace").unwrap()
        handle.set_workspace(workspace.view(np.uint8, 1 << 16))
        handle.set_stream(bench.stream)
        bench.stream.begin_capture()
        bench.stream.call(product(handle, x, weight, y))
        return bench, handle, workspace, y, bench.stream.end_capture("gemm")

    def test_the_worker_ends_and_takes_handle_and_workspace_with_it(self):
        bench, handle, workspace, y, graph = self.captured()
        handle.destroy()
        with pytest.raises(FindingError, match="GRA001 free of a pinned buffer"):
            workspace.free()
        bench.stream.replay(graph)
        np.testing.assert_array_equal(bench.get(y), np.full((8, 8), 8))

    def test_repaired_they_are_as_old_as_the_graph(self):
        bench, handle, workspace, y, graph = self.captured()
        bench.stream.replay(graph)
        np.testing.assert_array_equal(bench.get(y), np.full((8, 8), 8))
        graph.destroy()
        handle.destroy()
        workspace.free()
        assert bench.findings.list() == ()
