"""Streams of the CUDA device on a driver that queues: order, staging, events, graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, increment, same_bits, scale_by
from fake_cuda import fake_device
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.allocator import BufferRequest
from instrumentation.devices.cuda_staging import MAX_SEGMENTS, Staging
from instrumentation.errors import BadInputError, DeviceError, FindingError, OutOfMemoryError
from instrumentation.levels import Level

if TYPE_CHECKING:
    from instrumentation.devices.base import Device, Event, Graph, Stream
    from instrumentation.devices.cuda import CudaDevice, CudaEvent, CudaGraph, CudaStream


def protocols(device: CudaDevice, stream: CudaStream, event: CudaEvent, graph: CudaGraph) -> list[object]:
    """For mypy: the CUDA device is one as the interface has it."""
    kept: tuple[Device, Stream, Event, Graph] = (device, stream, event, graph)
    return list(kept)


@pytest.fixture
def bench() -> Bench:
    return Bench(device=fake_device())


@pytest.fixture
def y(bench):
    return bench.put(bench.arena(), np.zeros(40, np.float32), "y")


def waiting(bench) -> int:
    return sum(len(stream.queue) for stream in bench.device.context.driver.streams)


def test_the_device_describes_itself(bench):
    assert bench.device.describe() == "cuda:0: Fake GPU 0, compute capability 9.0, 1.0 GiB"
    info = bench.device.memory_info()
    assert (info.total, info.free) == (1 << 30, (1 << 30) - bench.device.context.driver.used)


@pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
@given(steps=st.lists(st.sampled_from(["add", "double", "ones", "zero", "keep", "sync"]), max_size=30))
def test_work_runs_in_the_order_it_was_queued(level: Level, steps: list[str]):
    bench = Bench(level, device=fake_device())
    arena = bench.arena()
    y, z = (bench.put(arena, np.zeros(3, np.float32), name) for name in "yz")
    wanted, kept, outs = 0.0, [], []
    ones = np.ones(3, np.float32)
    for step in steps:
        if step == "add":
            bench.stream.launch(increment, 1, {"y": y})
            wanted += 1
        elif step == "double":
            bench.stream.launch(scale_by, 1, {"x": y, "y": z, "factor": 2.0, "offset": 0})
            bench.stream.copy(y, z)
            wanted *= 2
        elif step == "ones":
            ones[:] = 1
            bench.stream.copy_in(y, ones)
            ones[:] = 77
            wanted = 1
        elif step == "zero":
            bench.stream.fill(y, 0)
            wanted = 0
        elif step == "sync":
            bench.stream.synchronize()
        else:
            outs.append(np.full(3, np.nan, np.float32))
            bench.stream.copy_out(outs[-1], y)
            kept.append(wanted)
    bench.stream.synchronize()
    assert [float(out[0]) for out in outs] == kept
    assert (bench.get(y) == wanted).all()
    assert bench.findings.list() == ()


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 900)), min_size=1, max_size=40),
    synchronised=st.sets(st.integers(0, 39)),
)
def test_copies_of_every_size_pass_through_a_small_ring(sizes, synchronised):
    """Segments of 256 bytes: copies share them, fill them, and go round the ring while others are in flight."""
    bench = Bench(Level.OFF, device=fake_device())
    stream = bench.stream
    stream.staging = Staging(bench.device.context.driver, stream.handle, 256)
    view = bench.arena().reserve(1024, owner=TARGET, name="y").unwrap().view(np.uint8, 1024)
    model = np.zeros(1024, np.uint8)
    stream.copy_in(view, model)
    expected = []
    for number, (inwards, nbytes) in enumerate(sizes):
        part = view.slice(0, nbytes)
        if inwards:
            source = np.full(nbytes, number + 1, np.uint8)
            stream.copy_in(part, source)
            model[:nbytes] = number + 1
            source[:] = 0
        else:
            out = np.full(nbytes, 0xEE, np.uint8)
            stream.copy_out(out, part)
            expected.append((out, model[:nbytes].copy()))
        if number in synchronised:
            stream.synchronize()
            assert all(same_bits(out, wanted) for out, wanted in expected)
    stream.synchronize()
    assert all(same_bits(out, wanted) for out, wanted in expected)
    assert len(bench.device.context.driver.pinned) <= MAX_SEGMENTS + 2


def test_a_large_copy_needs_no_more_than_the_ring(bench):
    arena = bench.arena(12 << 20)
    values = np.arange(2 << 20, dtype=np.float32)
    view = bench.put(arena, values, "large")
    assert same_bits(bench.get(view), values)
    pinned = sum(block.nbytes for block in bench.device.context.driver.pinned.values())
    assert pinned < 10 << 20


def test_nothing_is_in_the_array_before_synchronize(bench, y):
    out = np.full(40, 9, np.float32)
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.copy_out(out, y)
    assert (out == 9).all()
    bench.stream.synchronize()
    assert (out == 1).all()


def test_a_decode_loop_records_no_event_and_waits_once(bench, y):
    calls = bench.device.context.driver.calls
    out = np.empty(40, np.float32)
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.synchronize()
    before = calls.copy()
    for _ in range(10):
        for _ in range(5):
            bench.stream.copy_in(y, out)
        bench.stream.copy_out(out, y)
        bench.stream.synchronize()
        bench.stream.synchronize()
    assert dict(calls - before) == {"copy_in": 50, "copy_out": 10, "synchronize_stream": 10}


def test_an_event_orders_two_streams(bench, y):
    other = bench.device.create_stream(owner=TARGET, name="other")
    event = bench.device.create_event(owner=TARGET, name="ready")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.record(event)
    bench.stream.launch(increment, 2, {"y": y})
    seen = np.empty(40, np.float32)
    other.wait(event)
    other.copy_out(seen, y)
    other.synchronize()
    assert (seen == 1).all()
    bench.stream.synchronize()
    event.synchronize()
    event.destroy()
    event.destroy()
    for call in (bench.stream.record, bench.stream.wait):
        with pytest.raises(FindingError, match="event ready, which was destroyed"):
            call(event)


def test_an_event_that_was_never_recorded_orders_nothing(bench, y):
    event = bench.device.create_event(owner=TARGET, name="never")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.wait(event)
    event.synchronize()
    assert waiting(bench) > 0


def test_device_synchronize_waits_for_every_stream(bench, y):
    for number in range(3):
        bench.device.create_stream(owner=TARGET, name=f"{number}").launch(increment, 2, {"y": y})
    bench.device.synchronize()
    assert waiting(bench) == 0
    assert (bench.get(y) == 3).all()


def test_another_thread_enters_the_context_by_itself(bench, y):
    def work():
        bench.stream.launch(increment, 2, {"y": y})
        bench.stream.synchronize()

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (bench.get(y) == 2).all()


def test_a_destroyed_stream_gives_everything_back(bench, y):
    driver = bench.device.context.driver
    stream = bench.device.create_stream(owner=TARGET, name="short")
    before = (len(driver.pinned), driver.used, len(driver.streams), len(driver.events))
    stream.launch(increment, 2, {"y": y})
    stream.copy_out(np.empty(40, np.float32), y)
    assert len(driver.pinned) > before[0]
    stream.destroy()
    stream.destroy()
    assert (len(driver.pinned), driver.used, len(driver.streams) + 1, len(driver.events)) == before
    with pytest.raises(FindingError, match="stream short of target was destroyed"):
        stream.fill(y, 0)


def test_memory_is_given_back_behind_the_work_that_names_it(bench):
    arena = bench.arena(1 << 16)
    view = bench.put(arena, np.zeros(64, np.float32), "gone")
    bench.stream.launch(increment, 2, {"y": view})
    view.buffer.free()
    arena.release()  # the fake driver refuses to free memory under queued work
    with pytest.raises(DeviceError, match="which was not allocated here"):
        bench.device.release(arena.driver_address)


@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 65537, 200_001])
@pytest.mark.parametrize("where", [0, 0.5, 1.0, None])
def test_the_first_wrong_byte_is_found(bench, nbytes, where):
    device = bench.device
    address = device.allocate(nbytes)
    device.fill_bytes(address, nbytes, 0xDD)
    at = -1 if where is None else int(where * (nbytes - 1))
    if at >= 0:
        device.fill_bytes(address + at, nbytes - at, 0x11)
    assert device.first_mismatch(address, nbytes, 0xDD) == at
    wanted = b"\xdd" * (nbytes if at < 0 else at) + b"\x11" * (0 if at < 0 else nbytes - at)
    assert device.read_bytes(address, nbytes) == wanted
    device.release(address)


@given(wrong=st.sets(st.integers(0, 4999), max_size=20), n=st.sampled_from([0, 1, 2, 3, 2048, 2049, 5000]))
def test_regions_with_wrong_bytes_are_found_together(wrong, n):
    device = fake_device()
    address = device.allocate(8 * 5000)
    device.fill_bytes(address, 8 * 5000, 0xFA)
    for region in wrong:
        device.fill_bytes(address + 8 * region + region % 8, 1, 0)
    found = device.mismatches([(address + 8 * i, 8, 0xFA) for i in range(n)])
    assert found == sorted(region for region in wrong if region < n)


def test_more_memory_than_there_is_is_refused(bench):
    with pytest.raises(
        OutOfMemoryError, match=r"cuda:0 memory: .* bytes were refused by the driver; .* are free"
    ):
        bench.device.allocate(1 << 40)


# --- graphs


def launches(stream, x, y, steps):
    for step in steps:
        if step < 0:
            stream.launch(increment, 2, {"y": x if step % 2 else y})
        else:
            stream.launch(scale_by, 2, {"x": x, "y": y, "factor": 0.5, "offset": step})


def pair(level=Level.GUARD):
    bench = Bench(level, device=fake_device())
    arena = bench.arena()
    x, y = (bench.put(arena, np.arange(40, dtype=np.float32) + i, name) for i, name in enumerate("xy"))
    return bench, x, y


@given(steps=st.lists(st.integers(-2, 5), max_size=12), replays=st.integers(1, 3))
def test_a_replay_equals_direct_launches(steps: list[int], replays: int):
    bench, x, y = pair()
    other, other_x, other_y = pair()
    bench.stream.begin_capture()
    launches(bench.stream, x, y, steps)
    graph = bench.stream.end_capture("steps")
    assert graph.launches == len(steps)
    np.testing.assert_array_equal(bench.get(x), np.arange(40))
    for _ in range(replays):
        bench.stream.replay(graph)
        launches(other.stream, other_x, other_y, steps)
    assert same_bits(bench.get(x), other.get(other_x))
    assert same_bits(bench.get(y), other.get(other_y))
    assert bench.findings.list() == other.findings.list() == ()


def test_a_graph_pins_its_buffers_until_it_is_destroyed():
    bench, x, y = pair()
    driver = bench.device.context.driver
    bench.stream.synchronize()
    used = driver.used
    bench.stream.begin_capture()
    launches(bench.stream, x, y, [1, 2])
    graph = bench.stream.end_capture("decode")
    with pytest.raises(FindingError, match=r"GRA001.*"):
        y.buffer.free()
    bench.stream.replay(graph)
    graph.destroy()  # waits for the replay that reads its table
    graph.destroy()
    assert driver.graphs == []
    bench.stream.synchronize()
    y.buffer.free()
    with pytest.raises(DeviceError, match="replay of graph decode, which was destroyed"):
        bench.stream.replay(graph)
    assert driver.used - used <= 4096 * 24  # the stream's own table, made at its first check


def test_kernels_are_compiled_and_memory_is_taken_before_the_driver_captures():
    bench, _x, y = pair()
    bench.stream.begin_capture()
    # The fake driver refuses loading and allocation while it captures.
    bench.stream.launch(increment, 2, {"y": y})
    assert bench.stream.end_capture("first").launches == 1


def test_a_graph_of_another_device_is_refused():
    bench, _x, y = pair()
    other, _ox, oy = pair()
    other.stream.begin_capture()
    other.stream.launch(increment, 2, {"y": oy})
    graph = other.stream.end_capture("other")
    for wrong in (None, graph):
        with pytest.raises(BadInputError, match="give a graph of the CUDA device"):
            bench.stream.replay(wrong)
    assert (bench.get(y) == np.arange(40) + 1).all()


@pytest.mark.parametrize("call", ["launch", "begin_capture", "end_capture", "allocate"])
def test_a_capture_that_fails_leaves_nothing(call):
    bench, _x, y = pair()
    driver = bench.device.context.driver
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.synchronize()
    before = (driver.used, len(driver.pinned))
    bench.stream.begin_capture()
    bench.stream.launch(increment, 2, {"y": y})
    driver.fail(call, "INVALID_VALUE")
    with pytest.raises(DeviceError, match=f"{call} failed with CUDA_ERROR_INVALID_VALUE, called for"):
        bench.stream.end_capture("half")
    bench.stream.abandon_capture()
    assert y.buffer.pins == {}
    assert driver.graphs == []
    assert (driver.used, len(driver.pinned)) == before
    bench.stream.launch(increment, 2, {"y": y})
    assert (bench.get(y) == np.arange(40) + 3).all()


def test_a_replay_over_a_dormant_overlay_is_refused():
    bench = Bench(device=fake_device())
    arena = bench.arena()
    first, second = (
        arena.reserve_overlay([BufferRequest(64, TARGET, name)], owner=TARGET, name=name).unwrap()
        for name in "ab"
    )
    first.activate()
    y = first.buffers[0].view(np.float32, 16)
    bench.stream.fill(y, 0)
    bench.stream.begin_capture()
    bench.stream.launch(increment, 1, {"y": y})
    graph = bench.stream.end_capture("a")
    bench.stream.replay(graph)
    bench.stream.synchronize()
    second.activate()
    with pytest.raises(FindingError, match="MEM004"):
        bench.stream.replay(graph)
    first.activate()
    bench.stream.replay(graph)
    bench.stream.synchronize()
    assert [finding.code for finding in bench.findings] == ["MEM004"]


def test_a_draft_may_not_use_what_is_not_lent(bench, y):
    draft = bench.device.create_stream(owner=DRAFT, name="draft")
    with pytest.raises(FindingError, match="OWN001"):
        draft.launch(increment, 2, {"y": y})
    with y.buffer.lend(to=DRAFT, mode="write"):
        draft.launch(increment, 2, {"y": y})
        draft.synchronize()
    assert (bench.get(y) == 1).all()


def test_a_device_that_nobody_holds_is_gone_with_its_driver_s_memory():
    device = fake_device()
    device.create_stream(owner=TARGET, name="stream")
    gone = [weakref.ref(device), weakref.ref(device.context), weakref.ref(device.context.driver)]
    del device
    gc.collect()
    assert [each() for each in gone] == [None, None, None]
