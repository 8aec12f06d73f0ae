"""What a refusal says and does, what the host may touch, and how long anything is kept."""

import re

import numpy as np
import pytest
from engines import TARGET
from fake_cuda import fake_device
from racing import Player, parse

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import RefusedError
from instrumentation.levels import Level


@pytest.fixture(params=["host", "cuda"])
def player(request):
    made = Player(fake_device() if request.param == "cuda" else None)
    yield made
    made.close()


def test_a_report_names_both_accesses_and_the_cure(player: Player):
    player.play("a fill y[0:4]; host syncs a; a scale x > y")
    finding = player.play("b scale y[16:48] > z")
    number = finding.launch
    earlier, later = f"kernel scale_by (launch {number - 1})", f"kernel scale_by (launch {number})"
    assert finding.message == (
        f"{later} of target on stream b would read bytes [16, 48) of y through x, which {earlier} of target on "
        f"stream a may still write; record an event on stream a after {earlier}, and wait for it on stream b "
        f"before {later}"
    )
    other, why = finding.notes
    assert other == f"other access: {earlier} of target on stream a: write bytes [16, 48) of y through y"
    assert why == (
        "stream b has waited for stream a up to 1 operation before that access: the event was recorded, or the "
        "wait was made, too early"
    )
    assert (finding.kernel, finding.argument, finding.offset, finding.size) == ("scale_by", "x", 16, 32)
    assert (finding.buffer.name, finding.buffer.owner, finding.actor) == ("y", "target", "target")
    assert all(stack[0].file.endswith("racing.py") for stack in (finding.access, finding.previous))


def test_a_report_of_a_free_and_of_a_host_array(player: Player):
    finding = player.play("a bump x; host frees x")
    launch = re.search(r"kernel increment \(launch \d+\)", finding.notes[0])[0]
    assert finding.message == (
        f"free() of x would give up bytes [0, 64) of x, which {launch} of target on stream a may still write; "
        f"synchronise stream a, or wait on the host for an event recorded on it after {launch}, before free() of x"
    )
    assert not player.buffers["x"].freed
    player.bench.findings.clear()
    finding = player.play("a get y > h; host writes h[60:64]")
    assert finding.message == (
        "the host would write bytes [0, 4) of the host array uint8 (4,), which copy_out of target on stream a may "
        "still fill; synchronise stream a, or wait on the host for an event recorded on it after copy_out, before "
        "the host's write"
    )


def test_a_replay_is_blamed_by_its_launch(player: Player):
    finding = player.play("a capture g bump x, scale x > y; a replay g; b fill y")
    assert "graph g, kernel scale_by (launch " in finding.message
    finding = player.play_again("b fill z; a capture g2 bump z; a replay g2")
    assert finding.kernel == "increment"
    assert finding.message.startswith("graph g2, kernel increment (launch ")


def test_what_is_refused_was_not_queued(player: Player):
    player.play("a fill x; host syncs a; b bump y; a bump x; b fill x")
    player.bench.device.synchronize()
    view = player.view("x", np.float32)
    player.bench.findings.clear()
    wanted = np.frombuffer(b"\1" * 64, np.float32) + np.float32(1)
    np.testing.assert_array_equal(player.bench.get(view), wanted)


def test_a_refusal_does_not_order(player: Player):
    for _ in range(3):
        assert player.play_again("b fill x", before="a fill x").code == "STR010"


@pytest.mark.parametrize("use", ["read", "write"])
def test_an_array_is_copied_in_late_on_the_host_and_at_once_on_cuda(player: Player, use: str):
    finding = player.play(f"a put h > x; host {use}s h")
    # A read beside a read is none; CUDA's copy has taken the bytes already.
    raced = use == "write" and not player.bench.device.stages_copies
    assert (finding is not None) == raced
    if raced:
        assert finding.code == "STR013"
        player.bench.findings.clear()
    assert player.play("host syncs a; host writes h") is None


def test_an_event_lands_what_came_before_it_and_no_more(player: Player):
    player.play("a fill x; a get x > h; a record e; a get x > i; host waits e; host reads h")
    assert player.arrays["h"].tolist() == [1] * 64
    assert player.play("host reads i").code == "STR013"


def test_an_activated_overlay_must_not_be_in_use(player: Player):
    arena = player.bench.arena()
    one, two = (
        arena.reserve_overlay([BufferRequest(64, TARGET, name)], owner=TARGET, name=name).unwrap()
        for name in "pq"
    )
    one.activate()
    stream = player.stream("a")
    stream.fill(one.buffers[0].view(np.uint8, 64), 0)
    for call in (two.activate, one.release):
        with pytest.raises(RefusedError, match="STR012"):
            call()
        assert one.active
    stream.synchronize()
    two.activate()
    one.release()
    two.release()
    arena.release()


def test_what_the_host_cannot_do_is_refused(player: Player):
    with pytest.raises(BadInputError, match="host_access of list; give a NumPy array"):
        player.bench.device.host_access([1.0], "read")
    with pytest.raises(BadInputError, match="host_access for 'look'; use 'read', 'write' or 'free'"):
        player.bench.device.host_access(np.zeros(1), "look")


def test_memory_is_bounded_whatever_is_never_waited_for(player: Player):
    detector = player.bench.device.audit.shared.detector
    player.play("a fill x")
    sizes = []
    for _ in range(300):
        array = np.zeros(64, np.uint8)
        player.stream("b").copy_out(array, player.view("y"))
        player.stream("b").synchronize()
        sizes.append(len(detector))
    assert max(sizes) <= 4
    player.play("host syncs a")
    assert len(detector) == 0


def test_a_lost_device_lets_everything_go():
    player = Player(fake_device())
    player.play("b fill x; b get x > h; a bump y")
    player.bench.device.context.driver.broken = {"increment": "ILLEGAL_ADDRESS"}
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        player.do(parse("host syncs a")[0])
    assert player.bench.device.lost
    for buffer in player.buffers.values():
        buffer.free()
    assert player.findings == []


def test_devices_that_report_to_one_log_know_of_each_other():
    one, two = Player(), Player()
    allocator = Allocator(two.bench.device, level=Level.AUDIT, findings=one.bench.findings)
    two.bench.device.watch(allocator)
    two.arena = allocator.reserve_arena(1 << 16, owner=TARGET, name="second").unwrap()
    two.arrays = one.arrays
    assert one.play("a get x > h") is None
    for step in ("a get y > h", "a put h > y", "host reads h"):
        assert two.refusal(parse(step)[0]).code == "STR013"
    one.bench.device.synchronize()
    for step in ("a get y > h", "b fill x"):
        assert two.refusal(parse(step)[0]) is None


def test_below_level_audit_nothing_is_kept():
    player = Player()
    allocator = Allocator(player.bench.device, level=Level.GUARD, findings=player.bench.findings)
    player.bench.device.watch(allocator)
    player.arena = allocator.reserve_arena(1 << 16, owner=TARGET, name="second").unwrap()
    assert player.bench.device.audit is None
    assert player.play("a bump x; b bump x; a get x > h; host reads h; host frees x") is None
