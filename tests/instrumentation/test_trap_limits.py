"""Level trap for some kernels and some buffers: the rest runs plain, and gives no false finding."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import numpy as np
import pytest
from engines import TARGET
from fake_memory import FakeMemory
from numba import cuda, float32

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError
from instrumentation.findings import FindingLog
from instrumentation.globs import EVERY_BUFFER, EVERY_KERNEL, Globs
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d
from instrumentation.levels import Level

N = 100


@kernel(block=64)
def plain_fill(y: f32_1d) -> None:
    """y = 1."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = float32(1.0)


@kernel(block=64)
def checked_copy(x: f32_1d, y: f32_1d) -> None:
    """y = x."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i]


@kernel(block=64)
def plain_copy(x: f32_1d, y: f32_1d) -> None:
    """y = x."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i]


@kernel(block=64)
def checked_past(x: f32_1d, y: f32_1d) -> None:
    """y = x, from one element too far on."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = x[i + 1]


class World:
    def __init__(self, kernels=None, buffers=None, *, captured=False):
        self.device = HostDevice(1)
        self.findings = FindingLog()
        self.allocator = Allocator(self.device, level=Level.TRAP, findings=self.findings)
        self.device.watch(
            self.allocator,
            trap_kernels=EVERY_KERNEL if kernels is None else Globs(kernels, "trap_kernels"),
            trap_buffers=EVERY_BUFFER if buffers is None else Globs(buffers, "trap_buffers"),
        )
        self.stream = self.device.create_stream(owner=TARGET, name="target")
        self.captured = captured

    def arena(self, name="arena"):
        return self.allocator.reserve_arena(1 << 16, owner=TARGET, name=name).unwrap()

    @staticmethod
    def view(arena, name):
        return arena.reserve(4 * N, owner=TARGET, name=name).unwrap().view(np.float32, N)

    def run(self, *launches):
        if self.captured:
            self.stream.begin_capture()
        for each, arguments in launches:
            self.stream.launch(each, 2, arguments)
        if self.captured:
            graph = self.stream.end_capture("graph")
            self.stream.replay(graph)
            self.stream.replay(graph)
        self.stream.synchronize()
        if self.captured:
            graph.destroy()
        return [(finding.code, finding.kernel) for finding in self.findings]

    @property
    def shadows(self):
        return {row.name for row in self.allocator.table() if row.name.startswith("shadow.")}


@pytest.fixture(params=[False, True], ids=["launched", "captured"])
def captured(request):
    return request.param


class TestKernels:
    def test_what_a_plain_kernel_wrote_counts_as_written(self, captured):
        world = World("checked_*", captured=captured)
        arena = world.arena()
        x, y = world.view(arena, "x"), world.view(arena, "y")
        assert world.run((plain_fill, {"y": x}), (checked_copy, {"x": x, "y": y})) == []

    def test_from_where_it_stands_on_and_not_before(self, captured):
        world = World("checked_*", captured=captured)
        arena = world.arena()
        x, y = world.view(arena, "x"), world.view(arena, "y")
        found = world.run((checked_copy, {"x": x, "y": y}), (plain_fill, {"y": x}))
        assert found == [("MEM012", "checked_copy")]
        # A second replay finds it written.
        assert all(finding.count <= N for finding in world.findings)

    def test_a_plain_kernel_is_not_checked(self, captured):
        world = World("checked_*", captured=captured)
        arena = world.arena()
        x, y = world.view(arena, "x"), world.view(arena, "y")
        assert world.run((plain_copy, {"x": x, "y": y})) == []
        assert World(captured=captured).device.traps_kernel(plain_copy)

    def test_what_a_plain_kernel_reads_does_not_become_written(self, captured):
        world = World("checked_*", captured=captured)
        arena = world.arena()
        x, y, z = (world.view(arena, name) for name in "xyz")
        found = world.run((plain_copy, {"x": x, "y": y}), (checked_copy, {"x": x, "y": z}))
        assert found == [("MEM012", "checked_copy")]


class TestBuffers:
    def test_of_others_no_state_is_kept_and_bounds_are_checked(self, captured):
        world = World(buffers="kv.*", captured=captured)
        arena = world.arena()
        x, y, kv = (world.view(arena, name) for name in ("x", "y", "kv.k.0"))
        assert world.run((checked_copy, {"x": x, "y": y})) == []
        found = world.run((checked_past, {"x": y, "y": x}))
        assert found == [("MEM010", "checked_past")]
        found = world.run((checked_copy, {"x": kv, "y": y}))
        assert found[1:] == [("MEM012", "checked_copy")]

    def test_only_arenas_with_such_a_buffer_have_a_shadow(self):
        world = World(buffers="kv.*,state")
        one, two, three = (world.arena(name) for name in ("one", "two", "three"))
        world.view(one, "x")
        assert world.shadows == set()
        world.view(one, "kv.v.1")
        world.view(one, "kv.v.2")
        request = BufferRequest(4 * N, TARGET, "state")
        overlay = two.reserve_overlay([request], owner=TARGET, name="layout").unwrap()
        world.view(three, "states")
        assert world.shadows == {"shadow.one", "shadow.two"}
        assert world.allocator.check_integrity() == []
        overlay.activate()
        y = world.view(three, "y")
        state = overlay.buffers[0].view(np.float32, N)
        assert world.run((checked_copy, {"x": state, "y": y})) == [("MEM012", "checked_copy")]

    def test_what_lay_there_before_its_shadow_came_is_not_called_unwritten(self):
        world = World(buffers="kv.*")
        arena = world.arena()
        x = world.view(arena, "x")
        assert world.run((plain_fill, {"y": x})) == []
        kv = world.view(arena, "kv.k.0")
        assert world.run((checked_copy, {"x": x, "y": kv}), (checked_copy, {"x": kv, "y": x})) == []

    def test_copies_between_what_is_watched_and_what_is_not(self):
        world = World(buffers="kv.*")
        arena = world.arena()
        x, y, kv = (world.view(arena, name) for name in ("x", "y", "kv.k.0"))
        world.stream.copy(kv, x)
        assert world.run((checked_copy, {"x": kv, "y": y})) == []

    def test_both_limits(self, captured):
        world = World("checked_*", "kv.*", captured=captured)
        arena = world.arena()
        x, kv = world.view(arena, "x"), world.view(arena, "kv.k.0")
        launches = ((plain_fill, {"y": kv}), (checked_copy, {"x": kv, "y": x}), (plain_fill, {"y": x}))
        assert world.run(*launches) == []

    def test_memory_is_given_back_with_its_shadow(self):
        world = World(buffers="kv.*")
        arena = world.arena()
        kv = world.view(arena, "kv.k.0")
        kv.buffer.free()
        arena.release()
        assert world.shadows == set()
        assert world.allocator.arenas == ()
        assert world.allocator.close() == []

    def test_where_a_shadow_does_not_fit_a_line_says_which_option_helps(self, capsys):
        memory = FakeMemory(total=(1 << 16) + (1 << 15))
        allocator = Allocator(memory, level=Level.TRAP, findings=FindingLog())
        allocator.keep_shadows(True)
        arena = allocator.reserve_arena(1 << 16, owner=TARGET, name="large").unwrap()
        assert arena.shadow is None
        out = capsys.readouterr().out
        assert "no memory for a shadow" in out
        assert "--trap-buffers GLOB" in out
        assert out.count("\n") == 1


class TestGlobs:
    def test_names(self):
        globs = Globs("kv.*, rms_norm_w?", "trap_kernels")
        assert [globs.matches(name) for name in ("kv.k.1", "rms_norm_w8", "rms_norm", "KV.k")] == [
            True,
            True,
            False,
            False,
        ]
        assert globs.hit
        assert not globs.all
        assert not Globs("x", "o").hit

    @pytest.mark.parametrize("text", ["", ",", "a,,b", " "])
    def test_no_pattern(self, text):
        with pytest.raises(BadInputError, match=r"^trap_kernels is .*give patterns"):
            Globs(text, "trap_kernels")
