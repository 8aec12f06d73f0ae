"""What generated code calls where every access is checked.

An access has an index and an extent for each axis. One that is not inside, or touches memory that was freed, is
reported and not made: a load gives 0, a store is dropped. One that reads what nothing wrote is reported and made.

A *shadow* tells what was done to memory. For parameters it has a byte for each byte, so far from the memory as a number
says (0: there is none); for arrays that a kernel declares a byte for each element, and beside its address that of
records of who accessed them (0: only one thread does).

``where`` is who makes an access: address of the report, calls, block and thread; and where races are looked for the
time that it is, that of the last barrier, and the address of their table (see ``checked.races``).
"""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.core.types.containers import BaseTuple
from numba.extending import intrinsic

from instrumentation.kernel.checked.block import touch
from instrumentation.kernel.checked.races import ATOMIC, FOUND, LOAD, STORE
from instrumentation.kernel.checked.races import RECORD_WORDS as RACE_WORDS
from instrumentation.kernel.checked.report import (
    AXES,
    CALL_BITS,
    CHAIN_BITS,
    OUTSIDE,
    RECORD_WORDS,
    UNWRITTEN,
    USED_AFTER_FREE,
    key_of,
    recorder,
)
from instrumentation.kernel.host_runtime import (
    KINDS,
    atomic_exchange,
    atomic_update,
    mark,
    read_element,
    want_atomic,
    want_integer,
    write_element,
)

#: states of a byte of shadow
NEVER, WRITTEN, FREED = 0x00, 0x01, 0x80
#: words of ``where`` without what races take
_PLACE_WORDS = 4
#: beside a chain of calls: who made one of them says that what is read may be unwritten
_ALLOWED = 1 << CHAIN_BITS

_I1, _I8, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
_KINDS = (*KINDS, "shadow")

__all__ = [
    "called", "forget", "try_atomic_add", "try_atomic_and", "try_atomic_cas", "try_atomic_exch", "try_atomic_max",
    "try_atomic_min", "try_atomic_or", "try_atomic_sub", "try_atomic_xor", "try_load_lane", "try_load_ro",
    "try_load_rw", "try_store_lane", "try_store_rw", "unwritten_allowed",
]  # fmt: skip


def _word(value: int) -> Any:
    return ir.Constant(_I64, value)


@intrinsic
def called(_typing: Any, where: Any, number: Any) -> Any:
    """``where`` of the accesses of a function that is called: its chain of calls with one more."""
    signature = where(where, types.int64)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        outer = builder.extract_value(values[0], 1)
        chain = builder.or_(builder.shl(outer, _word(CALL_BITS)), values[1])
        chain = builder.and_(chain, _word((1 << CHAIN_BITS) - 1))
        chain = builder.or_(chain, builder.and_(outer, _word(_ALLOWED)))
        return builder.insert_value(values[0], chain, 1)

    return signature, generate


@intrinsic
def unwritten_allowed(_typing: Any, where: Any) -> Any:
    """``where`` of accesses that may read what nothing wrote."""
    signature = where(where)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        chain = builder.or_(builder.extract_value(values[0], 1), _word(_ALLOWED))
        return builder.insert_value(values[0], chain, 1)

    return signature, generate


@intrinsic
def forget(_typing: Any, shadow: Any, length: Any) -> Any:
    """Say of the shadow's elements that nothing wrote them."""
    signature = types.void(shadow, types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        cgutils.memset(builder, builder.extract_value(values[0], 0), values[1], NEVER)
        return context.get_dummy_value()

    return signature, generate


class _Access:
    """One checked access while its code is written."""

    def __init__(self, context: Any, builder: Any, kind: str, sig: Any, values: Any) -> None:
        self.context = context
        self.builder = builder
        self.kind = kind
        self.item = sig.args[0].dtype
        self.pointer, indices, extents, self.scale, self.shift, self.shadow, self.site, self.where = values[
            :8
        ]
        self.records = None
        if isinstance(sig.args[5], BaseTuple):
            self.shadow, self.records = (builder.extract_value(self.shadow, i) for i in (0, 1))
        self.races = len(sig.args[7]) > _PLACE_WORDS
        self.indices = self._numbers(indices, sig.args[1])
        self.extents = self._numbers(extents, sig.args[2])

    def _numbers(self, group: Any, kinds: Any) -> list[Any]:
        return [
            self.context.cast(self.builder, self.builder.extract_value(group, i), kind, types.int64)
            for i, kind in enumerate(kinds)
        ]

    def record(self, kind: int) -> None:
        """Report this access."""
        chain = self.builder.extract_value(self.where, 1)
        self._record(key_of(self.builder, chain, self.site, kind), [_word(0)] * 3)

    def _record(self, key: Any, race: list[Any]) -> None:
        builder = self.builder
        report, block, thread = (builder.extract_value(self.where, i) for i in (0, 2, 3))
        rest = [_word(0)] * AXES
        places = [*[*self.indices, *rest][:AXES], *[*self.extents, *rest][:AXES]]
        target = builder.inttoptr(report, _I64.as_pointer())
        words = [key, block, thread, *places, *race]
        assert len(words) == RECORD_WORDS - 1, words
        builder.call(recorder(builder.module), [target, *words])

    def touch(self, place: Any, number: Any, how: int) -> None:
        """Look whether the access is ordered behind those of other threads, and keep it for the next one."""
        builder = self.builder
        if not self.races or self.kind == "ro" or (self.kind == "lane" and self.records is None):
            return
        chain, block, thread, now, since, table = (builder.extract_value(self.where, i) for i in range(1, 7))
        record, watched = _word(0), table
        if self.records is not None:
            record = builder.add(self.records, builder.mul(number, _word(8 * RACE_WORDS)))
            watched = self.records
        with builder.if_then(builder.icmp_unsigned("!=", watched, _word(0))):
            address = builder.ptrtoint(place, _I64)
            words = [table, record, address, _word(how), self.site, chain, block, thread, now, since]
            key = touch(builder, words)
            with builder.if_then(builder.icmp_unsigned("!=", key, _word(0)), likely=False):
                found = builder.inttoptr(table, _I64.as_pointer())
                self._record(key, [builder.load(builder.gep(found, [_word(FOUND + i)])) for i in range(3)])

    def inside(self) -> Any:
        """Whether every index is one of its axis; a negative one is none, and a very large number unsigned."""
        result = ir.Constant(_I1, 1)
        for index, extent in zip(self.indices, self.extents, strict=True):
            result = self.builder.and_(result, self.builder.icmp_unsigned("<", index, extent))
        return result

    def element(self) -> tuple[Any, Any]:
        """Address of the element, and its number in the storage."""
        builder, number = self.builder, self.indices[0]
        for index, extent in zip(self.indices[1:], self.extents[1:], strict=True):
            number = builder.add(builder.mul(number, extent), index)
        number = builder.add(builder.mul(number, self.scale), self.shift)
        return builder.gep(self.pointer, [number], inbounds=True), number

    def shadow_of(self, place: Any, number: Any) -> tuple[Any, int]:
        """Address of an element's shadow as one integer, and its bytes."""
        builder = self.builder
        if self.kind == "lane":
            return builder.gep(self.shadow, [number], inbounds=True), 1
        size = self.context.get_abi_sizeof(self.context.get_data_type(self.item))
        address = builder.add(builder.ptrtoint(place, _I64), self.shadow)
        return builder.inttoptr(address, ir.IntType(8 * size).as_pointer()), size

    def make(self, made: Any, how: int, *, reads: bool, nothing: Any = None) -> Any:
        """The access: ``made(place)`` where it may be made, else ``nothing``."""
        builder = self.builder
        function = builder.function
        outside, inside, done = (function.append_basic_block(n) for n in ("outside", "inside", "done"))
        branch = builder.cbranch(self.inside(), inside, outside)
        branch.set_weights([1 << 20, 1])
        builder.position_at_end(outside)
        self.record(OUTSIDE)
        builder.branch(done)
        builder.position_at_end(inside)
        place, number = self.element()
        values, writes = [], how != LOAD
        if self.kind == "lane":
            self._shadowed(place, number, reads=reads, writes=writes, refused=None)
        else:
            refused, shadowed, ready = (
                function.append_basic_block(n) for n in ("refused", "shadowed", "ready")
            )
            builder.cbranch(builder.icmp_unsigned("!=", self.shadow, _word(0)), shadowed, ready)
            builder.position_at_end(shadowed)
            self._shadowed(place, number, reads=reads, writes=writes, refused=refused)
            builder.branch(ready)
            builder.position_at_end(refused)
            self.record(USED_AFTER_FREE)
            builder.branch(done)
            values.append((nothing, refused))
            builder.position_at_end(ready)
        self.touch(place, number, how)
        value = made(place)
        values += [(value, builder.block), (nothing, outside)]
        builder.branch(done)
        builder.position_at_end(done)
        if nothing is None:
            return self.context.get_dummy_value()
        result = builder.phi(nothing.type)
        for each, block in values:
            result.add_incoming(each, block)
        return result

    def _shadowed(self, place: Any, number: Any, *, reads: bool, writes: bool, refused: Any) -> None:
        """Look at the shadow and change it; goes to ``refused`` where memory was freed."""
        builder = self.builder
        shadow, size = self.shadow_of(place, number)
        kind = ir.IntType(8 * size)
        written = ir.Constant(kind, int.from_bytes([WRITTEN] * size, "little"))
        if reads or refused is not None:
            state = builder.load(shadow, align=size)
            mark(builder, state, "shadow", _KINDS)
        if reads:
            with builder.if_then(builder.icmp_unsigned("!=", state, written), likely=False):
                if refused is not None:
                    self._refuse_freed(state, size, refused)
                allowed = builder.and_(builder.extract_value(self.where, 1), _word(_ALLOWED))
                with builder.if_then(builder.icmp_unsigned("==", allowed, _word(0))):
                    self.record(UNWRITTEN)
        elif refused is not None:
            self._refuse_freed(state, size, refused)
        if writes:
            mark(builder, builder.store(written, shadow, align=size), "shadow", _KINDS)

    def _refuse_freed(self, state: Any, size: int, refused: Any) -> None:
        builder = self.builder
        mask = ir.Constant(state.type, int.from_bytes([FREED] * size, "little"))
        usable = builder.function.append_basic_block("usable")
        freed = builder.icmp_unsigned("!=", builder.and_(state, mask), ir.Constant(state.type, 0))
        builder.cbranch(freed, refused, usable).set_weights([1, 1 << 20])
        builder.position_at_end(usable)


def _want_indices(indices: Any) -> None:
    for index in indices:
        want_integer(index)


def _terms(pointer: Any, indices: Any, extents: Any, shadow: Any, where: Any) -> tuple[Any, ...]:
    """Types of what every checked access takes."""
    _want_indices(indices)
    # Numbers that the text spells out have types of their own, which a tuple keeps.
    if not isinstance(shadow, BaseTuple | types.Integer):
        raise TypingError(f"a shadow of type {shadow}")
    return (pointer, indices, extents, types.int64, types.int64, shadow, types.int64, where)


def _checked(kind: str) -> tuple[Any, Any]:
    @intrinsic
    def load(
        _typing: Any,
        pointer: Any,
        indices: Any,
        extents: Any,
        scale: Any,
        shift: Any,
        shadow: Any,
        site: Any,
        where: Any,
    ) -> Any:
        signature = pointer.dtype(*_terms(pointer, indices, extents, shadow, where))

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = _Access(context, builder, kind, sig, values)
            nothing = ir.Constant(context.get_value_type(access.item), 0)
            return access.make(
                lambda place: read_element(builder, place, access.item, kind, _KINDS),
                LOAD,
                reads=True,
                nothing=nothing,
            )

        return signature, generate

    @intrinsic
    def store(
        _typing: Any,
        pointer: Any,
        indices: Any,
        extents: Any,
        scale: Any,
        shift: Any,
        shadow: Any,
        site: Any,
        where: Any,
        value: Any,
    ) -> Any:
        signature = types.void(*_terms(pointer, indices, extents, shadow, where), value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = _Access(context, builder, kind, sig, values)
            stored = context.cast(builder, values[8], sig.args[8], access.item)
            return access.make(
                lambda place: write_element(builder, place, access.item, stored, kind, _KINDS),
                STORE,
                reads=False,
            )

        return signature, generate

    return load, store


try_load_lane, try_store_lane = _checked("lane")
try_load_ro, _ = _checked("ro")
try_load_rw, try_store_rw = _checked("rw")


def _shadow_kind(shadow: Any) -> str:
    return "lane" if isinstance(shadow, BaseTuple) else "rw"


def _atomic(operation: str) -> Any:
    @intrinsic
    def atomic(
        _typing: Any,
        pointer: Any,
        indices: Any,
        extents: Any,
        scale: Any,
        shift: Any,
        shadow: Any,
        site: Any,
        where: Any,
        value: Any,
    ) -> Any:
        want_atomic(operation, pointer)
        signature = pointer.dtype(*_terms(pointer, indices, extents, shadow, where), value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = _Access(context, builder, _shadow_kind(sig.args[5]), sig, values)
            operand = context.cast(builder, values[8], sig.args[8], access.item)
            # An exchange is how a first value is put in place: it may find none.
            return access.make(
                lambda place: atomic_update(builder, operation, access.item, place, operand),
                ATOMIC,
                reads=operation != "xchg",
                nothing=ir.Constant(operand.type, 0),
            )

        return signature, generate

    return atomic


try_atomic_add, try_atomic_sub = _atomic("add"), _atomic("sub")
try_atomic_min, try_atomic_max = _atomic("min"), _atomic("max")
try_atomic_and, try_atomic_or, try_atomic_xor = _atomic("and"), _atomic("or"), _atomic("xor")
try_atomic_exch = _atomic("xchg")


@intrinsic
def try_atomic_cas(
    _typing: Any,
    pointer: Any,
    indices: Any,
    extents: Any,
    scale: Any,
    shift: Any,
    shadow: Any,
    site: Any,
    where: Any,
    expected: Any,
    value: Any,
) -> Any:
    """Compare and swap; returns what was there before."""
    want_atomic("cas", pointer)
    signature = pointer.dtype(*_terms(pointer, indices, extents, shadow, where), expected, value)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        access = _Access(context, builder, _shadow_kind(sig.args[5]), sig, values)
        old, new = (context.cast(builder, values[i], sig.args[i], access.item) for i in (8, 9))
        return access.make(
            lambda place: atomic_exchange(builder, place, old, new),
            ATOMIC,
            reads=True,
            nothing=ir.Constant(old.type, 0),
        )

    return signature, generate
