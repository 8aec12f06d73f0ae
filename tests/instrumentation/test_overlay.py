from __future__ import annotations

import pytest
from allocator_world import DRAFT, LEVELS, TARGET, World, overwrite, refusal

from instrumentation.allocator import BufferRequest
from instrumentation.buffer import BufferState
from instrumentation.errors import BadInputError, DeviceError


@pytest.fixture
def world():
    return World()


@pytest.fixture(params=LEVELS, ids=str)
def either(request):
    return World(request.param)


class TestOverlays:
    def overlays(self, world):
        make = world.arena.reserve_overlay
        decode = make(
            [BufferRequest(100, TARGET, "q"), BufferRequest(300, TARGET, "k")], owner=TARGET, name="decode"
        )
        prefill = make([BufferRequest(5000, TARGET, "q")], owner=TARGET, name="prefill")
        return decode.unwrap(), prefill.unwrap()

    def test_one_is_active(self, either):
        decode, prefill = self.overlays(either)
        view = decode.buffers[1].view("f4", (75,))
        finding = refusal(view.check_live)
        assert (finding.code, finding.kind) == ("MEM004", "use of a dormant buffer")
        assert "activate decode" in finding.message
        decode.activate()
        view.check_live()
        assert [buffer.state for buffer in prefill.buffers] == [BufferState.DORMANT]
        assert either.allocator.snapshot().used.current == 400
        prefill.activate()
        assert refusal(view.check_live).code == "MEM004"
        assert either.allocator.snapshot().used.current == 5000
        assert either.allocator.snapshot().used.peak == 5000
        decode.activate()
        view.check_live()
        assert either.allocator.check_integrity() == []

    def test_layouts_share_the_memory_from_its_start(self, either):
        decode, prefill = self.overlays(either)
        assert decode.buffers[0].address == prefill.buffers[0].address
        assert decode.buffers[0].address + 100 < decode.buffers[1].address

    def test_activation_of_the_active_one_touches_nothing(self, world):
        decode, _ = self.overlays(world)
        decode.activate()
        world.memory.broken = True
        decode.activate()

    def test_canaries_are_checked_when_it_turns_dormant(self, world):
        decode, prefill = self.overlays(world)
        decode.activate()
        overwrite(world, decode.buffers[0].address + 100, 4)
        prefill.activate()
        (finding,) = world.log
        assert (finding.code, finding.buffer.name, finding.size) == ("MEM002", "q", 4)
        assert prefill.buffers[0].check_canaries() == []
        overwrite(world, decode.buffers[1].address, 40)  # inside prefill's q now
        decode.activate()
        assert world.codes == ["MEM002"]

    def test_dormant_buffers_have_no_canaries(self, world):
        decode, prefill = self.overlays(world)
        prefill.activate()
        assert decode.buffers[0].check_canaries() == []
        assert len(world.allocator.canary_regions()) == 2
        assert world.allocator.canary_regions(decode.buffers) == []

    def test_first_activation_poisons(self, world):
        decode, _ = self.overlays(world)
        decode.activate()
        assert world.memory.read_bytes(decode.buffers[0].address, 100) == b"\xcd" * 100

    def test_parts_are_not_freed_or_lent_dormant(self, either):
        decode, _ = self.overlays(either)
        assert refusal(decode.buffers[0].free).kind == "free of a part of an overlay"
        assert refusal(decode.buffers[0].lend, to=DRAFT, mode="read").code == "MEM004"
        decode.activate()
        assert refusal(decode.buffers[0].free).code == "MEM005"
        assert decode.buffers[0].lend(to=DRAFT, mode="read").active

    def test_arena_is_for_one_kind_of_use(self, either):
        decode, prefill = self.overlays(either)
        with pytest.raises(BadInputError, match="holds overlays"):
            either.arena.reserve(10, owner=TARGET, name="x")
        decode.release()
        prefill.release()
        buffer = either.buffer()
        with pytest.raises(BadInputError, match="holds buffers"):
            self.overlays(either)
        buffer.free()
        self.overlays(either)
        assert either.allocator.check_integrity() == []

    def test_release(self, either):
        decode, prefill = self.overlays(either)
        decode.activate()
        decode.buffers[0].pin("graph")
        assert refusal(decode.release).code == "GRA001"
        decode.buffers[0].unpin("graph")
        decode.release()
        assert all(buffer.freed for buffer in decode.buffers)
        assert either.allocator.table() == ()
        assert refusal(decode.release).code == "MEM005"
        assert refusal(decode.activate).code == "MEM004"
        prefill.release()
        either.arena.release()
        assert either.allocator.close() == []

    def test_exact_fit(self):
        world = World(arena_bytes=768)
        assert world.arena.reserve_overlay([BufferRequest(256, TARGET, "x")], owner=TARGET, name="fits").ok
        error = world.arena.reserve_overlay(
            [BufferRequest(257, TARGET, "x")], owner=TARGET, name="wide"
        ).error
        assert "has 768 bytes" in str(error)
        assert error.requested == 1024

    def test_device_that_fails_leaves_none_active(self, world):
        decode, prefill = self.overlays(world)
        decode.activate()
        world.memory.broken = True
        with pytest.raises(DeviceError):
            prefill.activate()
        world.memory.broken = False
        assert world.arena.active is None
        assert world.allocator.check_integrity() == []
        decode.activate()
        assert world.codes == []


class TestPlans:
    def test_one_that_fits_is_none(self, either):
        nbytes = either.arena.nbytes
        most = nbytes - (either.allocator.arena_size([BufferRequest(1, TARGET, "q")]) - 256)
        assert either.arena.check_plan([BufferRequest(most, TARGET, "q")], name="largest")
        assert either.arena.check_plan([BufferRequest(1, TARGET, "q")] * 3, name="small")
        assert either.log.list() == ()

    def test_one_that_does_not_is_reported_and_nothing_else(self, either):
        requests = [BufferRequest(either.arena.nbytes, TARGET, "q"), BufferRequest(1, TARGET, "k")]
        before = either.allocator.snapshot()
        assert not either.arena.check_plan(requests, name="512 rows")
        [finding] = either.log
        assert (finding.code, finding.actor) == ("RES003", "target")
        assert finding.size == either.allocator.arena_size(requests) - either.arena.nbytes
        assert "plan 512 rows of target needs" in finding.message
        assert finding.allocation == either.arena.allocation
        assert either.allocator.snapshot() == before

    def test_an_empty_one_is_bad_input(self, world):
        with pytest.raises(BadInputError, match="nothing is asked of none"):
            world.arena.check_plan([], name="none")
