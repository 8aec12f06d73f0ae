"""Level guard on the CUDA device: a check behind each launch and replay finds who wrote outside, at synchronize."""

import numpy as np
import pytest
from engines import TARGET, Bench, increment, write_from
from fake_cuda import fake_device
from hypothesis import given
from hypothesis import strategies as st

from instrumentation.devices import cuda_checks
from instrumentation.errors import FindingError
from instrumentation.levels import Level

N = 16


class Three:
    """Buffers left, y and right beside each other, and x elsewhere; a stream of the target."""

    def __init__(self, level: Level = Level.GUARD) -> None:
        self.bench = Bench(level, device=fake_device())
        self.driver = self.bench.device.context.driver
        arena = self.bench.arena()
        self.left, self.y, self.right = (
            self.bench.put(arena, np.zeros(N, np.float32), name) for name in ("left", "y", "right")
        )
        self.x = self.bench.put(self.bench.arena(), np.array([7.5], np.float32), "x")
        self.stream = self.bench.stream

    def write(self, first: int, count: int = 1, y=None) -> None:
        arguments = {"x": self.x, "y": y or self.y, "first": first, "count": count}
        self.stream.launch(write_from, 1, arguments)


@pytest.mark.parametrize("how", ["direct", "graph"])
@pytest.mark.parametrize(
    ("first", "count", "code", "offset"),
    [(N, 1, "MEM002", 4 * N), (-1, 1, "MEM001", -4), (N + 2, 3, "MEM002", 4 * N + 8)],
)
def test_a_write_outside_is_found_when_the_stream_is_synchronised(how, first, count, code, offset):
    three = Three()
    if how == "graph":
        three.stream.begin_capture()
    three.stream.launch(increment, 1, {"y": three.left})
    three.write(first, count)
    three.stream.launch(increment, 1, {"y": three.right})
    if how == "graph":
        three.stream.replay(three.stream.end_capture("bad"))
    assert three.bench.findings.list() == ()
    three.stream.synchronize()
    [finding] = three.bench.findings
    assert (finding.code, finding.kernel, finding.stream, finding.actor) == (
        code, "write_from", "target", "target",
    )  # fmt: skip
    assert (finding.buffer.name, finding.offset, finding.size) == ("y", offset, 4 * count)
    assert finding.launch is not None
    np.testing.assert_array_equal(three.bench.get(three.left), np.ones(N))
    np.testing.assert_array_equal(three.bench.get(three.right), np.ones(N))
    assert three.bench.allocator.check_integrity() == []


def test_of_several_writers_in_a_graph_the_graph_is_blamed():
    three = Three()
    three.stream.begin_capture()
    three.write(0)
    three.write(N)
    three.stream.replay(three.stream.end_capture("two"))
    three.stream.synchronize()
    [finding] = three.bench.findings
    assert (finding.kernel, finding.launch) == ("graph two", None)


def test_a_graph_is_checked_on_whatever_stream_it_is_replayed():
    three = Three()
    three.stream.begin_capture()
    three.write(N)
    graph = three.stream.end_capture("bad")
    other = three.bench.device.create_stream(owner=TARGET, name="other")
    other.replay(graph)
    three.stream.synchronize()
    assert three.bench.findings.list() == ()
    other.synchronize()
    [finding] = three.bench.findings
    assert (finding.kernel, finding.stream) == ("write_from", "other")
    graph.destroy()


def test_a_graph_is_blamed_at_each_replay():
    three = Three()
    three.stream.begin_capture()
    three.write(N)
    graph = three.stream.end_capture("bad")
    for _ in range(3):
        three.stream.replay(graph)
        three.stream.synchronize()
    assert three.bench.findings.total == 3


def test_between_two_waits_the_first_launch_with_the_damage_is_blamed():
    seen = []
    three = Three()
    three.bench.findings._on_finding = seen.append
    for first in (0, N, 2, N + 1, -1):
        three.write(first)
    three.stream.synchronize()
    assert sorted(finding.code for finding in seen) == ["MEM001", "MEM002"]
    # Damage at N + 1 lies in the canary that was damaged already: it is one finding, of the first launch.
    launches = {finding.code: finding.launch for finding in seen}
    assert launches["MEM001"] - launches["MEM002"] == 3
    three.write(N + 1)
    three.stream.synchronize()
    assert (seen[-1].code, seen[-1].launch) == ("MEM002", launches["MEM001"] + 1)


@given(first=st.integers(-40, N + 40), count=st.integers(1, 30))
def test_what_is_found_is_what_was_written_outside(first: int, count: int):
    three = Three()
    three.write(first, count)
    three.stream.synchronize()
    codes = {finding.code for finding in three.bench.findings}
    assert codes == ({"MEM001"} if first < 0 else set()) | ({"MEM002"} if first + count > N else set())
    wanted = np.zeros(N)
    wanted[max(0, first) : max(0, first + count)] = 7.5
    np.testing.assert_array_equal(three.bench.get(three.y), wanted)


def test_more_launches_than_flags_are_all_checked(monkeypatch):
    monkeypatch.setattr(cuda_checks, "FLAGS", 64)
    three = Three()
    for number in range(69):
        three.write(N if number == 35 else 0)
    three.stream.synchronize()
    [finding] = three.bench.findings
    assert finding.kernel == "write_from"
    assert three.bench.findings.total == 1


def test_more_buffers_than_the_table_has_rows_are_all_checked(monkeypatch):
    monkeypatch.setattr(cuda_checks, "MAX_ROWS", 64)
    three = Three()
    arena = three.bench.arena(8 << 20)
    views = [arena.reserve(4 * N, owner=TARGET, name=f"b{i}").unwrap().view(np.float32, N) for i in range(42)]
    for i, view in enumerate(views):
        three.write(N if i in (0, 20, len(views) - 1) else 0, y=view)
    three.write(-1, y=views[5])
    three.stream.synchronize()
    assert [finding.buffer.name for finding in three.bench.findings] == [
        "b0", "b20", f"b{len(views) - 1}", "b5",
    ]  # fmt: skip


def test_a_graph_with_more_canaries_than_flags_is_checked_all_the_same(monkeypatch):
    monkeypatch.setattr(cuda_checks, "FLAGS", 4)
    three = Three()
    three.stream.begin_capture()
    for view in (three.left, three.right):
        three.stream.launch(increment, 1, {"y": view})
    three.write(-1)
    graph = three.stream.end_capture("wide")
    three.stream.replay(graph)
    three.stream.replay(graph)
    three.stream.synchronize()
    [finding] = three.bench.findings
    assert (finding.code, finding.buffer.name, finding.kernel) == ("MEM001", "y", "write_from")
    assert three.bench.findings.total == 1


def test_launches_after_a_callback_that_raises_still_run():
    three = Three()

    def fail(finding):
        raise RuntimeError(finding.code)

    three.bench.findings._on_finding = fail
    three.write(N)
    three.stream.launch(increment, 1, {"y": three.right})
    with pytest.raises(RuntimeError, match="MEM002"):
        three.stream.synchronize()
    np.testing.assert_array_equal(three.bench.get(three.right), np.ones(N))


def test_a_callback_that_raises_while_the_queue_is_drained_is_heard_at_synchronize(monkeypatch):
    monkeypatch.setattr(cuda_checks, "FLAGS", 64)
    three = Three()

    def fail(finding):
        raise RuntimeError(finding.code)

    three.bench.findings._on_finding = fail
    three.write(N)
    for _ in range(33):
        three.write(0)
    with pytest.raises(RuntimeError, match="MEM002"):
        three.stream.synchronize()
    three.stream.synchronize()


def test_at_level_off_nothing_is_launched_but_what_was_asked_for():
    three = Three(Level.OFF)
    three.stream.synchronize()
    before = three.driver.calls["launch"]
    three.write(N)
    three.stream.synchronize()
    assert three.driver.calls["launch"] == before + 1
    assert three.bench.findings.list() == ()


def test_a_replay_is_checked_by_one_launch():
    three = Three()
    three.stream.begin_capture()
    for _ in range(50):
        three.write(0)
        three.stream.launch(increment, 1, {"y": three.left})
    graph = three.stream.end_capture("many")
    three.stream.replay(graph)
    three.stream.synchronize()
    before = three.driver.calls.copy()
    for _ in range(3):
        three.stream.replay(graph)
        three.stream.synchronize()
    assert dict(three.driver.calls - before) == {"replay": 3, "launch": 3, "synchronize_stream": 3}


def test_a_buffer_freed_before_anybody_waited_is_not_looked_at_again():
    three = Three()
    three.write(N)
    three.y.buffer.free()
    three.stream.synchronize()
    # What runs after a free is found in the quarantine.
    three.bench.allocator.check_integrity()
    assert {finding.code for finding in three.bench.findings} <= {"MEM003"}


@pytest.mark.parametrize("argument", ["x", "y"])
def test_a_freed_buffer_is_refused_before_the_launch(argument: str):
    three = Three()
    getattr(three, argument).buffer.free()
    launches = three.driver.calls["launch"]
    with pytest.raises(FindingError, match="MEM004"):
        three.write(0)
    [finding] = three.bench.findings
    assert (finding.code, finding.kernel, finding.argument) == ("MEM004", "write_from", argument)
    assert three.driver.calls["launch"] == launches


@pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
def test_copies_of_freed_buffers_are_refused_at_every_level(level: Level):
    three = Three(level)
    three.y.buffer.free()
    for call in (
        lambda: three.stream.copy_in(three.y, np.zeros(N, np.float32)),
        lambda: three.stream.copy_out(np.zeros(N, np.float32), three.y),
        lambda: three.stream.copy(three.left, three.y),
        lambda: three.stream.fill(three.y, 0),
    ):
        with pytest.raises(FindingError, match="MEM004"):
            call()
