from __future__ import annotations

import pytest
from allocator_world import DRAFT, TARGET, World, overwrite

from instrumentation.errors import BadInputError


@pytest.fixture
def world():
    return World()


class TestCanaries:
    @pytest.mark.parametrize("nbytes", [1, 255, 256, 1000])
    @pytest.mark.parametrize("distance", [1, 2, 100, 256])
    def test_byte_left_of_the_payload(self, world, nbytes, distance):
        buffer = world.buffer(nbytes)
        overwrite(world, buffer.address - distance, 1)
        (finding,) = buffer.check_canaries()
        assert (finding.code, finding.offset, finding.size) == ("MEM001", -distance, 1)
        assert finding.buffer.name == "x"
        assert "holds 41, not fa" in finding.message
        assert world.codes == ["MEM001"]

    @pytest.mark.parametrize("nbytes", [1, 255, 256, 1000])
    @pytest.mark.parametrize("distance", [0, 1, 100, 255])
    def test_byte_right_of_the_payload(self, world, nbytes, distance):
        buffer = world.buffer(nbytes)
        overwrite(world, buffer.address + nbytes + distance, 1)
        (finding,) = buffer.check_canaries()
        assert (finding.code, finding.offset, finding.size) == ("MEM002", nbytes + distance, 1)
        assert "holds 41, not fb" in finding.message
        window = finding.window
        assert window.data[window.first - window.address] == 0x41
        assert window.stop == window.first + 1

    def test_range_of_bytes_is_measured(self, world):
        buffer = world.buffer(100)
        world.memory.write(buffer.address + 90, bytes(range(1, 31)))
        (finding,) = buffer.check_canaries()
        assert (finding.offset, finding.size) == (100, 20)
        assert "hold 0b 0c 0d 0e 0f 10 11 12 ..., not fb" in finding.message

    def test_damage_inside_the_payload_is_no_damage(self, world):
        buffer = world.buffer(100)
        overwrite(world, buffer.address, 100)
        assert buffer.check_canaries() == []

    def test_damage_is_found_once(self, world):
        buffer = world.buffer(100)
        overwrite(world, buffer.address + 100, 4)
        overwrite(world, buffer.address - 4, 4)
        assert [finding.code for finding in buffer.check_canaries()] == ["MEM001", "MEM002"]
        assert buffer.check_canaries() == []
        assert world.allocator.check_integrity() == []

    def test_neighbours_are_named(self, world):
        first, second, third = (world.buffer(256, name=name) for name in ("first", "second", "third"))
        overwrite(world, second.address + 256, 4)
        overwrite(world, second.address - 4, 4)
        left, right = second.check_canaries()
        assert (left.neighbour.name, left.reached_neighbour) == ("first", False)
        assert (right.neighbour.name, right.reached_neighbour) == ("third", False)
        overwrite(world, third.address + 256, 4)
        assert third.check_canaries()[0].neighbour is None
        assert first.live

    @pytest.mark.parametrize("overflow", [256, 257, 300, 512, 600])
    def test_overflow_into_the_neighbour(self, world, overflow):
        first, second = (
            world.buffer(256, owner, name) for owner, name in ((TARGET, "first"), (DRAFT, "second"))
        )
        overwrite(world, first.address + 256, overflow)
        findings = world.allocator.check_integrity()
        assert findings[0].code == "MEM002"
        assert findings[0].buffer.name == "first"
        assert findings[0].offset == 256
        assert findings[0].neighbour == second.facts()
        assert findings[0].reached_neighbour == (overflow > 256)
        if overflow == 256:
            assert len(findings) == 1
            return
        assert findings[1].code == "MEM001"
        assert findings[1].buffer.name == "second"
        assert findings[1].neighbour == first.facts()
        crossed = overflow >= 512
        assert bool(findings[0].notes) == crossed
        if crossed:
            assert "second" in findings[0].notes[0]

    def test_redzone_of_one_byte_has_no_gap(self):
        world = World(redzone=1)
        buffer = world.buffer(256)
        overwrite(world, buffer.address + 256, 1)
        overwrite(world, buffer.address - 1, 1)
        assert [finding.code for finding in buffer.check_canaries()] == ["MEM001", "MEM002"]

    def test_free_checks_canaries(self, world):
        buffer = world.buffer(100)
        overwrite(world, buffer.address + 100, 1)
        buffer.free()
        assert world.codes == ["MEM002"]

    def test_device_finds_damage_by_address(self, world):
        buffer = world.buffer(100)
        address = buffer.address + 103
        overwrite(world, address, 2)
        finding = world.allocator.find_damage(
            address, kernel="axpy", launch=7, argument="y", stream="target.0", actor="target"
        )
        assert (finding.code, finding.offset, finding.size) == ("MEM002", 103, 2)
        assert (finding.kernel, finding.launch, finding.argument, finding.stream) == (
            "axpy",
            7,
            "y",
            "target.0",
        )
        assert world.log.list() == (finding,)
        assert world.allocator.check_integrity() == []

    def test_device_finds_damage_in_quarantine_by_address(self, world):
        buffer = world.buffer(100)
        buffer.free()
        overwrite(world, buffer.address + 5, 1)
        finding = world.allocator.find_damage(buffer.address + 5, kernel="late")
        assert (finding.code, finding.offset, finding.kernel) == ("MEM003", 5, "late")

    def test_damage_repaired_meanwhile_is_still_reported(self, world):
        buffer = world.buffer(100)
        finding = world.allocator.find_damage(buffer.address + 103)
        assert (finding.code, finding.offset, finding.size) == ("MEM002", 103, 1)

    @pytest.mark.parametrize("where", ["payload", "free", "unmapped"])
    def test_address_without_a_guard_is_bad_input(self, world, where):
        buffer = world.buffer(100)
        address = {
            "payload": buffer.address,
            "free": world.arena.address + world.arena.nbytes - 1,
            "unmapped": 12,
        }[where]
        with pytest.raises(BadInputError, match="no guard byte"):
            world.allocator.find_damage(address)

    def test_regions_of_some_buffers(self, world):
        first, second, gone = (world.buffer(100) for _ in range(3))
        gone.free()
        assert len(world.allocator.canary_regions()) == 4
        (left, right) = world.allocator.canary_regions([second, gone])
        assert left.stop == second.address
        assert right.address == second.address + 100
        assert first.live


class TestQuarantine:
    @pytest.mark.parametrize("offset", [0, 1, 500, 999])
    def test_write_after_free(self, world, offset):
        buffer = world.buffer(1000)
        buffer.free()
        overwrite(world, buffer.address + offset, 1, 0x42)
        (finding,) = world.allocator.check_integrity()
        assert (finding.code, finding.offset, finding.size) == ("MEM003", offset, 1)
        assert finding.buffer == buffer.facts()
        assert "holds 42, not dd" in finding.message
        assert finding.free == buffer.free_stack != ()
        assert world.allocator.check_integrity() == []

    @pytest.mark.parametrize("offset", [-1, 1000])
    def test_write_beside_a_freed_buffer(self, world, offset):
        buffer = world.buffer(1000)
        buffer.free()
        overwrite(world, buffer.address + offset, 1)
        (finding,) = world.allocator.check_integrity()
        assert (finding.code, finding.offset) == ("MEM003", offset)

    def test_memory_is_not_used_again_at_once(self, world):
        first = world.buffer(1000)
        first.free()
        assert world.buffer(1000).address != first.address

    def test_oldest_leaves_first_and_is_verified_then(self):
        world = World(quarantine_bytes=4096)
        old, young = world.buffer(1000, name="old"), world.buffer(1000, name="young")
        old.free()
        young.free()
        overwrite(world, old.address + 3, 1)
        overwrite(world, young.address + 3, 1)
        assert world.codes == []
        world.buffer(1000, name="third").free()
        assert [finding.buffer.name for finding in world.log] == ["old"]
        assert world.buffer(1000, name="again").address == old.address

    def test_block_beyond_the_bound_leaves_the_others_alone(self):
        world = World(quarantine_bytes=2048)
        small, large = world.buffer(1000), world.buffer(4000)
        small.free()
        large.free()
        assert [buffer.serial for buffer in world.allocator._heap.quarantine] == [small.serial]
        assert world.allocator.check_integrity() == []

    def test_quarantine_gives_way_when_memory_is_short(self):
        world = World(arena_bytes=2 * 1536)
        first, second = world.buffer(1000, name="first"), world.buffer(1000, name="second")
        first.free()
        second.free()
        overwrite(world, first.address, 1)
        third = world.buffer(1000, name="third")
        assert third.address == first.address
        assert [finding.buffer.name for finding in world.log] == ["first"]
        assert [buffer.name for buffer in world.allocator._heap.quarantine] == ["second"]
        assert world.arena.free_bytes == 1536

    def test_quarantine_gives_way_in_one_piece(self):
        world = World(arena_bytes=2 * 1536)
        for buffer in (world.buffer(1000), world.buffer(1000)):
            buffer.free()
        assert world.arena.reserve(2000, owner=TARGET, name="wide").ok
        assert world.allocator.check_integrity() == []

    def test_release_of_the_arena_verifies_what_waits(self, world):
        buffer = world.buffer(100)
        buffer.free()
        overwrite(world, buffer.address, 1)
        world.arena.release()
        assert world.codes == ["MEM003"]
        assert world.memory.used == 0
        assert world.allocator._heap.quarantine.nbytes == 0

    def test_damage_in_a_large_buffer_is_bounded(self):
        world = World(arena_bytes=1 << 19)
        buffer = world.buffer(1 << 18)
        buffer.free()
        overwrite(world, buffer.address, 1 << 18)
        (finding,) = world.allocator.check_integrity()
        assert finding.size == 64 * 1024
        assert "at least 65536" in finding.message
        assert len(finding.window.data) <= 112
        assert world.allocator.check_integrity() == []
