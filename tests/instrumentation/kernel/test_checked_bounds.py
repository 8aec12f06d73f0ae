"""Loops of checked CUDA kernels whose indices are looked at before them: what is found does not change."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import ast
import inspect
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_source import load_module
from numba import cuda, int64
from ptx_cuda import ptx_device
from trap_world import World

from instrumentation.kernel import device_function, kernel
from instrumentation.kernel.checked.bounds import Bounds, Root, View
from instrumentation.kernel.checked.lower_cuda import checked_source
from instrumentation.kernel.checked.sums import MOST_FACTOR, Part, Sum
from instrumentation.kernel.types import i32, i32_1d, i64_1d, i64_2d, u8_1d, u16_1d, u32, u64

N = 24


@device_function
def around(x, row, i):
    at = 2 * i + 1
    return x[row, at] - x[row, at - 1]


@kernel(block=4)
def walk(x: i64_1d, z: i64_2d, y: i64_1d, first: i32, end: i32, at: i32, row: i32, cap: i32) -> None:
    t = cuda.threadIdx.x
    own = cuda.local.array(8, int64)
    total = 0
    for k in range(first, end):
        total = total + x[3 * k + at + t]
        total = total - x[at - k]
        total = total + around(z, row, k + t)
        total = total + x[min(2 * k, cap)]
    for k in range(8):
        own[k] = x[at + 2 * k + t]
    for k in range(8):
        total = total * 3 + own[k]
    for k in range(first, end):
        y[k * 4 + t] = total + k


def launched(world, numbers, what=walk):
    arguments = world.bind(
        {"x": np.arange(N) ** 2, "z": np.arange(3 * N).reshape(3, N), "y": np.full(N, -1)} | numbers
    )
    world.stream.launch(what, 1, arguments)
    world.stream.synchronize()
    # Which of several threads is shown, and with which index, is a matter of the order on either device.
    found = [(f.code, f.argument, f.access[0].line, f.count) for f in world.findings]
    return sorted(found), world.read(arguments["y"]).tolist()


places = st.integers(-4, N + 4)


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({"first": st.integers(-2, 5), "end": st.integers(-2, 7), "at": places,
                              "row": st.integers(-1, 3), "cap": places}))  # fmt: skip
def test_findings_and_bits_are_those_of_the_host(numbers):
    assert launched(World(device=ptx_device()), numbers) == launched(World(), numbers)


@pytest.mark.parametrize("numbers", [
    {"first": 2**31 - 3, "end": 2**31 - 1, "at": 4, "row": 0, "cap": 3},
    {"first": -(2**31), "end": -(2**31) + 2, "at": 4, "row": 0, "cap": 3},
], ids=["largest", "smallest"])  # fmt: skip
def test_the_ends_of_integers(numbers):
    assert launched(World(device=ptx_device()), numbers) == launched(World(), numbers)


def test_the_loops_are_there_twice():
    source, _ = checked_source(walk.plan, walk.access_table)
    assert source.count("all_within(") == 3
    assert source.count("for v_k") == 4
    # All four of the first loop, two of them in the function, eight of the second, and the store.
    assert len(re.findall(r"\bsure_load_ro\(", source)) == 3 + 2 + 8
    assert source.count("sure_store_rw(") == 1


@kernel(block=4)
def parts(x: i64_1d, z: i64_2d, y: i64_1d, first: i32, end: i32, at: i32, row: i32) -> None:
    t = cuda.threadIdx.x
    total = 0
    for k in range(first, end):
        total = total + x[(2 * k + at) >> 1]  # shift
        total = total * 3 + x[at + ((k + t) & 3)]  # bits
        total = total - z[row, (k + t) // 2 + k % 5]  # quotient
        total = total + x[3 * ((at + k) % 4)]  # remainder
        total = total + x[((k + at) >> 2) * 4 + (((k + at) & 3) >> 1)]  # part of a part
    y[t] = total


@settings(max_examples=25, deadline=None)
@given(st.fixed_dictionaries({"first": st.integers(-2, 5), "end": st.integers(-2, 9), "at": places,
                              "row": st.integers(-1, 3)}))  # fmt: skip
def test_findings_and_bits_of_parts_are_those_of_the_host(numbers):
    assert launched(World(device=ptx_device()), numbers, parts) == launched(World(), numbers, parts)


def takes_the_form_without_checks(numbers, t):
    """Whether a thread of ``parts`` does so."""
    source, _ = checked_source(parts.plan, parts.access_table)
    test = re.search(r"if (all_within\(.*\)):\n", source)[1]
    bound = {f"_{end}{number}": numbers["first"] if end == "first" else numbers["end"] - 1
             for end, number in re.findall(r"_(first|last)(\d+)\b", test)}  # fmt: skip
    bound |= {"v_x_d0": N, "v_z_d0": 3, "v_z_d1": N, "v_y_d0": N} | {f"v_{k}": v for k, v in numbers.items()}
    bound["cuda"] = SimpleNamespace(threadIdx=SimpleNamespace(x=t))
    for name in re.findall(r"\bv_t\w*", test):
        bound[name] = t
    bound["all_within"] = lambda indices, extents: all(
        0 <= i < n for i, n in zip(indices, extents, strict=True)
    )
    return eval(test, bound)  # noqa: S307 - text of our own


@pytest.mark.parametrize(("numbers", "mark"), [
    ({"first": 0, "end": 4, "at": 42, "row": 0}, "shift"),
    ({"first": 0, "end": 4, "at": -1, "row": 0}, "shift"),
    ({"first": 0, "end": 2, "at": 22, "row": 0}, "bits"),
    ({"first": 40, "end": 44, "at": 0, "row": 0}, "quotient"),
], ids=["too high in the last turn", "too low in the first", "in the middle of a mask", "quotient"])  # fmt: skip
def test_a_part_outside_is_found_where_it_stands(numbers, mark):
    text = inspect.getsource(parts.function).splitlines()
    line = parts.function.__code__.co_firstlineno + next(
        i for i, each in enumerate(text) if f"# {mark}" in each
    )
    found, _ = launched(World(device=ptx_device()), numbers, parts)
    assert line in {each[2] for each in found}, found
    assert not all(takes_the_form_without_checks(numbers, t) for t in range(4))


@pytest.mark.parametrize("numbers", [
    {"first": 0, "end": 4, "at": 17, "row": 2},
    {"first": 0, "end": 4, "at": 0, "row": 0},
    {"first": 3, "end": 7, "at": 8, "row": 1},
], ids=["highest", "lowest", "between"])  # fmt: skip
def test_parts_inside_are_silent_and_not_checked_in_the_loop(numbers):
    assert launched(World(device=ptx_device()), numbers, parts)[0] == []
    assert all(takes_the_form_without_checks(numbers, t) for t in range(4))


@kernel(block=4)
def much(a: u8_1d, b: u16_1d, c: i32_1d, d: i64_2d, y: i64_1d, n: i32, at: i32, row: i32, cap: i32) -> None:
    t = cuda.threadIdx.x
    total = 0
    for k in range(n):
        total = total * 3 + a[2 * k + t] + a[2 * k + t + 1]
        total = total * 3 + b[at + k] - b[k // 2]
        total = total * 3 + c[at + (k & 1)] - c[at + 2 * k]
        total = total * 3 + d[row, k + t] - d[row, min(k, cap)]
    y[t] = total


def much_read(world, numbers, written):
    kinds = {"a": np.uint8, "b": np.uint16, "c": np.int32, "d": np.int64}
    arrays = {name: np.arange(N).astype(kind) for name, kind in kinds.items()}
    arrays["d"] = np.arange(2 * N).reshape(2, N)
    bound = {name: (each, min(each.nbytes, written[name] * each.itemsize)) for name, each in arrays.items()}
    arguments = world.bind(bound | {"y": np.full(N, -1)} | numbers)
    world.stream.launch(much, 1, arguments)
    world.stream.synchronize()
    found = [(f.code, f.argument, f.access[0].line, f.count) for f in world.findings]
    return sorted(found), world.read(arguments["y"]).tolist() if not found else None


counts = st.integers(0, 8) | st.just(2 * N)


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries({"n": st.integers(-1, 5), "at": st.integers(0, 3), "row": st.integers(0, 2),
                           "cap": st.integers(0, 9)}),
    st.fixed_dictionaries(dict.fromkeys("abcd", counts)),
)  # fmt: skip
def test_states_that_are_looked_at_first_are_those_that_the_host_looks_up(numbers, written):
    assert much_read(World(device=ptx_device()), numbers, written) == much_read(World(), numbers, written)


@pytest.mark.parametrize("name", "abcd")
def test_one_element_that_nothing_wrote(name):
    numbers = {"n": 2, "at": 0, "row": 0, "cap": 1}
    just = {"a": 7, "b": 2, "c": 3, "d": 5}
    found, values = much_read(World(device=ptx_device()), numbers, just)
    assert found == []
    assert values is not None
    found, _ = much_read(World(device=ptx_device()), numbers, just | {name: just[name] - 1})
    assert {each[1] for each in found} == {name}


def test_states_of_many_reads_are_looked_at_first():
    source, _ = checked_source(much.plan, much.access_table)
    # d is read at two places a turn, and so are all others.
    assert source.count("common_states(") == 8
    assert source.count("load_known(") == 8
    assert "sure_load_ro(" not in source


def source_of(tmp_path, body, known=frozenset()):
    text = f"""\
from numba import cuda, float32
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32, i32_1d


@kernel(block=32)
def made(x: f32_1d, places: i32_1d, y: f32_1d, n: i32) -> None:
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
{body}
    y[t] = total
"""
    made = load_module(tmp_path / "made.py", text).made
    return checked_source(made.plan, made.access_table, known)[0]


@pytest.mark.parametrize("body", [
    "    for k in range(n):\n        total = total + x[k * k]",
    "    for k in range(n):\n        total = total + x[k ^ 1]",
    "    for k in range(1, n):\n        total = total + x[n // k]",
    "    for k in range(n):\n        total = total + x[k >> t]",
    "    for k in range(n):\n        total = total + x[((k << 30) >> 0) * 3]",
    "    for k in range(n):\n        total = total + x[max(k, 3)]",
    "    for k in range(n):\n        total = total + x[places[0] + k]",
    "    at = 0\n    for k in range(n):\n        total = total + x[at]\n        at = at + 2",
    "    for k in range(n, 0, -1):\n        total = total + x[k]",
    "    for k in range(places[0]):\n        total = total + x[k]",
    "    for k in range(n):\n        total = total + x[k * 2147483648]",
    "    for k in range(n):\n        tile[t] = x[k]\n        cuda.syncthreads()\n        total = total + tile[31 - t]",
], ids=[
    "square", "bits", "divided by it", "unknown shift", "parts wrap", "max", "loaded", "carried", "falling",
    "loaded end", "wraps", "barrier",
])  # fmt: skip
def test_what_stays_checked_where_it_stands(tmp_path, body):
    source = source_of(tmp_path, body)
    assert "sure_load_ro(v_x," not in source
    assert "try_load_ro(v_x," in source


@pytest.mark.parametrize("body", [
    "    for k in range(n):\n        if k > 2:\n            total = total + x[k]",
    "    for k in range(n):\n        total = total + (x[k] if k > 2 else float32(1))",
    "    for k in range(n):\n        if k > 2:\n            at = k + 1\n            total = total + x[at]",
], ids=["if", "choice", "name"])  # fmt: skip
def test_what_may_not_run_is_looked_at_as_if_it_did(tmp_path, body):
    assert "sure_load_ro(v_x," in source_of(tmp_path, body)


@pytest.mark.parametrize("body", [
    "        at = k\n        if k > 2:\n            at = k + 1\n        total = total + x[at]",
    "        at = k\n        if k > 2:\n            at = k + 1\n        else:\n            total = total + x[at]",
    "        at = k\n        for j in range(n):\n            total = total + x[at]\n            at = at + 1",
], ids=["behind", "other side", "carried"])  # fmt: skip
def test_a_name_that_one_of_several_ways_gives_is_not_known(tmp_path, body):
    source = source_of(tmp_path, f"    at = 0\n    for k in range(n):\n{body}")
    assert "sure_load_ro(v_x," not in source


def test_ends_that_a_loop_assigns_are_read_before_it(tmp_path):
    source = source_of(
        tmp_path,
        "    m = n + 1\n    for k in range(m):\n        m = k + 1\n        total = total + x[m] + x[k]",
    )
    (end,) = set(re.findall(r"for v_k\w* in range\((\w+)\):", source))
    assert end == "v_m"


@kernel(block=4)
def unsigned(
    x: i64_1d, z: i64_2d, y: i64_1d, first: u32, end: u32, a: u32, b: u32, h: u64, n: i32, by: i32
) -> None:
    t = cuda.threadIdx.x
    total = z[0, t]
    for k in range(first, end):
        total = total + x[((a - b) >> 60) + k]  # shifted without a sign
    for k in range(n):
        total = total + x[((h << 3) >> 61) + k]
    for k in range(first, end):
        total = total + x[max(a - b, b - a) + k]
    for k in range(n):
        total = total + x[((h + 0) >> 60) + k + by]  # with one
    for k in range(n):
        total = total + x[(h >> 60) + k]
    y[t] = total


@pytest.mark.parametrize("numbers", [
    {"a": 3, "b": 5}, {"a": 5, "b": 3}, {"a": 4, "b": 4}, {"h": 7 << 60}, {"h": 9 << 60, "by": 1},
    {"h": 9 << 60, "by": 8}, {"h": 2**64 - 1, "by": 1}, {"first": 2**32 - 3, "end": 2**32 - 1},
], ids=str)  # fmt: skip
def test_unsigned_numbers_are_shifted_and_compared_as_such(numbers):
    given = {"first": 1, "end": 18, "a": 0, "b": 0, "h": 0, "n": 20, "by": 0} | numbers
    assert launched(World(device=ptx_device()), given, unsigned) == launched(World(), given, unsigned)


def test_signed_numbers_may_be_negative_before_a_loop(tmp_path):
    source = source_of(
        tmp_path, "    for k in range(n):\n        total = total + x[k + min(n - 9, places.shape[0])]"
    )
    (test,) = re.findall(r"if all_within\(.*", source)
    assert "int64(" not in test
    assert str(2**63 - 1) not in test


def test_ends_may_be_extents(tmp_path):
    source = source_of(
        tmp_path, "    for k in range(min(n, x.shape[0] >> 1)):\n        total = total + x[2 * k]"
    )
    assert "sure_load_ro(v_x," in source


def test_constants_are_not_looked_up_where_the_host_knows_them(tmp_path):
    source = source_of(tmp_path, "    for k in range(n):\n        total = total + x[k]", frozenset({"x"}))
    assert "load_known(v_x, v_k" in source
    assert re.search(r"if all_within\(\(.*, s_x, .*,\), \(.*, 1, ", source)


@pytest.mark.parametrize(
    ("n_reads", "said", "first"), [(8, "", True), (7, "", False), (8, "  # unwritten: allowed", False)]
)
def test_where_states_are_looked_at_first(tmp_path, n_reads, said, first):
    reads = "".join(f"        total = total + x[k + {i}]{said}\n" for i in range(n_reads))
    source = source_of(tmp_path, f"    for k in range(n):\n{reads}")
    assert source.count("common_states(") == (n_reads if first else 0)
    assert source.count("sure_load_ro(v_x") == (0 if first else n_reads)
    assert source.count("try_load_ro(v_x") == n_reads


def test_states_that_are_the_same_in_each_turn_are_looked_at_once(tmp_path):
    reads = "".join(f"        total = total + x[t + {i}] * x[k + {i}]\n" for i in range(8))
    source = source_of(tmp_path, f"    for k in range(n):\n{reads}")
    before, _, behind = source.partition("for v_k")
    assert before.count("common_states(") == 8
    assert behind.count("common_states(") == 8


def test_equal_reads_are_one_state(tmp_path):
    reads = "        total = total + x[k]\n" * 9
    assert "common_states(" not in source_of(tmp_path, f"    for k in range(n):\n{reads}")


sums = st.builds(
    lambda factors, constant: Sum(tuple(sorted(factors.items())), constant),
    st.dictionaries(st.sampled_from(["v_k", "v_a"]), st.integers(-9, 9).filter(bool), max_size=2),
    st.integers(-50, 50),
)


@given(st.lists(sums, min_size=1, max_size=4), st.integers(-5, 5), st.integers(0, 6), st.integers(-20, 20))
def test_tests_hold_where_every_turn_is_inside_and_nowhere_else(indices, first, more, a):
    bounds = Bounds("v_k")
    for each in indices:
        bounds.require(Root("x", ("60",), "ro"), [each])
    last = first + more
    turns = [
        sum(factor * {"v_k": k, "v_a": a}[term] for term, factor in each.factors) + each.constant
        for each in indices
        for k in range(first, last + 1)
    ]
    values = [(eval(text, {"first": first, "last": last, "v_a": a}), int(extent))  # noqa: S307 - text of our own
              for text, extent in bounds.tests("first", "last")]  # fmt: skip
    assert all(0 <= value < extent for value, extent in values) == all(0 <= value < 60 for value in turns)


def expressions(numbers):
    """Text of indices of a loop over k: sums of parts of sums of parts."""
    leaves = st.sampled_from(["k", "a"]) | numbers.map(lambda n: f"({n})")

    def larger(inner):
        number = numbers.map(abs)
        return st.one_of(
            st.tuples(inner, st.sampled_from("+-"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            st.tuples(numbers, inner).map(lambda t: f"(({t[0]}) * {t[1]})"),
            st.tuples(inner, number).map(lambda t: f"({t[0]} >> {t[1] % 8})"),
            st.tuples(inner, st.sampled_from(["//", "%"]), number).map(
                lambda t: f"({t[0]} {t[1]} {t[2] + 1})"
            ),
            st.tuples(inner, number).map(lambda t: f"({t[0]} & {t[1]})"),
            st.tuples(number, inner).map(lambda t: f"({t[0]} & {t[1]})"),
        )

    return st.recursive(leaves, larger, max_leaves=6)


def value_of(text, bounds):
    """What is known of an index in the loop of ``bounds``."""
    names = {"k": Sum((("k", 1),))}
    view = View(bounds, walk.parsed, lambda name: name, names, signs=frozenset("ka"))
    return view.value(ast.parse(text, mode="eval").body)


@settings(max_examples=300)
@given(expressions(st.integers(-9, 9)), st.integers(-6, 6), st.integers(-1, 7), st.integers(-20, 20),
       st.sampled_from([1, 5, 40, 10**6]))  # fmt: skip
def test_where_tests_hold_every_turn_is_inside(text, first, more, a, extent):
    bounds = Bounds("k")
    index = value_of(text, bounds)
    if index is None:  # checked where it stands
        return
    bounds.require(Root("x", (str(extent),), "ro"), [index])
    last = first + more
    tests = bounds.tests(str(first), str(last))
    holds = all(0 <= eval(each, {"a": a}) < int(most) for each, most in tests)  # noqa: S307 - text of our own
    for k in range(first, last + 1):
        value = eval(text, {"k": k, "a": a})  # noqa: S307
        assert eval(index.text(), {"k": k, "a": a}) == value  # noqa: S307
        assert not holds or 0 <= value < extent, (index, k)


@given(st.sampled_from([">>", "//"]), st.integers(1, 6), st.integers(1, 9), st.integers(-9, 60), st.integers(0, 7),
       st.integers(0, 7))  # fmt: skip
def test_quotients_of_what_rises_are_looked_at_exactly(operation, by, factor, constant, first, more):
    bounds = Bounds("k")
    text = f"({factor} * k + {constant}) {operation} {by}"
    bounds.require(Root("x", ("12",), "ro"), [value_of(text, bounds)])
    last = first + more
    holds = all(0 <= eval(each) < int(most) for each, most in bounds.tests(str(first), str(last)))  # noqa: S307
    turns = [eval(text, {"k": k}) for k in range(first, last + 1)]  # noqa: S307
    assert holds == all(0 <= turn < 12 for turn in turns)


@settings(max_examples=200)
@given(expressions(st.integers(-(2**31), 2**31) | st.integers(-9, 9)))
def test_ends_are_never_so_far_apart_that_they_could_wrap(text):
    index = value_of(text, Bounds("k"))
    if index is None:
        return
    ends = {"k": ("0", str(MOST_FACTOR - 1))}
    for each in (index, *(part.of for part in index.parts())):
        low, high = (eval(each.end(ends, largest=largest), {"a": 0}) for largest in (False, True))  # noqa: S307
        assert high - low < 2**62


@pytest.mark.parametrize(("text", "known"), [
    ("(k + a) >> 3", True), ("k // 32", True), ("(5 - k) % 7", True), ("7 & (k * 3)", True), ("k >> 62", True),
    ("k >> 63", False), ("k >> -1", False), ("k // 0", False), ("k // -3", False), ("k & -8", False),
    ("k // a", False), ("k & a", False), ("a >> k", False), ("k | 1", False), ("k * k", False),
    ("((k << 30) & 2147483647) << 30", True), ("(k & 2147483648)", False), ("((k << 30) >> 1) * 4", False),
])  # fmt: skip
def test_what_a_part_is(text, known):
    assert (value_of(text, Bounds("k")) is not None) == known


@pytest.mark.parametrize("text", ["((k + a) & 7) + 10", "((k + a) % 8) + 10", "min(k + a, 3)"])
@pytest.mark.parametrize("a", [-3, 2**63 - 2])
def test_a_part_of_what_is_negative_or_wraps_is_not_known(text, a):
    bounds = Bounds("k")
    bounds.require(Root("x", ("12",), "ro"), [value_of(text, bounds)])
    values = [
        (eval(each, {"a": a}) + 2**63) % 2**64 - 2**63  # noqa: S307 - text of our own
        for each, _ in bounds.tests("0", "7")
    ]
    assert any(int(value) < 0 for value in values)


def test_parts_of_what_stays_are_terms():
    index = value_of("((a + 3) & 7) + (k >> 1)", Bounds("k"))
    assert index == Sum.of({"((a + 3) & 7)": 1, Part(Sum((("k", 1),)), ">>", 1): 1}, 0)


def test_sums_that_could_wrap_are_none():
    assert Sum.of({"v_k": MOST_FACTOR}, 0) is None
    assert Sum((("v_k", MOST_FACTOR - 1),)).times(2) is None
