"""What a GPU's driver holds beside arenas is in the ledger while it is held, and explains device memory."""

from __future__ import annotations

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, increment
from fake_cuda import FakeDriver, fake_device, fake_image

from instrumentation.account import Account, DriverUsage
from instrumentation.devices.cuda import CudaDevice
from instrumentation.errors import DeviceError
from instrumentation.levels import Level
from instrumentation.memory_watch import MemoryWatch

MIB = 1 << 20


@pytest.fixture
def bench():
    made = Bench(Level.AUDIT, device=fake_device())
    made.driver = made.device.context.driver
    return made


def beside(bench):
    """Rows of the ledger that are no buffers."""
    rows = {row.name: (row.owner, row.nbytes, row.host) for row in bench.allocator.table()}
    for buffer in bench.allocator.live_buffers():
        rows.pop(buffer.name, None)
    return rows


def captured(bench, view, name="decode", n_launches=1):
    """Graphs of different lengths are no second capture of the first, which would be a finding of its own."""
    bench.stream.begin_capture()
    for _ in range(n_launches):
        bench.stream.launch(increment, 1, {"y": view})
    return bench.stream.end_capture(name)


class TestGraphs:
    def test_a_graph_is_in_the_ledger_with_what_the_driver_took_until_it_is_destroyed(self, bench):
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        before = bench.allocator.snapshot().driver.device
        bench.driver.graph_nbytes = 3 * MIB
        graph = captured(bench, view)
        # Two canaries of x, 24 bytes each.
        checks = before or beside(bench)["checks of stream target"][1]
        assert beside(bench)["graph decode"] == (TARGET, 3 * MIB + 48, 0)
        assert bench.allocator.snapshot().driver.device == checks + 3 * MIB + 48
        graph.destroy()
        graph.destroy()
        assert "graph decode" not in beside(bench)
        assert bench.allocator.snapshot().driver.device == checks

    def test_what_the_first_replay_takes_is_the_graphs(self, bench):
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        graph = captured(bench, view)
        bench.stream.synchronize()
        replay = bench.driver.replay

        def taking(handle, stream):
            bench.driver.hidden += MIB
            replay(handle, stream)

        bench.driver.replay = taking
        for _ in range(3):
            bench.stream.replay(graph)
        bench.stream.synchronize()
        assert beside(bench)["graph decode"] == (TARGET, MIB + 48, 0)
        graph.destroy()

    def test_a_capture_that_fails_leaves_nothing(self, bench):
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        bench.driver.graph_nbytes = MIB
        bench.driver.fail("end_capture", "UNKNOWN")
        with pytest.raises(DeviceError):
            captured(bench, view)
        assert "graph decode" not in beside(bench)

    def test_graphs_that_the_driver_keeps_memory_of_are_explained_once(self, bench):
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        captured(bench, view).destroy()
        explained = bench.device.account.explained
        bench.driver.graph_nbytes = MIB
        graph = captured(bench, view)
        bench.driver.destroy_graph = lambda _: None
        graph.destroy()
        assert bench.device.account.explained == explained + MIB
        for _ in range(
            5
        ):  # each new one takes memory, and none comes back: more than there ever was of live ones
            captured(bench, view).destroy()
        assert bench.device.account.explained == explained + MIB


class TestHostMemory:
    def test_staging_is_page_locked_memory_of_its_owner_until_its_stream_is_destroyed(self, bench):
        stream = bench.device.create_stream(owner=DRAFT, name="draft")
        assert "staging of stream draft" not in beside(bench)
        view = bench.arena(owner=DRAFT).reserve(64, owner=DRAFT, name="h").unwrap().view("float32", 16)
        stream.copy_in(view, np.zeros(16, np.float32))
        assert beside(bench)["staging of stream draft"] == (DRAFT, 0, 1 << 20)
        stream.destroy()
        assert "staging of stream draft" not in beside(bench)

    def test_a_stream_of_a_lost_device_leaves_nothing(self, bench):
        view = bench.put(bench.arena(), np.zeros(16, np.float32), "x")
        bench.stream.launch(increment, 1, {"y": view})
        bench.driver.fail("synchronize_stream", "ILLEGAL_ADDRESS")
        with pytest.raises(DeviceError):
            bench.stream.synchronize()
        bench.stream.destroy()
        assert beside(bench) == {}


class TestProcess:
    def test_loaded_kernels_belong_to_the_process(self):
        driver = FakeDriver()
        bench = Bench(Level.OFF, device=CudaDevice(driver=driver, compile_kernel=fake_image))
        load = driver.load

        def taking(image, entry):
            driver.hidden += 2 * MIB
            return load(image, entry)

        driver.load = taking
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        bench.stream.launch(increment, 1, {"y": view})
        bench.stream.launch(increment, 1, {"y": view})
        bench.stream.synchronize()
        rows = {row.name: row for row in bench.allocator.table(process=True)}
        assert rows["loaded kernels"].nbytes == 2 * MIB
        assert rows["scratch"].host == 256 * 1024
        assert "loaded kernels" not in {row.name for row in bench.allocator.table()}

    def test_two_devices_of_one_gpu_explain_its_memory_together(self):
        driver = FakeDriver()
        first, second = (
            Bench(Level.AUDIT, device=CudaDevice(driver=driver, compile_kernel=fake_image)) for _ in range(2)
        )
        arena = first.arena(4 * MIB)
        assert second.device.account.explained == 0
        assert second.device.account.shared.explained == first.device.account.shared.explained == driver.used
        arena.release()
        assert second.device.account.shared.explained == driver.used


class TestWatch:
    def test_streams_sample_and_a_leak_is_found(self, bench):
        watch = bench.device.memory_watch
        now = 0.0
        watch._clock = lambda: now
        watch.begin()
        for _ in range(8):
            now += 10.0
            bench.driver.hidden += 4 * MIB
            for _ in range(16):
                bench.stream.synchronize()
        assert [finding.code for finding in bench.findings] == ["ACC001"]

    def test_captures_arenas_and_staging_are_no_leak(self, bench):
        watch = bench.device.memory_watch
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        bench.driver.graph_nbytes = 3 * MIB
        watch.begin()
        graphs = []
        for at in range(12):
            graphs.append(captured(bench, view, f"decode {at}", at + 1))
            bench.arena(3 * MIB)
            bench.stream.replay(graphs[-1])
            bench.stream.synchronize()
            watch.sample()
        for graph in graphs:
            graph.destroy()
            watch.sample()
        assert bench.findings.list() == ()
        assert {sample.unexplained for sample in watch.samples} == {0}

    @pytest.mark.parametrize("leak", [0, 3 * MIB])
    def test_what_each_capture_takes_and_never_gives_back_is_found(self, bench, leak):
        """Incident I1: a library took a workspace for each captured graph, and graphs were captured anew."""
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        bench.driver.graph_nbytes = 2 * MIB
        end_capture = bench.driver.end_capture

        def leaking(stream):
            bench.driver.hidden += leak
            return end_capture(stream)

        bench.driver.end_capture = leaking
        watch = MemoryWatch(bench.allocator, every=0, spacing=0)
        watch.begin()
        cache = []
        for at in range(12):
            if len(cache) == 2:
                cache.pop(0).destroy()
            cache.append(captured(bench, view, f"decode {at}", at % 3 + 1))
            bench.stream.replay(cache[-1])
            bench.stream.synchronize()
            watch.sample()
        assert [finding.code for finding in bench.findings] == (["ACC001"] if leak else [])
        for graph in cache:
            graph.destroy()

    @pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
    def test_below_audit_nobody_looks(self, level):
        assert Bench(level, device=fake_device()).device.memory_watch is None

    def test_nor_does_anybody_on_the_host_whose_memory_is_the_machines(self):
        assert Bench(Level.AUDIT).device.memory_watch is None

    def test_a_driver_that_cannot_say_what_is_free_fails_the_capture_and_leaves_nothing(self, bench):
        view = bench.put(bench.arena(), np.zeros(8, np.float32), "x")
        bench.device.context.function(increment)
        bench.stream.synchronize()
        captured(bench, view).destroy()
        bench.driver.fail("memory_info", "UNKNOWN")
        with pytest.raises(DeviceError):
            captured(bench, view)
        assert bench.driver.graphs == []
        assert "graph decode" not in beside(bench)


def test_an_account_adds_up_and_takes_back():
    account = Account()
    first = account.hold(TARGET, "graph a", device=5, host=2)
    second = account.hold(DRAFT, "graph b", device=7)
    first.grow(device=1)
    assert account.usage == DriverUsage(13, 2)
    assert [name for _, name, _ in account.rows] == ["graph a", "graph b"]
    first.drop()
    second.drop()
    assert account.usage == DriverUsage(0, 0)
    assert account.rows == ()
    assert account.explained == 0
