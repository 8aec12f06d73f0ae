from __future__ import annotations

import threading

import pytest
from allocator_world import DRAFT, LEVELS, MODEL, TARGET, World, overwrite, refusal
from fake_memory import FakeMemory
from patience import PATIENCE

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.buffer import BufferState
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner


@pytest.fixture
def world():
    return World()


@pytest.fixture(params=LEVELS, ids=str)
def either(request):
    return World(request.param)


class TestPlacement:
    def test_arena_is_one_driver_allocation(self, either):
        assert either.memory.calls == 1
        for index in range(5):
            either.buffer(name=f"x.{index}")
        assert either.memory.calls == 1

    @pytest.mark.parametrize("alignment", [16, 64, 256, 512])
    def test_payloads_are_aligned_on_any_device(self, alignment):
        world = World(alignment=alignment)
        addresses = [world.buffer(nbytes).address for nbytes in (1, 255, 256, 257, 4096)]
        assert all(address % 256 == 0 for address in addresses)
        assert addresses == sorted(addresses)

    @pytest.mark.parametrize("level", LEVELS, ids=str)
    @pytest.mark.parametrize("redzone", [1, 16, 256, 300])
    def test_arena_size_holds_its_requests_and_nothing_more(self, level, redzone):
        requests = [BufferRequest(nbytes, TARGET, "x") for nbytes in (1, 256, 257, 1000, 4096)]
        allocator = Allocator(FakeMemory(), level=level, findings=FindingLog(), redzone=redzone)
        size = allocator.arena_size(requests)
        arena = allocator.reserve_arena(size, owner=TARGET, name="arena").unwrap()
        assert arena.reserve_all(requests).ok
        assert arena.free_bytes == 0
        small = allocator.reserve_arena(size - 256, owner=TARGET, name="small").unwrap()
        assert not small.reserve_all(requests)

    def test_off_has_no_redzones(self):
        world = World(Level.OFF)
        first, second = world.buffer(256), world.buffer(256)
        assert second.address == first.address + 256
        assert world.allocator.canary_regions() == []

    def test_redzones_surround_the_payload(self, world):
        buffer = world.buffer(1000)
        left, right = world.allocator.canary_regions()
        assert (left.stop, left.nbytes, left.byte) == (buffer.address, 256, 0xFA)
        assert (right.address, right.byte) == (buffer.address + 1000, 0xFB)
        assert right.nbytes == 256 + 24
        around = world.memory.read_bytes(left.address, right.stop - left.address)
        assert around == b"\xfa" * 256 + b"\xcd" * 1000 + b"\xfb" * 280

    def test_freed_neighbours_become_one_piece(self):
        world = World(Level.OFF, arena_bytes=4 * 256)
        buffers = [world.buffer(256) for _ in range(4)]
        for index in (0, 2):
            buffers[index].free()
        error = world.arena.reserve(512, owner=TARGET, name="wide").error
        assert (error.free, error.largest_free) == (512, 256)
        buffers[1].free()
        wide = world.arena.reserve(768, owner=TARGET, name="wide").unwrap()
        assert wide.address == world.arena.address

    def test_reserve_all_keeps_order(self, either):
        buffers = either.arena.reserve_all(
            [BufferRequest(300, TARGET, f"x.{index}") for index in range(4)]
        ).unwrap()
        assert [buffer.name for buffer in buffers] == ["x.0", "x.1", "x.2", "x.3"]
        assert sorted(buffer.address for buffer in buffers) == [buffer.address for buffer in buffers]

    @pytest.mark.parametrize("requests", [[], ["x"], [None]])
    def test_reserve_all_of_nothing_is_bad_input(self, either, requests):
        with pytest.raises(BadInputError, match="BufferRequest"):
            either.arena.reserve_all(requests)


class TestBadFrees:
    def test_double_free(self, either):
        buffer = either.buffer()
        buffer.free()
        finding = refusal(buffer.free)
        assert (finding.code, finding.kind) == ("MEM005", "double free")
        assert finding.allocation == buffer.allocation != ()
        assert finding.free == buffer.free_stack != ()
        assert either.codes == ["MEM005"]
        assert either.allocator.check_integrity() == []

    def test_free_of_a_view(self, either):
        buffer = either.buffer()
        finding = refusal(either.allocator.free, buffer.view("f4", (10,), name="q"))
        assert (finding.code, finding.kind) == ("MEM005", "free of a view")
        assert "view q of x" in finding.message
        assert buffer.live

    def test_free_of_a_pointer_names_the_buffer_it_lies_in(self, either):
        buffer = either.buffer()
        finding = refusal(either.allocator.free, buffer.address + 12)
        assert (finding.code, finding.offset) == ("MEM005", 12)
        assert finding.buffer.name == "x"
        assert refusal(either.allocator.free, 12).buffer is None

    @pytest.mark.parametrize("thing", [None, "x", object(), b"1"], ids=["none", "text", "object", "bytes"])
    def test_free_of_anything_else(self, either, thing):
        assert refusal(either.allocator.free, thing).code == "MEM005"

    def test_free_of_another_allocators_buffer(self, either):
        other = World()
        buffer = other.buffer()
        finding = refusal(either.allocator.free, buffer)
        assert finding.kind == "free of a foreign buffer"
        assert other.codes == []
        assert buffer.live

    def test_free_through_the_allocator(self, either):
        buffer = either.buffer()
        either.allocator.free(buffer)
        assert buffer.state is BufferState.FREED

    def test_use_after_release_and_close(self, either):
        arena, allocator = either.arena, either.allocator
        arena.release()
        assert refusal(arena.release).kind == "double release"
        assert refusal(arena.reserve, 10, owner=TARGET, name="x").code == "MEM005"
        assert (
            refusal(arena.reserve_overlay, [BufferRequest(1, TARGET, "x")], owner=TARGET, name="o").kind
            == "use of a released arena"
        )
        assert allocator.close() == []
        assert refusal(allocator.reserve_arena, 10, owner=TARGET, name="x").kind == "use after close"
        assert allocator.close() == []

    def test_pinned_buffer_is_not_freed(self, either):
        buffer = either.buffer()
        buffer.pin("graph a")
        buffer.pin("graph a")
        buffer.pin("graph b")
        finding = refusal(buffer.free)
        assert finding.code == "GRA001"
        assert "graph a, graph b" in finding.message
        assert buffer.live
        buffer.unpin("graph b")
        buffer.unpin("graph a")
        assert refusal(either.arena.release).code == "GRA001"
        assert not either.arena.released
        buffer.unpin("graph a")
        buffer.free()
        assert either.codes == ["GRA001", "GRA001"]

    def test_unpin_without_pin(self, either):
        buffer = either.buffer()
        with pytest.raises(BadInputError, match="pinned by nobody"):
            buffer.unpin("graph")
        buffer.free()
        assert refusal(buffer.pin, "graph").code == "MEM004"


class TestLeaks:
    def test_close_names_each_leak(self, either):
        either.buffer(100, TARGET, "kv.k.0")
        pinned = either.buffer(200, DRAFT, "kv.v.0")
        pinned.pin("graph")
        findings = either.allocator.close()
        assert [(f.code, f.buffer.owner, f.buffer.name, f.size) for f in findings] == [
            ("MEM006", "target", "kv.k.0", 100),
            ("MEM006", "draft", "kv.v.0", 200),
        ]
        assert "graph" in findings[1].notes[0]
        assert findings[1].allocation == pinned.allocation
        assert list(either.log) == findings
        assert pinned.state is BufferState.FREED
        assert either.memory.used == 0
        assert either.allocator.snapshot().reserved == 0

    def test_arena_and_overlay_leak(self, either):
        either.arena.reserve_overlay([BufferRequest(1, TARGET, "x")], owner=DRAFT, name="decode").unwrap()
        either.allocator.reserve_arena(100, owner=MODEL, name="weights").unwrap()
        messages = [finding.message for finding in either.allocator.close()]
        assert messages[0].startswith("overlay decode of draft")
        assert messages[1].startswith("arena weights of model")

    def test_nothing_leaks(self, either):
        either.buffer().free()
        either.arena.release()
        assert either.allocator.close() == []
        assert either.codes == []

    def test_release_reports_what_is_left_in_the_arena(self, either):
        buffer = either.buffer()
        view = buffer.view("u1", (10,))
        either.arena.release()
        assert either.codes == ["MEM006"]
        assert refusal(view.check_live).code == "MEM004"

    def test_close_of_a_failing_device_gives_everything_back(self, world):
        buffer = world.buffer()
        second = world.allocator.reserve_arena(100, owner=MODEL, name="weights").unwrap()
        overwrite(world, buffer.address - 1, 1)
        world.memory.broken = True
        with pytest.raises(DeviceError):
            world.allocator.close()
        assert world.memory.used == 0
        assert second.released
        assert set(world.codes) == {"MEM006"}


class TestLedger:
    def test_current_and_peak_by_owner_and_arena(self, either):
        either.buffer(1000, TARGET, "a")
        draft = either.buffer(500, DRAFT, "b")
        draft.free()
        either.buffer(200, DRAFT, "c")
        snapshot = either.allocator.snapshot()
        assert snapshot.owners == {TARGET: (1000, 1000), DRAFT: (200, 500)}
        assert snapshot.arenas == {"arena": (1200, 1500)}
        assert snapshot.used == (1200, 1500)
        assert (snapshot.reserved, snapshot.reserved_peak) == (1 << 16, 1 << 16)
        assert snapshot.reservations == 4

    def test_table_is_sorted_and_adds_up(self, either):
        either.buffer(100, TARGET, "kv")
        either.buffer(100, TARGET, "kv")
        either.buffer(150, DRAFT, "kv")
        assert either.allocator.table() == ((TARGET, "kv", 200, 0), (DRAFT, "kv", 150, 0))

    def test_books_that_contradict_each_other_are_a_bug(self, either):
        either.buffer()
        either.arena.free_list.pieces[0] = (0, 256)
        with pytest.raises(AssertionError, match="arena arena"):
            either.allocator.check_integrity()

    def test_ledger_that_lost_a_buffer_is_a_bug(self, either):
        either.buffer(100)
        either.allocator._heap.ledger.remove(TARGET, "arena", "x", 100)
        with pytest.raises(AssertionError, match="ledger"):
            either.allocator.check_integrity()


@pytest.mark.parametrize(
    "options", [{"limit": 0}, {"limit": -1}, {"redzone": 0}, {"redzone": 1 << 30}, {"quarantine_bytes": -1}]
)
def test_senseless_options(options):
    with pytest.raises(BadInputError):
        Allocator(FakeMemory(), level=Level.GUARD, findings=FindingLog(), **options)


def test_threads_share_an_allocator(either):
    errors = []

    def work(owner):
        try:
            for index in range(60):
                buffers = either.arena.reserve_all(
                    [BufferRequest(100 + index, owner, "a"), BufferRequest(50, owner, "b")]
                ).unwrap()
                for buffer in buffers:
                    buffer.free()
                either.arena.reserve(10, owner=owner, name="dropped")
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(Owner(f"owner.{index}"),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert either.log.total == 4 * 60
    assert {finding.code for finding in either.log} == {"RES001"}
    assert either.allocator.table() == ()
    assert either.allocator.check_integrity() == []


def test_callback_may_call_the_allocator():
    seen = []
    memory = FakeMemory()
    log = FindingLog(on_finding=lambda finding: seen.append((finding.code, allocator.table())))
    allocator = Allocator(memory, level=Level.GUARD, findings=log)
    arena = allocator.reserve_arena(4096, owner=TARGET, name="arena").unwrap()
    buffer = arena.reserve(100, owner=TARGET, name="x").unwrap()
    memory.write(buffer.address + 100, b"a")
    buffer.free()
    assert seen == [("MEM002", ())]
    refusal(buffer.free)
    assert [code for code, _ in seen] == ["MEM002", "MEM005"]
