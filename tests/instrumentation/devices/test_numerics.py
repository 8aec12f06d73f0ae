"""``--check-numerics``: the first NaN or infinity, on the host and on a GPU, launched one by one or captured."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import math

import numpy as np
import pytest
from engines import TARGET, Bench
from fake_cuda import fake_device
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, float32

from instrumentation.allocator import Allocator, BufferRequest
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError
from instrumentation.findings import FindingLog
from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.intrinsics import f32_to_f16
from instrumentation.kernel.stores import stores_to
from instrumentation.kernel.types import f32, f32_1d, f32_2d, f64_1d, i32, i32_1d, u16_2d
from instrumentation.levels import Level
from instrumentation.reports.jsonlines import read
from instrumentation.reports.text import render
from instrumentation.sanitizer import Sanitizer

WIDTH = 40


@kernel(block=64)
def inverse(x: f32_2d, y: f32_2d) -> None:
    """y = 1 / x."""
    row = cuda.blockIdx.x
    i = cuda.threadIdx.x
    if i < y.shape[1]:
        y[row, i] = float32(1.0) / x[row, i]


@kernel(block=64)
def subtract(x: f32_2d, y: f32_2d) -> None:
    """y -= x."""
    row = cuda.blockIdx.x
    i = cuda.threadIdx.x
    if i < y.shape[1]:
        y[row, i] = y[row, i] - x[row, i]


@kernel(block=64)
def to_halves(x: f32_2d, y: u16_2d) -> None:
    """Bits of x in half precision."""
    row = cuda.blockIdx.x
    i = cuda.threadIdx.x
    if i < y.shape[1]:
        y[row, i] = f32_to_f16(x[row, i])


@kernel(block=64)
def some(y: f32_1d, first: i32, value: f32) -> None:
    """Write four elements and leave the others."""
    i = cuda.threadIdx.x
    if i < 4:
        y[first + i] = value


@kernel(block=64)
def largest_so_far(x: f32_1d, y: f32_1d) -> None:
    """y[1:] = the largest of those before; y[0] = -inf, as it is meant."""
    i = cuda.threadIdx.x
    if i == 0:
        y[0] = float32(-math.inf)  # infinity: intended
        for k in range(y.shape[0] - 1):
            y[k + 1] = max(y[k], x[k])


@device_function
def put(y: f32_1d, i: i32, value: f32) -> None:
    y[i] = value


@kernel(block=64)
def through_function(x: f32_1d, y: f32_1d) -> None:
    """y = sqrt(x), and its first element once more."""
    i = cuda.threadIdx.x
    if i < y.shape[0]:
        put(y, i, math.sqrt(x[i]))
    if i == 0:
        cuda.atomic.add(y, 0, float32(0.0))


@kernel(block=64)
def doubles(x: f64_1d, y: f64_1d) -> None:
    """y = x * x."""
    i = cuda.threadIdx.x
    if i < y.shape[0]:
        y[i] = x[i] * x[i]


@kernel(block=64)
def count_up(y: i32_1d) -> None:
    """Integers whose bits are those of NaN."""
    i = cuda.threadIdx.x
    if i < y.shape[0]:
        y[i] = -1 - i


class World:
    """A device whose launches are looked at, called one by one or in a captured graph."""

    def __init__(self, kind, level=Level.GUARD, *, captured=False):
        self.device = HostDevice(1) if kind == "host" else fake_device()
        self.findings = FindingLog()
        self.allocator = Allocator(self.device, level=level, findings=self.findings)
        self.device.watch(self.allocator, check_numerics=True)
        self.stream = self.device.create_stream(owner=TARGET, name="target")
        self.arena = self.allocator.reserve_arena(1 << 18, owner=TARGET, name="arena").unwrap()
        self.captured = captured

    def put(self, array, name, bits=""):
        buffer = self.arena.reserve(array.nbytes, owner=TARGET, name=name).unwrap()
        view = buffer.view(array.dtype, array.shape, bits=bits)
        self.stream.copy_in(view, array)
        self.stream.synchronize()
        return view

    def get(self, view):
        array = np.empty(view.shape, view.dtype)
        self.stream.copy_out(array, view)
        self.stream.synchronize()
        return array

    def run(self, *launches, times=1):
        if self.captured:
            self.stream.begin_capture()
        for each, grid, arguments in launches:
            self.stream.launch(each, grid, arguments)
        if self.captured:
            graph = self.stream.end_capture("graph")
            for _ in range(times):
                self.stream.replay(graph)
        self.stream.synchronize()
        if self.captured:
            graph.destroy()

    @property
    def found(self):
        return self.findings.of("NUM001")


@pytest.fixture(params=["host", "cuda"])
def kind(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["launched", "captured"])
def world(kind, request):
    return World(kind, captured=request.param)


def ones(rows=6):
    return np.ones((rows, WIDTH), np.float32)


class TestTheFirst:
    def test_an_infinity_has_kernel_line_tensor_row_column_and_layer(self, world):
        x = ones()
        x[4, 7] = 0
        views = {
            "x": world.put(x, "x"),
            "y": world.put(ones(), "y").buffer.view(np.float32, x.shape, name="l_out-3"),
        }
        world.run((inverse, 6, views))
        (finding,) = world.found
        assert finding.kind == "first infinity"
        assert "l_out-3, row 4, column 7, layer 3 is infinite: kernel inverse" in finding.message
        assert "1 element that it wrote is not finite" in finding.message
        assert (finding.kernel, finding.argument, finding.stream) == ("inverse", "y", "target")
        assert finding.source.line == inverse.parsed.line + 5
        assert finding.source.file == __file__
        assert finding.offset == 4 * (4 * WIDTH + 7)
        assert finding.access[0].function == "World.run"
        assert finding.notes == ("all numbers that the kernel reads are finite: it made this one itself",)
        assert world.findings.list() == (finding,)

    def test_of_many_the_first_element_of_the_first_launch(self, world):
        x, z = world.put(np.zeros((6, WIDTH), np.float32), "x"), world.put(ones(), "z")
        y = world.put(ones(), "y")
        world.run(
            (inverse, 6, {"x": z, "y": y}), (inverse, 6, {"x": x, "y": z}), (subtract, 6, {"x": z, "y": x})
        )
        (finding,) = world.found
        assert "z, row 0, column 0 is infinite" in finding.message
        assert f"{6 * WIDTH} elements that it wrote are not finite" in finding.message
        assert f"behind it, 1 launch made {6 * WIDTH} more" in finding.notes[-1]

    def test_once_for_a_run_of_many(self, world):
        x, y = world.put(np.zeros((6, WIDTH), np.float32), "x"), world.put(ones(), "y")
        for _ in range(3):
            world.run((inverse, 6, {"x": x, "y": y}), times=3)
        assert [finding.count for finding in world.found] == [1]

    def test_nan_of_an_array_that_is_read_and_written(self, world):
        x = ones()
        x[1, 2] = np.inf
        views = {"x": world.put(x, "x"), "y": world.put(x, "y")}
        world.run((subtract, 6, views))
        # inf - inf: the element was not finite before, so it is not the launch's.
        assert world.found == ()
        x[1, 2] = np.nan
        views = {"x": world.put(x, "x2"), "y": world.put(ones(), "y2")}
        world.run((subtract, 6, views))
        (finding,) = world.found
        assert "y2, row 1, column 2 is NaN" in finding.message
        assert finding.notes == (
            "the kernel may have passed it on: x2 (x) held 1, the first at row 1, column 2",
        )

    def test_what_a_written_array_held_before_is_told(self, world):
        x, y = ones(), ones()
        x[0, 0], y[5, 1] = -np.inf, np.nan
        world.run((subtract, 6, {"x": world.put(x, "x"), "y": world.put(y, "y")}))
        (finding,) = world.found
        assert "y, row 0, column 0 is infinite" in finding.message
        assert (
            "x (x) held 1, the first at row 0, column 0; y (y) held 1, the first at row 5, column 1"
            in finding.notes[0]
        )

    def test_half_precision_overflows(self, world):
        x = ones()
        x[3, 33] = 70000.0
        y = world.put(np.zeros(x.shape, np.uint16), "kv.k.2", bits="f16")
        world.run((to_halves, 6, {"x": world.put(x, "x"), "y": y}))
        (finding,) = world.found
        assert finding.message.startswith("kv.k.2, row 3, column 33, layer 2 is infinite")
        assert (finding.size, finding.offset) == (2, 2 * (3 * WIDTH + 33))
        assert "it made this one itself" in finding.notes[0]

    def test_integers_are_no_numbers(self, world):
        world.run((count_up, 1, {"y": world.put(np.zeros(30, np.int32), "y")}))
        x = ones()
        x[:] = 70000.0
        world.run(
            (to_halves, 6, {"x": world.put(x, "x"), "y": world.put(np.zeros(x.shape, np.uint16), "bits")})
        )
        assert world.found == ()

    def test_doubles(self, world):
        x = np.ones(50)
        x[41] = 1e200
        world.run((doubles, 1, {"x": world.put(x, "x"), "y": world.put(np.ones(50), "y")}))
        assert "y, element 41 is infinite" in world.found[0].message

    def test_rows_are_those_of_the_tensor_whatever_shape_the_kernel_has(self, world):
        x = np.ones((3, 4 * WIDTH), np.float32)
        x[2, WIDTH + 1] = 0
        y = world.put(np.ones_like(x), "Qcur-0").reshape((12, WIDTH))
        world.run((inverse, 12, {"x": world.put(x, "x").reshape((12, WIDTH)), "y": y}))
        assert f"Qcur-0, row 2, column {WIDTH + 1}, layer 0 is infinite" in world.found[0].message


class TestWhatIsNot:
    def test_memory_that_a_launch_leaves_alone(self, world):
        y = world.put(np.full(100, np.nan, np.float32), "y")
        world.run((some, 1, {"y": y, "first": 8, "value": 2.0}))
        assert world.found == ()
        assert np.isfinite(world.get(y)[8:12]).all()
        world.run((some, 1, {"y": y, "first": 9, "value": math.inf}))
        (finding,) = world.found
        assert "y, element 9 is infinite" in finding.message
        assert "3 elements that it wrote are" in finding.message

    def test_integers_that_lay_there_before(self, world):
        buffer = world.arena.reserve(400, owner=TARGET, name="shared").unwrap()
        world.run((count_up, 1, {"y": buffer.view(np.int32, 100)}))
        world.run((some, 1, {"y": buffer.view(np.float32, 100), "first": 0, "value": 1.0}))
        assert world.found == ()

    def test_infinities_that_are_meant(self, world):
        x = np.ones(10, np.float32)
        y = world.put(np.ones(11, np.float32), "y")
        world.run((largest_so_far, 1, {"x": world.put(x, "x"), "y": y}))
        assert world.get(y)[0] == -np.inf
        assert world.found == ()

    def test_nan_where_infinities_are_meant(self, world):
        assert stores_to(largest_so_far, "y").infinite
        x = np.ones(10, np.float32)
        # max(a, nan) of a kernel is a; a launch whose infinity is meant may not make a NaN out of it.
        x[:] = -np.inf
        world.run((largest_so_far, 1, {"x": world.put(x, "x"), "y": world.put(np.ones(11, np.float32), "y")}))
        assert world.found == ()

    @pytest.mark.parametrize("level", list(Level))
    def test_bits_are_the_same_at_every_level(self, kind, level):
        world = World(kind, level)
        x = np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32)
        x[2] = np.nan
        x[3, 3] = 0
        views = {"x": world.put(x, "x"), "y": world.put(ones(), "y")}
        world.run((inverse, 6, views), (subtract, 6, views))
        plain = Bench(Level.OFF, device=HostDevice(1))
        requests = [BufferRequest(x.nbytes, TARGET, name) for name in "xy"]
        arena = plain.arena(plain.allocator.arena_size(requests))
        others = {"x": plain.put(arena, x, "x"), "y": plain.put(arena, ones(), "y")}
        for each in (inverse, subtract):
            plain.stream.launch(each, 6, others)
        assert world.get(views["y"]).tobytes() == plain.get(others["y"]).tobytes()
        assert "y, row 2, column 0 is NaN" in world.found[0].message


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 4),
    data=st.data(),
    kind=st.sampled_from(["host", "cuda"]),
    captured=st.booleans(),
)
def test_the_first_of_any_is_found(rows, data, kind, captured):
    """Zeros at random: what NumPy says is the first is the first."""
    world = World(kind, captured=captured)
    x = ones(rows)
    places = data.draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, WIDTH - 1)), max_size=5))
    for place in places:
        x[place] = 0
    world.run((inverse, rows, {"x": world.put(x, "x"), "y": world.put(ones(rows), "y")}))
    assert len(world.found) == bool(places)
    if places:
        row, column = min(places)
        assert f"y, row {row}, column {column} is infinite" in world.found[0].message
        number = len(set(places))
        assert world.found[0].message.endswith(
            f"{number} elements that it wrote are not finite"
            if number > 1
            else "1 element that it wrote is not finite"
        )


class TestStores:
    def test_device_functions_and_atomics_are_among_them(self):
        stores = stores_to(through_function, "y")
        lines = [frame.line for frame in stores.frames]
        assert lines == sorted(lines)
        assert [frame.function for frame in stores.frames] == ["put", "through_function"]
        assert not stores.infinite
        assert stores_to(through_function, "x").frames == ()

    def test_a_finding_names_all_of_them(self, world):
        x = np.ones(20, np.float32)
        x[11] = -1
        world.run((through_function, 1, {"x": world.put(x, "x"), "y": world.put(x, "y")}))
        (finding,) = world.found
        assert "y, element 11 is NaN" in finding.message
        assert finding.source == stores_to(through_function, "y").frames[0]
        assert finding.notes[0].startswith("one of the stores at test_numerics.py:")
        assert finding.notes[0].count("test_numerics.py:") == 2


class TestStreams:
    def test_a_graph_that_another_stream_replays(self, kind):
        world = World(kind)
        other = world.device.create_stream(owner=TARGET, name="other")
        x, y = world.put(np.zeros((6, WIDTH), np.float32), "x"), world.put(ones(), "y")
        world.stream.begin_capture()
        world.stream.launch(inverse, 6, {"x": x, "y": y})
        graph = world.stream.end_capture("graph")
        other.replay(graph)
        other.synchronize()
        assert len(world.found) == 1
        graph.destroy()
        other.destroy()

    def test_more_numbers_than_there_was_room_for(self, kind):
        world = World(kind)
        arena = world.allocator.reserve_arena(1 << 26, owner=TARGET, name="large").unwrap()
        rows = (1 << 23) // WIDTH + 1
        large = (
            arena.reserve(rows * WIDTH * 4, owner=TARGET, name="large")
            .unwrap()
            .view(np.float32, (rows, WIDTH))
        )
        world.stream.fill(large, 0)
        world.stream.synchronize()
        world.run((subtract, 1, {"x": world.put(ones(), "x"), "y": large}))
        assert world.found == ()
        world.captured = True
        world.run((inverse, 1, {"x": world.put(np.zeros((1, WIDTH), np.float32), "z"), "y": large}))
        assert len(world.found) == 1
        assert f"{WIDTH} elements" in world.found[0].message

    def test_nothing_is_left(self, kind):
        world = World(kind, Level.AUDIT)
        x, y = world.put(np.zeros((6, WIDTH), np.float32), "x"), world.put(ones(), "y")
        world.run((inverse, 6, {"x": x, "y": y}))
        for view in (x, y):
            view.buffer.free()
        world.stream.destroy()
        world.arena.release()
        assert world.allocator.close() == []
        if kind == "cuda":
            assert not any("numerics" in row.name for row in world.allocator.table())

    def test_what_a_callback_raises_comes_when_the_host_waits(self, kind):
        world = World(kind)

        def refuse(finding):
            raise RuntimeError(finding.code)

        world.findings._on_finding = refuse
        x, y = world.put(np.zeros((6, WIDTH), np.float32), "x"), world.put(ones(), "y")
        world.stream.launch(inverse, 6, {"x": x, "y": y})
        with pytest.raises(RuntimeError, match="NUM001"):
            world.stream.synchronize()
        world.stream.synchronize()


class TestSanitizer:
    @pytest.mark.parametrize("check", ["off", "audit"])
    def test_an_unmodified_kernel(self, check, capsys):
        with Sanitizer(device="host", check=check, check_numerics=True) as san:
            x, y = san.array(np.zeros(10, np.float32), name="x"), san.empty(10, np.float32, name="y")
            stream = san.stream("compute")

            def divide(x, y):
                i = cuda.grid(1)
                if i < y.size:
                    y[i] = x[i] / x[i]

            san.launch(san.kernel(divide, block=32), 1, stream, x=x, y=y)
        assert [finding.code for finding in san.findings] == ["NUM001"]
        assert san.exit_code == 1
        assert "NUM001 first NaN: 4 bytes, y of main, kernel divide (" in capsys.readouterr().err

    def test_findings_are_kept_as_json_lines(self, tmp_path, capsys):
        kept = tmp_path / "found.jsonl"
        with Sanitizer(device="host", check="off", check_numerics=True, report_file=kept) as san:
            x, y = san.array(np.zeros((1, 10), np.float32)), san.empty((1, 10), np.float32)
            san.launch(inverse, 1, san.stream("compute"), x=x, y=y)
        with kept.open("rb") as lines:
            assert [each.finding for each in read(lines, "kept")] == san.findings
        assert "1 finding: device host, level off" in capsys.readouterr().err

    def test_nothing_without_it(self, capsys):
        with Sanitizer(device="host", check="audit") as san:
            x, y = san.array(np.zeros((1, 10), np.float32)), san.empty((1, 10), np.float32)
            san.launch(inverse, 1, san.stream("compute"), x=x, y=y)
        assert san.findings == []
        assert "0 findings" in capsys.readouterr().err


def test_a_view_of_bits_that_are_no_format():
    world = World("host")
    with pytest.raises(BadInputError, match="bits of 'f8'; use one of f16, bf16, f32, f64"):
        world.put(np.zeros(4, np.uint16), "x", bits="f8")


def test_the_report_as_text():
    world = World("host")
    x = world.put(np.zeros((1, WIDTH), np.float32), "x")
    world.run((inverse, 1, {"x": x, "y": world.put(ones(1), "y")}))
    text = render(world.found[0])
    assert text.startswith("NUM001 first infinity: 4 bytes, y of target, kernel inverse (")
    assert "0 bytes inside the 160-byte buffer y" in text


@pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
def test_what_fresh_memory_held_hides_nothing(level, monkeypatch):
    """Memory that was full of NaN when the process got it, as it is after somebody else's."""
    usual = HostDevice.allocate

    def allocate(self, nbytes):
        address = usual(self, nbytes)
        self.fill_bytes(address, nbytes, 0xFF)
        return address

    monkeypatch.setattr(HostDevice, "allocate", allocate)
    world = World("host", level)
    y = world.arena.reserve(4 * 6 * WIDTH, owner=TARGET, name="y").unwrap().view(np.float32, (6, WIDTH))
    world.run((inverse, 6, {"x": world.put(np.zeros((6, WIDTH), np.float32), "x"), "y": y}))
    assert "y, row 0, column 0 is infinite" in world.found[0].message
    assert f"{6 * WIDTH} elements" in world.found[0].message
