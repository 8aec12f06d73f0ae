"""Level trap on the CUDA device, over a fake driver: reports, shadows and marks; kernels run by the host's lowering."""

from __future__ import annotations

import gc

import numpy as np
import planted_kernels
import pytest
from fake_cuda import fake_device
from planted_faults import PLANTED, N
from planted_kernels import line_at, shifted
from trap_world import TARGET, World

from instrumentation.allocator import Allocator
from instrumentation.devices.cuda_trap import _REPORTS
from instrumentation.errors import FindingError
from instrumentation.levels import Level


@pytest.fixture
def world():
    return World(device=fake_device())


def line(world, **more):
    return world.bind(
        {"x": np.arange(N, dtype=np.float32), "y": np.zeros(N, np.float32), "n": N}
        | {"load_at": 0, "store_at": 0}
        | more
    )


def said(world):
    return [(finding.code, finding.argument, finding.count) for finding in world.findings]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
class TestPlantedFaults:
    def test_a_fault_is_found_at_its_line_and_argument(self, world, fault):
        found = world.launch(fault.kernel, fault.grid_of("bad"), fault.arguments("bad"))
        assert tuple(finding.code for finding in found) == fault.codes
        finding = found[0]
        assert finding.argument == fault.argument
        frames = finding.access[: len(fault.marks)]
        assert [frame.line for frame in frames] == [line_at(mark) for mark in fault.marks]
        assert {frame.file for frame in frames} == {planted_kernels.__file__}
        assert finding.access[len(fault.marks)].function == "World.launch"
        assert fault.says in finding.message
        assert (finding.stream, finding.actor, finding.device) == ("target.0", "target", "cuda:0")
        assert finding.launch is not None
        if fault.thread is not None:
            assert finding.thread == fault.thread
        if finding.buffer is not None:
            assert (finding.buffer.name, finding.buffer.owner) == (fault.argument, "target")
        assert world.allocator.check_integrity() == []

    def test_its_twin_is_not(self, world, fault):
        assert world.launch(fault.kernel, fault.grid_of("fixed"), fault.arguments("fixed")) == ()


class TestReports:
    def test_a_launch_reports_each_run_of_it(self, world):
        arguments = line(world, n=64)
        prepared = world.stream.prepare(shifted, 2, arguments)
        for turn in range(3):
            world.stream.launch_prepared(prepared)
            world.stream.synchronize()
            assert said(world) == [("MEM010", "x", 24 * (turn + 1)), ("MEM011", "y", 24 * (turn + 1))]

    def test_what_was_reported_is_not_reported_again(self, world):
        world.launch(shifted, 2, {"x": np.ones(N, np.float32), "y": np.ones(N, np.float32), "n": N + 1}
                     | {"load_at": 0, "store_at": 0})  # fmt: skip
        before = said(world)
        world.stream.launch(shifted, 2, line(world))
        world.stream.synchronize()
        assert said(world) == before

    def test_a_graph_reports_each_replay_with_the_launch_and_the_stream_it_ran_on(self, world):
        arguments, fine = line(world, n=64), line(world)
        world.stream.synchronize()
        world.stream.begin_capture()
        world.stream.launch(shifted, 2, fine)
        world.stream.launch(shifted, 2, arguments)
        graph = world.stream.end_capture("step")
        other = world.device.create_stream(owner=TARGET, name="other")
        for _ in range(2):
            other.replay(graph)
            other.synchronize()
        assert said(world) == [("MEM010", "x", 48), ("MEM011", "y", 48)]
        assert {finding.stream for finding in world.findings} == {"other"}
        assert {finding.launch for finding in world.findings} == {graph.captured[1].number}
        graph.destroy()

    def test_launches_share_reports_one_after_the_other(self, world):
        for _ in range(3 * _REPORTS):
            world.stream.launch(shifted, 2, line(world, n=8))
            world.stream.synchronize()
            for buffer in list(world.arena.buffers.values()):
                buffer.free()
        gc.collect()
        assert len(world.device.context.reports) <= 2 * _REPORTS

    def test_many_in_the_queue_have_each_their_own(self, world):
        arguments = line(world)
        for n in range(2 * _REPORTS):
            world.stream.launch(shifted, 2, arguments | {"n": N + n % 2})
        world.stream.synchronize()
        assert said(world) == [("MEM010", "x", _REPORTS), ("MEM011", "y", _REPORTS)]

    def test_their_memory_is_in_the_account(self, world):
        world.stream.launch(shifted, 2, line(world))
        rows = {name: usage for _, name, usage in world.device.context.account.rows}
        assert rows["reports of checked launches"].device > 0
        world.stream.synchronize()

    def test_a_callback_that_raises_reaches_who_waits_and_the_rest_is_reported(self, world):
        world.findings._on_finding = lambda finding: (_ for _ in ()).throw(ValueError(finding.code))
        world.stream.launch(shifted, 2, line(world, n=64))
        with pytest.raises(ValueError, match="MEM010"):
            world.stream.synchronize()
        assert [finding.code for finding in world.findings] == ["MEM010", "MEM011"]


class TestShadows:
    def test_what_a_kernel_wrote_is_written(self, world):
        arguments = line(world, y=("float32", (N,)))
        world.stream.launch(shifted, 2, arguments)
        world.stream.launch(shifted, 2, arguments | {"x": arguments["y"], "y": arguments["x"]})
        world.stream.synchronize()
        assert world.findings.list() == ()

    def test_a_copy_of_unwritten_memory_is_unwritten(self, world):
        arguments = line(world, x=(np.arange(N, dtype=np.float32), 4 * 7))
        copied = world.array("copied", ("float32", (N,)))
        world.stream.fill(copied, 0)
        world.stream.copy(copied, arguments["x"])
        world.stream.launch(shifted, 2, arguments | {"x": copied})
        world.stream.synchronize()
        (finding,) = world.findings
        assert (finding.code, finding.buffer.name, finding.count) == ("MEM012", "copied", N - 7)

    def test_a_copy_of_written_memory_is_written(self, world):
        arguments = line(world)
        copied = world.array("copied", ("float32", (N,)))
        world.stream.copy(copied, arguments["x"])
        world.stream.launch(shifted, 2, arguments | {"x": copied})
        world.stream.synchronize()
        assert world.findings.list() == ()

    def test_memory_that_is_reserved_again_is_unwritten(self):
        world = World(device=fake_device(), quarantine_bytes=0)
        arguments = line(world)
        world.stream.launch(shifted, 2, arguments)
        world.stream.synchronize()
        arguments["x"].buffer.free()
        again = world.array("again", ("float32", (N,)))
        assert again.address == arguments["x"].address
        world.stream.launch(shifted, 2, arguments | {"x": again})
        world.stream.synchronize()
        assert [(f.code, f.buffer.name) for f in world.findings] == [("MEM012", "again")]

    def test_what_copies_wrote_whole_is_not_looked_up(self, world):
        arguments = line(world, y=("float32", (N,)))
        prepared = world.stream.prepare(shifted, 2, arguments)
        report, *distances = prepared.trap.slots
        assert report
        assert distances == [0, world.arena.shadow.delta]
        world.stream.fill(arguments["y"], 0)
        assert prepared.trap.slots[1:] == [0, 0]


class TestFreedMemory:
    def queued(self, world):
        """A launch that waits behind the marks of a free that nobody refuses."""
        world.allocator.watch_frees(None)
        arguments = line(world)
        world.stream.synchronize()
        world.stream.launch(shifted, 2, arguments)
        return arguments

    @pytest.mark.parametrize(("argument", "mark", "how"), [("x", "load", "load"), ("y", "store", "store")])
    def test_freed_under_queued_work(self, world, argument, mark, how):
        view = self.queued(world)[argument]
        view.buffer.free()
        world.device.settle()
        world.stream.synchronize()
        assert said(world) == [("MEM013", argument, N)]
        (finding,) = world.findings
        assert finding.source.line == line_at(mark)
        assert finding.free[0].function == "TestFreedMemory.test_freed_under_queued_work"
        assert f"the {how} " in finding.notes[0]
        assert world.allocator.check_integrity() == []

    def test_a_graph_that_is_stale(self, world):
        world.allocator.watch_frees(None)
        arguments = line(world)
        world.stream.synchronize()
        world.stream.begin_capture()
        world.stream.launch(shifted, 2, arguments)
        graph = world.stream.end_capture("step")
        world.stream.replay(graph)
        world.stream.synchronize()
        assert world.findings.list() == ()
        world.stream.replay(graph)
        # Destroying a graph waits for it: what is stale is its memory, which is given up behind its back.
        arguments["x"].buffer.arena.shadow.mark(arguments["x"].address, arguments["x"].nbytes, 0x80)
        world.device.settle()
        world.stream.synchronize()
        assert said(world) == [("MEM013", "x", N)]
        graph.destroy()

    def test_a_view_that_is_stale_when_it_is_queued(self, world):
        """The monitor refuses such a launch; were it queued, nothing would be touched."""
        arguments = line(world)
        prepared = world.stream.prepare(shifted, 2, arguments)
        world.stream.synchronize()
        arguments["y"].buffer.free()
        with pytest.raises(FindingError, match="MEM004"):
            world.stream.launch_prepared(prepared)
        world.stream._queue_launch(prepared)
        world.stream.synchronize()
        assert said(world)[1:] == [("MEM013", "y", N)]

    def test_what_the_audit_sees_is_refused_before_it_happens(self, world):
        arguments = line(world)
        world.stream.launch(shifted, 2, arguments)
        with pytest.raises(FindingError, match="STR012"):
            arguments["x"].buffer.free()
        world.stream.synchronize()
        assert [finding.code for finding in world.findings] == ["STR012"]


def test_below_the_level_kernels_are_plain():
    world = World(device=fake_device(), level=Level.AUDIT)
    prepared = world.stream.prepare(shifted, 2, line(world))
    assert prepared.trap is None
    assert not prepared.function.checked
    assert world.arena.shadow is None
    world.stream.synchronize()


def test_a_second_allocator_without_shadows_has_its_bounds_checked(world):
    allocator = Allocator(world.device, level=Level.TRAP, findings=world.findings)
    arena = allocator.reserve_arena(1 << 14, owner=TARGET, name="scratch").unwrap()
    view = world.array("kept", ("float32", (N,)), arena)
    world.stream.launch(shifted, 2, line(world, n=N + 1) | {"x": view})
    world.stream.synchronize()
    assert said(world) == [("MEM010", "x", 1), ("MEM011", "y", 1)]
