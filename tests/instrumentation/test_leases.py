"""Level audit: what a lease covers, and that lender and borrower are behind each other, on both devices."""

import numpy as np
import pytest
from engines import DRAFT, MODEL, TARGET, Bench, increment, n_queued, scale_by
from fake_cuda import fake_device

from instrumentation.allocator import BufferRequest
from instrumentation.errors import BadInputError
from instrumentation.findings import RefusedError
from instrumentation.levels import Level

N = 16


class Lending:
    """x and y of the target, z of the draft; a stream and an event of each."""

    def __init__(self, device=None, level: Level = Level.AUDIT) -> None:
        self.bench = Bench(level, device=device, threads=1 if device is None else None)
        self.device = self.bench.device
        arena = self.bench.arena()
        self.x, self.y, self.z = (
            self.bench.put(arena, np.arange(N, dtype=np.float32), name, owner)
            for name, owner in (("x", TARGET), ("y", TARGET), ("z", DRAFT))
        )
        self.target = self.bench.stream
        self.draft = self.device.create_stream(owner=DRAFT, name="draft")
        self.written = self.device.create_event(owner=TARGET, name="written")
        self.done = self.device.create_event(owner=DRAFT, name="done")

    def write(self) -> None:
        self.target.launch(increment, 1, {"y": self.x})

    def read(self) -> None:
        self.draft.launch(scale_by, 1, {"x": self.x, "y": self.z, "factor": 2.0, "offset": 0})

    def overwrite(self) -> None:
        self.draft.launch(increment, 1, {"y": self.x})

    def lend(self, mode="read", **given):
        return self.x.buffer.lend(**({"to": DRAFT, "mode": mode, "after": self.written} | given))

    def capture(self, call, stream=None):
        stream = stream or self.draft
        stream.begin_capture()
        call()
        return stream.end_capture("captured")

    def refusal(self, call):
        """The finding that refuses a call, which queues nothing."""
        queued = [n_queued(stream) for stream in (self.target, self.draft)]
        with pytest.raises(RefusedError) as caught:
            call()
        assert [n_queued(stream) for stream in (self.target, self.draft)] == queued
        assert list(self.bench.findings) == [caught.value.finding]
        self.bench.findings.clear()
        return caught.value.finding

    def nothing_found(self) -> None:
        self.device.synchronize()
        assert self.bench.findings.list() == ()


@pytest.fixture(params=["host", "cuda"])
def lending(request):
    return Lending(fake_device() if request.param == "cuda" else None)


class TestCover:
    """OWN001, OWN010."""

    def test_where_no_lease_ever_was_it_is_another_owners_buffer(self, lending):
        finding = lending.refusal(lending.read)
        assert (finding.code, finding.kernel, finding.argument) == ("OWN001", "scale_by", "x")
        assert finding.previous == ()

    def test_a_lease_to_somebody_else_is_none(self, lending):
        lending.lend(to=MODEL)
        assert lending.refusal(lending.read).code == "OWN001"

    def test_beyond_the_mode(self, lending):
        lending.target.record(lending.written)
        lease = lending.lend()
        lending.draft.wait(lending.written)
        finding = lending.refusal(lending.overwrite)
        assert finding.code == "OWN010"
        assert finding.message.endswith("which is owned by target and lent to draft for reading only")
        assert (finding.actor, finding.buffer.owner, finding.argument) == ("draft", "target", "y")
        assert finding.previous == lease.made_at
        lending.read()
        lending.nothing_found()

    def test_after_the_end(self, lending):
        lending.target.record(lending.written)
        lending.draft.wait(lending.written)
        with lending.lend() as lease:
            lending.read()
        finding = lending.refusal(lending.read)
        assert finding.code == "OWN010"
        assert finding.message.endswith("which is owned by target and no longer lent to draft")
        assert finding.previous == lease.ended_at

    def test_a_free_ends_leases_for_good(self, lending):
        lease = lending.lend()
        buffer = lending.x.buffer
        buffer.free()
        assert not lease.active
        assert (buffer.leases, buffer.last_lease(DRAFT)) == ((), None)
        assert lending.refusal(lending.read).code == "MEM004"

    def test_at_level_guard_all_of_it_is_another_owners_buffer(self):
        lending = Lending(level=Level.GUARD)
        with lending.lend(after=None):
            assert lending.refusal(lending.overwrite).code == "OWN001"
            lending.read()
        finding = lending.refusal(lending.read)
        assert finding.code == "OWN001"
        assert "no longer lent" in finding.message

    def test_a_replay(self, lending):
        lending.target.record(lending.written)
        lending.draft.wait(lending.written)
        with lending.lend():
            graph = lending.capture(lending.read)
            lending.draft.replay(graph)
        finding = lending.refusal(lambda: lending.draft.replay(graph))
        assert (finding.code, finding.kernel, finding.argument) == ("OWN010", "scale_by", "x")
        with lending.lend():
            lending.draft.replay(graph)
        lending.nothing_found()


class TestEvent:
    """OWN011, OWN012."""

    def accesses(self, lending):
        out = np.empty(N, np.float32)
        graph = lending.capture(lending.read)
        return {
            "launch": lending.read,
            "copy_out": lambda: lending.draft.copy_out(out, lending.x),
            "copy": lambda: lending.draft.copy(lending.z, lending.x),
            "replay": lambda: lending.draft.replay(graph),
        }

    def test_never_recorded(self, lending):
        lending.write()
        lease = lending.lend()
        lending.draft.wait(lending.written)
        for call in self.accesses(lending).values():
            finding = lending.refusal(call)
            assert finding.code == "OWN011"
            assert "lent behind event written, which was never recorded; record it" in finding.message
            assert (finding.buffer.owner, finding.actor, finding.stream) == ("target", "draft", "draft")
            assert finding.previous == lease.made_at

    def test_never_recorded_though_the_host_waited(self, lending):
        """The lease names it, so it must have been."""
        lending.lend()
        lending.device.synchronize()
        assert lending.refusal(lending.read).code == "OWN011"

    def test_recorded_too_early(self, lending):
        lending.target.record(lending.written)
        lending.write()
        lending.lend()
        lending.draft.wait(lending.written)
        finding = lending.refusal(lending.read)
        assert finding.code == "OWN011"
        assert finding.kind == "lease without a recorded event"
        start = (
            "x is lent by target to draft behind event written, which was recorded too early: kernel scale_by"
        )
        assert finding.message.startswith(start)
        assert finding.notes[-1].startswith("lent at ")
        assert "test_leases.py" in finding.previous[0].file

    def test_not_waited_for(self, lending):
        lending.write()
        lending.target.record(lending.written)
        lease = lending.lend()
        for call in self.accesses(lending).values():
            finding = lending.refusal(call)
            assert finding.code == "OWN012"
            assert "lent behind event written, and stream draft has not waited for that" in finding.message
            assert finding.previous == lease.made_at
        lending.draft.wait(lending.written)
        lending.read()
        lending.nothing_found()

    @pytest.mark.parametrize(
        "how", ["stream", "event", "host", "by way of another", "record after the lease"]
    )
    def test_waited_for(self, lending, how):
        lending.write()
        if how == "record after the lease":
            lending.lend()
            lending.target.record(lending.written)
        else:
            lending.target.record(lending.written)
            lending.lend()
        if how == "event":
            lending.written.synchronize()
        elif how == "host":
            lending.target.synchronize()
        elif how == "by way of another":
            third = lending.device.create_stream(owner=MODEL, name="third")
            passed = lending.device.create_event(owner=MODEL, name="passed")
            third.wait(lending.written)
            third.record(passed)
            lending.draft.wait(passed)
        else:
            lending.draft.wait(lending.written)
        for call in self.accesses(lending).values():
            call()
        lending.nothing_found()

    def test_an_event_that_is_used_again_meanwhile(self, lending):
        """The borrower has waited for what it was lent behind; what it is recorded for next is another hand-over."""
        lending.write()
        lending.target.record(lending.written)
        lending.lend()
        lending.draft.wait(lending.written)
        lending.target.launch(increment, 1, {"y": lending.y})
        lending.target.record(lending.written)
        lending.read()
        lending.written.destroy()
        lending.read()
        lending.nothing_found()

    def test_without_an_event_the_host_has_to_wait(self, lending):
        lending.write()
        lending.lend(after=None)
        finding = lending.refusal(lending.read)
        assert finding.code == "OWN011"
        assert finding.message.startswith("x is lent by target to draft behind no event: kernel scale_by")
        lending.target.synchronize()
        lending.read()
        lending.nothing_found()

    def test_the_owner_goes_on_too_early(self, lending):
        lending.target.record(lending.written)
        lending.draft.wait(lending.written)
        with lending.lend():
            lending.read()
        finding = lending.refusal(lending.write)
        assert finding.code == "OWN012"
        assert finding.message.startswith(
            "x is lent by target to draft, and target went on before draft was done"
        )
        assert finding.actor == "target"
        lending.draft.record(lending.done)
        lending.target.wait(lending.done)
        lending.write()
        lending.nothing_found()

    def test_one_of_two_leases_is_enough(self, lending):
        lending.target.record(lending.written)
        lending.lend(after=lending.done)
        assert lending.refusal(lending.read).code == "OWN011"
        lending.lend()
        lending.draft.wait(lending.written)
        lending.read()
        lending.nothing_found()

    def test_two_streams_of_one_owner_race_as_ever(self, lending):
        other = lending.device.create_stream(owner=TARGET, name="other")
        lending.target.record(lending.written)
        lending.lend()
        lending.write()
        finding = lending.refusal(lambda: other.launch(increment, 1, {"y": lending.x}))
        assert finding.code == "STR010"

    def test_a_draft_that_hands_over_many_times(self, lending):
        for _ in range(50):
            lending.write()
            lending.target.record(lending.written)
            with lending.lend():
                lending.draft.wait(lending.written)
                lending.read()
                lending.draft.record(lending.done)
            lending.target.wait(lending.done)
        lending.nothing_found()
        assert len(lending.device.audit.shared.detector) == 0


class TestEvents:
    """OWN002."""

    def test_an_event_is_recorded_by_its_owner(self, lending):
        finding = lending.refusal(lambda: lending.target.record(lending.done))
        assert finding.code == "OWN002"
        assert finding.message.startswith("stream target of target would record event done of draft; ")
        lending.target.wait(lending.done)
        lending.nothing_found()

    def test_at_level_off_nobody_asks(self):
        lending = Lending(level=Level.OFF)
        lending.target.record(lending.done)
        lending.nothing_found()


class TestHost:
    """The host's own accesses to device memory."""

    def test_an_owner_is_asked_for_the_same_as_for_a_launch(self, lending):
        device = lending.device
        device.host_access(lending.x, "write")
        device.host_access(lending.x, "read", owner=TARGET)
        finding = lending.refusal(lambda: device.host_access(lending.x, "read", owner=DRAFT))
        assert (finding.code, finding.actor, finding.buffer.owner) == ("OWN001", "draft", "target")
        with lending.lend(after=None):
            device.host_access(lending.x, "read", owner=DRAFT)
            finding = lending.refusal(lambda: device.host_access(lending.x, "write", owner=DRAFT))
            assert finding.code == "OWN010"
        finding = lending.refusal(lambda: device.host_access(lending.x, "read", owner=DRAFT))
        assert finding.code == "OWN010"
        lending.x.buffer.free()
        assert lending.refusal(lambda: device.host_access(lending.x)).code == "MEM004"

    def test_the_host_has_to_wait_itself(self, lending):
        device = lending.device
        lending.write()
        lending.target.record(lending.written)
        lending.lend()
        lending.draft.wait(lending.written)
        finding = lending.refusal(lambda: device.host_access(lending.x, "read", owner=DRAFT))
        assert finding.code == "OWN012"
        assert "on the host would read x" in finding.message
        assert "the host has not waited for that" in finding.message
        finding = lending.refusal(lambda: device.host_access(lending.x, "read"))
        assert (finding.code, finding.actor) == ("STR011", "target")
        lending.written.synchronize()
        device.host_access(lending.x, "read", owner=DRAFT)
        device.host_access(lending.x, "write")
        lending.nothing_found()

    def test_bad_input(self, lending):
        with pytest.raises(BadInputError, match="free its buffer"):
            lending.device.host_access(lending.x, "free")
        with pytest.raises(BadInputError, match="give a NumPy array or a view"):
            lending.device.host_access([1])


def test_a_lease_of_a_layout_that_is_not_active(lending):
    arena = lending.bench.arena()
    overlays = [
        arena.reserve_overlay([BufferRequest(64, TARGET, n)], owner=TARGET, name=n).unwrap() for n in "ab"
    ]
    overlays[0].activate()
    lending.target.record(lending.written)
    lending.draft.wait(lending.written)
    view = overlays[0].buffers[0].view(np.float32, N)
    view.buffer.lend(to=DRAFT, mode="write", after=lending.written)
    lending.draft.launch(increment, 1, {"y": view})
    lending.draft.synchronize()
    overlays[1].activate()
    assert lending.refusal(lambda: lending.draft.launch(increment, 1, {"y": view})).code == "MEM004"
