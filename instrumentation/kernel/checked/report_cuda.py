"""The report of a checked launch on a GPU: how it lies in memory, the code that writes it, and how it is read.

Many threads write it at once, by a function of PTX that a kernel calls. There is a table of what was found, for each
site, calls around it and kind, with a count and the rank of the first thread; and a log of accesses, to which whoever
comes before all others so far adds its own. Of the log, the host takes the entries of the lowest block and thread, as
on the host.

Words: the address of a flag in page-locked memory, which is set with the first finding; the counter of all, which is
what the report's address names; how many came to the log; the table; the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from instrumentation.kernel.checked.report import (
    AXES,
    OUTSIDE,
    RECORD_WORDS,
    RECORDS,
    REPORT_WORDS,
    UNWRITTEN,
    USED_AFTER_FREE,
)
from instrumentation.kernel.checked.runtime import FREED, WRITTEN

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: words before the counter
FLAG_WORDS = 1
#: rows of the table: key, count, rank. A key has several places in it: with two, one key in fifty had none among ten.
_ROWS, _ROW_WORDS = 128, 3
#: entries of the log: key, block, thread, indices, extents
_ENTRIES, _ENTRY_WORDS = 64, 3 + 2 * AXES
_TABLE = 2
_LOG = _TABLE + _ROWS * _ROW_WORDS
#: words from the counter on
COUNTED_WORDS = _LOG + _ENTRIES * _ENTRY_WORDS
DEVICE_REPORT_WORDS = FLAG_WORDS + COUNTED_WORDS
_HASHES = (
    -7046029254386353131,
    -4658895280553007687,
    669462377706339727,
    -1024200197608785869,
    -4182250636115577469,
    3545008704559388633,
)

#: of an access that may find memory which nothing wrote: what its form says beside the bytes of its state
ONLY_FREED = 16
#: what a recorder takes: the report, how often the access was made, which it is, its form, the state of its memory;
#: then the index and the extent of each axis
_TAKEN = ("report", "times", "key", "form", "state")
_FREED, _WRITTEN = (int.from_bytes([state] * 8, "little") for state in (FREED, WRITTEN))


def recorder_name(axes: int) -> str:
    """The recorder of accesses of arrays of so many axes."""
    return f"refengine_record_{axes}"


def recorder(axes: int) -> str:
    """PTX of the function that puts an access into the report, if something is wrong with it.

    A kernel calls it for all accesses among which there is a wrong one. Of two ranks the larger one comes first, and
    there is no rank 0. What is not to be done is predicated.
    """
    names = [*_TAKEN, *(f"{what}_{axis}" for what in ("index", "extent") for axis in range(axes))]
    parameters = ", ".join(f".param .b64 {name}" for name in names)
    kept = "\n".join(
        f"ld.param.u64 %a, [{what}_{axis}];\n@%p st.global.u64 [%at+{8 * (_LOG + 3 + group * AXES + axis)}], %a;"
        for group, what in enumerate(("index", "extent"))
        for axis in range(min(axes, AXES))
    )
    bounds = "\n".join(
        f"ld.param.u64 %a, [index_{axis}];\nld.param.u64 %b, [extent_{axis}];\nsetp.ge.or.u64 %p, %a, %b, %p;"
        for axis in range(axes)
    )
    others = "\n".join(
        f"""{_row("%a", factor)}
@!%p mov.u64 %h, %a;
@!%p atom.global.cas.b64 %b, [%h], 0, %key;
setp.eq.u64 %p, %b, 0;
setp.eq.or.u64 %p, %b, %key, %p;"""
        for factor in _HASHES[1:]
    )
    return f""".func {recorder_name(axes)}({parameters})
{{
.reg .pred %p, %q;
.reg .b64 %at, %a, %b, %h, %key, %rank, %report, %thread, %block;
.reg .b32 %x, %y, %z;
ld.param.u64 %report, [report];
ld.param.u64 %key, [key];
mov.pred %p, 0;
{bounds}
mov.u64 %thread, {OUTSIDE};
@%p bra FOUND;
ld.param.u64 %a, [state];
ld.param.u64 %b, [form];
mov.u64 %thread, {USED_AFTER_FREE};
and.b64 %h, %a, {_FREED};
setp.ne.u64 %p, %h, 0;
@%p bra FOUND;
and.b64 %h, %b, {ONLY_FREED};
setp.ne.u64 %p, %h, 0;
@%p ret;
mov.u64 %thread, {UNWRITTEN};
shl.b64 %h, %b, 3;
sub.u64 %h, 64, %h;
cvt.u32.u64 %x, %h;
mov.u64 %h, {_WRITTEN};
shr.u64 %h, %h, %x;
setp.eq.u64 %p, %a, %h;
@%p ret;
FOUND:
add.u64 %key, %key, %thread;
ld.param.u64 %block, [times];
atom.global.add.u64 %a, [%report], %block;
{_row("%h", _HASHES[0])}
atom.global.cas.b64 %b, [%h], 0, %key;
setp.eq.u64 %p, %b, 0;
setp.eq.or.u64 %p, %b, %key, %p;
{others}
@%p atom.global.add.u64 %b, [%h+8], %block;
mov.u32 %x, %ctaid.z;
mov.u32 %y, %nctaid.y;
mul.wide.u32 %block, %x, %y;
mov.u32 %x, %ctaid.y;
cvt.u64.u32 %thread, %x;
add.u64 %block, %block, %thread;
mov.u32 %x, %nctaid.x;
cvt.u64.u32 %thread, %x;
mov.u32 %x, %ctaid.x;
cvt.u64.u32 %rank, %x;
mad.lo.u64 %block, %block, %thread, %rank;
mov.u32 %x, %tid.z;
mov.u32 %y, %ntid.y;
mov.u32 %z, %tid.y;
mad.lo.u32 %x, %x, %y, %z;
mov.u32 %y, %ntid.x;
mov.u32 %z, %tid.x;
mad.lo.u32 %x, %x, %y, %z;
cvt.u64.u32 %thread, %x;
shl.b64 %rank, %block, 10;
or.b64 %rank, %rank, %thread;
not.b64 %rank, %rank;
mov.u64 %a, %rank;
@%p atom.global.max.u64 %a, [%h+16], %rank;
setp.lt.u64 %p, %a, %rank;
@%p ld.global.u64 %a, [%report+-8];
mov.u32 %x, 1;
@%p st.u32 [%a], %x;
@%p atom.global.add.u64 %a, [%report+8], 1;
setp.lt.and.u64 %p, %a, {_ENTRIES}, %p;
mad.lo.u64 %at, %a, {8 * _ENTRY_WORDS}, %report;
@%p st.global.u64 [%at+{8 * _LOG}], %key;
@%p st.global.u64 [%at+{8 * _LOG + 8}], %block;
@%p st.global.u64 [%at+{8 * _LOG + 16}], %thread;
{kept}
ret;
}}
"""


def _row(register: str, factor: int) -> str:
    """One of a key's places in the table."""
    bits = _ROWS.bit_length() - 1
    return f"""mul.lo.u64 {register}, %key, {factor};
shr.u64 {register}, {register}, {64 - bits};
mad.lo.u64 {register}, {register}, {8 * _ROW_WORDS}, %report;
add.u64 {register}, {register}, {8 * _TABLE};"""


def as_on_the_host(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A report of a GPU, from its counter on, as ``checked.report`` has it. What there is no room for is counted."""
    report = words[:REPORT_WORDS] * 0
    report[0] = words[0]
    table = words[_TABLE:_LOG].reshape(_ROWS, _ROW_WORDS)
    counts: dict[int, int] = {}
    for key, count, _ in table[table[:, 0] != 0].tolist():
        counts[key] = counts.get(key, 0) + count
    first: dict[int, list[int]] = {}
    log = words[_LOG : _LOG + _ENTRIES * _ENTRY_WORDS].reshape(_ENTRIES, _ENTRY_WORDS)
    for entry in log[: min(int(words[1]), _ENTRIES)].tolist():
        known = first.get(entry[0])
        if known is None or entry[1:3] < known[1:3]:
            first[entry[0]] = entry
    rows = report[1:].reshape(RECORDS, RECORD_WORDS)
    for row, (key, entry) in zip(rows, sorted(first.items()), strict=False):
        row[: 4 + 2 * AXES] = [key, counts.get(key, 0), *entry[1:]]  # no race
    return report


def add_from_the_host(words: npt.NDArray[np.int64], report: npt.NDArray[np.int64]) -> None:
    """Add a report of the host to that of a GPU, from its counter on: for a driver that runs the host's code."""
    table = words[_TABLE:_LOG].reshape(_ROWS, _ROW_WORDS)
    log = words[_LOG:].reshape(_ENTRIES, _ENTRY_WORDS)
    words[0] += report[0]
    for key, count, *entry in report[1:].reshape(RECORDS, RECORD_WORDS).tolist():
        free = [row for row in table if row[0] in (0, key)]
        if key and free:
            row = next((row for row in free if row[0] == key), free[0])
            row[:2] = key, row[1] + count
            if words[1] < _ENTRIES:
                log[words[1]] = [key, *entry[: 2 + 2 * AXES]]
            words[1] += 1
