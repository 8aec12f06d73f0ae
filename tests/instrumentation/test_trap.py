"""Level trap on the host: planted faults are found where they are, their repaired twins are not."""

from __future__ import annotations

import gc

import numpy as np
import planted_kernels
import pytest
from planted_faults import PLANTED, N
from planted_kernels import line_at, selecting, shifted
from trap_world import TARGET, World

from instrumentation.allocator import Allocator
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, FindingError, OutOfMemoryError
from instrumentation.levels import Level
from instrumentation.reports.text import render


@pytest.fixture
def world():
    return World()


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
        assert finding.source == frames[0]
        assert frames[-1].function == fault.kernel.name == finding.kernel
        # The frame behind the kernel's is that of its launch.
        assert finding.access[len(fault.marks)].function == "World.launch"
        assert fault.says in finding.message
        assert (finding.stream, finding.actor, finding.device) == ("target.0", "target", "host")
        if fault.thread is not None:
            assert finding.thread == fault.thread
        if finding.buffer is not None:
            assert (finding.buffer.name, finding.buffer.owner) == (fault.argument, "target")
            assert finding.allocation

    def test_its_twin_is_not(self, world, fault):
        assert world.launch(fault.kernel, fault.grid_of("fixed"), fault.arguments("fixed")) == ()

    def test_nothing_but_what_is_reported_comes_of_it(self, world, fault):
        """Guards are whole, and memory of other buffers is as it was."""
        beside = world.array("beside", np.full(64, 7, np.uint8))
        world.launch(fault.kernel, fault.grid_of("bad"), fault.arguments("bad"))
        assert world.allocator.check_integrity() == []
        assert (world.read(beside) == 7).all()


def test_there_are_enough():
    assert len(PLANTED) >= 55
    assert len({fault.name for fault in PLANTED}) == len(PLANTED)


def line(world, **more):
    return world.bind(
        {"x": np.arange(N, dtype=np.float32), "y": np.zeros(N, np.float32), "n": N}
        | {"load_at": 0, "store_at": 0}
        | more
    )


class TestWhatABadAccessDoes:
    def test_a_load_gives_zero_and_a_store_is_dropped(self, world):
        arguments = line(world, load_at=1)
        world.stream.launch(shifted, 2, arguments)
        assert world.read(arguments["y"]).tolist() == [*range(1, N), 0]
        world.stream.launch(shifted, 2, arguments | {"load_at": 0, "store_at": 2})
        assert world.read(arguments["y"]).tolist() == [1, 2, *range(N - 2)]

    def test_a_read_of_unwritten_memory_gives_what_is_there(self):
        bits = []
        for level in (Level.GUARD, Level.TRAP):
            world = World(level=level)
            arguments = line(world, x=("float32", (N,)))
            world.stream.launch(shifted, 2, arguments)
            bits.append(world.read(arguments["y"]).tobytes())
        assert bits[0] == bits[1]
        assert len(world.findings) == 1

    def test_what_a_kernel_wrote_is_written(self, world):
        arguments = line(world, y=("float32", (N,)))
        world.stream.launch(shifted, 2, arguments)
        world.stream.launch(shifted, 2, arguments | {"x": arguments["y"], "y": arguments["x"]})
        world.stream.synchronize()
        assert world.findings.list() == ()

    def test_a_copy_of_unwritten_memory_is_unwritten(self, world):
        arguments = line(world, x=(np.arange(N, dtype=np.float32), 4 * 7))
        copied = world.array("copied", ("float32", (N,)))
        world.stream.copy(copied, arguments["x"])
        world.stream.launch(shifted, 2, arguments | {"x": copied})
        world.stream.synchronize()
        (finding,) = world.findings
        assert (finding.code, finding.buffer.name, finding.count) == ("MEM012", "copied", N - 7)

    def test_what_was_filled_is_written(self, world):
        arguments = line(world, x=("float32", (N,)))
        world.stream.fill(arguments["x"], 0)
        world.stream.launch(shifted, 2, arguments)
        world.stream.synchronize()
        assert world.findings.list() == ()

    def test_memory_that_is_reserved_again_is_unwritten(self):
        world = World(quarantine_bytes=0)
        arguments = line(world)
        world.stream.launch(shifted, 2, arguments)
        world.stream.synchronize()
        arguments["x"].buffer.free()
        again = world.array("again", ("float32", (N,)))
        assert again.address == arguments["x"].address
        world.stream.launch(shifted, 2, arguments | {"x": again})
        world.stream.synchronize()
        assert [(f.code, f.buffer.name) for f in world.findings] == [("MEM012", "again")]

    def test_findings_of_one_site_are_one_with_its_count(self, world):
        arguments = line(world, n=64)
        for _ in range(3):
            world.stream.launch(shifted, 2, arguments)
        world.stream.synchronize()
        found = [(finding.code, finding.count) for finding in world.findings]
        assert found == [("MEM010", 3 * 24), ("MEM011", 3 * 24)]

    def test_many_threads_lose_nothing(self):
        world = World(threads=2)
        n = 100 * 1024
        arguments = line(world, x=np.zeros(32, np.float32), y=("float32", (N,)), n=n)
        world.stream.launch(shifted, n // 32, arguments)
        world.stream.synchronize()
        assert [finding.count for finding in world.findings] == [n - 32, n - N]

    def test_the_neighbour_that_an_address_lies_in_is_named(self, world):
        world.stream.launch(shifted, 1, line(world, n=1, load_at=192))
        world.stream.synchronize()
        (finding,) = world.findings
        assert finding.neighbour.name == "y"
        assert "That is 0 bytes inside the 160-byte buffer y" in render(finding)
        assert finding.offset == 768

    def test_a_callback_that_raises_reaches_who_waits_and_the_rest_is_reported(self, world):
        world.findings._on_finding = lambda finding: (_ for _ in ()).throw(ValueError(finding.code))
        world.stream.launch(shifted, 2, line(world, n=64))
        with pytest.raises(ValueError, match="MEM010"):
            world.stream.synchronize()
        assert [finding.code for finding in world.findings] == ["MEM010", "MEM011"]


class TestReadsThatComeToNothing:
    def launch(self, world, **more):
        given = {
            "x": (np.ones(32, np.float32), 4 * 20),
            "y": ("float32", (32,)),
            "n": 20,
            "at": 0,
            "unsaid": 20,
        }
        arguments = world.bind(given | more)
        world.stream.launch(selecting, 1, arguments)
        y = world.read(arguments["y"])
        return [(finding.code, finding.source.line) for finding in world.findings], y

    def test_where_a_line_says_so_unwritten_memory_is_read(self, world):
        found, y = self.launch(world)
        assert found == []
        assert y.tolist() == [4.0] * 20 + [0.0] * 12

    def test_bounds_are_checked_there(self, world):
        found, _ = self.launch(world, at=1)
        assert found == [("MEM010", line_at("element"))]

    def test_other_lines_are_not_meant(self, world):
        found, _ = self.launch(world, unsaid=21)
        assert found == [("MEM012", line_at("unsaid"))]


class TestFreedMemory:
    """What is queued is checked against what is freed when it runs; the audit refuses such frees where it sees them."""

    def scratch(self, world, **options):
        allocator = Allocator(world.device, level=Level.TRAP, findings=world.findings, **options)
        arena = allocator.reserve_arena(1 << 14, owner=TARGET, name="scratch").unwrap()
        return allocator, arena

    @pytest.mark.parametrize(("argument", "mark", "how"), [("x", "load", "load"), ("y", "store", "store")])
    def test_freed_under_queued_work(self, world, argument, mark, how):
        _, arena = self.scratch(world)
        view = world.array("kept", np.ones(N, np.float32), arena)
        world.stream.launch(shifted, 2, line(world) | {argument: view})
        view.buffer.free()
        world.stream.synchronize()
        (finding,) = world.findings
        assert (finding.code, finding.argument, finding.count) == ("MEM013", argument, N)
        assert finding.source.line == line_at(mark)
        assert finding.free
        assert finding.free[0].function == "TestFreedMemory.test_freed_under_queued_work"
        assert f"the {how} " in finding.notes[0]

    def test_freed_and_reserved_again_under_queued_work(self, world):
        _, arena = self.scratch(world, quarantine_bytes=0)
        view = world.array("kept", np.ones(N, np.float32), arena)
        arguments = line(world) | {"y": view}
        world.stream.synchronize()
        world.stream.launch(shifted, 2, arguments)
        view.buffer.free()
        other = world.array("other", ("float32", (N,)), arena)
        assert other.address == view.address
        world.device.fill_bytes(other.address, other.nbytes, 0x11)
        world.stream.synchronize()
        assert [(f.code, f.argument, f.buffer.name) for f in world.findings] == [("MEM013", "y", "kept")]
        assert (world.read(other).view(np.uint8) == 0x11).all()

    def test_a_queued_graph_that_was_destroyed(self, world):
        _, arena = self.scratch(world)
        view = world.array("kept", np.ones(N, np.float32), arena)
        arguments = line(world) | {"x": view}
        world.stream.synchronize()
        world.stream.begin_capture()
        world.stream.launch(shifted, 2, arguments)
        graph = world.stream.end_capture("step")
        world.stream.replay(graph)
        world.stream.synchronize()
        assert world.findings.list() == ()
        world.stream.replay(graph)
        graph.destroy()
        view.buffer.free()
        world.stream.synchronize()
        assert [(f.code, f.argument) for f in world.findings] == [("MEM013", "x")]

    def test_an_arena_released_under_queued_work(self, world):
        world.stream.launch(shifted, 2, line(world))
        world.arena.release()
        world.stream.synchronize()
        codes = [(finding.code, finding.argument) for finding in world.findings]
        assert [code for code in codes if code[0] == "MEM013"] == [("MEM013", "x"), ("MEM013", "y")]

    def test_the_twins(self, world):
        _, arena = self.scratch(world)
        view = world.array("kept", np.ones(N, np.float32), arena)
        world.stream.launch(shifted, 2, line(world) | {"x": view})
        world.stream.synchronize()
        view.buffer.free()
        assert world.findings.list() == ()

    def test_what_the_audit_sees_is_refused_before_it_happens(self, world):
        arguments = line(world)
        world.stream.launch(shifted, 2, arguments)
        with pytest.raises(FindingError, match="STR012"):
            arguments["x"].buffer.free()
        world.stream.synchronize()
        arguments["x"].buffer.free()
        with pytest.raises(FindingError, match="MEM004"):
            world.stream.launch(shifted, 2, arguments)
        assert [finding.code for finding in world.findings] == ["STR012", "MEM004"]


class TestShadows:
    def test_they_are_in_the_ledger(self, world):
        rows = {(row.owner, row.name): row.nbytes for row in world.allocator.table()}
        assert rows == {(TARGET, "shadow.arena"): world.arena.nbytes}
        assert world.allocator.snapshot().reserved > 2 * world.arena.nbytes
        assert world.allocator.check_integrity() == []

    def test_they_go_with_their_arena(self, world):
        world.arena.release()
        assert world.allocator.snapshot().reserved == 0
        assert world.allocator.arenas == ()
        assert world.allocator.close() == []

    def test_a_close_gives_them_back_and_reports_none(self, world):
        codes = [(finding.code, finding.actor) for finding in world.allocator.close()]
        assert codes == [("MEM006", "target")]
        assert world.allocator.snapshot().reserved == 0

    def test_where_there_is_no_memory_for_one_bounds_are_checked(self, monkeypatch):
        allocate = HostDevice.allocate

        def small(device, nbytes):
            if nbytes > 1 << 18:
                raise OutOfMemoryError("no more")
            return allocate(device, nbytes)

        monkeypatch.setattr(HostDevice, "allocate", small)
        world = World()
        assert world.arena.shadow is None
        assert world.allocator.snapshot().reserved == 1 << 18
        assert world.launch(shifted, 2, line(world, x=("float32", (N,)))) == ()
        assert [f.code for f in world.launch(shifted, 2, line(world, load_at=1))] == ["MEM010"]

    def test_a_limit_is_on_what_is_watched(self):
        world = World(limit=(1 << 18) + 8192)
        assert world.arena.shadow is not None
        more = world.allocator.reserve_arena(8192, owner=TARGET, name="more").unwrap()
        failed = world.allocator.reserve_arena(256, owner=TARGET, name="too much")
        assert failed.error.free == 0
        more.release()
        world.allocator.reserve_arena(8192, owner=TARGET, name="again").unwrap()

    @pytest.mark.parametrize("level", [Level.OFF, Level.GUARD, Level.AUDIT])
    def test_there_are_none_below_trap(self, level):
        world = World(level=level)
        assert world.arena.shadow is None
        assert world.launch(shifted, 2, line(world, x=("float32", (N,)))) == ()

    def test_a_layout_that_becomes_active_holds_nothing(self, world):
        from instrumentation.allocator import BufferRequest  # noqa: PLC0415

        arena = world.allocator.reserve_arena(1 << 14, owner=TARGET, name="compute").unwrap()
        first, second = (
            arena.reserve_overlay([BufferRequest(4 * N, TARGET, name)], owner=TARGET, name=name).unwrap()
            for name in ("decode", "prefill")
        )
        for overlay in (first, second, first):
            overlay.activate()
            view = overlay.buffers[0].view("float32", N)
            world.stream.launch(shifted, 2, line(world, y=("float32", (N,))) | {"x": view})
            world.stream.fill(view, 0)
            world.stream.synchronize()
        assert [(f.code, f.buffer.name, f.count) for f in world.findings] == [
            ("MEM012", "decode", 2 * N), ("MEM012", "prefill", N)
        ]  # fmt: skip


def test_a_device_without_checked_kernels_refuses_the_level(monkeypatch):
    monkeypatch.setattr(HostDevice, "traps", False)
    with pytest.raises(BadInputError, match="trap is not built yet for device host"):
        World()
    gc.collect()
