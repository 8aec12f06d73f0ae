"""Runs PTX on the host, thread by thread: what a kernel's code for a GPU does, as far as memory and integers go.

A function of PTX becomes one of Python. Threads of a block run one after the other up to what they wait for: a barrier,
or what a warp does together. It knows what kernels of this project are compiled to, and raises ``NotImplementedError``
for other instructions. An access of memory that is none of its own raises ``WildAccessError``. Floats are rounded once
more than a GPU does in float32 ``fma``, so they need not have its bits.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ptx_text import (
    FORMATS,
    LOCAL,
    MASKS,
    NAMES,
    SHARED,
    Function,
    name_of,
    rounded,
    signed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FUNCTION = re.compile(r"(\.visible\s+\.entry|\.func)\s+([^\s(]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([usbf]\d+)\s+([^\s,()]+)")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")


class WildAccessError(Exception):
    """An access of memory that nobody gave."""


@dataclass(frozen=True)
class Ptx:
    """Compiled text: a function of Python for each of PTX."""

    entry: Callable[..., Any]
    #: all functions by name
    functions: dict[str, Any]
    #: whether threads wait for each other
    waits: bool
    shared_bytes: int
    local_bytes: int


class Memory:
    """What a kernel may touch: bytes at real addresses."""

    def __init__(self, blocks: Sequence[tuple[int, int]]) -> None:
        self.blocks = sorted(blocks)

    def at(self, address: int, nbytes: int) -> int:
        """The address, if all of the bytes are there."""
        for start, size in self.blocks:
            if start <= address and address + nbytes <= start + size:
                return address
        raise WildAccessError(f"{nbytes} bytes at {address:#x}")

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes at an address."""
        if address % nbytes:
            raise WildAccessError(f"{nbytes} bytes at {address:#x}, which is not aligned")
        return ctypes.string_at(self.at(address, nbytes), nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at an address."""
        if address % len(data):
            raise WildAccessError(f"{len(data)} bytes at {address:#x}, which is not aligned")
        ctypes.memmove(self.at(address, len(data)), data, len(data))


class _Own:
    """Shared or local memory."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start = start
        self.data = bytearray(b"\xa7" * nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        at = address - self.start
        if not 0 <= at <= len(self.data) - nbytes or address % nbytes:
            raise WildAccessError(f"{nbytes} bytes at {at} of {len(self.data)} of a block's or thread's own")
        return bytes(self.data[at : at + nbytes])

    def write(self, address: int, data: bytes) -> None:
        self.read(address, len(data))
        at = address - self.start
        self.data[at : at + len(data)] = data


class Thread:
    """What one thread's code asks for."""

    def __init__(self, memory: Memory, shared: _Own, local_bytes: int, special: dict[str, int]) -> None:
        self.spaces = {"global": memory, "": memory, "shared": shared, "local": _Own(LOCAL, local_bytes)}
        self.special = special

    def load(self, space: str, kind: str, address: int) -> Any:
        """Value of a type such as ``u32`` at an address."""
        nbytes = int(kind[1:]) // 8
        data = self.spaces[space].read(address & MASKS[64], nbytes)
        return struct.unpack(FORMATS[kind], data)[0] if kind in FORMATS else int.from_bytes(data, "little")

    def store(self, space: str, kind: str, address: int, value: Any) -> None:
        """Put a value of a type at an address."""
        nbytes = int(kind[1:]) // 8
        data = (
            struct.pack(FORMATS[kind], value)
            if kind in FORMATS
            else (int(value) & MASKS[8 * nbytes]).to_bytes(nbytes, "little")
        )
        self.spaces[space].write(address & MASKS[64], data)

    def atomic(self, space: str, operation: str, kind: str, address: int, *operands: Any) -> Any:
        """Change the value at an address; what was there before."""
        old = self.load(space, kind, address)
        first = operands[0]
        if operation == "cas":
            new = operands[1] if old == first else old
        else:
            new = {
                "add": lambda: old + first, "exch": lambda: first, "and": lambda: old & first,
                "or": lambda: old | first, "xor": lambda: old ^ first,
                "min": lambda: min(signed(old, kind), signed(first, kind)),
                "max": lambda: max(signed(old, kind), signed(first, kind)),
            }[operation]()  # fmt: skip
        self.store(space, kind, address, rounded(new) if kind == "f32" else new)
        return old


@lru_cache(maxsize=512)
def compiled(ptx: str) -> Ptx:
    """The functions of one text."""
    places, at = {}, SHARED
    for align, name, size in _SHARED.findall(ptx):
        at = -(-at // int(align)) * int(align)
        places[name] = at
        at += int(size)
    namespace: dict[str, Any] = dict(NAMES)
    entry: Function | None = None
    heads = list(_FUNCTION.finditer(ptx))
    for head, behind in itertools.zip_longest(heads, heads[1:]):
        start = ptx.index("{", head.end())
        body = ptx[start + 1 : behind.start() if behind else len(ptx)]
        function = Function(head[2], _PARAMETER.findall(head[3]), body, places)
        exec(compile(function.text, head[2], "exec"), namespace)  # noqa: S102
        if "entry" in head[1]:
            entry = function
    assert entry is not None, "no kernel"
    return Ptx(namespace[name_of(entry.name)], namespace, entry.waits, at - SHARED, entry.local_bytes)


def run(
    ptx: str, grid: Sequence[int], block: Sequence[int], parameters: Sequence[int], memory: Memory
) -> None:
    """Run a kernel; ``parameters``: of each its bits."""
    made = compiled(ptx)
    x, y, z = (*block, 1, 1)[:3]
    gx, gy, gz = (*grid, 1, 1)[:3]
    of_grid = {"%ntid.x": x, "%ntid.y": y, "%ntid.z": z, "%nctaid.x": gx, "%nctaid.y": gy, "%nctaid.z": gz}
    for bz, by, bx in itertools.product(range(gz), range(gy), range(gx)):
        shared = _Own(SHARED, made.shared_bytes)
        of_block = of_grid | {"%ctaid.x": bx, "%ctaid.y": by, "%ctaid.z": bz}
        threads = []
        for number, (tz, ty, tx) in enumerate(itertools.product(range(z), range(y), range(x))):
            special = of_block | {"%tid.x": tx, "%tid.y": ty, "%tid.z": tz, "%laneid": number % 32}
            threads.append(
                made.entry(Thread(memory, shared, made.local_bytes, special), made.functions, *parameters)
            )
        if made.waits:
            _run_block(threads)


def _run_block(threads: list[Any]) -> None:
    """Let threads run from one thing that they wait for to the next."""
    waiting: dict[int, Any] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(threads)))
    while answers or waiting:
        for number, answer in sorted(answers.items()):
            try:
                waiting[number] = threads[number].send(answer)
            except StopIteration:
                waiting.pop(number, None)
        answers = {}
        for start in range(0, len(threads), 32):
            warp = [n for n in range(start, min(start + 32, len(threads))) if n in waiting]
            if warp and all(waiting[n][0] != "block" for n in warp):
                answers |= _of_warp({n - start: waiting[n] for n in warp}, start)
        if not answers and waiting:
            assert all(each[0] == "block" for each in waiting.values()), (
                f"threads wait for each other: {waiting}"
            )
            answers = dict.fromkeys(waiting)
        for number in answers:
            waiting.pop(number, None)


def _of_warp(asked: dict[int, Any], start: int) -> dict[int, Any]:
    assert len({each[0] for each in asked.values()}) == 1, (
        f"a warp's threads ask for different things: {asked}"
    )
    answers = {}
    for lane, (what, *operands) in asked.items():
        if what == "warp":
            answers[start + lane] = None
            continue
        _, by, _ = operands
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": by & 31}[what]
        inside = 0 <= source < 32
        value = asked[source if inside else lane][1]
        answers[start + lane] = (value, inside)
    return answers
