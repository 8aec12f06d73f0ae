"""A few lines around any program: its arrays guarded, its streams ordered, its findings a list and a report."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
from fake_cuda import fake_device
from numba import cuda, float32

import instrumentation
from instrumentation import Sanitizer
from instrumentation.errors import BadInputError, KernelDialectError
from instrumentation.findings import RefusedError
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d  # noqa: TC001 - kernels read their annotations

MIB = 1 << 20


@kernel(block=64)
def triple(x: f32_1d, y: f32_1d) -> None:
    """Y = 3 x."""
    i = cuda.grid(1)
    if i < y.shape[0]:
        y[i] = float32(3.0) * x[i]


@cuda.jit
def scale(x, y, factor, n):
    """The first n of y = factor x."""
    i = cuda.grid(1)
    if i < n:
        y[i] = factor * x[i]


def plain(y):
    """One too far."""
    i = cuda.grid(1)
    if i <= y.shape[0]:
        y[i] = 1


def outside(y):
    """No dialect has this."""
    y[0] = len({2, 1})


def opened(**settings):
    return Sanitizer(**({"device": "host", "threads": 1, "file": io.StringIO()} | settings))


def codes(san):
    return [finding.code for finding in san.findings]


def neighbours(x, y):
    """Y is the sum of an element and the next; a tile that nobody waits for."""
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    y[i] = tile[i] + tile[(i + 1) % 64]


class TestTrap:
    """Every access of a kernel that Numba's own decorator made, or none did."""

    @pytest.mark.parametrize("device", ["host", "fake GPU"])
    @pytest.mark.parametrize("jitted", [True, False])
    def test_a_store_too_far_has_its_line_and_changes_nothing(self, device, jitted):
        with opened(device=fake_device() if device == "fake GPU" else "host", check="trap") as san:
            stream = san.stream()
            y = san.array(np.zeros(100, np.float32), name="y")
            one_too_far = san.kernel(cuda.jit(plain) if jitted else plain, block=64)
            san.launch(one_too_far, 2, stream, y=y)
            stream.synchronize()
            assert (san.copy_out(y, stream) == 0).all()  # not waited for yet
            san.synchronize()
        [finding] = san.findings
        assert (finding.code, finding.argument, finding.thread) == ("MEM011", "y", (36, 0, 0))
        assert finding.access[0].line == plain.__code__.co_firstlineno + 4
        assert "index 100 of axis 0, which has 100 elements" in finding.message

    def test_never_written_memory_and_a_race_are_told(self):
        with opened(check="trap") as san:
            stream = san.stream()
            x, y = san.empty(64, np.float32, name="x"), san.empty(64, np.float32, name="y")
            san.launch(san.kernel(neighbours, block=64), 1, stream, x=x, y=y)
            san.synchronize()
        found = {(finding.code, finding.argument) for finding in san.findings}
        # On the host the element that the race is about is not even written yet.
        assert found == {("MEM012", "x"), ("MEM012", "tile"), ("RAC001", "tile")}


class TestArrays:
    @pytest.mark.parametrize("device", ["host", "fake GPU"])
    def test_arrays_go_in_and_results_come_out(self, device):
        with opened(device=fake_device() if device == "fake GPU" else "host") as san:
            x = san.array(np.arange(100, dtype=np.float32), name="x")
            y = san.empty(100, np.float32, name="y")
            stream = san.stream()
            assert san.launch(triple, 2, stream, x=x, y=y)
            result = san.copy_out(y, stream)
            san.synchronize()
            assert (result == 3 * np.arange(100)).all()
        assert san.findings == []
        assert san.exit_code == 0
        assert san.report() == f"0 findings: device {san.device.name}, level audit"

    @pytest.mark.parametrize("source", [np.zeros((3, 0)), np.arange(6)[::2], [[1.0, 2.0]], np.int8(3)])
    def test_any_array_of_numbers_keeps_its_values(self, source):
        with opened() as san:
            stream = san.stream()
            result = san.copy_out(san.array(source), stream)
            stream.synchronize()
            assert np.array_equal(result, np.asarray(source))
            assert result.shape == np.shape(source)

    def test_large_arrays_and_many_small_ones_are_given_back(self):
        device = fake_device(total=256 * MIB)
        before = device.context.driver.used
        with opened(device=device) as san:
            for at in range(200):
                san.free(san.empty(MIB, np.float32, name=f"step {at}"))
            san.empty(40 * MIB, np.uint8, name="large")
        assert device.context.driver.used == before
        assert san.findings == []

    @pytest.mark.parametrize(
        ("shape", "dtype"), [(-1, "f4"), ((2, -3), "f4"), (4, object)], ids=["negative", "axis", "objects"]
    )
    def test_what_is_no_array_of_numbers_is_refused(self, shape, dtype):
        with opened() as san, pytest.raises(BadInputError, match=r"array x of .* give numbers"):
            san.empty(shape, dtype, name="x")

    def test_use_after_free_is_found(self):
        with opened(keep_going=True) as san:
            x, y = (san.array(np.zeros(8, np.float32), name=name) for name in "xy")
            stream = san.stream()
            assert san.free(x)
            assert not san.launch(triple, 1, stream, x=x, y=y)
            assert not san.free(x)
        assert codes(san) == ["MEM004", "MEM005"]


class TestOrder:
    def race(self, san, *, repaired):
        x = san.array(np.ones(64, np.float32), name="x")
        y = san.array(np.zeros(64, np.float32), name="y")
        one, two = san.stream("one"), san.stream("two")
        san.launch(triple, 1, one, x=x, y=y)
        if repaired:
            done = san.event()
            one.record(done)
            two.wait(done)
        result = san.copy_out(y, two)
        san.synchronize()
        return result

    def test_a_race_raises_and_is_reported_at_the_end(self):
        file = io.StringIO()
        with pytest.raises(RefusedError) as caught, opened(file=file) as san:
            self.race(san, repaired=False)
        assert caught.value.finding.code == "STR011"
        assert file.getvalue().startswith("STR011 unordered read and write: 256 bytes, y of main\n")
        assert file.getvalue().endswith("1 finding: device host, level audit\n")

    def test_or_the_program_goes_on_without_the_call(self):
        with opened(keep_going=True) as san:
            assert (self.race(san, repaired=False) == 0).all()
        assert codes(san) == ["STR011"]
        assert san.exit_code == 1
        frame = san.findings[0].access[0]
        assert frame.file == __file__
        assert frame.function == "TestOrder.race"

    def test_its_repaired_twin_is_clean(self):
        with opened() as san:
            assert (self.race(san, repaired=True) == 3).all()
        assert san.findings == []

    def test_host_arrays_are_watched_where_the_program_says_so(self):
        with opened(keep_going=True) as san:
            stream = san.stream()
            result = san.copy_out(san.array(np.ones(8)), stream)
            assert not san.host_access(result)
            stream.synchronize()
            assert san.host_access(result)
            assert san.copy_in(san.empty(8, float), result, stream)
        assert codes(san) == ["STR013"]

    def test_owners_may_touch_what_is_theirs_shared_or_lent(self):
        with opened(keep_going=True) as san:
            x = san.array(np.ones(8, np.float32), owner="a", name="x")
            y = san.array(np.ones(8, np.float32), owner="b", name="y")
            stream = san.stream(owner="b")
            assert not san.launch(triple, 1, stream, x=x, y=y)
            x.buffer.share_read_only()
            assert san.launch(triple, 1, stream, x=x, y=y)
        assert codes(san) == ["OWN001"]


class TestKernels:
    def test_what_cuda_jit_made_runs_with_the_types_of_its_arguments(self):
        with opened() as san:
            stream, doubled = san.stream(), san.kernel(scale, block=32)
            for kind in (np.float32, np.int32):
                x, y = (san.array(np.arange(40, dtype=kind)) for _ in "xy")
                san.launch(doubled, 2, stream, x=x, y=y, factor=2, n=np.int32(39))
                result = san.copy_out(y, stream)
                san.synchronize()
                assert (result == [*range(0, 78, 2), 39]).all()
            assert len({id(doubled.typed({"x": x, "y": y, "factor": 2, "n": 3})) for _ in range(3)}) == 1
        assert san.findings == []

    def test_a_plain_functions_overflow_names_it(self):
        with opened() as san:
            san.launch(
                san.kernel(plain, block=64), 1, san.stream(), y=san.array(np.zeros(10, np.int64), name="y")
            )
        [finding] = san.findings
        assert (finding.code, finding.kernel, finding.size) == ("MEM002", "plain", 8)
        assert finding.buffer.name == "y"

    def test_source_outside_the_dialect_is_refused_with_its_line(self):
        with opened() as san:
            y = san.array(np.zeros(4))
            line = outside.__code__.co_firstlineno
            with pytest.raises(KernelDialectError, match=rf"test_sanitizer\.py:{line + 2}: outside: "):
                san.launch(san.kernel(outside, block=1), 1, san.stream(), y=y)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"x": 1}, "plain: arguments x; it takes y"),
            ({"y": "text"}, "plain: argument y is 'text'; give a view"),
            ({"y": True}, "plain: argument y is True"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, arguments, words):
        with opened() as san, pytest.raises(BadInputError, match=words):
            san.launch(san.kernel(plain, block=1), 1, san.stream(), **arguments)

    @pytest.mark.parametrize("value", [np.zeros(3, np.float16), np.zeros(3, np.complex64), np.float32(1)])
    def test_so_are_arrays_that_kernels_cannot_have(self, value):
        with opened() as san:
            y = san.array(value)
            with pytest.raises(BadInputError, match="plain: argument y is a view of "):
                san.launch(san.kernel(plain, block=1), 1, san.stream(), y=y)

    def test_what_is_no_function_is_no_kernel(self):
        with opened() as san, pytest.raises(BadInputError, match="kernel of int; give a function"):
            san.kernel(7, block=1)


class TestMemory:
    def test_a_leak_beside_the_ledger_is_found(self):
        device = fake_device()
        with opened(device=device) as san:
            stream = san.stream()
            now = 0.0
            device.memory_watch._clock = lambda: now
            san.warmed_up()
            for _ in range(6):
                now += 10.0
                device.context.driver.hidden += 4 * MIB
                for _ in range(16):
                    stream.synchronize()
        assert codes(san) == ["ACC001"]

    def test_on_the_host_there_is_nothing_to_watch(self):
        with opened() as san:
            san.warmed_up()
        assert san.findings == []


@cuda.jit
def half_waits(x):
    """A barrier for half of the block."""
    i = cuda.threadIdx.x
    if i < 16:
        cuda.syncthreads()
    x[i] = i


class TestBarriers:
    @pytest.mark.parametrize("keep_going", [False, True])
    def test_one_that_part_of_a_block_reaches_is_a_finding(self, keep_going):
        with opened(keep_going=keep_going) as san:
            x = san.array(np.zeros(32, np.float32))
            half = san.kernel(half_waits, block=32)
            if keep_going:
                assert not san.launch(half, 1, san.stream(), x=x)
            else:
                with pytest.raises(KernelDialectError, match="branch that differs between threads, at line"):
                    san.launch(half, 1, san.stream(), x=x)
        assert codes(san) == ["SYN001"]
        (finding,) = san.findings
        assert finding.source.line + 1 == finding.previous[0].line
        assert finding.source.file == __file__


class TestEnd:
    def test_closing_twice_reports_once(self):
        file = io.StringIO()
        san = opened(file=file)
        san.close()
        san.close()
        assert file.getvalue() == "0 findings: device host, level audit\n"

    def test_an_error_of_the_program_passes_through_and_memory_is_given_back(self):
        device = fake_device()
        before = device.context.driver.used

        def program():
            with opened(device=device) as san:
                san.array(np.zeros(4))
                return 1 / 0

        with pytest.raises(ZeroDivisionError):
            program()
        assert device.context.driver.used == before
        assert device.streams == {}

    @pytest.mark.parametrize("level", ["off", "guard"])
    def test_lower_levels_see_less(self, level):
        with opened(check=level) as san:
            assert (TestOrder().race(san, repaired=False) >= 0).all()
        assert san.findings == []

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"check": "all"}, "check level 'all' is unknown"),
            ({"device": "tpu"}, "device 'tpu' is unknown"),
        ],
    )
    def test_settings_that_cannot_be_are_refused(self, settings, words):
        with pytest.raises(BadInputError, match=words):
            opened(**settings)


class TestImport:
    def test_it_costs_nothing_until_it_is_used(self):
        program = "import sys, instrumentation; print('numba' in sys.modules, 'Sanitizer' in instrumentation.__all__)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True"]

    def test_other_names_are_not_there(self):
        with pytest.raises(AttributeError, match="has no attribute 'sanitizer_'"):
            _ = instrumentation.sanitizer_
