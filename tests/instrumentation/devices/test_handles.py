"""STR001: streams and events whose handle is not what the driver gave, which came from elsewhere, or are gone."""

import numpy as np
import pytest
from engines import TARGET, Bench, increment
from fake_cuda import fake_device

from instrumentation.devices.host import HostDevice
from instrumentation.devices.registry import HandleRegistry
from instrumentation.findings import RefusedError
from instrumentation.levels import Level

HEAP = 0x62D0_1000_2000


class World:
    def __init__(self, kind: str, level: Level) -> None:
        self.device = fake_device() if kind == "cuda" else HostDevice(1)
        self.bench = Bench(level, device=self.device)
        self.y = self.bench.put(self.bench.arena(), np.zeros(32, np.float32), "y")
        self.stream = self.bench.stream
        self.event = self.device.create_event(owner=TARGET, name="ready")
        self.stream.record(self.event)
        self.stream.begin_capture()
        self.stream.launch(increment, 1, {"y": self.y})
        self.graph = self.stream.end_capture("g")
        self.array = np.zeros(32, np.float32)

    def calls(self):
        stream, y = self.stream, self.y
        return {
            "launch": lambda: stream.launch(increment, 1, {"y": y}),
            "copy_in": lambda: stream.copy_in(y, self.array),
            "copy_out": lambda: stream.copy_out(self.array, y),
            "copy": lambda: stream.copy(y, y),
            "fill": lambda: stream.fill(y, 0),
            "record": lambda: stream.record(self.event),
            "wait": lambda: stream.wait(self.event),
            "replay": lambda: stream.replay(self.graph),
            "synchronize": stream.synchronize,
        }

    def queued(self) -> object:
        return self.stream.pending


@pytest.fixture(params=["host", "cuda"])
def world(request):
    return World(request.param, Level.GUARD)


def test_a_changed_stream_handle_is_found_at_each_call(world: World):
    world.stream.synchronize()
    before = world.queued()
    given, world.stream.handle = world.stream.handle, HEAP
    for name, call in world.calls().items():
        with pytest.raises(RefusedError, match="STR001") as caught:
            call()
        finding = caught.value.finding
        assert "stream target of target has the handle 0x62d010002000, and 0x" in finding.message, name
        assert finding.stream == "target"
        assert finding.actor == "target"
    assert world.queued() == before
    world.stream.handle = given
    for call in world.calls().values():
        call()


def test_a_changed_event_handle_is_found_at_each_use(world: World):
    given, world.event.handle = world.event.handle, HEAP
    for name in ("record", "wait"):
        with pytest.raises(
            RefusedError, match=rf"{name}: event ready of target has the handle 0x62d010002000"
        ):
            world.calls()[name]()
    with pytest.raises(RefusedError, match="event ready of target has the handle"):
        world.event.synchronize()
    world.event.handle = given
    world.event.synchronize()


def test_what_is_destroyed_is_destroyed_by_its_own_handle(world: World):
    world.stream.launch(increment, 1, {"y": world.y})
    world.stream.handle = world.event.handle = HEAP
    world.event.destroy()
    world.stream.destroy()
    assert [finding.code for finding in world.bench.findings] == ["STR001", "STR001"]
    assert world.stream not in world.device.streams
    # Its work ran before.
    world.stream = world.device.create_stream(owner=TARGET, name="other")
    np.testing.assert_array_equal(world.bench.get(world.y, world.stream), np.ones(32))


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_events_of_another_device_and_things_that_are_none(kind: str):
    world, other = World(kind, Level.GUARD), World(kind, Level.GUARD)
    for event in (other.event, object(), None, HEAP):
        for call in (world.stream.record, world.stream.wait):
            with pytest.raises(RefusedError, match="an event that this device did not create"):
                call(event)


def test_what_was_destroyed_is_refused(world: World):
    world.event.destroy()
    for name in ("record", "wait"):
        with pytest.raises(RefusedError, match="event ready, which was destroyed"):
            world.calls()[name]()
    with pytest.raises(RefusedError, match="event ready, which was destroyed"):
        world.event.synchronize()
    world.event = world.device.create_event(owner=TARGET, name="another")
    world.stream.destroy()
    for call in world.calls().values():
        with pytest.raises(RefusedError, match="stream target of target was destroyed"):
            call()


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_what_the_registry_does_not_know_is_refused(kind: str):
    world = World(kind, Level.GUARD)
    world.device.handles = HandleRegistry()
    with pytest.raises(RefusedError, match="stream target of target is not one that this device has created"):
        world.calls()["launch"]()


def test_at_level_off_nobody_looks():
    world = World("host", Level.OFF)
    world.stream.handle = HEAP
    for call in world.calls().values():
        call()
    assert world.bench.findings.list() == ()
