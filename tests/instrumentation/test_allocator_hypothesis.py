"""Random sequences of calls against a model that only remembers what is live and what it holds.

``HYPOTHESIS_PROFILE=deep`` runs 10,000 sequences for each level.
"""

from __future__ import annotations

import os

import pytest
from fake_memory import FakeMemory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.arena import FreeList
from instrumentation.buffer import BufferState
from instrumentation.errors import BadInputError, FindingError
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner

_common = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
}
settings.register_profile(
    "allocator-ci", max_examples=500, stateful_step_count=20, derandomize=True, **_common
)
settings.register_profile("allocator-deep", max_examples=10_000, stateful_step_count=50, **_common)
PROFILE = settings.get_profile(
    "allocator-deep" if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else "allocator-ci"
)

OWNERS = [Owner("target"), Owner("draft"), Owner("model")]
owners = st.sampled_from(OWNERS)
names = st.sampled_from(["kv.k", "kv.v", "compute.q", "logits"])
sizes = st.one_of(st.integers(1, 600), st.sampled_from([255, 256, 257, 1024, 3000, 1 << 20]))
requests = st.builds(BufferRequest, sizes, owners, names)


class AllocatorMachine(RuleBasedStateMachine):
    """Every live buffer holds bytes of its own; whoever else writes there, or loses them, is seen."""

    level: Level

    arenas = Bundle("arenas")
    buffers = Bundle("buffers")
    overlays = Bundle("overlays")
    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.memory = FakeMemory(1 << 17)
        self.log = FindingLog()
        self.expected = []  # codes, in order
        self.content = {}  # live buffer -> the byte that fills it
        self.dormant = {}  # overlay -> arena
        self.closed = False
        self.stamp = 0

    @initialize(quarantine=st.sampled_from([0, 2048, 1 << 20]), redzone=st.sampled_from([1, 256, 300]))
    def begin(self, quarantine, redzone):
        self.allocator = Allocator(
            self.memory,
            level=self.level,
            findings=self.log,
            limit=3 << 14,
            redzone=redzone,
            quarantine_bytes=quarantine,
        )

    # What every step is held to

    def snapshot(self):
        pieces = [list(arena.free_list.pieces) for arena in self.allocator.arenas]
        return (self.allocator.snapshot(), self.allocator.table(), pieces, self.memory.used)

    def live(self, buffer):
        self.stamp = self.stamp % 200 + 1
        self.content[buffer] = self.stamp
        assert buffer.address % 256 == 0
        self.memory.fill_bytes(buffer.address, buffer.nbytes, self.stamp)

    def refused(self, code, call, *args, **kwargs):
        before = self.snapshot()
        with pytest.raises(FindingError, match=code):
            call(*args, **kwargs)
        self.expected.append(code)
        assert self.snapshot() == before

    @invariant()
    def books_agree_and_contents_are_kept(self):
        if not hasattr(self, "allocator"):
            return
        assert self.allocator.check_integrity() == []
        assert set(self.allocator.live_buffers()) == set(self.content)
        for buffer, byte in self.content.items():
            assert buffer.state is BufferState.LIVE
            assert self.memory.first_mismatch(buffer.address, buffer.nbytes, byte) == -1
        held = dict.fromkeys(OWNERS, 0)
        for buffer in self.content:
            held[buffer.owner] += buffer.nbytes
        usage = self.allocator.snapshot().owners
        assert {owner: usage[owner].current if owner in usage else 0 for owner in OWNERS} == held
        assert self.memory.used == self.allocator.snapshot().reserved <= 3 << 14
        assert self.log.total == len(self.expected)
        counts = {code: self.expected.count(code) for code in self.expected}
        assert {code: sum(each.count for each in self.log.of(code)) for code in counts} == counts

    # Steps

    @rule(target=arenas, nbytes=st.integers(1, 1 << 14), owner=owners)
    def reserve_arena(self, nbytes, owner):
        if self.closed:
            self.refused("MEM005", self.allocator.reserve_arena, nbytes, owner=owner, name="arena")
            return multiple()
        before = self.snapshot()
        rounded = -(-nbytes // 256) * 256
        fits = before[0].reserved + rounded <= 3 << 14
        reservation = self.allocator.reserve_arena(nbytes, owner=owner, name="arena")
        assert reservation.ok == fits
        if fits:
            return reservation.value
        assert self.snapshot() == before
        return multiple()

    @rule(
        target=buffers, arena=arenas, wanted=st.lists(requests, min_size=1, max_size=4), single=st.booleans()
    )
    def reserve(self, arena, wanted, single):
        wanted = wanted[:1] if single else wanted

        def call():
            if single:
                (request,) = wanted
                return arena.reserve(request.nbytes, owner=request.owner, name=request.name)
            return arena.reserve_all(wanted)

        if arena.released:
            self.refused("MEM005", call)
            return multiple()
        if arena.overlays:
            with pytest.raises(BadInputError, match="overlays"):
                call()
            return multiple()
        before = self.snapshot()
        largest = arena.largest_free
        reservation = call()
        need = [self.allocator.arena_size([request]) for request in wanted]
        if not reservation:
            # One piece that held everything would have been found.
            assert sum(need) > largest
            assert self.snapshot() == before
            return multiple()
        assert max(need) <= largest
        made = (reservation.value,) if single else reservation.value
        assert [(each.nbytes, each.owner, each.name) for each in made] == [
            (each.nbytes, each.owner, each.name) for each in wanted
        ]
        for buffer in made:
            self.live(buffer)
        return multiple(*made)

    @rule(arena=arenas, request=requests)
    def drop(self, arena, request):
        if arena.released or arena.overlays:
            return
        used = self.allocator.table()
        arena.reserve(request.nbytes, owner=request.owner, name=request.name)
        self.expected.append("RES001")
        assert self.allocator.table() == used

    @rule(target=overlays, arena=arenas, wanted=st.lists(requests, min_size=1, max_size=3), owner=owners)
    def reserve_overlay(self, arena, wanted, owner):
        def call():
            return arena.reserve_overlay(wanted, owner=owner, name="overlay")

        if arena.released:
            self.refused("MEM005", call)
            return multiple()
        if arena.buffers:
            with pytest.raises(BadInputError, match="buffers"):
                call()
            return multiple()
        before = self.snapshot()
        reservation = call()
        assert reservation.ok == (self.allocator.arena_size(wanted) <= arena.nbytes)
        if not reservation.ok:
            assert self.snapshot() == before
            return multiple()
        return reservation.value

    @rule(overlay=overlays)
    def activate(self, overlay):
        if overlay.released:
            self.refused("MEM004", overlay.activate)
            return
        before = overlay.arena.active
        overlay.activate()
        if before is not overlay:
            for buffer in before.buffers if before else ():
                del self.content[buffer]
                assert buffer.state is BufferState.DORMANT
            for buffer in overlay.buffers:
                self.live(buffer)

    @rule(overlay=overlays)
    def release_overlay(self, overlay):
        if overlay.released:
            self.refused("MEM005", overlay.release)
        elif any(buffer.pins for buffer in overlay.buffers):
            self.refused("GRA001", overlay.release)
        else:
            for buffer in overlay.buffers:
                self.content.pop(buffer, None)
            overlay.release()

    @rule(buffer=buffers)
    def free(self, buffer):
        if buffer.freed:
            self.refused("MEM005", buffer.free)
        elif buffer.pins:
            self.refused("GRA001", buffer.free)
        else:
            del self.content[buffer]
            buffer.free()

    @rule(buffer=buffers)
    def free_what_is_no_buffer(self, buffer):
        self.refused("MEM005", self.allocator.free, buffer.address)

    @rule(buffer=buffers, by=st.sampled_from(["graph a", "graph b"]), on=st.booleans())
    def pin(self, buffer, by, on):
        if on and buffer.freed:
            self.refused("MEM004", buffer.pin, by)
        elif on:
            buffer.pin(by)
        elif by in buffer.pins:
            buffer.unpin(by)
        else:
            with pytest.raises(BadInputError):
                buffer.unpin(by)

    @rule(
        buffer=buffers,
        offset=st.integers(-1, 700),
        rows=st.integers(0, 20),
        columns=st.integers(0, 40),
        data=st.data(),
    )
    def view(self, buffer, offset, rows, columns, data):
        def call():
            return buffer.view("f4", (rows, columns), offset=offset)

        if buffer.freed:
            self.refused("MEM004", call)
        elif offset < 0 or offset % 4 or offset + rows * columns * 4 > buffer.nbytes:
            with pytest.raises(BadInputError):
                call()
        else:
            view = call()
            view.check_live()
            assert (view.address, view.nbytes) == (buffer.address + offset, rows * columns * 4)
            start = data.draw(st.integers(0, rows))
            stop = data.draw(st.integers(start, rows))
            part = view.slice(start, stop)
            assert [view.row(index).address for index in range(start, stop)] == [
                part.row(index).address for index in range(stop - start)
            ]
            assert (
                buffer.address <= part.address <= part.address + part.nbytes <= buffer.address + buffer.nbytes
            )

    @rule(target=leases, buffer=buffers, to=owners, by=owners, mode=st.sampled_from(["read", "write"]))
    def lend(self, buffer, to, by, mode):
        if by != buffer.owner:
            self.refused("OWN001", buffer.lend, to=to, mode=mode, by=by)
            return multiple()
        if to == buffer.owner:
            with pytest.raises(BadInputError):
                buffer.lend(to=to, mode=mode)
            return multiple()
        if buffer.freed:
            self.refused("MEM004", buffer.lend, to=to, mode=mode)
            return multiple()
        lease = buffer.lend(to=to, mode=mode)
        assert buffer.permits(to, mode)
        return lease

    @rule(lease=leases)
    def end(self, lease):
        if lease.active:
            lease.end()
        else:
            self.refused("OWN010", lease.end)
        assert not lease.permits(lease.to, "read")

    @rule(arena=arenas)
    def release_arena(self, arena):
        if arena.released:
            self.refused("MEM005", arena.release)
        elif any(buffer.pins for buffer in arena.buffers.values()):
            self.refused("GRA001", arena.release)
        else:
            self.leak(arena)
            arena.release()

    @rule(sure=st.integers(0, 9))
    def close(self, sure):
        if sure or self.closed:
            return
        for arena in self.allocator.arenas:
            if not self.leak(arena):
                self.expected.append("MEM006")
        self.allocator.close()
        self.closed = True
        assert self.memory.used == 0

    def leak(self, arena):
        leaks = len(arena.buffers) + len(arena.overlays)
        self.expected += ["MEM006"] * leaks
        for buffer in arena.live_buffers():
            del self.content[buffer]
        return leaks

    def teardown(self):
        if hasattr(self, "allocator"):
            self.allocator.close()
            assert self.memory.used == 0


def _machine(level):
    machine = type(f"Machine{level.name.title()}", (AllocatorMachine,), {"level": level})
    case = machine.TestCase
    case.settings = PROFILE
    return case


TestAllocatorAtOff = _machine(Level.OFF)
TestAllocatorAtGuard = _machine(Level.GUARD)


@PROFILE
@given(
    before=st.integers(1, 700),
    nbytes=st.integers(1, 700),
    after=st.integers(1, 700),
    redzone=st.sampled_from([16, 256, 300]),
    data=st.data(),
)
def test_any_write_within_the_redzone_is_found_where_it_is(before, nbytes, after, redzone, data):
    memory, log = FakeMemory(), FindingLog()
    allocator = Allocator(memory, level=Level.GUARD, findings=log, redzone=redzone)
    arena = allocator.reserve_arena(1 << 14, owner=OWNERS[0], name="arena").unwrap()
    left, middle, right = arena.reserve_all(
        [
            BufferRequest(size, OWNERS[0], name)
            for size, name in ((before, "left"), (nbytes, "middle"), (after, "right"))
        ]
    ).unwrap()
    side = data.draw(st.sampled_from(["left", "right"]))
    if side == "left":
        start = data.draw(st.integers(-redzone, -1))
        stop = data.draw(st.integers(start + 1, 0))
    else:
        start = data.draw(st.integers(nbytes, nbytes + redzone - 1))
        stop = data.draw(st.integers(start + 1, nbytes + redzone))
    written = data.draw(st.binary(min_size=stop - start, max_size=stop - start))
    canary = 0xFA if side == "left" else 0xFB
    wrong = [index for index, byte in enumerate(written) if byte != canary]
    memory.write(middle.address + start, written)
    findings = allocator.check_integrity()
    if not wrong:
        assert findings == []
        return
    (finding,) = findings
    assert finding.code == ("MEM001" if side == "left" else "MEM002")
    assert finding.buffer == middle.facts()
    assert finding.offset == start + wrong[0]
    assert finding.size == wrong[-1] - wrong[0] + 1
    assert finding.neighbour == (left if side == "left" else right).facts()
    assert not finding.reached_neighbour
    window = finding.window
    at = window.first - window.address
    assert window.data[at] == written[wrong[0]]
    assert allocator.check_integrity() == []


@PROFILE
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_free_list_against_a_bitmap(steps):
    free = [True] * 200
    pieces = FreeList([(0, 200)])
    taken = []
    for take, size in steps:
        if take:
            runs = [at for at in range(200 - size + 1) if all(free[at : at + size])]
            offset = pieces.take(size)
            assert offset == (runs[0] if runs else None)
            if offset is not None:
                free[offset : offset + size] = [False] * size
                taken.append((offset, size))
        elif taken:
            offset, count = taken.pop(size % len(taken))
            free[offset : offset + count] = [True] * count
            pieces.give(offset, count)
        assert pieces.nbytes == sum(free)
        assert all(
            left[0] + left[1] < right[0]
            for left, right in zip(pieces.pieces, pieces.pieces[1:], strict=False)
        )


@pytest.mark.parametrize("piece", [(0, 5), (0, 10), (4, 5), (6, 10), (15, 10), (19, 1)])
def test_free_list_refuses_what_is_free(piece):
    with pytest.raises(AssertionError, match="free already"):
        FreeList([(0, 5), (15, 5)]).give(*piece)
