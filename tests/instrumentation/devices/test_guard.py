"""Level guard: who may touch what, and which launch wrote outside its buffer."""

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, increment, scale_by, write_from
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.allocator import BufferRequest
from instrumentation.devices.monitor import AccessMonitor, allowed
from instrumentation.errors import FindingError
from instrumentation.levels import Level
from instrumentation.view import View

N = 16
ONE = np.array([7.5], np.float32)


class Three:
    """Buffers left, y and right beside each other, and x elsewhere; a stream of the target."""

    def __init__(self, level: Level = Level.GUARD) -> None:
        self.bench = Bench(level)
        self.arena = self.bench.arena()
        self.left, self.y, self.right = (
            self.bench.put(self.arena, np.zeros(N, np.float32), name) for name in ("left", "y", "right")
        )
        self.x = self.bench.put(self.bench.arena(), ONE, "x")
        self.stream = self.bench.stream

    def write(self, first: int, count: int = 1, stream=None) -> None:
        arguments = {"x": self.x, "y": self.y, "first": first, "count": count}
        (stream or self.stream).launch(write_from, 1, arguments)

    def launched(self, how: str, first: int, count: int) -> None:
        """One bad launch between two good ones, direct or in a graph, run."""
        if how == "graph":
            self.stream.begin_capture()
        self.stream.launch(increment, 1, {"y": self.left})
        self.write(first, count)
        self.stream.launch(increment, 1, {"y": self.right})
        if how == "graph":
            self.stream.replay(self.stream.end_capture("bad"))
        self.stream.synchronize()


@pytest.mark.parametrize("how", ["direct", "graph"])
@pytest.mark.parametrize(
    ("first", "count", "code", "offset"),
    [(N, 1, "MEM002", 4 * N), (-1, 1, "MEM001", -4), (N + 2, 3, "MEM002", 4 * N + 8)],
)
def test_a_write_outside_is_found_after_its_launch(how: str, first: int, count: int, code: str, offset: int):
    three = Three()
    three.launched(how, first, count)
    [finding] = three.bench.findings
    assert finding.code == code
    assert finding.kernel == "write_from"
    assert finding.stream == "target"
    assert finding.actor == "target"
    assert finding.buffer.name == "y"
    assert finding.buffer.owner == "target"
    assert finding.offset == offset
    assert finding.size == 4 * count
    assert finding.launch is not None
    # The launches around it ran, and nobody else's memory changed.
    np.testing.assert_array_equal(three.bench.get(three.left), np.ones(N))
    np.testing.assert_array_equal(three.bench.get(three.right), np.ones(N))
    np.testing.assert_array_equal(three.bench.get(three.y), np.zeros(N))
    # Repaired: it is found once, and not again at the next check.
    assert three.bench.allocator.check_integrity() == []


def test_each_bad_launch_has_its_own_number():
    seen = []
    three = Three()
    three.bench.findings._on_finding = seen.append
    for first in (N, 2, -1, N + 1):
        three.write(first)
    three.stream.synchronize()
    assert [finding.code for finding in seen] == ["MEM002", "MEM001", "MEM002"]
    numbers = [finding.launch for finding in seen]
    assert [number - numbers[0] for number in numbers] == [0, 2, 3]


def test_a_graph_is_blamed_at_each_replay():
    three = Three()
    three.stream.begin_capture()
    three.write(N)
    graph = three.stream.end_capture("bad")
    for _ in range(3):
        three.stream.replay(graph)
        three.stream.synchronize()
    assert three.bench.findings.total == 3


@given(first=st.integers(-40, N + 40), count=st.integers(1, 30))
def test_what_is_found_is_what_was_written_outside(first: int, count: int):
    three = Three()
    three.write(first, count)
    three.stream.synchronize()
    codes = {finding.code for finding in three.bench.findings}
    # Redzones are 256 bytes: nothing here jumps past them.
    assert codes == ({"MEM001"} if first < 0 else set()) | ({"MEM002"} if first + count > N else set())
    wanted = np.zeros(N)
    wanted[max(0, first) : max(0, first + count)] = 7.5
    np.testing.assert_array_equal(three.bench.get(three.y), wanted)


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


def test_copies_and_launches_after_a_callback_that_raises_still_run():
    """What is no launch ends a native call: the queue goes on behind it, once."""
    three = Three()
    raised = []

    def fail(finding):
        raised.append(finding.code)
        if len(raised) == 1:
            raise RuntimeError(finding.code)
        raise ValueError("the first one is told")

    three.bench.findings._on_finding = fail
    three.write(N)
    three.stream.fill(three.left, 0)
    three.write(N)
    three.stream.launch(increment, 1, {"y": three.right})
    three.stream.fill(three.x, 0)
    with pytest.raises(RuntimeError, match="MEM002"):
        three.stream.synchronize()
    assert three.stream.pending == 0
    assert raised == ["MEM002"] * len(raised)
    assert len(raised) >= 2
    np.testing.assert_array_equal(three.bench.get(three.right), np.ones(N))
    np.testing.assert_array_equal(three.bench.get(three.x), np.zeros(1))


def test_at_level_off_nobody_looks():
    three = Three(Level.OFF)
    three.write(N)
    three.stream.synchronize()
    assert three.bench.findings.list() == ()


@pytest.mark.parametrize("argument", ["x", "y"])
def test_a_freed_buffer_is_refused_before_the_launch(argument: str):
    three = Three()
    getattr(three, argument).buffer.free()
    with pytest.raises(FindingError, match="MEM004"):
        three.write(0)
    [finding] = three.bench.findings
    assert (finding.code, finding.kernel, finding.argument) == ("MEM004", "write_from", argument)
    assert finding.kind == "use of a freed buffer"
    assert (finding.stream, finding.actor) == ("target", "target")
    assert finding.free
    assert three.stream.pending == 0


def test_a_view_of_a_buffer_that_was_freed_and_reserved_again_is_refused():
    three = Three()
    three.y.buffer.free()
    three.bench.allocator._heap.leave_quarantine_locked(three.bench.allocator._heap.quarantine)
    again = three.arena.reserve(4 * N, owner=TARGET, name="again").unwrap()
    assert again.address == three.y.address
    with pytest.raises(FindingError, match="MEM004"):
        three.write(0)


def test_a_dormant_buffer_is_refused():
    three = Three()
    arena = three.bench.arena()
    overlays = [
        arena.reserve_overlay([BufferRequest(64, TARGET, n)], owner=TARGET, name=n).unwrap() for n in "ab"
    ]
    overlays[0].activate()
    view = overlays[1].buffers[0].view(np.float32, N)
    with pytest.raises(FindingError, match="activate b first"):
        three.stream.launch(increment, 1, {"y": view})
    [finding] = three.bench.findings
    assert (finding.code, finding.kernel, finding.argument) == ("MEM004", "increment", "y")
    assert finding.kind == "use of a dormant buffer"


@pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
def test_copies_of_freed_buffers_are_refused_at_every_level(level: Level):
    three = Three(level)
    three.y.buffer.free()
    for call in (
        lambda: three.stream.copy_in(three.y, np.zeros(N, np.float32)),
        lambda: three.stream.copy_out(np.zeros(N, np.float32), three.y),
        lambda: three.stream.copy(three.left, three.y),
        lambda: three.stream.copy(three.y, three.left),
        lambda: three.stream.fill(three.y, 0),
    ):
        with pytest.raises(FindingError, match="MEM004"):
            call()
    assert three.stream.pending == 0


class TestOwners:
    """A stream of the draft, and buffers of the target."""

    @pytest.fixture
    def three(self):
        return Three()

    @pytest.fixture
    def draft(self, three):
        return three.bench.device.create_stream(owner=DRAFT, name="draft")

    @pytest.mark.parametrize("lent", ["nothing", "x"])
    def test_buffers_of_another_owner_are_refused(self, three, draft, lent):
        if lent == "x":
            three.x.buffer.lend(to=DRAFT, mode="read")
        with pytest.raises(FindingError, match="OWN001"):
            three.write(0, stream=draft)
        [finding] = three.bench.findings
        argument, mode = ("x", "read") if lent == "nothing" else ("y", "write")
        assert (finding.code, finding.kernel, finding.argument) == ("OWN001", "write_from", argument)
        assert (finding.actor, finding.buffer.owner, finding.stream) == ("draft", "target", "draft")
        assert finding.message.startswith(f"write_from of draft would {mode} {argument} through {argument}")
        assert draft.pending == 0

    def test_leases_allow_what_they_say(self, three, draft):
        with three.x.buffer.lend(to=DRAFT, mode="read"):
            with three.y.buffer.lend(to=DRAFT, mode="write"):
                three.write(3, stream=draft)
                draft.synchronize()
            with (
                three.y.buffer.lend(to=DRAFT, mode="read"),
                pytest.raises(FindingError, match="for reading only"),
            ):
                three.write(4, stream=draft)
        with pytest.raises(FindingError, match="OWN001"):
            three.write(5, stream=draft)
        wanted = np.zeros(N)
        wanted[3] = 7.5
        np.testing.assert_array_equal(three.bench.get(three.y), wanted)

    def test_shared_read_only_buffers_are_read_by_all_and_written_by_none(self, three, draft):
        three.y.buffer.lend(to=DRAFT, mode="write")
        three.x.buffer.share_read_only()
        three.write(0, stream=draft)
        three.write(1)
        for stream in (three.stream, draft):
            with pytest.raises(FindingError, match="OWN001"):
                stream.launch(increment, 1, {"y": three.x})
        assert {finding.actor for finding in three.bench.findings} == {"target", "draft"}
        assert all("shared read-only" in finding.message for finding in three.bench.findings)

    def test_copies_need_the_same_rights(self, three, draft):
        three.left.buffer.lend(to=DRAFT, mode="read")
        three.right.buffer.share_read_only()
        values = np.zeros(N, np.float32)
        draft.copy_out(values, three.left)
        draft.copy_out(values, three.right)
        for call in (
            lambda: draft.copy_out(values, three.y),
            lambda: draft.copy_in(three.left, values),
            lambda: draft.fill(three.y, 0),
            lambda: draft.copy(three.left, three.right),
            lambda: three.stream.copy_in(three.right, values),
        ):
            with pytest.raises(FindingError, match="OWN001"):
                call()
        assert draft.pending == 2

    def test_a_read_and_written_argument_needs_the_right_to_write(self, three, draft):
        three.y.buffer.lend(to=DRAFT, mode="read")
        with pytest.raises(FindingError, match="would write y"):
            draft.launch(increment, 1, {"y": three.y})
        three.x.buffer.lend(to=DRAFT, mode="read")

    def test_at_level_off_owners_are_not_asked(self):
        three = Three(Level.OFF)
        draft = three.bench.device.create_stream(owner=DRAFT, name="draft")
        arguments = {"x": three.left, "y": three.y, "factor": 1.0, "offset": 2}
        draft.launch(scale_by, 1, arguments)
        draft.synchronize()
        np.testing.assert_array_equal(three.bench.get(three.y), np.full(N, 2))


class Captured:
    """A graph that reads x and writes y, left, and z of an overlay, whose arena has another one."""

    def __init__(self) -> None:
        self.three = Three()
        self.bench = self.three.bench
        self.draft = self.bench.device.create_stream(owner=DRAFT, name="draft")
        arena = self.bench.arena()
        self.overlays = [
            arena.reserve_overlay([BufferRequest(64, TARGET, n)], owner=TARGET, name=n).unwrap() for n in "ab"
        ]
        self.overlays[0].activate()
        self.z: View = self.overlays[0].buffers[0].view(np.float32, N)
        stream = self.three.stream
        stream.begin_capture()
        self.three.write(0)
        stream.launch(increment, 1, {"y": self.three.left})
        stream.launch(increment, 1, {"y": self.z})
        self.graph = stream.end_capture("captured")

    def views(self) -> tuple[View, ...]:
        return self.three.x, self.three.y, self.three.left, self.z

    def replay(self, stream) -> bool:
        """Whether the graph may be replayed; refused as a check of everything would refuse it."""
        wanted = all(allowed(access.view, access.mode, stream.owner) for access in self.graph.accesses)
        try:
            stream.replay(self.graph)
        except FindingError:
            assert not wanted
            return False
        assert wanted
        stream.synchronize()
        return True


def test_a_graph_is_checked_again_when_something_is_otherwise(monkeypatch: pytest.MonkeyPatch):
    made = Captured()
    checks = []
    check = AccessMonitor.check
    monkeypatch.setattr(
        AccessMonitor,
        "check",
        lambda self, accesses, *rest: checks.append(accesses) or check(self, accesses, *rest),
    )
    stream, three = made.three.stream, made.three
    assert [made.replay(stream) for _ in range(3)] == [True] * 3
    assert checks == [made.graph.accesses]
    # What it does not name changes nothing of it: another lease, another buffer that is reserved.
    with three.right.buffer.lend(to=DRAFT, mode="write"):
        three.arena.reserve(64, owner=TARGET, name="more").unwrap()
        assert made.replay(stream)
    assert len(checks) == 1
    three.right.buffer.free()
    assert made.replay(stream)
    assert len(checks) == 2
    made.overlays[1].activate()
    assert not made.replay(stream)
    made.overlays[0].activate()
    assert made.replay(stream)
    assert not made.replay(made.draft)
    assert made.replay(stream)
    three.y.buffer.share_read_only()
    assert not made.replay(stream)
    codes = [finding.code for finding in made.bench.findings]
    assert codes == ["MEM004", "OWN001", "OWN001"]


def test_a_lease_that_ends_is_missed_at_the_next_replay():
    made = Captured()
    leases = [view.buffer.lend(to=DRAFT, mode="write") for view in made.views()]
    assert made.replay(made.draft)
    assert made.replay(made.draft)
    leases[2].end()
    assert not made.replay(made.draft)
    assert made.replay(made.three.stream)
    made.three.left.buffer.lend(to=DRAFT, mode="write")
    assert made.replay(made.draft)


CHANGES = st.one_of(
    st.tuples(st.just("replay"), st.booleans()),
    st.tuples(st.just("lend"), st.integers(0, 3), st.sampled_from(["read", "write"])),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("activate"), st.integers(0, 1)),
    st.tuples(st.just("share"), st.integers(0, 3)),
    st.tuples(st.just("free")),
)


@settings(max_examples=60)
@given(st.lists(CHANGES, max_size=25))
def test_replays_are_refused_as_a_check_of_everything_would_refuse_them(changes):
    made = Captured()
    leases = []
    for what, *rest in changes:
        match what:
            case "replay":
                made.replay(made.draft if rest[0] else made.three.stream)
            case "lend" | "share":
                buffer = made.views()[rest[0]].buffer
                if what == "lend" and buffer.live and not (buffer.read_only and rest[1] == "write"):
                    leases.append(buffer.lend(to=DRAFT, mode=rest[1]))
                elif what == "share" and buffer.live and rest[0] == 0:
                    buffer.share_read_only()
            case "end":
                if leases:
                    leases.pop(rest[0] % len(leases)).end()
            case "activate":
                made.overlays[rest[0]].activate()
            case "free":
                if made.three.right.buffer.live:
                    made.three.right.buffer.free()
        for stream in (made.three.stream, made.draft):
            made.replay(stream)
