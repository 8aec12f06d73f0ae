"""The report of a checked launch: how it lies in memory, the code that writes it, and how it is read.

A report is a counter of all that was found and a table of records, one for each site, calls around it and kind: how
often, and who was first. Sites and calls are numbers, which ``checked.access`` gave. Two accesses that race have a
record for each pair of sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: kinds of a record
OUTSIDE, UNWRITTEN, USED_AFTER_FREE, RACE, DIVERGED = range(5)
#: words of a report: all that was found; then records of key, count, block, thread, indices, extents, of a race also
#: both accesses and the place of the other one. Parameters have at most four axes; of arrays that a kernel declares the
#: first four are told.
AXES = 4
RECORDS = 64
RECORD_WORDS = 7 + 2 * AXES
REPORT_WORDS = 1 + RECORDS * RECORD_WORDS
#: a chain of calls is one number: so many bits for each call, innermost last
CALL_BITS, CHAIN_BITS = 10, 40
#: a key is one more than: calls, site, kind; of a race its pair of sites, mixed
KIND_BITS, SITE_BITS = 3, 19
#: an access is one number: calls, site; a place: block, thread
THREAD_BITS = 10
_SLOT_BITS = RECORDS.bit_length() - 1
assert RECORDS == 1 << _SLOT_BITS
assert CHAIN_BITS + SITE_BITS + KIND_BITS < 63

_I64 = ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Record:
    """What was found at one site, through one chain of calls: how often, and where first."""

    site: int
    chain: int
    kind: int
    count: int
    block: int
    thread: int
    #: of each axis; zeros behind the last, and none behind the fourth
    indices: tuple[int, ...]
    extents: tuple[int, ...]
    #: the other access of a race, which came first
    other: Other | None = None

    @property
    def words(self) -> list[int]:
        """The record as it lies in a report; a race's key is not what its code would give it."""
        access = self.chain << SITE_BITS | self.site
        key = (access << KIND_BITS | self.kind) + 1
        more = [0, 0, 0]
        if self.other is not None:
            other = self.other
            more = [access, other.chain << SITE_BITS | other.site, other.block << THREAD_BITS | other.thread]
        return [key, self.count, self.block, self.thread, *self.indices, *self.extents, *more]


@dataclass(frozen=True, slots=True)
class Other:
    """The access of another thread that one races with. Of its block the last 24 bits are known."""

    site: int
    chain: int
    block: int
    thread: int


def read_records(words: npt.NDArray[np.int64]) -> tuple[list[Record], int]:
    """Records of a report, in the order of calls and sites, and how many findings have none."""
    rows = words[1:].reshape(-1, RECORD_WORDS)
    found = [_record(row) for row in rows[rows[:, 0] != 0].tolist()]
    found.sort(key=lambda record: (record.words, record.kind))
    return found, int(words[0]) - sum(record.count for record in found)


def _record(row: list[int]) -> Record:
    key, count, block, thread = row[0] - 1, *row[1:4]
    kind, access, other = key & ((1 << KIND_BITS) - 1), key >> KIND_BITS, None
    if kind == RACE:
        access, first, place = row[-3:]
        other = Other(*_access(first), place >> THREAD_BITS, place & ((1 << THREAD_BITS) - 1))
    indices, extents = tuple(row[4 : 4 + AXES]), tuple(row[4 + AXES : 4 + 2 * AXES])
    return Record(*_access(access), kind, count, block, thread, indices, extents, other)


def _access(number: int) -> tuple[int, int]:
    return number & ((1 << SITE_BITS) - 1), number >> SITE_BITS


def _word(value: int) -> Any:
    return ir.Constant(_I64, value)


def key_of(builder: Any, chain: Any, site: Any, kind: int) -> Any:
    """Code that makes a record's key."""
    chain = builder.and_(chain, _word((1 << CHAIN_BITS) - 1))
    key = builder.or_(builder.shl(chain, _word(SITE_BITS)), site)
    return builder.add(builder.or_(builder.shl(key, _word(KIND_BITS)), _word(kind)), _word(1))


def recorder(module: Any) -> Any:
    """The function ``record(report, key, block, thread, indices, extents, race)`` of a module, written once.

    Out of line and cold, so that a check costs little where it finds nothing. Counts in the record of a key, or takes a
    free one; when there is none, only the counter of all tells.
    """
    name = "refengine_record"
    if name in module.globals:
        return module.globals[name]
    pointer = _I64.as_pointer()
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [pointer, *[_I64] * (RECORD_WORDS - 1)]), name
    )
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("cold")
    report, key, *values = function.args
    entry, probe, known, take, fill, onward, end = (
        function.append_basic_block(label)
        for label in ("entry", "probe", "known", "take", "fill", "onward", "end")
    )
    builder = ir.IRBuilder(entry)
    builder.atomic_rmw("add", report, _word(1), "monotonic")
    start = builder.lshr(
        builder.mul(key, _word(-7046029254386353131)), _word(64 - _SLOT_BITS)
    )  # Fibonacci hashing
    builder.branch(probe)

    builder.position_at_end(probe)
    tried = builder.phi(_I64)
    slot = builder.urem(builder.add(start, tried), _word(RECORDS))
    first = builder.add(builder.mul(slot, _word(RECORD_WORDS)), _word(1))
    record = builder.gep(report, [first])
    there = builder.load_atomic(record, "monotonic", 8)
    builder.cbranch(builder.icmp_unsigned("==", there, _word(0)), take, known)

    builder.position_at_end(take)
    found = builder.extract_value(builder.cmpxchg(record, _word(0), key, "monotonic", "monotonic"), 0)
    builder.cbranch(builder.icmp_unsigned("==", found, _word(0)), fill, known)

    builder.position_at_end(fill)
    for i, value in enumerate(values):
        builder.store(value, builder.gep(record, [_word(2 + i)]))
    builder.atomic_rmw("add", builder.gep(record, [_word(1)]), _word(1), "monotonic")
    builder.branch(end)

    builder.position_at_end(known)
    held = builder.phi(_I64)
    held.add_incoming(there, probe)
    held.add_incoming(found, take)
    with builder.if_then(builder.icmp_unsigned("==", held, key)):
        builder.atomic_rmw("add", builder.gep(record, [_word(1)]), _word(1), "monotonic")
        builder.branch(end)
    builder.branch(onward)

    builder.position_at_end(onward)
    more = builder.add(tried, _word(1))
    tried.add_incoming(_word(0), entry)
    tried.add_incoming(more, onward)
    builder.cbranch(builder.icmp_unsigned("<", more, _word(RECORDS)), probe, end)

    builder.position_at_end(end)
    builder.ret_void()
    return function
