"""Captured graphs of the host device: equal to direct launches, checked at each replay, pinning their buffers."""

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, increment, same_bits, scale_by
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.allocator import BufferRequest
from instrumentation.errors import BadInputError, DeviceError, FindingError


def setup(n: int = 40):
    bench = Bench()
    arena = bench.arena()
    x, y = (bench.put(arena, np.arange(n, dtype=np.float32) + i, name) for i, name in enumerate("xy"))
    return bench, x, y


def launches(stream, x, y, steps):
    for step in steps:
        if step < 0:
            stream.launch(increment, 2, {"y": x if step % 2 else y})
        else:
            stream.launch(scale_by, 2, {"x": x, "y": y, "factor": 0.5, "offset": step})


@given(steps=st.lists(st.integers(-2, 5), min_size=1, max_size=12), replays=st.integers(1, 3))
def test_a_replay_equals_direct_launches(steps: list[int], replays: int):
    bench, x, y = setup()
    other, other_x, other_y = setup()
    bench.stream.begin_capture()
    launches(bench.stream, x, y, steps)
    graph = bench.stream.end_capture("steps")
    assert graph.launches == len(steps)
    before = bench.get(x)
    np.testing.assert_array_equal(before, np.arange(40))
    for _ in range(replays):
        bench.stream.replay(graph)
        launches(other.stream, other_x, other_y, steps)
    assert same_bits(bench.get(x), other.get(other_x))
    assert same_bits(bench.get(y), other.get(other_y))
    assert bench.findings.list() == ()


def test_a_replay_is_queued_like_everything_else():
    bench, _, y = setup()
    bench.stream.begin_capture()
    bench.stream.launch(increment, 2, {"y": y})
    graph = bench.stream.end_capture("one")
    bench.stream.fill(y, 0)
    bench.stream.replay(graph)
    bench.stream.launch(increment, 2, {"y": y})
    assert bench.stream.pending == 3
    np.testing.assert_array_equal(bench.get(y), np.full(40, 2))


def test_a_capture_refuses_what_is_no_launch():
    bench, x, y = setup()
    event = bench.device.create_event(owner=TARGET, name="event")
    bench.stream.begin_capture()
    bench.stream.launch(increment, 2, {"y": y})
    for what, call in {
        "copy_in": lambda: bench.stream.copy_in(y, np.zeros(40, np.float32)),
        "copy_out": lambda: bench.stream.copy_out(np.zeros(40, np.float32), y),
        "copy": lambda: bench.stream.copy(y, x),
        "fill": lambda: bench.stream.fill(y, 0),
        "record": lambda: bench.stream.record(event),
        "wait": lambda: bench.stream.wait(event),
    }.items():
        with pytest.raises(DeviceError, match=f"stream target: {what} during capture; only launches"):
            call()
    # What was refused leaves no trace: neither in the queue nor in the event nor in the graph.
    assert bench.stream.pending == 0
    assert event.stream is None
    assert bench.stream.end_capture("one").launches == 1


def test_an_abandoned_capture_leaves_nothing():
    bench, _, y = setup()
    bench.stream.begin_capture()
    bench.stream.launch(increment, 2, {"y": y})
    bench.stream.abandon_capture()
    np.testing.assert_array_equal(bench.get(y), np.arange(40) + 1)
    assert y.buffer.pins == {}


def test_a_graph_pins_its_buffers():
    bench, x, y = setup()
    bench.stream.begin_capture()
    launches(bench.stream, x, y, [1, 2])
    graph = bench.stream.end_capture("decode")
    assert dict(x.buffer.pins) == {"graph decode": 1}
    for view in (x, y):
        with pytest.raises(FindingError, match=r"GRA001.*"):
            view.buffer.free()
    [finding, _] = bench.findings.of("GRA001")
    assert "pinned by graph decode" in finding.message
    bench.stream.replay(graph)
    bench.stream.synchronize()
    graph.destroy()
    graph.destroy()
    x.buffer.free()
    with pytest.raises(DeviceError, match="replay of graph decode, which was destroyed"):
        bench.stream.replay(graph)


def test_what_is_no_graph_is_refused():
    bench, _, _ = setup()
    with pytest.raises(BadInputError, match="give a graph of the host device"):
        bench.stream.replay(None)


def test_a_replay_over_a_dormant_overlay_is_refused():
    bench = Bench()
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
    [finding] = bench.findings
    assert (finding.code, finding.kernel, finding.argument) == ("MEM004", "increment", "y")
    assert finding.kind == "use of a dormant buffer"
    first.activate()
    bench.stream.replay(graph)
    bench.stream.synchronize()


def test_a_lease_that_ended_is_noticed_at_replay():
    bench, x, y = setup()
    stream = bench.device.create_stream(owner=DRAFT, name="draft")
    leases = [x.buffer.lend(to=DRAFT, mode="read"), y.buffer.lend(to=DRAFT, mode="write")]
    stream.begin_capture()
    launches(stream, x, y, [1])
    graph = stream.end_capture("borrowed")
    stream.replay(graph)
    stream.synchronize()
    leases[0].end()
    with pytest.raises(FindingError, match="OWN001"):
        stream.replay(graph)
    [finding] = bench.findings
    assert (finding.kernel, finding.argument, finding.actor) == ("scale_by", "x", "draft")
    assert stream.pending == 0
