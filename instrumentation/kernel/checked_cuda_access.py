"""One checked access while its CUDA code is written: where its element lies, what is looked up, what is reported."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.datamodel import PrimitiveModel
from numba.cuda.extending import register_model

from instrumentation.kernel.checked_report import (
    CHAIN_BITS,
    OUTSIDE,
    UNWRITTEN,
    USED_AFTER_FREE,
    key_of,
)
from instrumentation.kernel.checked_report_cuda import record
from instrumentation.kernel.checked_runtime import FREED, WRITTEN
from instrumentation.kernel.host_runtime import KINDS as PLAIN_KINDS
from instrumentation.kernel.host_runtime import mark

GENERIC, GLOBAL, SHARED = 0, 1, 3
_ALLOWED = 1 << CHAIN_BITS
_I1, _I8, _I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
KINDS = (*PLAIN_KINDS, "shadow")
#: of what gives the same whenever it is done
_PURE = ("readnone", "nounwind")


class Address(types.Type):
    """Where elements of a number type lie, in one of a GPU's address spaces."""

    def __init__(self, dtype: Any, space: int) -> None:
        self.dtype = dtype
        self.space = space
        super().__init__(name=f"address({dtype}, {space})")


@register_model(Address)
class _AddressModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Address) -> None:
        item = manager.lookup(kind.dtype).get_data_type()
        super().__init__(manager, kind, item.as_pointer(kind.space))


def _word(value: int) -> Any:
    return ir.Constant(_I64, value)


class Access:
    """One checked access while its code is written."""

    def __init__(self, context: Any, builder: Any, kind: str, sig: Any, values: Any) -> None:
        self.context = context
        self.builder = builder
        self.kind = kind
        self.item = sig.args[0].dtype
        self.pointer, indices, extents, self.shadow, self.site, self.where = values[:6]
        self.own_shadow = isinstance(sig.args[3], Address)
        self.indices = self._numbers(indices, sig.args[1])
        self.extents = self._numbers(extents, sig.args[2])

    def _numbers(self, group: Any, kinds: Any) -> list[Any]:
        return [
            self.context.cast(self.builder, self.builder.extract_value(group, i), kind, types.int64)
            for i, kind in enumerate(kinds)
        ]

    def record(self, kind: Any) -> Any:
        """Report this access; returns its kind."""
        builder = self.builder
        report, chain = (builder.extract_value(self.where, i) for i in range(2))
        key = builder.add(key_of(builder, chain, self.site, OUTSIDE), kind)
        return record(builder, report, key, kind, self.indices, self.extents)

    def inside(self) -> Any:
        """Whether every index is one of its axis; a negative one is none, and a very large number unsigned."""
        result = ir.Constant(_I1, 1)
        for index, extent in zip(self.indices, self.extents, strict=True):
            result = self.builder.and_(result, self.builder.icmp_unsigned("<", index, extent))
        return result

    def element(self) -> tuple[Any, Any]:
        """Address of the element, and its number."""
        builder, number = self.builder, self.indices[0]
        for index, extent in zip(self.indices[1:], self.extents[1:], strict=True):
            number = builder.add(builder.mul(number, extent), index)
        return builder.gep(self.pointer, [number]), number

    def shadow_of(self, place: Any, number: Any) -> tuple[Any, int]:
        """Address of an element's shadow as one integer, and its bytes."""
        builder = self.builder
        if self.own_shadow:
            return builder.gep(self.shadow, [number], inbounds=True), 1
        size = self.context.get_abi_sizeof(self.context.get_data_type(self.item))
        address = builder.add(builder.ptrtoint(place, _I64), self.shadow)
        return builder.inttoptr(address, ir.IntType(8 * size).as_pointer(GLOBAL)), size

    def load_constant(self, nothing: Any) -> Any:
        """Element of a parameter that nothing writes while the kernel runs, nor its shadow.

        Both are read before it is known whether they may be, the one where something always is, the other not at all
        where there is none: what depends on nothing that changes, the compiler does once for all equal accesses.
        """
        builder, function = self.builder, self.builder.function
        inside = self.inside()
        place, _ = self.element()
        report = builder.extract_value(self.where, 0)
        safe = builder.select(inside, place, builder.inttoptr(report, place.type))
        value = _constant_element(builder, safe)
        if isinstance(self.item, types.Boolean):
            value = builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
        distance = builder.select(inside, self.shadow, _word(0))
        size = self.context.get_abi_sizeof(self.context.get_data_type(self.item))
        state, written = _constant_state(builder, builder.ptrtoint(safe, _I64), distance, size)
        mask = ir.Constant(state.type, int.from_bytes([FREED] * size, "little"))
        freed = builder.icmp_unsigned("!=", builder.and_(state, mask), ir.Constant(state.type, 0))
        said = builder.and_(builder.extract_value(self.where, 1), _word(_ALLOWED))
        allowed = builder.and_(builder.icmp_unsigned("!=", said, _word(0)), builder.not_(freed))
        fine = builder.and_(inside, builder.or_(builder.icmp_unsigned("==", state, written), allowed))
        before = builder.block
        reported, done = (function.append_basic_block(n) for n in ("reported", "done"))
        builder.cbranch(fine, done, reported).set_weights([1 << 20, 1])
        builder.position_at_end(reported)
        kind = builder.select(freed, _word(USED_AFTER_FREE), _word(UNWRITTEN))
        kind = self.record(builder.select(inside, kind, _word(OUTSIDE)))
        other = builder.select(builder.icmp_unsigned("==", kind, _word(UNWRITTEN)), value, nothing)
        builder.branch(done)
        builder.position_at_end(done)
        result = builder.phi(value.type)
        result.add_incoming(value, before)
        result.add_incoming(other, reported)
        return result

    def make(self, made: Any, *, reads: bool, writes: bool, nothing: Any = None) -> Any:
        """The access: ``made(place)`` where it may be made, else ``nothing``."""
        builder = self.builder
        function = builder.function
        outside, inside, done = (function.append_basic_block(n) for n in ("outside", "inside", "done"))
        entry = builder.block
        place, number = self.element()
        builder.cbranch(self.inside(), inside, outside).set_weights([1 << 20, 1])
        builder.position_at_end(outside)
        kind = builder.phi(_I64)
        kind.add_incoming(_word(OUTSIDE), entry)
        builder.position_at_end(inside)
        reported = self.own_shadow or self.kind != "lane"  # an own array without room for a shadow has none
        if reported:
            ready = function.append_basic_block("ready")
            if not self.own_shadow:
                shadowed = function.append_basic_block("shadowed")
                builder.cbranch(builder.icmp_unsigned("!=", self.shadow, _word(0)), shadowed, ready)
                builder.position_at_end(shadowed)
            self._shadowed(place, number, (kind, outside), reads=reads, writes=writes)
            builder.branch(ready)
            builder.position_at_end(outside)
            made_all_the_same = builder.icmp_unsigned("==", self.record(kind), _word(UNWRITTEN))
            builder.cbranch(made_all_the_same, ready, done)
            builder.position_at_end(ready)
        else:
            builder.position_at_end(outside)
            self.record(kind)
            builder.branch(done)
            builder.position_at_end(inside)
        value = made(place)
        values = [(value, builder.block), (nothing, outside)]
        builder.branch(done)
        builder.position_at_end(done)
        if nothing is None:
            return self.context.get_dummy_value()
        result = builder.phi(nothing.type)
        for each, block in values:
            result.add_incoming(each, block)
        return result

    def _shadowed(
        self, place: Any, number: Any, report: tuple[Any, Any], *, reads: bool, writes: bool
    ) -> None:
        """Look at the shadow and change it; ``report``: its kind, and where it is made."""
        builder = self.builder
        kind, outside = report
        shadow, size = self.shadow_of(place, number)
        state_type = ir.IntType(8 * size)
        written = ir.Constant(state_type, int.from_bytes([WRITTEN] * size, "little"))
        may_be_freed = not self.own_shadow
        if reads or may_be_freed:
            state = builder.load(shadow, align=size)
            mark(builder, state, "shadow", KINDS)
            mask = ir.Constant(state_type, int.from_bytes([FREED] * size, "little"))
            none = ir.Constant(state_type, 0)
            odd, usable = (builder.function.append_basic_block(n) for n in ("odd", "usable"))
            fine = (
                builder.icmp_unsigned("==", state, written)
                if reads
                else builder.icmp_unsigned("==", builder.and_(state, mask), none)
            )
            builder.cbranch(fine, usable, odd).set_weights([1 << 20, 1])
            builder.position_at_end(odd)
            if reads:
                freed = builder.icmp_unsigned("!=", builder.and_(state, mask), none)
                unsaid = builder.icmp_unsigned(
                    "==", builder.and_(builder.extract_value(self.where, 1), _word(_ALLOWED)), _word(0)
                )
                which = builder.select(freed, _word(USED_AFTER_FREE), _word(UNWRITTEN))
                builder.cbranch(builder.or_(freed, unsaid), outside, usable)
            else:
                which = _word(USED_AFTER_FREE)
                builder.branch(outside)
            kind.add_incoming(which, odd)
            builder.position_at_end(usable)
        if writes:
            mark(builder, builder.store(written, shadow, align=size), "shadow", KINDS)


def _constant_element(builder: Any, place: Any) -> Any:
    """Value at a place that does not change.

    Not a load that LLVM knows as one of something constant: that may be moved to before the wait for the predecessor.
    """
    item = place.type.pointee
    if isinstance(item, ir.IntType) and item.width < 32:
        wide = ir.IntType(32)
        text, register = f"ld.global.u{item.width} $0, [$1];", "r"
    else:
        wide = item
        bits, register = {ir.FloatType(): (32, "f"), ir.DoubleType(): (64, "d")}.get(item) or (
            item.width,
            "l" if item.width == 64 else "r",
        )
        text = f"ld.global.{'f' if register in 'fd' else 'u'}{bits} $0, [$1];"
    address = builder.ptrtoint(place, _I64)
    code = ir.InlineAsm(ir.FunctionType(wide, [_I64]), text, f"={register},l", side_effect=False)
    value = builder.call(code, [address], attrs=_PURE)
    return value if wide is item else builder.trunc(value, item)


def _constant_state(builder: Any, address: Any, distance: Any, size: int) -> tuple[Any, Any]:
    """State of a place whose shadow does not change, written where there is none; and what written is."""
    wide = size == 8
    kind, register = (_I64, "l") if wide else (ir.IntType(32), "r")
    written = int.from_bytes([WRITTEN] * size, "little")
    text = (
        f"{{ .reg .pred rf_p; setp.ne.s64 rf_p, $2, 0; mov.b{64 if wide else 32} $0, {written}; "
        f"@rf_p ld.global.u{8 * size} $0, [$1]; }}"
    )
    signature = ir.FunctionType(kind, [_I64, _I64])
    code = ir.InlineAsm(signature, text, f"=&{register},l,l", side_effect=False)
    state = builder.call(code, [builder.add(address, distance), distance], attrs=_PURE)
    return state, ir.Constant(kind, written)
