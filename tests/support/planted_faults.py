"""Faults of memory beside their repaired twins: what is launched on what, and what must be reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from planted_kernels import calls, counters, deep, five_axes, limited, matrix, shifted, sums, tiles

# An array argument is an array; (element type, shape) for one that nothing wrote; (array, n) for one of which the
# first n bytes were written.
N = 40


@dataclass(frozen=True)
class Planted:
    """One fault. ``bad`` and ``fixed`` are the arguments in which the two differ from ``given``.

    ``marks``: where it is reported, innermost first. ``codes``: each of the findings that it gives.
    """

    name: str
    kernel: Any
    given: dict[str, Any]
    bad: dict[str, Any]
    fixed: dict[str, Any]
    codes: tuple[str, ...]
    argument: str
    marks: tuple[str, ...]
    grid: int | tuple[int, ...] = 2
    fixed_grid: int | tuple[int, ...] | None = None
    #: text of the message
    says: str = ""
    #: first thread that does it
    thread: tuple[int, int, int] | None = field(default=None)

    def arguments(self, kind: str) -> dict[str, Any]:
        return self.given | (self.bad if kind == "bad" else self.fixed)

    def grid_of(self, kind: str) -> int | tuple[int, ...]:
        return self.grid if kind == "bad" or self.fixed_grid is None else self.fixed_grid


def _floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def _line() -> dict[str, Any]:
    return {"x": _floats(N), "y": _floats(N), "n": N, "load_at": 0, "store_at": 0}


def _spatial() -> list[Planted]:
    def load(name: str, at: int, says: str, **more: Any) -> Planted:
        bad = {"load_at": at, **more}
        return Planted(f"load {name}", shifted, _line(), bad, {}, ("MEM010",), "x", ("load",), says=says)

    def store(name: str, at: int, says: str, **more: Any) -> Planted:
        bad = {"store_at": at, **more}
        return Planted(f"store {name}", shifted, _line(), bad, {}, ("MEM011",), "y", ("store",), says=says)

    one = {"n": 1}
    return [
        load("adjacent right", 1, "index 40 of axis 0, which has 40 elements"),
        load("adjacent left", -1, "index -1 of axis 0"),
        load("far right, past the redzone", 100_000, "index 100000 of", **one),
        load("far left, past the redzone", -100_000, "index -100000 of", **one),
        load("in the arena, of another buffer", 192, "index 192 of", **one),
        load("at the last index there is", 2**31 - 1, "index 2147483647 of", **one),
        load("at the first index there is", -(2**31), "index -2147483648 of", **one),
        store("adjacent right", 1, "index 40 of axis 0, which has 40 elements"),
        store("adjacent left", -1, "index -1 of axis 0"),
        store("far right, past the redzone", 100_000, "index 100000 of", **one),
        store("far left, past the redzone", -100_000, "index -100000 of", **one),
        store("in the arena, of another buffer", -192, "index -192 of", **one),
        store("at the last index there is", 2**31 - 1, "index 2147483647 of", **one),
        Planted(
            "off by one in the count", shifted, _line() | {"y": _floats(N + 1)}, {"n": N + 1}, {},
            ("MEM010",), "x", ("load",), thread=(8, 0, 0), says="index 40",
        ),
        Planted(
            "no guard, a grid of whole blocks", shifted, _line() | {"x": _floats(64)}, {"n": 64}, {},
            ("MEM011",), "y", ("store",), thread=(8, 0, 0), says="index 40",
        ),
        Planted(
            "one block too many", shifted, _line() | {"x": _floats(64), "y": _floats(64), "n": 10_000}, {}, {},
            ("MEM010", "MEM011"), "x", ("load",), grid=3, fixed_grid=2, thread=(0, 0, 0), says="index 64",
        ),
        Planted(
            "an array without elements", shifted, _line() | {"n": 1}, {"x": _floats(0)}, {},
            ("MEM010",), "x", ("load",), says="index 0 of axis 0, which has 0 elements",
        ),
    ]  # fmt: skip


def _axes() -> list[Planted]:
    plain = {"a": _floats(6, 10), "b": _floats(6, 10), "rows": 6, "columns": 10, "row_at": 0, "column_at": 0}
    place = {"a": _floats(3, 4, 5), "b": np.zeros((3, 4, 5, 6), np.int64), "i": 2, "j": 3, "k": 4, "m": 5}

    def of(name: str, says: str, code: str = "MEM010", argument: str = "a", **bad: int) -> Planted:
        return Planted(name, matrix, plain, bad, {}, (code,), argument, ("matrix",), (2, 2), says=says)

    def at(name: str, says: str, argument: str, **bad: int) -> Planted:
        code, mark = {"a": ("MEM010", "three axes"), "b": ("MEM011", "four axes")}[argument]
        return Planted(name, deep, place, bad, {}, (code,), argument, (mark,), 1, says=says, thread=(2, 0, 0))

    return [
        of("a column behind the last, inside memory", "index 10 of axis 1, which has 10", column_at=1),
        of("a column before the first, inside memory", "index -1 of axis 1", column_at=-1),
        of("a row behind the last", "index 6 of axis 0, which has 6 elements", row_at=1),
        of("a row before the first", "index -1 of axis 0", row_at=-1),
        of("both axes", "index 6 of axis 0, which has 6 elements and index 10 of axis 1",
           row_at=6, column_at=10),
        Planted("more rows than there are", matrix, plain | {"a": _floats(8, 10)}, {"rows": 7}, {},
                ("MEM011", "MEM010", "MEM011"), "b", ("matrix",), (2, 2), says="index 6 of axis 0"),
        Planted("the middle of three axes", deep, place | {"b": np.zeros((3, 9, 5, 6), np.int64)}, {"j": 4},
                {}, ("MEM010",), "a", ("three axes",), 1, says="index 4 of axis 1, which has 4"),
        Planted("the last of three axes", deep, place | {"b": np.zeros((3, 4, 9, 6), np.int64)}, {"k": 5}, {},
                ("MEM010",), "a", ("three axes",), 1, says="index 5 of axis 2, which has 5"),
        at("the last of four axes", "b[2, 3, 4, 6]: index 6 of axis 3, which has 6", "b", m=6),
        at("the last of four axes, negative", "index -1 of axis 3", "b", m=-1),
    ]  # fmt: skip


def _own_arrays() -> list[Planted]:
    good = {"y": _floats(64), "load_at": 0, "store_at": 0, "row": 3, "column": 7, "own_at": 2, "filled": 64}

    def of(name: str, code: str, argument: str, mark: str, says: str, **bad: int) -> Planted:
        return Planted(name, tiles, good, bad, {}, (code,), argument, (mark,), 1, says=says)

    return [
        of("shared load behind the last", "MEM010", "tile", "shared load", "in shared memory", load_at=1),
        Planted("shared store before the first", tiles, good, {"store_at": -1}, {}, ("MEM011", "MEM012"),
                "tile", ("shared store",), 1, says="as tile[-1] in shared memory: index -1"),
        Planted("shared store behind the last", tiles, good, {"store_at": 1}, {}, ("MEM011", "MEM012"),
                "tile", ("shared store",), 1, says="as tile[64] in", thread=(63, 0, 0)),
        of("shared table, a row behind the last", "MEM010", "table", "table", "index 4 of axis 0", row=4),
        of("shared table, a column inside memory", "MEM010", "table", "table", "index 8 of axis 1",
           row=2, column=8),
        of("local load behind the last", "MEM010", "own", "local", "own[3] in local", own_at=3),
        of("local load before the first", "MEM010", "own", "local", "in local memory", own_at=-1),
        Planted("shared and local elements that one thread did not write", tiles, good, {"filled": 63}, {},
                ("MEM012", "MEM012"), "tile", ("shared load",), 1, says="since the block began",
                thread=(63, 0, 0)),
    ]  # fmt: skip


def _through_calls() -> list[Planted]:
    good = {
        "x": _floats(33), "z": _floats(32), "y": _floats(32),
        "x_at": 0, "z_at": 0, "y_at": 0, "table_at": 3, "step": 1,
    }  # fmt: skip

    def of(name: str, code: str, argument: str, marks: tuple[str, ...], **bad: int) -> Planted:
        return Planted(name, calls, good, bad, {}, (code,), argument, marks, 1)

    return [
        of("load, two functions deep", "MEM010", "x", ("element", "pair", "call of x"), x_at=1),
        of("load, one function deep", "MEM010", "z", ("element", "call of z"), z_at=1),
        of("negative load, one function deep", "MEM010", "z", ("element", "call of z"), z_at=-1),
        of("store in a function", "MEM011", "y", ("put", "call of y"), y_at=1),
        of("negative store in a function", "MEM011", "y", ("put", "call of y"), y_at=-1),
        of("array of a function", "MEM010", "table", ("table of a function", "call of y"), table_at=4),
        of(
            "shared load in a function that waits",
            "MEM010",
            "tile",
            ("neighbour", "call of neighbour"),
            step=2,
        ),
    ]


def _atomics() -> list[Planted]:
    good = {
        "h": np.zeros(16, np.int32), "f": np.zeros(4, np.float64),
        "at": 15, "f_at": 3, "shared_at": 3, "how": 0,
    }  # fmt: skip

    def of(mark: str, how: int, argument: str, codes: tuple[str, ...], **bad: int) -> Planted:
        name = f"atomic {mark}, {bad}" if how < 5 else f"augmented assignment, {bad}"
        return Planted(
            name, counters, good | {"how": how}, bad, {}, codes, argument, (mark,), 1, thread=(5, 0, 0)
        )

    out = ("MEM011",)
    return [
        of("add", 0, "h", out, at=16),
        of("add", 0, "h", out, at=-1),
        of("cas", 1, "h", out, at=16),
        of("exch", 2, "h", out, at=17),
        of("min", 3, "f", out, f_at=4),
        of("min", 3, "f", out, f_at=-2),
        of("shared add", 4, "s", out, shared_at=4),
        of("augmented", 5, "h", ("MEM010", "MEM011"), at=16),
    ]


def _uniform() -> list[Planted]:
    good = {
        "limit": np.array([32, 32], np.int32), "x": np.ones(32, np.uint16), "y": np.zeros(32, np.uint8), "at": 0
    }  # fmt: skip
    return [
        Planted("what a block loads once", limited, good, {"at": 2}, {}, ("MEM010",), "limit", ("uniform",),
                1, says="index 2 of axis 0", thread=(0, 0, 0)),
        Planted("a condition of a loop", limited, good | {"y": np.zeros(64, np.uint8)},
                {"limit": np.array([33, 32], np.int32)}, {}, ("MEM010",), "x", ("while",), 1, says="index 32"),
        Planted("single bytes", limited, good | {"x": np.ones(64, np.uint16)},
                {"limit": np.array([33, 32], np.int32)}, {}, ("MEM011",), "y", ("bytes",), 1, says="index 32"),
    ]  # fmt: skip


def _odd() -> list[Planted]:
    good = {"y": _floats(2), "k": 1, "m": 2}

    def of(name: str, code: str, argument: str, mark: str, says: str, **bad: Any) -> Planted:
        return Planted(name, five_axes, good, bad, {}, (code,), argument, (mark,), 1, says=says)

    return [
        of("the fifth axis of a shared array", "MEM011", "deep", "five axes", "behind the fourth", m=3),
        of("a very large unsigned index", "MEM010", "flags", "flag", "index -1 of axis 0", k=2**64 - 1),
        of("a flag that nothing wrote", "MEM012", "flags", "flag", "since the block began", k=0),
        of("an unsigned index", "MEM011", "y", "unsigned", "index 1 of axis 0", y=_floats(1)),
    ]


def _unwritten() -> list[Planted]:
    def of(name: str, given: Any, kernel: Any, mark: str, argument: str, bad: Any, **more: Any) -> Planted:
        return Planted(
            name, kernel, given, bad, {}, ("MEM012",), argument, (mark,), says="nothing wrote", **more
        )

    doubles = {"x": np.ones(8), "y": ("float64", (8,)), "n": 8}
    rows = {"a": _floats(6, 10), "b": _floats(6, 10), "rows": 6, "columns": 10, "row_at": 0, "column_at": 0}
    counts = {"h": np.zeros(16, np.int32), "f": np.zeros(4), "at": 7, "f_at": 0, "shared_at": 0, "how": 0}
    return [
        of("an input that nothing wrote", _line(), shifted, "load", "x", {"x": ("float32", (N,))}, grid=2),
        of("the last element alone", _line(), shifted, "load", "x", {"x": (_floats(N), 4 * (N - 1))}),
        of("half of one number", doubles, sums, "sums", "x", {"x": (np.ones(8), 8 * 5 + 4)}, grid=1),
        of("a row written in part", rows, matrix, "matrix", "a", {"a": (_floats(6, 10), 4 * 57)}, grid=(2, 2)),
        of("rows of padding", rows, matrix, "matrix", "a", {"a": (_floats(6, 10), 4 * 40)}, grid=(2, 2)),
        of("a counter that starts nowhere", counts, counters, "add", "h", {"h": ("int32", (16,))}, grid=1),
    ]  # fmt: skip


PLANTED = [
    *_spatial(), *_axes(), *_own_arrays(), *_through_calls(), *_atomics(), *_uniform(), *_odd(), *_unwritten(),
]  # fmt: skip
