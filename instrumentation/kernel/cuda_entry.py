"""What a kernel's PTX says at its entry, beside what Numba writes: its threads, and a prologue.

The number of threads of a block lets the assembler give each as many registers as there are; else it plans for 1,024,
and puts each load just before its use.

A replayed graph may start a kernel while the one before it still runs (programmatic dependent launch, compute
capability 9.0 and up). Every kernel says at once that its successor may start, and waits for its predecessor before it
touches memory, so results cannot depend on it: what overlaps is the launch itself, and the fetch of weights into the
second-level cache. What is fetched changes nothing either: no value is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba.core import types as nb

from instrumentation.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: devices that know these instructions
LEAST_CAPABILITY = (9, 0)
_ENTRY = re.compile(r"(\.visible\s+\.entry\s+[^\s(]+\s*\([^)]*\))\s*\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[usbf]\d+\s+([^\s,()]+)")
#: slots of an array parameter before its extents, as ``cuda_launch`` says
_ADDRESS, _EXTENTS = 4, 5


@dataclass(frozen=True)
class RowsAhead:
    """Rows of matrices that a block will read, whatever its predecessor does: constants, such as weights.

    Block x reads rows ``rows * x`` to ``rows * x + rows - 1`` of each array of the first group. When there are no such
    rows in it, it reads those of the next group, whose rows are counted on from the next whole block.
    """

    rows: int
    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> frozenset[str]:
        """All arrays of the groups."""
        return frozenset(name for group in self.groups for name in group)

    def __post_init__(self) -> None:
        assert self.rows >= 1, self
        assert self.rows & (self.rows - 1) == 0, f"{self}: the number of rows is a power of two"
        assert self.groups, self
        assert all(self.groups), self


def with_entry(
    ptx: str,
    signature: Mapping[str, Any],
    block: tuple[int, ...],
    capability: tuple[int, int],
    *,
    ahead: RowsAhead | None = None,
    resident: int | None = None,
) -> str:
    """PTX of one kernel with the shape of its blocks and, for devices that know it, the prologue.

    ``resident``: blocks that a multiprocessor shall hold at a time, for which the assembler leaves registers.

    Raises ``DeviceError`` when there is no kernel in it: one that does not wait must not be loaded.
    """
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise DeviceError("no entry in PTX; a kernel was wanted")
    x, y, z = (*block, 1, 1)[:3]
    lines = [f".reqntid {x}, {y}, {z}"]
    if resident is not None:
        lines.append(f".minnctapersm {resident}")
    lines.append("{")
    if capability >= LEAST_CAPABILITY:
        lines.append("griddepcontrol.launch_dependents;")
        if ahead is not None:
            names = _PARAMETER.findall(entry[1])
            lines += _fetches(_slots(signature, names), ahead)
        lines.append("griddepcontrol.wait;")
    return "\n".join([ptx[: entry.end(1)], *lines, ptx[entry.end() :]])


@dataclass(frozen=True)
class _Array:
    """Names of the parameters of a two-dimensional array."""

    address: str
    n_rows: str
    stride: str


def _slots(signature: Mapping[str, Any], names: Sequence[str]) -> dict[str, _Array]:
    found, at = {}, 0
    for name, kind in signature.items():
        if not isinstance(kind, nb.Array):
            at += 1
            continue
        if kind.ndim == 2:
            extents = at + _EXTENTS
            found[name] = _Array(names[at + _ADDRESS], names[extents], names[extents + kind.ndim])
        at += _EXTENTS + 2 * kind.ndim
    assert at == len(names), (at, names)
    return found


def _fetches(arrays: Mapping[str, _Array], ahead: RowsAhead) -> list[str]:
    """Instructions by which the first thread of a block fetches its rows, in multiples of 16 bytes."""
    lines = [
        "{",
        ".reg .pred %rap<4>;",
        ".reg .b32 %rar<4>;",
        ".reg .b64 %ra<12>;",
        "mov.u32 %rar0, %tid.x;",
        "mov.u32 %rar1, %tid.y;",
        "mov.u32 %rar2, %ctaid.y;",
        "or.b32 %rar0, %rar0, %rar1;",
        "or.b32 %rar0, %rar0, %rar2;",
        "setp.ne.u32 %rap0, %rar0, 0;",
        "@%rap0 bra RA_END;",
        "mov.u32 %rar3, %ctaid.x;",
        f"mul.wide.u32 %ra0, %rar3, {ahead.rows};",  # the first row, counted in the group
    ]
    for number, group in enumerate(ahead.groups):
        # Arrays that a format leaves out have one row.
        lines.append("mov.u64 %ra1, 0;")
        for name in group:
            lines += [f"ld.param.u64 %ra2, [{arrays[name].n_rows}];", "max.s64 %ra1, %ra1, %ra2;"]
        lines += ["setp.ge.s64 %rap1, %ra0, %ra1;", f"@%rap1 bra RA_NEXT{number};"]
        for name in group:
            array = arrays[name]
            lines += [
                f"ld.param.u64 %ra2, [{array.n_rows}];",
                f"ld.param.u64 %ra3, [{array.stride}];",
                f"ld.param.u64 %ra4, [{array.address}];",
                f"add.s64 %ra5, %ra0, {ahead.rows};",
                "min.s64 %ra5, %ra5, %ra2;",
                "mad.lo.s64 %ra6, %ra0, %ra3, %ra4;",
                "mad.lo.s64 %ra7, %ra5, %ra3, %ra4;",
                "and.b64 %ra6, %ra6, -16;",
                "and.b64 %ra7, %ra7, -16;",
                "sub.s64 %ra8, %ra7, %ra6;",
                "setp.le.s64 %rap2, %ra8, 0;",
                "cvt.u32.u64 %rar0, %ra8;",
                "cvta.to.global.u64 %ra9, %ra6;",
                "@!%rap2 cp.async.bulk.prefetch.L2.global [%ra9], %rar0;",
            ]
        lines += [
            "bra RA_END;",
            f"RA_NEXT{number}:",
            f"add.s64 %ra1, %ra1, {ahead.rows - 1};",
            f"and.b64 %ra1, %ra1, {-ahead.rows};",
            "sub.s64 %ra0, %ra0, %ra1;",
        ]
    return [*lines, "RA_END:", "}"]
