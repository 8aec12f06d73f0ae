"""llama.cpp #7376: an allocation failed, its error stayed pending, and the next operation was blamed for it.

A failed allocation is no end: a caller asks for less. Elsewhere the driver's last error was not cleared, so
that whatever looked at it next failed in its place. Here an allocation's failure is the result of that
reservation and of nothing else: who drops it is reported, and what comes next works.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, increment
from fake_cuda import fake_device

from instrumentation.devices.host import HostDevice
from instrumentation.reservation import ReservationError

N = 40
MODEL = 1 << 20


@pytest.fixture(params=["host", "cuda"])
def bench(request):
    """A device that has a little less than the model needs."""
    device = fake_device() if request.param == "cuda" else HostDevice(1)
    return Bench(device=device, limit=MODEL)


def faulty_load(bench: Bench) -> None:
    """Try the whole model; what comes of it is found out later."""
    bench.allocator.reserve_arena(MODEL + 1, owner=TARGET, name="weights")


def repaired_load(bench: Bench):
    """With half as many layers where all of them do not fit."""
    reservation = bench.allocator.reserve_arena(MODEL + 1, owner=TARGET, name="weights")
    if not reservation.ok:
        reservation = bench.allocator.reserve_arena(MODEL // 2, owner=TARGET, name="weights")
    return reservation.unwrap()


def next_operation(bench: Bench) -> None:
    arena = bench.arena(1 << 14)
    y = bench.put(arena, np.zeros(N, np.float32), "y")
    bench.stream.launch(increment, 2, {"y": y})
    np.testing.assert_array_equal(bench.get(y), np.ones(N))
    y.buffer.free()
    arena.release()


def test_the_first_report_is_the_allocation_and_the_next_operation_works(bench):
    faulty_load(bench)
    [finding] = bench.findings
    assert finding.code == "RES001"
    assert f"{MODEL + 1} bytes for weights failed, and it was dropped" in finding.message
    assert finding.allocation[0].function == "faulty_load"
    next_operation(bench)
    assert len(bench.findings) == 1


def test_repaired_less_is_asked_for(bench):
    arena = repaired_load(bench)
    next_operation(bench)
    arena.release()
    assert bench.findings.list() == ()


def test_what_the_driver_itself_refuses_ends_with_that_call():
    bench = Bench(device=fake_device())
    bench.device.context.driver.fail("allocate", "OUT_OF_MEMORY")
    reservation = bench.allocator.reserve_arena(MODEL, owner=TARGET, name="weights")
    assert isinstance(reservation.error, ReservationError)
    assert "target cannot reserve 1048576 bytes" in str(reservation.error)
    next_operation(bench)
    assert bench.allocator.reserve_arena(MODEL, owner=TARGET, name="weights").ok
    assert bench.findings.list() == ()
