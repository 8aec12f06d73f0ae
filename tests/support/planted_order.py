"""Faults of order inside a block beside their repaired twins: which accesses race, and whose promises are not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from planted_races import (
    agreed,
    buffers,
    counting,
    counting_in_memory,
    early,
    elements,
    in_a_warp,
    many_readers,
    moved,
    neighbours,
    neighbours_in_memory,
    promises,
    rounds,
    stripes,
    through_functions,
    transposed,
    tree,
)

Thread = tuple[int, int, int]


@dataclass(frozen=True)
class Fault:
    """One fault. ``bad`` and ``fixed`` are the arguments in which the two differ from ``given``.

    ``marks``: where it is reported, innermost first; ``other``: where the access is that came first, or the barrier.
    ``threads``: the first thread that is reported, and the other one.
    """

    name: str
    kernel: Any
    given: dict[str, Any]
    bad: dict[str, Any]
    fixed: dict[str, Any]
    marks: tuple[str, ...]
    other: tuple[str, ...]
    threads: tuple[Thread, Thread]
    argument: str | None = "tile"
    code: str = "RAC001"
    grid: int = 1
    #: text of the message and its notes
    says: str = ""

    def arguments(self, kind: str) -> dict[str, Any]:
        return self.given | (self.bad if kind == "bad" else self.fixed)


def _floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def _t(x: int, y: int = 0) -> Thread:
    return (x, y, 0)


def _line(**more: Any) -> dict[str, Any]:
    return {"x": _floats(64), "y": np.zeros(64, np.float32)} | more


REPAIR: dict[str, Any] = {"bad": {"repaired": 0}, "fixed": {"repaired": 1}}
_BLOCK_WIDE, _OF_A_WARP = "only cuda.syncthreads()", "cuda.syncwarp() between the two"


def _shared() -> list[Fault]:
    near = _line(step=1, repaired=0, by_warp=0)
    written, read = ("neighbour is written",), ("neighbour is read",)
    long = {"x": _floats(128), "y": np.zeros(1, np.float32), "from_half": 32, "warps_from": 16}
    three = {"x": _floats(3, 64), "y": np.zeros(64, np.float32)}
    return [
        Fault("a missing barrier", neighbours, near, **REPAIR, marks=read, other=written, threads=(_t(0), _t(1)),
              says=_OF_A_WARP),
        Fault("a missing barrier, over warps", neighbours, near | {"step": 32}, **REPAIR, marks=read, other=written,
              threads=(_t(0), _t(32)), says=_BLOCK_WIDE),
        Fault("a warp's barrier for what is another warp's", neighbours, near | {"step": 32, "by_warp": 1}, {},
              {"step": 16, "repaired": 1}, read, written, (_t(0), _t(32)), says=_BLOCK_WIDE),
        Fault("a warp's barrier, at the warp's edge alone", neighbours, near | {"by_warp": 1}, **REPAIR,
              marks=read, other=written, threads=(_t(31), _t(32)), says=_BLOCK_WIDE),
        Fault("written after it is read", moved, _line(), **REPAIR, marks=("overwritten",),
              other=("read before it is overwritten",), threads=(_t(0), _t(24)), says=_OF_A_WARP),
        Fault("a tree without barriers", tree, long, {"from_half": 128, "warps_from": 0}, {}, ("tree",), ("tree",),
              (_t(0), _t(32)), "sums", says="which came first here with the store of sums[t]"),
        Fault("a tree with barriers of a warp where two warps meet", tree, long,
              {"from_half": 128, "warps_from": 64}, {}, ("tree",), ("tree",), (_t(0), _t(32)), "sums",
              says=_BLOCK_WIDE),
        Fault("a tree whose last steps trust that a warp is in step", tree, long, {"warps_from": 0}, {},
              ("tree",), ("tree",), (_t(0), _t(8)), "sums", says=_OF_A_WARP),
        Fault("two buffers, off by one", buffers, three, {"ahead": 0}, {"ahead": 1}, ("buffer is filled",),
              ("buffer is read",), (_t(32), _t(31))),
        Fault("the second round of a loop alone", rounds, _line(n=2), **REPAIR, marks=("next round",),
              other=("last round",), threads=(_t(0), _t(63)), says=_BLOCK_WIDE),
        Fault("the second round of a loop that has one", rounds, _line(repaired=0), {"n": 3}, {"n": 1},
              ("next round",), ("last round",), (_t(0), _t(63))),
        Fault("a shuffle taken for a barrier", in_a_warp, {"x": _floats(32), "y": np.zeros(32, np.float32)},
              **REPAIR, marks=("behind the shuffle",), other=("before the shuffle",), threads=(_t(0), _t(1)),
              says=_OF_A_WARP),
        Fault("through functions", through_functions, _line(), **REPAIR,
              marks=("put", "call of put", "second exchange"), other=("get", "call of get", "first exchange"),
              threads=(_t(0), _t(63)), says=_BLOCK_WIDE),
        Fault("a transposition", transposed, {"x": _floats(8, 8), "y": np.zeros((8, 8), np.float32)}, **REPAIR,
              marks=("column",), other=("row",), threads=(_t(1), _t(0, 1))),
        Fault("a writer behind many readers of its warp", many_readers, _line(readers=33, writer=3), {"writer": 40},
              {"readers": 32}, ("writer",), ("one of many",), (_t(40), _t(0)), says=_BLOCK_WIDE),
        Fault("a writer behind many readers of another warp", many_readers, _line(writer=40), {"readers": 32},
              {"readers": 0}, ("writer",), ("one of many",), (_t(40), _t(1)), says=_BLOCK_WIDE),
    ]  # fmt: skip


def _elements() -> list[Fault]:
    good = {
        "y": np.zeros(64, np.float32), "h": np.zeros(64, np.int32),
        "at": 64, "same": 63, "counted": 1, "broadcast": -1,
    }  # fmt: skip
    pair = _line(z=np.zeros(64, np.float32))
    two = {"y": np.zeros(129, np.float32), "z": np.zeros(128, np.float32), "stride": 64, "read_at": 0}

    def of(name: str, mark: str, argument: str, threads: tuple[Thread, Thread], **bad: Any) -> Fault:
        other = {"broadcast": "received", "cleared": "same value"}.get(mark, mark)
        return Fault(name, elements, good, bad, {}, (mark,), (other,), threads, argument)

    return [
        of("halves that are not disjoint", "element", "y", (_t(1), _t(0)), at=32),
        of("everyone writes one element", "element", "y", (_t(1), _t(0)), at=0),
        of("counted without an atomic", "counted", "h", (_t(1), _t(0)), counted=2),
        of("one value, written by two", "cleared", "shared", (_t(63), _t(62)), same=62),
        of("one thread's value, read at once", "broadcast", "shared", (_t(5), _t(2)), broadcast=5),
        Fault("memory, written and read", neighbours_in_memory, pair, **REPAIR, marks=("memory is read",),
              other=("memory is written",), threads=(_t(0), _t(63)), argument="y", says=_BLOCK_WIDE),
        Fault("two blocks whose stripes overlap", stripes, two, {"stride": 63}, {}, ("stripe",), ("stripe",),
              (_t(0), _t(63)), "y", grid=2, says="behind thread (63, 0, 0) of block (0, 0, 0)"),
    ]  # fmt: skip


def _atomics() -> list[Fault]:
    good = {
        "x": np.arange(64, dtype=np.int32) % 4, "counts": np.zeros(4, np.int32), "first": 1, "last": 1, "plain": 0
    }  # fmt: skip
    memory = {
        "x": np.arange(64, dtype=np.int32), "counts": np.zeros(1, np.int32), "seen": np.zeros(64, np.int32)
    }  # fmt: skip
    return [
        Fault("an atomic beside a plain store", counting, good, {"first": 0}, {}, ("count",),
              ("bin is cleared",), (_t(4), _t(0)), "bins", says="with the store of bins[t]"),
        Fault("an atomic beside a plain load", counting, good, {"last": 0}, {}, ("bin is read",),
              ("count",), (_t(0), _t(32)), "bins", says="with the atomic add of cuda.atomic.add(bins, x[t], 1)"),
        Fault("a count without atomics", counting, good, {"plain": 1}, {}, ("plain count",), ("plain count",),
              (_t(4), _t(0)), "bins"),
        Fault("an atomic in memory beside a plain load", counting_in_memory, memory, **REPAIR,
              marks=("plain in memory",), other=("atomic in memory",), threads=(_t(0), _t(32)), argument="counts",
              says=_BLOCK_WIDE),
    ]  # fmt: skip


def _promises() -> list[Fault]:
    good = {
        "x": np.full(64, 2, np.float32), "n": np.full(64, 3, np.int32), "y": np.zeros(64, np.float32), "how": 0
    }  # fmt: skip
    one = good["n"].copy()
    one[37] = 2
    some = good["n"].copy()
    some[20:30] = 1
    half = good["x"].copy()
    half[5] = 2.5

    def of(name: str, kernel: Any, mark: str, barrier: str, says: str, thread: int, **bad: Any) -> Fault:
        given = {key: good[key] for key in kernel.signature} | {
            key: value for key, value in bad.items() if key == "how"
        }
        others = (barrier,) if barrier else ()
        threads = _t(thread), _t(0)
        return Fault(name, kernel, given, bad, {}, (mark,), others, threads, None, "SYN001", says=says)

    return [
        of("a count", promises, "promised count", "in a loop",
           "3 in thread (0, 0, 0), and 2 in thread (37, 0, 0)", 37, n=one),
        of("a branch", promises, "branch", "under a branch",
           "thread (0, 0, 0) reaches cuda.syncthreads() at line", 37, n=one, how=1),
        of("the other side of a branch", promises, "other branch", "under else",
           "10 of 64 threads, from (20, 0, 0) to (29, 0, 0), do", 20, n=some, how=2),
        of("a range", promises, "range", "in a range", "range(1, limits[t]) is promised", 20, n=some, how=3),
        of("a float", promises, "weight", "in a while", "2 in thread (0, 0, 0), and 2.5 in", 5, x=half, how=4),
        of("no barrier", promises, "no barrier", "", "done once for the block", 37, n=one, how=5),
        of("an early return", early, "early return", "behind a return",
           "reaches cuda.syncthreads() at line", 9, n=np.where(np.arange(64) == 9, 0, 3).astype(np.int32)),
        of("the result of a function", agreed, "result of a function", "while of a result",
           "4 in thread (0, 0, 0)", 1,
           n=np.where(np.arange(64) == 32, 4, 3).astype(np.int32)),
    ]  # fmt: skip


FAULTS = [*_shared(), *_elements(), *_atomics(), *_promises()]
