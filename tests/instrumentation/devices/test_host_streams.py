"""Streams of the host device queue their work; events order it across streams."""

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, increment, same_bits, scale_by
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, DeviceError, FindingError


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def y(bench):
    return bench.put(bench.arena(), np.zeros(40, np.float32), "y")


def raw(bench, view):
    """Bytes as they lie in memory now, whatever is queued."""
    return np.frombuffer(bench.device.read_bytes(view.address, view.nbytes), view.dtype)


def test_nothing_runs_before_somebody_waits(bench, y):
    out = np.full(40, 9, np.float32)
    bench.stream.copy_in(y, np.ones(40, np.float32))
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.copy_out(out, y)
    assert not raw(bench, y).any()
    assert (out == 9).all()
    bench.stream.synchronize()
    assert (raw(bench, y) == 2).all()
    assert (out == 2).all()


def test_a_copy_in_reads_its_source_when_it_runs(bench, y):
    source = np.ones(40, np.float32)
    bench.stream.copy_in(y, source)
    source[:] = 5
    bench.stream.synchronize()
    assert (raw(bench, y) == 5).all()


@given(steps=st.lists(st.sampled_from(["add", "double", "ones", "zero", "keep"]), max_size=30))
def test_work_runs_in_the_order_it_was_queued(steps: list[str]):
    bench = Bench()
    arena = bench.arena()
    y, z = (bench.put(arena, np.zeros(3, np.float32), name) for name in "yz")
    wanted, kept, outs = 0.0, [], []
    for step in steps:
        if step == "add":
            bench.stream.launch(increment, 1, {"y": y})
            wanted += 1
        elif step == "double":
            bench.stream.launch(scale_by, 1, {"x": y, "y": z, "factor": 2.0, "offset": 0})
            bench.stream.copy(y, z)
            wanted *= 2
        elif step == "ones":
            bench.stream.copy_in(y, np.ones(3, np.float32))
            wanted = 1
        elif step == "zero":
            bench.stream.fill(y, 0)
            wanted = 0
        else:
            outs.append(np.empty(3, np.float32))
            bench.stream.copy_out(outs[-1], y)
            kept.append(wanted)
    bench.stream.synchronize()
    assert [float(out[0]) for out in outs] == kept
    assert (bench.get(y) == wanted).all()


def test_a_wait_runs_the_other_stream_to_its_record_and_no_further(bench, y):
    other = bench.device.create_stream(owner=TARGET, name="other")
    event = bench.device.create_event(owner=TARGET, name="ready")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.record(event)
    bench.stream.launch(increment, 2, {"y": y})
    seen = np.empty(40, np.float32)
    other.wait(event)
    other.copy_out(seen, y)
    assert not raw(bench, y).any()
    other.synchronize()
    assert (seen == 1).all()
    assert (raw(bench, y) == 1).all()
    bench.stream.synchronize()
    assert (raw(bench, y) == 2).all()


def test_a_wait_is_for_the_record_that_was_last_when_it_was_queued(bench, y):
    other = bench.device.create_stream(owner=TARGET, name="other")
    event = bench.device.create_event(owner=TARGET, name="ready")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.record(event)
    other.wait(event)
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.record(event)
    other.synchronize()
    assert (raw(bench, y) == 1).all()
    event.synchronize()
    assert (raw(bench, y) == 2).all()


def test_an_event_that_was_never_recorded_orders_nothing(bench, y):
    event = bench.device.create_event(owner=TARGET, name="never")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.wait(event)
    event.synchronize()
    assert not raw(bench, y).any()


def test_waits_in_both_directions_end(bench, y):
    streams = [bench.stream, bench.device.create_stream(owner=TARGET, name="other")]
    for step in range(20):
        event = bench.device.create_event(owner=TARGET, name=f"step {step}")
        streams[step % 2].launch(increment, 2, {"y": y})
        streams[step % 2].record(event)
        streams[1 - step % 2].wait(event)
    bench.device.synchronize()
    assert (raw(bench, y) == 20).all()


def test_device_synchronize_runs_every_stream(bench, y):
    for number in range(3):
        bench.device.create_stream(owner=TARGET, name=f"{number}").launch(increment, 2, {"y": y})
    bench.device.synchronize()
    assert (raw(bench, y) == 3).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_the_blocks(threads):
    bench = Bench(threads=threads)
    x = np.arange(10_000, dtype=np.float32)
    found = bench.run(increment, 313, y=x)["y"]
    assert same_bits(found, x + 1)


@pytest.mark.parametrize("threads", [0, -1, 10_000, 1.5, "2"])
def test_wrong_numbers_of_threads_are_refused(threads):
    with pytest.raises(BadInputError, match=r"threads is .*; give a whole number from 1 to"):
        HostDevice(threads)


def test_copies_of_another_size_are_refused(bench, y):
    z = bench.put(bench.arena(), np.zeros(41, np.float32), "z")
    for call in (
        lambda: bench.stream.copy_in(y, np.zeros(41, np.float32)),
        lambda: bench.stream.copy_out(np.zeros(39, np.float32), y),
        lambda: bench.stream.copy(y, z),
        lambda: bench.stream.copy_in(y, np.zeros(80, np.float32)[::2]),
        lambda: bench.stream.copy_in(y, [0.0] * 40),
        lambda: bench.stream.copy_in(y, np.zeros(20, object)),
    ):
        with pytest.raises(BadInputError, match="y"):
            call()
    assert bench.stream.pending == 0


def test_a_copy_out_into_a_read_only_array_is_refused(bench, y):
    target = np.zeros(40, np.float32)
    target.flags.writeable = False
    with pytest.raises(BadInputError, match="copy_out of y: the target array is read-only"):
        bench.stream.copy_out(target, y)


@pytest.mark.parametrize("value", [-1, 256, 1.0, None])
def test_a_fill_takes_a_byte(bench, y, value):
    with pytest.raises(BadInputError, match=r"fill of y with .*; give a byte"):
        bench.stream.fill(y, value)


def test_a_fill_sets_every_byte(bench, y):
    bench.stream.fill(y, 0x3F)
    assert bench.get(y).tobytes() == b"\x3f" * 160


def test_a_destroyed_stream_is_refused(bench, y):
    event = bench.device.create_event(owner=TARGET, name="event")
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.destroy()
    assert (raw(bench, y) == 1).all()
    for call in (
        lambda: bench.stream.launch(increment, 2, {"y": y}),
        lambda: bench.stream.copy_in(y, np.zeros(40, np.float32)),
        lambda: bench.stream.fill(y, 0),
        lambda: bench.stream.record(event),
        bench.stream.begin_capture,
        bench.stream.synchronize,
    ):
        with pytest.raises(FindingError, match="STR001"):
            call()
    findings = bench.findings.of("STR001")
    assert {finding.message for finding in findings} == {"stream target of target was destroyed"}
    assert findings[0].stream == "target"
    bench.stream.destroy()


def test_destroyed_and_foreign_events_are_refused(bench):
    event = bench.device.create_event(owner=TARGET, name="old")
    event.destroy()
    foreign = HostDevice().create_event(owner=TARGET, name="foreign")
    for call in (bench.stream.record, bench.stream.wait):
        with pytest.raises(FindingError, match="event old, which was destroyed"):
            call(event)
        with pytest.raises(FindingError, match="that this device did not create"):
            call(foreign)
    with pytest.raises(FindingError, match="synchronize of event old"):
        event.synchronize()
    assert len(bench.findings.of("STR001")) == len(bench.findings)


def test_memory_released_while_work_is_queued_stays_mapped_until_it_ran(bench):
    arena = bench.arena(1 << 22)
    view = bench.put(arena, np.zeros(1 << 18, np.float32), "gone")
    bench.stream.launch(increment, 1 << 13, {"y": view})
    view.buffer.free()
    arena.release()
    assert len(bench.device._retired) == 1
    bench.stream.synchronize()
    other = bench.device.create_stream(owner=DRAFT, name="draft")
    other.synchronize()
    assert bench.device._retired == []


def test_an_interrupted_operation_ends_the_queue(bench, y, monkeypatch):
    def interrupt(batch):
        raise KeyboardInterrupt

    bench.stream.fill(y, 0)
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.copy_in(y, np.full(40, 7, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(bench.stream, "_run_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.stream.synchronize()
    assert bench.stream.pending == 0
    assert not raw(bench, y).any()
    bench.stream.launch(increment, 2, {"y": y})
    np.testing.assert_array_equal(bench.get(y), np.ones(40))


def test_captures_begin_and_end_once(bench):
    with pytest.raises(DeviceError, match="end_capture without begin_capture"):
        bench.stream.end_capture("none")
    bench.stream.begin_capture()
    with pytest.raises(DeviceError, match="begin_capture while a capture is going on"):
        bench.stream.begin_capture()
    bench.stream.abandon_capture()
    bench.stream.abandon_capture()
    bench.stream.begin_capture()
