from __future__ import annotations

import numpy as np
import pytest
from allocator_world import DRAFT, LEVELS, MODEL, TARGET, World, refusal

from instrumentation.errors import BadInputError
from instrumentation.levels import Level


@pytest.fixture(params=LEVELS, ids=str)
def either(request):
    return World(request.param)


class TestViews:
    def test_parts_are_exact(self, either):
        buffer = either.buffer(4 * 6 * 4)
        view = buffer.view(np.float32, (4, 6), name="q")
        assert (view.nbytes, view.itemsize, view.size, view.ndim, view.offset) == (96, 4, 24, 2, 0)
        row = view.row(2)
        assert (row.shape, row.offset, row.nbytes, row.name) == ((6,), 48, 24, "q[2]")
        part = view.slice(1, 3)
        assert (part.shape, part.offset, part.nbytes) == ((2, 6), 24, 48)
        assert part.row(1) == view.slice(2, 3).reshape((6,)).row(0) or part.row(1).offset == row.offset
        assert view.reshape((2, 3, 4)).row(1).offset == 48
        assert view.slice(4, 4).nbytes == 0
        assert row.row(5).offset == 68
        assert row.row(5).shape == ()

    @pytest.mark.parametrize(
        ("dtype", "shape", "offset"),
        [
            ("f4", (25,), 0),
            ("f4", (24,), 4),
            ("f4", (1,), 96),
            ("u1", (97,), 0),
            ("u1", (1,), -1),
            ("u1", (1 << 40, 1 << 40), 0),
            ("f4", (2,), 2),
            ("f8", (1,), 4),
            ("f4", (-1,), 0),
            ("f4", (1.5,), 0),
            ("f4", "x", 0),
            ("f4", (1,), 0.5),
            ("O", (1,), 0),
            ("V0", (1,), 0),
            ("no such type", (1,), 0),
        ],
    )
    def test_what_lies_outside_or_askew_is_refused(self, either, dtype, shape, offset):
        buffer = either.buffer(96)
        with pytest.raises(BadInputError, match="view x"):
            buffer.view(dtype, shape, offset=offset)

    def test_parts_outside_are_refused(self, either):
        view = either.buffer(96).view("f4", (4, 6))
        for call in (
            lambda: view.row(4),
            lambda: view.row(-1),
            lambda: view.slice(2, 5),
            lambda: view.slice(3, 2),
            lambda: view.slice(-1, 2),
            lambda: view.reshape((5, 5)),
            lambda: view.reshape((-1, 6)),
            lambda: view.row(0).row(0).row(0),
        ):
            with pytest.raises(BadInputError):
                call()

    def test_use_after_free_is_seen_through_any_part(self, either):
        buffer = either.buffer(96)
        view = buffer.view("f4", (4, 6))
        view.check_live()
        assert view.generation == buffer.generation
        buffer.free()
        assert view.generation != buffer.generation
        for part in (view, view.row(0), view.slice(0, 1), view.reshape(24)):
            finding = refusal(part.check_live, kernel="axpy", argument="x", launch=3)
            assert (finding.code, finding.kernel, finding.argument, finding.launch) == (
                "MEM004",
                "axpy",
                "x",
                3,
            )
            assert finding.free == buffer.free_stack
        assert refusal(buffer.view, "f4", (1,)).code == "MEM004"

    def test_view_does_not_come_back_with_its_address(self):
        world = World(Level.OFF)
        buffer = world.buffer(96)
        view = buffer.view("f4", (24,))
        buffer.free()
        again = world.buffer(96)
        assert again.address == view.address
        assert refusal(view.check_live).code == "MEM004"
        again.view("f4", (24,)).check_live()


class TestOwnership:
    def test_lease_gives_what_it_says_while_it_lasts(self, either):
        buffer = either.buffer()
        assert buffer.permits(TARGET, "write")
        assert not buffer.permits(DRAFT, "read")
        event = object()
        with buffer.lend(to=DRAFT, mode="read", after=event) as lease:
            assert lease.after is event
            assert buffer.permits(DRAFT, "read")
            assert not buffer.permits(DRAFT, "write")
            assert not buffer.permits(MODEL, "read")
            assert buffer.leases == (lease,)
            with buffer.lend(to=DRAFT, mode="write"):
                assert buffer.permits(DRAFT, "write")
        assert not lease.active
        assert not buffer.permits(DRAFT, "read")
        assert buffer.leases == ()
        assert either.codes == []

    def test_lease_ends_once(self, either):
        lease = either.buffer().lend(to=DRAFT, mode="read")
        lease.end()
        finding = refusal(lease.end)
        assert finding.code == "OWN010"
        assert finding.previous == lease.ended_at != ()

    def test_lease_is_over_when_its_buffer_is_freed(self, either):
        buffer = either.buffer()
        with buffer.lend(to=DRAFT, mode="write") as lease:
            buffer.free()
            assert not lease.active
        assert either.codes == []

    def test_only_the_owner_lends(self, either):
        buffer = either.buffer()
        finding = refusal(buffer.lend, to=MODEL, mode="read", by=DRAFT)
        assert (finding.code, finding.actor, finding.buffer.owner) == ("OWN001", "draft", "target")
        assert buffer.leases == ()

    def test_freed_buffer_is_not_lent(self, either):
        buffer = either.buffer()
        buffer.free()
        assert refusal(buffer.lend, to=DRAFT, mode="read").code == "MEM004"

    def test_senseless_leases(self, either):
        buffer = either.buffer()
        with pytest.raises(BadInputError, match="belongs to target already"):
            buffer.lend(to=TARGET, mode="read")
        with pytest.raises(BadInputError, match="mode 'execute'"):
            buffer.lend(to=DRAFT, mode="execute")
        buffer.share_read_only()
        with pytest.raises(BadInputError, match="read-only"):
            buffer.lend(to=DRAFT, mode="write")

    def test_shared_buffer_is_read_by_all_and_written_by_none(self, either):
        buffer = either.buffer(owner=MODEL)
        buffer.share_read_only()
        assert buffer.read_only
        for owner in (TARGET, DRAFT, MODEL):
            assert buffer.permits(owner, "read")
            assert not buffer.permits(owner, "write")


@pytest.mark.parametrize("index", [1.0, "a", None])
def test_rows_are_whole_numbers(index):
    view = World(Level.OFF).buffer(64).view(np.float32, (4, 4))
    with pytest.raises(BadInputError, match="whole number"):
        view.row(index)
    with pytest.raises(BadInputError, match="whole number"):
        view.slice(index, 2)
