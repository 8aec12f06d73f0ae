"""The checked lowering: no bit of a correct kernel changes, and a report's numbers lead back to the source."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run
from kernel_source import load_module
from numba import cuda, float32
from sample_kernels import arg_max, bits, calls, collectives_inside, tiled_product

from instrumentation.kernel import HostOptions, device_function, kernel
from instrumentation.kernel.checked.access import MAX_CALLS, AccessTable, CallSite, Site
from instrumentation.kernel.checked.report import CALL_BITS, RECORDS
from instrumentation.kernel.types import f32_1d, f32_2d

CHECKED = HostOptions(checked=True)
few = settings(max_examples=30, deadline=None)


def both(kernel_, grid, *arguments):
    """Launch plain and checked on fresh copies, assert equal bits; the arrays afterwards."""
    found = []
    for options in (HostOptions(), CHECKED):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        run(kernel_, grid, *copies, options=options)
        found.append([a for a in copies if isinstance(a, np.ndarray)])
    for plain, checked in zip(*found, strict=True):
        assert plain.tobytes() == checked.tobytes()
    return found[0]


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class TestNoBitChanges:
    @few
    @given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
    def test_a_tiled_product(self, m, k, n, seed):
        a, b, c = numbers(seed, m, k), numbers(seed + 1, k, n), np.zeros((m, n), np.float32)
        *_, product = both(tiled_product, ((n + 7) // 8, (m + 7) // 8), a, b, c)
        assert np.allclose(product, a @ b, atol=1e-4)

    @few
    @given(st.integers(1, 4), st.integers(1, 300), st.integers(0, 99))
    def test_shuffles_and_shared_memory(self, rows, columns, seed):
        x = numbers(seed, rows, columns).round(1)
        *_, where = both(arg_max, rows, x, np.zeros(rows, np.float32), np.zeros(rows, np.int32))
        assert where.tolist() == x.argmax(axis=1).tolist()

    @few
    @given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 100), st.integers(0, 99))
    def test_device_functions(self, rows, columns, n, seed):
        arguments = numbers(seed, rows, columns), numbers(seed + 1, columns), np.zeros(n, np.float32)
        both(calls, (n + 31) // 32, *arguments)

    @few
    @given(st.integers(0, 3), st.integers(0, 99))
    def test_inlined_functions(self, rounds, seed):
        x = np.random.default_rng(seed).integers(-50, 50, 96).astype(np.int32)
        both(collectives_inside, 1, x, np.zeros(96, np.int32), np.zeros(96, np.int32), rounds)

    def test_bytes_and_words(self):
        rng = np.random.default_rng(1)
        words = rng.integers(0, 2**32, 32, dtype=np.uint32)
        arguments = words.view(np.float32), words.view(np.uint8)[:32].copy(), words
        outputs = np.zeros(32, np.int32), np.zeros(32, np.float32), np.zeros(96, np.int32)
        both(bits, 1, *arguments, *outputs)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_however_a_block_runs(self, reverse):
        a, b, c = numbers(1, 9, 9), numbers(2, 9, 9), np.zeros((9, 9), np.float32)
        other = c.copy()
        run(tiled_product, (2, 2), a, b, c)
        options = HostOptions(checked=True, poison=True, reverse_lanes=reverse)
        run(tiled_product, (2, 2), a, b, other, options=options)
        assert other.tobytes() == c.tobytes()


@device_function
def first(v, i):
    return v[i]


@device_function
def second(v, i):
    return first(v, i) + first(v, i + 1)


@device_function
def third(v, i):
    return second(v, i)


@device_function
def fourth(v, i):
    return third(v, i)


@device_function
def fifth(v, i):
    return fourth(v, i)


@device_function
def beside(tile, t, v):
    tile[t] = v
    cuda.syncthreads()
    # fmt: off
    return tile[
        (t + 1) % 32
    ]
    # fmt: on


def made():
    @kernel(block=32)
    def indented(x: f32_2d, y: f32_1d, z: f32_1d) -> None:
        tile = cuda.shared.array(32, float32)
        t = cuda.threadIdx.x
        # fmt: off
        y[t] = x[t,
                 0] + x[t, 1]
        # fmt: on
        v = beside(tile, t, fifth(y, t) + second(z, t))
        for k in (0, 1):
            y[k * 32 + t] += v

    return indented


class TestTable:
    @pytest.fixture
    def table(self):
        return made().access_table

    def test_an_expression_is_as_it_was_written(self, table):
        texts = [(site.origin.text, site.array, site.space, site.how) for site in table.sites]
        assert texts[:4] == [
            ("x[t, 0]", "x", "", "load"), ("x[t, 1]", "x", "", "load"), ("y[t]", "y", "", "store"),
            ("v[i]", "v", "", "load"),
        ]  # fmt: skip
        assert ("tile[ (t + 1) % 32 ]", "tile", "shared", "load") in texts

    def test_columns_count_from_one_and_know_the_indentation(self, table):
        site = table.sites[2]
        line = made().parsed.source.splitlines()[site.origin.line - site.origin.first_line]
        assert line.index("y[t]") + 4 + 1 == site.origin.column == 9

    def test_a_loop_that_was_unrolled_is_one_site(self, table):
        assert [site.how for site in table.sites if site.origin.text == "y[k * 32 + t]"] == ["load", "store"]

    def test_an_inlined_function_knows_its_call(self, table):
        (site,) = [site for site in table.sites if site.origin.text == "tile[t]"]
        assert [frame.function for frame in site.origin.frames] == ["beside", "indented"]
        assert site.origin.callers[0].text == "beside(tile, t, fifth(y, t) + second(z, t))"

    def chain(self, table, *texts):
        by_text = {call.origin.text: number + 1 for number, call in enumerate(table.calls)}
        chain = 0
        for text in texts:
            chain = chain << CALL_BITS | by_text[text]
        return chain

    def number(self, table, text):
        return [site.origin.text for site in table.sites].index(text)

    def test_arrays_are_followed_through_calls(self, table):
        site = self.number(table, "v[i]")
        found = table.resolve(site, self.chain(table, "second(z, t)", "first(v, i + 1)"))
        assert (found.array, [frame.function for frame in found.frames]) == (
            "z",
            ["first", "second", "indented"],
        )

    def test_more_calls_than_fit_leave_the_array_unknown(self, table):
        outer = "fifth(y, t)", "fourth(v, i)", "third(v, i)", "second(v, i)", "first(v, i)"
        whole = self.chain(table, *outer)
        found = table.resolve(self.number(table, "v[i]"), whole & ((1 << 4 * CALL_BITS) - 1))
        assert [frame.function for frame in found.frames] == ["first", "second", "third", "fourth", "fifth"]
        assert found.array is None

    def test_an_unknown_caller(self, table):
        call = CallSite(table.sites[0].origin, (("v", "w"),))
        inner = Site(table.sites[self.number(table, "v[i]")].origin, "v", "", "load")
        table = AccessTable("indented", (inner,), (call,))
        assert table.resolve(0, 1).array == "w"
        assert table.resolve(0, 1 << CALL_BITS).array is None
        assert MAX_CALLS == 1023


def test_code_from_the_cache_has_the_lines_of_today(tmp_path):
    source = """\
from numba import cuda
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d


@kernel(block=32)
def copy(x: f32_1d, y: f32_1d) -> None:
    y[cuda.threadIdx.x] = x[0]
"""
    one = load_module(tmp_path / "one.py", source).copy
    other = load_module(tmp_path / "other.py", f"\n\n\n{source}").copy
    assert one.host(CHECKED).path == other.host(CHECKED).path
    lines = [k.access_table.sites[0].origin.line for k in (one, other)]
    assert lines[1] - lines[0] == 3
    assert one.host(CHECKED).path != one.host().path


def test_what_has_no_room_in_a_report_is_counted(tmp_path):
    n = RECORDS + 6
    body = "\n".join(f"    y[i + {k}] = float32({k})" for k in range(n))
    source = f"""\
from numba import cuda, float32
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d


@kernel(block=32)
def much(y: f32_1d) -> None:
    i = cuda.grid(1) + 32
{body}
"""
    much = load_module(tmp_path / "much.py", source).much
    from engines import Bench  # noqa: PLC0415

    from instrumentation.levels import Level  # noqa: PLC0415

    bench = Bench(Level.TRAP)
    y = bench.put(bench.arena(), np.zeros(32, np.float32), "y")
    bench.stream.launch(much, 1, {"y": y})
    bench.stream.synchronize()
    found = bench.findings.list()
    assert len(found) == RECORDS
    assert {finding.count for finding in found} == {32}
    assert f"{6 * 32} more at other places" in found[0].notes[1]
