from __future__ import annotations

import gc

import numpy as np
import pytest
from allocator_world import DRAFT, LEVELS, TARGET, World

from instrumentation.allocator import BufferRequest
from instrumentation.errors import BadInputError, DeviceError, FindingError, OutOfMemoryError
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@pytest.fixture(params=LEVELS, ids=str)
def either(request):
    return World(request.param)


class TestReservation:
    def test_value_comes_after_a_check(self, either):
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        assert reservation.ok
        assert reservation.value.nbytes == 100
        assert reservation.error is None
        assert either.codes == []

    def test_truth_is_a_check(self, either):
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        assert reservation
        assert reservation.value is reservation.unwrap()

    def test_value_before_a_check_is_refused_and_found_once(self, either):
        before = either.allocator.snapshot().used.current
        reservation = either.arena.reserve(100, owner=DRAFT, name="x")
        with pytest.raises(FindingError, match="RES001"):
            _ = reservation.value
        del reservation
        assert either.codes == ["RES001"]
        assert either.log.list()[0].count == 1
        assert either.allocator.snapshot().used.current == before

    def test_value_may_be_taken_after_a_late_check(self, either):
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        with pytest.raises(FindingError):
            _ = reservation.value
        assert reservation.ok
        assert reservation.value.nbytes == 100

    def test_repr_is_no_check(self, either):
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        assert "not checked" in repr(reservation)
        with pytest.raises(FindingError):
            _ = reservation.value

    @pytest.mark.parametrize("kind", ["buffer", "all", "overlay", "arena"])
    def test_dropped_success_is_found_and_gives_its_memory_back(self, either, kind):
        allocator, arena = either.allocator, either.arena
        requests = [BufferRequest(100, DRAFT, "a"), BufferRequest(200, DRAFT, "b")]
        free = arena.free_bytes
        reserved = allocator.snapshot().reserved
        match kind:
            case "buffer":
                arena.reserve(100, owner=DRAFT, name="a")
            case "all":
                arena.reserve_all(requests)
            case "overlay":
                arena.reserve_overlay(requests, owner=DRAFT, name="decode")
            case "arena":
                allocator.reserve_arena(4096, owner=DRAFT, name="second")
        (finding,) = either.log
        assert finding.code == "RES001"
        assert finding.actor == "draft"
        assert any(
            kind in frame.function or "dropped_success" in frame.function for frame in finding.allocation
        )
        assert arena.free_bytes == free
        assert allocator.snapshot().reserved == reserved
        assert allocator.table() == ()
        assert not arena.overlays
        assert allocator.check_integrity() == []

    def test_dropped_failure_is_found(self, either):
        either.arena.reserve(1 << 30, owner=TARGET, name="big")
        (finding,) = either.log
        assert finding.code == "RES001"
        assert "failed" in finding.message

    def test_dropped_in_a_cycle_is_found_by_the_collector(self, either):
        cycle = [either.arena.reserve(100, owner=TARGET, name="x")]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert either.codes == ["RES001"]
        assert either.allocator.table() == ()

    def test_dropped_while_the_lock_is_held_waits_for_it(self, either):
        # What the garbage collector does in the middle of a change of the free lists.
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        with either.allocator._heap.section():
            del reservation
            assert either.codes == []
            assert len(either.arena.buffers) == 1
        assert len(either.arena.buffers) == 0
        assert either.codes == ["RES001"]

    def test_held_but_unchecked_at_close_is_found_and_is_unusable(self, either):
        reservation = either.arena.reserve(100, owner=TARGET, name="x")
        either.allocator.close()
        assert either.codes == ["RES001", "MEM006"]
        assert either.log.list()[1].message.startswith("arena arena")
        assert not reservation.ok
        with pytest.raises(FindingError, match="taken back"):
            reservation.unwrap()

    def test_unwrap_of_a_failure_raises_its_message(self, either):
        reservation = either.arena.reserve(1 << 30, owner=TARGET, name="big")
        with pytest.raises(
            OutOfMemoryError, match=r"target cannot reserve .* for big in arena arena"
        ) as raised:
            reservation.unwrap()
        assert raised.value is reservation.error
        assert either.codes == []

    def test_error_tells_sizes_owner_and_the_five_largest_holders(self, either):
        for index in range(7):
            either.buffer(1000 + 500 * index, owner=DRAFT, name=f"kv.{index}")
        error = either.arena.reserve(1 << 20, owner=TARGET, name="logits").error
        assert error.code == "RES002"
        assert (error.owner, error.name) == (TARGET, "logits")
        assert error.requested >= 1 << 20
        assert error.free == either.arena.free_bytes
        assert error.largest_free == either.arena.largest_free
        assert [row.name for row in error.holders] == ["kv.6", "kv.5", "kv.4", "kv.3", "kv.2"]
        assert "kv.6 of draft 4000 bytes" in str(error)

    @pytest.mark.parametrize("nbytes", [0, -1, -(1 << 70), 1.5, "9", None, True])
    def test_size_that_makes_no_sense_is_bad_input(self, either, nbytes):
        calls = either.memory.calls
        for call in (either.arena.reserve, either.allocator.reserve_arena):
            with pytest.raises(BadInputError, match="whole number above 0"):
                call(nbytes, owner=TARGET, name="x")
        with pytest.raises(BadInputError):
            BufferRequest(nbytes, TARGET, "x")
        assert either.memory.calls == calls
        assert either.codes == []

    @pytest.mark.parametrize("nbytes", [1 << 40, 1 << 63, 1 << 64, 10**30])
    def test_huge_size_fails_without_asking_the_driver(self, either, nbytes):
        calls = either.memory.calls
        assert not either.arena.reserve(nbytes, owner=TARGET, name="x")
        assert not either.allocator.reserve_arena(nbytes, owner=TARGET, name="x")
        assert either.memory.calls == calls

    def test_numpy_size_is_a_size(self, either):
        assert type(either.buffer(np.int64(77)).nbytes) is int

    @pytest.mark.parametrize("name", ["", "  ", None, 3])
    def test_name_is_needed(self, either, name):
        with pytest.raises(BadInputError, match="name"):
            either.arena.reserve(10, owner=TARGET, name=name)

    def test_owner_is_needed(self, either):
        with pytest.raises(BadInputError, match="Owner"):
            either.arena.reserve(10, owner="target", name="x")
        with pytest.raises(BadInputError):
            Owner(" ")


class TestFailureLeavesNoTrace:
    def state(self, world):
        arena = world.arena
        return (
            world.allocator.snapshot(),
            world.allocator.table(),
            list(arena.free_list.pieces),
            list(arena.buffers),
            [buffer.serial for buffer in world.allocator._heap.quarantine],
            world.memory.used,
            world.memory.read_bytes(arena.address, arena.nbytes),
        )

    @pytest.mark.parametrize("how", ["buffer", "all", "overlay", "arena", "limit", "fault", "device"])
    @pytest.mark.parametrize("level", LEVELS, ids=str)
    def test_state_is_equal(self, level, how):
        class Faults:
            armed = False

            def __init__(self):
                self.seen = []

            def refusal(self, kind, detail):
                self.seen.append((kind, detail))
                return "failed on purpose" if self.armed else None

        world = World(level, total=1 << 18, limit=1 << 17, faults=(faults := Faults()))
        arena = world.arena
        if how != "overlay":
            world.buffer(3000)
            world.buffer(500).free()
        before = self.state(world)
        match how:
            case "buffer":
                assert not arena.reserve(arena.nbytes, owner=DRAFT, name="y")
            case "all":
                # The first fits, the second does not.
                assert not arena.reserve_all(
                    [BufferRequest(100, DRAFT, "a"), BufferRequest(1 << 16, DRAFT, "b")]
                )
            case "overlay":
                assert not arena.reserve_overlay([BufferRequest(1 << 17, DRAFT, "a")], owner=DRAFT, name="y")
            case "arena":
                assert not world.allocator.reserve_arena(1 << 19, owner=DRAFT, name="y")
            case "limit":
                error = world.allocator.reserve_arena((1 << 16) + 1, owner=DRAFT, name="y").error
                assert (error.requested, error.free) == ((1 << 16) + 256, 1 << 16)
                assert "limited to 131072 bytes" in str(error)
            case "fault":
                faults.armed = True
                error = arena.reserve(10, owner=DRAFT, name="y").error
                assert "failed on purpose" in str(error)
                assert not arena.reserve_all([BufferRequest(10, DRAFT, "y")])
                assert not world.allocator.reserve_arena(10, owner=DRAFT, name="y")
                assert faults.seen[-1] == ("reserve", "draft/y: 256 bytes in device fake")
            case "device":
                world.memory.broken = True
                if level is Level.OFF:  # nothing is filled there, so nothing fails
                    arena.reserve(10, owner=DRAFT, name="y").unwrap().free()
                    return
                with pytest.raises(DeviceError):
                    arena.reserve(10, owner=DRAFT, name="y")
                world.memory.broken = False
        assert self.state(world) == before
        assert world.codes == []
        assert world.allocator.check_integrity() == []

    def test_smaller_request_succeeds_afterwards(self, either):
        assert not either.arena.reserve(1 << 17, owner=TARGET, name="x")
        assert either.arena.reserve(1 << 10, owner=TARGET, name="x")

    def test_full_device_behaves_like_a_limit(self):
        world = World(total=1 << 17)
        error = world.allocator.reserve_arena(1 << 17, owner=DRAFT, name="y").error
        assert "131072 bytes asked, 65536 free" in str(error)
        assert error.holders[0].name == "arena"
        assert world.codes == []

    def test_limit_counts_every_byte_taken_from_the_driver(self):
        world = World(limit=1 << 17)
        assert world.allocator.reserve_arena(1 << 16, owner=DRAFT, name="fits").ok
        assert world.allocator.reserve_arena(1, owner=DRAFT, name="does not").error.free == 0
