"""Level trap by the code that a GPU would run: PTX of checked kernels, on ``ptx_machine``, beside the host's form."""

from __future__ import annotations

import numpy as np
import planted_kernels
import pytest
from planted_faults import PLANTED, N
from planted_kernels import shifted
from ptx_cuda import ptx_device
from ptx_machine import Memory, WildAccessError, run
from trap_world import World

#: a block's threads all do what the host does once
ONCE = "what a block loads once"


def facts(found, *, counted=True):
    return [
        (f.code, f.argument, [frame.line for frame in f.access if frame.file == planted_kernels.__file__], f.message,
         f.block, f.thread, f.count if counted else None)
        for f in found
    ]  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
class TestPlantedFaults:
    def test_what_is_found_is_what_the_host_finds(self, fault):
        host, gpu = (
            world.launch(fault.kernel, fault.grid_of("bad"), fault.arguments("bad"))
            for world in (World(), World(device=ptx_device()))
        )
        counted = fault.name != ONCE
        assert facts(gpu, counted=counted) == facts(host, counted=counted)
        assert facts(gpu)[0][0] == fault.codes[0]

    def test_its_twin_has_the_bits_of_the_host_and_no_finding(self, fault):
        made = []
        for world in (World(), World(device=ptx_device())):
            arguments = world.bind(fault.arguments("fixed"))
            world.stream.launch(fault.kernel, fault.grid_of("fixed"), arguments)
            world.stream.synchronize()
            assert world.findings.list() == ()
            made.append([world.read(arguments[name]).tobytes() for name in sorted(fault.kernel.writes)])
        assert made[0] == made[1]


class TestFreedMemory:
    """What was freed behind a launch in the queue is not touched."""

    @pytest.mark.parametrize("freed", ["x", "y"])
    def test_neither_read_nor_written(self, freed):
        world = World(device=ptx_device())
        arguments = world.bind(
            {"x": np.ones(N, np.float32), "y": np.full(N, 7, np.float32), "n": N, "load_at": 0, "store_at": 0}
        )
        world.allocator.watch_frees(None)
        world.stream.synchronize()
        world.stream.launch(shifted, 2, arguments)
        other = arguments["y" if freed == "x" else "x"]
        arguments[freed].buffer.free()
        world.device.settle()
        world.stream.synchronize()
        assert [(f.code, f.argument, f.count) for f in world.findings] == [("MEM013", freed, N)]
        assert world.read(other).tolist() == [0 if freed == "x" else 1] * N
        assert world.allocator.check_integrity() == []


def test_an_access_that_is_not_checked_is_seen():
    """The machine itself: the plain form of a kernel reads what is not its own."""
    held = np.zeros(4, np.float32)
    parameters = [held.ctypes.data, 4, held.ctypes.data, 4, 5, 0, 0]
    memory = Memory([(held.ctypes.data, held.nbytes)])
    plain = shifted.ptx((9, 0))
    numbers = [parameters[i] for i in (0, 1, 2, 3)]
    arrays = [0, 0, 4, 4, numbers[0], 4, 4, 0, 0, 4, 4, numbers[2], 4, 4]
    with pytest.raises(WildAccessError, match="4 bytes at"):
        run(plain, (1, 1, 1), shifted.block, [*arrays, *parameters[4:]], memory)
