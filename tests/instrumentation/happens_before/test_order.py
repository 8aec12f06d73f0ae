"""Order that our own devices do not make: default streams, events across devices, frees queued on a stream."""

import pytest
from racing import SPACING, CorePlayer

from instrumentation.happens_before.accesses import Kind, Operation, Touch
from instrumentation.happens_before.detector import RaceDetector

#: name: code, racy program, repaired program; ``blocking`` streams are ordered with ``default``, others are not
SCENARIOS = {
    # --- the legacy default stream
    "default, then another": ("STR010", "default write x; a write x", "default write x; blocking write x"),
    "another, then default": ("STR011", "a write x; default read x", "blocking write x; default read x"),
    "between two blocking streams": (
        "STR010",
        "blocking1 write x; blocking2 write x",
        "blocking1 write x; default write y; blocking2 write x",
    ),
    "default does not order what comes after it": (
        "STR010",
        "blocking1 write y; default write z; blocking1 write x; blocking2 write x",
        "blocking1 write x; default write z; blocking1 write y; blocking2 write x",
    ),
    "what a blocking stream waited for": (
        "STR011",
        "a write x; a record e; a write y; blocking wait e; default read y",
        "a write x; a record e; a write y; blocking wait e; default read x",
    ),
    "of another device": (
        "STR010", "gpu1.default write x; gpu0.blocking write x", "gpu1.default write x; gpu1.blocking write x",
    ),
    "default stream synchronised": (
        "STR011",
        "a write x; default write y; host syncs default; b read x",
        "blocking write x; default write y; host syncs default; b read x",
    ),
    # --- several devices
    "event across devices": (
        "STR010", "gpu0.a write x; gpu1.a write x", "gpu0.a write x; gpu0.a record e; gpu1.a wait e; gpu1.a write x",
    ),
    "synchronise of another device": (
        "STR011",
        "gpu0.a write x; gpu1.a write y; host syncs all.gpu1; gpu1.b read x",
        "gpu0.a write x; gpu1.a write y; host syncs all.gpu0; gpu1.b read x",
    ),
    "chain over three devices": (
        "STR011",
        "gpu0.a write x; gpu0.a record e; gpu1.a wait e; gpu1.a write y; gpu2.a wait e; gpu2.a read y",
        "gpu0.a write x; gpu0.a record e; gpu1.a wait e; gpu1.a write y; gpu1.a record f; gpu2.a wait f; gpu2.a read y",
    ),
    "host array of two devices": (
        "STR013", "gpu0.a get x > h; gpu1.a get y > h", "gpu0.a get x > h; host syncs all.gpu0; gpu1.a get y > h",
    ),
    "a peer's queued writer": (
        "STR012", "gpu1.a write x; gpu0.a free x", "gpu1.a write x; gpu1.a record e; gpu0.a wait e; gpu0.a free x",
    ),
    # --- memory that is freed in stream order
    "freed under another stream's read": (
        "STR012", "a write x; b write y; b read y; a free x; a free y", "a write x; b write y; a free x; b free y",
    ),
    "used again before it is free": (
        "STR012", "a read x; a free x; b write x", "a read x; a free x; a record e; b wait e; b write x",
    ),
    "used again after the event before the free": (
        "STR012",
        "a read x; a record e; a free x; b wait e; b write x",
        "a read x; a free x; a record e; b wait e; b write x",
    ),
    "freed twice": ("STR012", "a free x; b free x", "a free x; a record e; b wait e; b free x"),
    # --- streams that go away while their work runs
    "destroyed without a wait": (
        "STR011", "a write x; a destroy; b read x", "a write x; a record e; a destroy; b wait e; b read x",
    ),
    "another one of the same name": (
        "STR010", "a write x; a destroy; a write x", "a write x; a destroy; host syncs all; a write x",
    ),
    "a destroyed stream's event": (
        "STR010",
        "a record e; a write x; a destroy; host waits e; b write x",
        "a write x; a record e; a destroy; host waits e; b write x",
    ),
    # --- graphs
    "two graphs": (
        "STR011", "a replay g1; b replay g2", "a replay g1; a record e; b wait e; b replay g2",
    ),
    "a graph and the end of a buffer": ("STR011", "a replay g1; b write x[23:24]", "a replay g1; b write x[24:25]"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_race_is_found(name: str):
    code, racy, _ = SCENARIOS[name]
    conflict = CorePlayer().play(racy)
    assert conflict is not None
    assert conflict.code == code
    assert conflict.earlier.op.timeline.name


@pytest.mark.parametrize("name", SCENARIOS)
def test_its_twin_has_none(name: str):
    _, _, repaired = SCENARIOS[name]
    assert CorePlayer().play(repaired) is None


def test_the_overlapping_bytes_are_those_of_both():
    conflict = CorePlayer().play("a write x[8:24]; b read x[20:64]")
    base = SPACING * ord("x")
    assert (conflict.start - base, conflict.stop - base) == (20, 24)
    conflict = CorePlayer().play("a replay g1; b write x[0:12]")
    assert (conflict.start - base, conflict.stop - base) == (0, 10)
    assert conflict.earlier.detail == ("read", "x[0:10]")


def test_the_last_reader_is_named_rather_than_the_writer_before_it():
    conflict = CorePlayer().play("a write x; a read x; b write x")
    assert conflict.earlier.detail.verb == "read"


def test_streams_that_come_and_go_leave_nothing():
    player = CorePlayer()
    for i in range(200):
        player.play(
            f"a{i} write x; a{i} record e{i}; host waits e{i}; a{i} destroy; e{i} destroy; keeper wait e{i}"
        )
    order = player.detector.order
    assert len(order.host) <= 1
    assert len(order._streams) == 1
    assert order._events == {}
    assert len(player.detector) == 0


def test_what_is_never_waited_for_is_bounded_by_its_ranges():
    player = CorePlayer()
    player.play("keeper write y")
    for i in range(3000):
        player.play(f"a write x[{i % 60}:{i % 60 + 3}]; a read x")
    assert len(player.detector) <= 130


def test_ranges_that_are_done_go_when_there_are_many():
    player = CorePlayer()
    player.play("keeper write y")
    sizes = []
    for i in range(5000):
        player.play(f"a write x[{10 * i}:{10 * i + 5}]; host syncs a")
        sizes.append(len(player.detector))
    assert max(sizes) <= 1100
    player.play("host syncs keeper")
    assert len(player.detector) == 0


def test_what_two_threads_queue_at_a_time_is_kept_of_both():
    """Another thread may check between one's check and its commit."""
    player = CorePlayer()
    detector, a, b = player.detector, player.stream("a"), player.stream("b")
    operations = [Operation(a), Operation(b)]
    space, start, stop = player.extent("x")
    for stream in (a, b):
        detector.enter(stream)
    for op in operations:
        detector.commit((op,), [Touch(op, space, start, stop, Kind.READ)])
    assert player.play("a write x").earlier.op is operations[1]
    assert player.play("b write x").earlier.op is operations[0]


def test_an_empty_detector_has_no_conflicts():
    detector = RaceDetector()
    assert detector.check([]) is None
    assert len(detector) == 0
