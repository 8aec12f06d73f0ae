"""The report of a checked launch on a GPU: how it lies in memory, the code that writes it, and how it is read.

Many threads write it at once, and the code stands in place at each access, as PTX: a call would keep what lives across
it out of most registers, and loops make the assembler slow. So there is a table of what was found, for each site, calls
around it and kind, with a count and the rank of the first thread; and a log of accesses, to which whoever comes before
all others so far adds its own. Of the log, the host takes the entries of the lowest block and thread, as on the host.

Words: the address of a flag in page-locked memory, which is set with the first finding; the counter of all, which is
what the report's address names; how many came to the log; the table; the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from instrumentation.kernel.checked_report import AXES, RECORD_WORDS, RECORDS, REPORT_WORDS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: words before the counter
FLAG_WORDS = 1
#: rows of the table: key, count, rank. A key has two places in it.
_ROWS, _ROW_WORDS = 128, 3
#: entries of the log: key, block, thread, indices, extents
_ENTRIES, _ENTRY_WORDS = 64, 3 + 2 * AXES
_TABLE = 2
_LOG = _TABLE + _ROWS * _ROW_WORDS
#: words from the counter on
COUNTED_WORDS = _LOG + _ENTRIES * _ENTRY_WORDS
DEVICE_REPORT_WORDS = FLAG_WORDS + COUNTED_WORDS
_I64 = ir.IntType(64)
_HASHES = (-7046029254386353131, -4658895280553007687)

# Operands: $0 kind (result, and $1 the same), $2 report, $3 key, $4 and $5 its places; then indices and extents. Of two
# ranks the larger one comes first, and there is no rank 0. What is not to be done is predicated: no branch.
_RECORD = f"""
.reg .pred rf_p, rf_q;
.reg .b64 rf_a, rf_b, rf_h, rf_r, rf_t;
.reg .b32 rf_x, rf_y, rf_z;
atom.global.add.u64 rf_a, [$2], 1;
add.u64 rf_h, $2, $4;
atom.global.cas.b64 rf_b, [rf_h], 0, $3;
setp.eq.u64 rf_p, rf_b, 0;
setp.eq.or.u64 rf_p, rf_b, $3, rf_p;
@!rf_p add.u64 rf_h, $2, $5;
@!rf_p atom.global.cas.b64 rf_b, [rf_h], 0, $3;
setp.eq.u64 rf_p, rf_b, 0;
setp.eq.or.u64 rf_p, rf_b, $3, rf_p;
@rf_p atom.global.add.u64 rf_b, [rf_h+8], 1;
mov.u32 rf_x, %ctaid.z;
mov.u32 rf_y, %nctaid.y;
mul.wide.u32 rf_b, rf_x, rf_y;
mov.u32 rf_x, %ctaid.y;
cvt.u64.u32 rf_t, rf_x;
add.u64 rf_b, rf_b, rf_t;
mov.u32 rf_x, %nctaid.x;
cvt.u64.u32 rf_t, rf_x;
mov.u32 rf_x, %ctaid.x;
cvt.u64.u32 rf_r, rf_x;
mad.lo.u64 rf_b, rf_b, rf_t, rf_r;
mov.u32 rf_x, %tid.z;
mov.u32 rf_y, %ntid.y;
mov.u32 rf_z, %tid.y;
mad.lo.u32 rf_x, rf_x, rf_y, rf_z;
mov.u32 rf_y, %ntid.x;
mov.u32 rf_z, %tid.x;
mad.lo.u32 rf_x, rf_x, rf_y, rf_z;
cvt.u64.u32 rf_t, rf_x;
shl.b64 rf_r, rf_b, 10;
or.b64 rf_r, rf_r, rf_t;
not.b64 rf_r, rf_r;
mov.u64 rf_a, rf_r;
@rf_p atom.global.max.u64 rf_a, [rf_h+16], rf_r;
setp.lt.u64 rf_p, rf_a, rf_r;
@rf_p ld.global.u64 rf_a, [$2+-8];
mov.u32 rf_x, 1;
@rf_p st.u32 [rf_a], rf_x;
@rf_p atom.global.add.u64 rf_a, [$2+8], 1;
setp.lt.and.u64 rf_p, rf_a, {_ENTRIES}, rf_p;
mad.lo.u64 rf_a, rf_a, {8 * _ENTRY_WORDS}, $2;
@rf_p st.global.u64 [rf_a+{8 * _LOG}], $3;
@rf_p st.global.u64 [rf_a+{8 * _LOG + 8}], rf_b;
@rf_p st.global.u64 [rf_a+{8 * _LOG + 16}], rf_t;
"""


def record(builder: Any, report: Any, key: Any, kind: Any, indices: list[Any], extents: list[Any]) -> Any:
    """Write code that puts an access of this thread into the report at an address. Returns ``kind``.

    The compiler does not know that it is the same: what depends on it need not be written once for each kind.
    """
    axes = min(AXES, len(indices))
    values = [*indices[:axes], *extents[:axes]]
    first = 8 * (_LOG + 3)
    places = [first + 8 * axis for axis in range(axes)] + [first + 8 * (AXES + axis) for axis in range(axes)]
    stores = [f"@rf_p st.global.u64 [rf_a+{place}], ${6 + i};" for i, place in enumerate(places)]
    # The result comes last: it may lie where an operand does.
    text = " ".join([*_RECORD.split(), *stores, "mov.u64 $0, $1;"])
    signature = ir.FunctionType(_I64, [_I64] * (5 + len(values)))
    code = ir.InlineAsm(
        signature, f"{{ {text} }}", ",".join(["=l", *["l"] * (5 + len(values))]), side_effect=True
    )
    rows = [_row(builder, key, factor) for factor in _HASHES]
    call = builder.call(code, [kind, report, key, *rows, *values])
    # The report is memory that the kernel never sees: its loads need not be made again behind a record. llvmlite knows
    # this attribute of functions only.
    set.add(call.attributes, "inaccessiblememonly")
    set.add(call.attributes, "nounwind")
    return call


def _row(builder: Any, key: Any, factor: int) -> Any:
    """One of a key's places in the table, in bytes from the counter."""
    bits = _ROWS.bit_length() - 1
    hashed = builder.lshr(builder.mul(key, ir.Constant(_I64, factor)), ir.Constant(_I64, 64 - bits))
    offset = builder.mul(hashed, ir.Constant(_I64, 8 * _ROW_WORDS))
    return builder.add(offset, ir.Constant(_I64, 8 * _TABLE))


def as_on_the_host(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A report of a GPU, from its counter on, as ``checked_report`` has it. What there is no room for is counted."""
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
