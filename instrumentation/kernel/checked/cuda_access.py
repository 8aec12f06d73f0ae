"""One checked access while its CUDA code is written: where its element lies, what is looked up, what is reported."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.cuda.datamodel import PrimitiveModel
from numba.cuda.extending import register_model

from instrumentation.kernel.checked.cuda_ptx import MARK
from instrumentation.kernel.checked.report import CHAIN_BITS, OUTSIDE, key_of
from instrumentation.kernel.checked.report_cuda import ONLY_FREED
from instrumentation.kernel.checked.runtime import FREED, WRITTEN
from instrumentation.kernel.host_runtime import KINDS as PLAIN_KINDS
from instrumentation.kernel.host_runtime import mark

GENERIC, GLOBAL, SHARED = 0, 1, 3
_ALLOWED = 1 << CHAIN_BITS
_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
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

    def __init__(
        self, context: Any, builder: Any, kind: str, sig: Any, values: Any, *, sure: bool = False
    ) -> None:
        #: whether its index was looked at before
        self.sure = sure
        self.context = context
        self.builder = builder
        self.kind = kind
        self.item = sig.args[0].dtype
        self.pointer, indices, extents, self.shadow, self.site, self.where = values[:6]
        self.own_shadow = isinstance(sig.args[3], Address)
        #: whether what stands for the shadow is the element's own state
        self.own_state = sig.args[3] == types.uint8
        self.indices = self._numbers(indices, sig.args[1])
        self.extents = self._numbers(extents, sig.args[2])

    def _numbers(self, group: Any, kinds: Any) -> list[Any]:
        return [
            self.context.cast(self.builder, self.builder.extract_value(group, i), kind, types.int64)
            for i, kind in enumerate(kinds)
        ]

    def check(self, inside: Any, odd: Any, state: Any, *, reads: bool) -> None:
        """Say whether something is wrong with this access, and what tells a report so once more.

        It is where it is not ``inside``, and where ``odd``, which is of 32 bits, is not 0. Nothing is looked at here:
        ``checked.cuda_ptx`` does so for all neighbouring accesses at once.
        """
        builder = self.builder
        chain = builder.extract_value(self.where, 1)
        form = _word(self.size | ONLY_FREED)
        if reads:
            form = builder.or_(_word(self.size), builder.select(self._unsaid(), _word(0), _word(ONLY_FREED)))
        operands = [
            key_of(builder, chain, self.site, OUTSIDE),
            form,
            builder.zext(state, _I64) if state.type.width < 64 else state,
            *self.indices,
            *self.extents,
        ]
        names = ", ".join(f"${i}" for i in range(2 + len(operands)))
        signature = ir.FunctionType(ir.VoidType(), [_I32, _I32, *[_I64] * len(operands)])
        code = ir.InlineAsm(
            signature, f"{MARK} {names};", ",".join(["r", "r", *["l"] * len(operands)]), side_effect=True
        )
        call = builder.call(code, [builder.zext(builder.not_(inside), _I32), odd, *operands])
        # The report is memory that the kernel never sees: its loads need not be made again behind a record. llvmlite
        # knows this attribute of functions only.
        set.add(call.attributes, "inaccessiblememonly")
        set.add(call.attributes, "nounwind")

    def inside(self) -> Any:
        """Whether every index is one of its axis; a negative one is none, and a very large number unsigned."""
        result = ir.Constant(_I1, 1)
        if self.sure:
            return result
        for index, extent in zip(self.indices, self.extents, strict=True):
            result = self.builder.and_(result, self.builder.icmp_unsigned("<", index, extent))
        return result

    def element(self, inside: Any = None) -> tuple[Any, Any]:
        """Address of the element, and its number; where it is not ``inside``, some address that can be read."""
        builder, number = self.builder, self.indices[0]
        for index, extent in zip(self.indices[1:], self.extents[1:], strict=True):
            number = builder.add(builder.mul(number, extent), index)
        if self.sure:
            return builder.gep(self.pointer, [number]), number
        if inside is not None and self.pointer.type.addrspace != GLOBAL:
            number = builder.select(inside, number, _word(0))
        place = builder.gep(self.pointer, [number])
        if inside is not None and self.pointer.type.addrspace == GLOBAL:
            report = builder.extract_value(self.where, 0)
            place = builder.select(inside, place, builder.inttoptr(report, place.type))
        return place, number

    @property
    def size(self) -> int:
        """Bytes of an element's state."""
        if self.own_shadow or self.own_state:
            return 1
        size: int = self.context.get_abi_sizeof(self.context.get_data_type(self.item))
        return size

    def load_constant(self) -> Any:
        """Element of a parameter that nothing writes while the kernel runs, nor its shadow.

        What depends on nothing that changes, the compiler does once for all equal accesses.
        """
        builder = self.builder
        inside = self.inside()
        place, _ = self.element()
        value = _constant_element(builder, place, inside)
        looked_up = builder.and_(inside, self._has_shadow())
        address = builder.add(builder.ptrtoint(place, _I64), self.shadow)
        state = _constant_state(builder, address, looked_up, self.size)
        self.check(inside, self._odd(state, reads=True), state, reads=True)
        freed = builder.and_(state, ir.Constant(state.type, FREED))
        value = _cleared(builder, freed if freed.type == _I32 else builder.trunc(freed, _I32), value)
        if isinstance(self.item, types.Boolean):
            return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
        return value if value.type == place.type.pointee else builder.trunc(value, place.type.pointee)

    def make(self, made: Any, *, reads: bool, writes: bool, nothing: Any = None) -> Any:
        """The access: ``made(place)`` where it may be made, else ``nothing``."""
        builder = self.builder
        inside = self.inside()
        place, number = self.element(inside)
        shadow, there = None, None
        odd, usable, state = ir.Constant(_I32, 0), inside, self._written(ir.IntType(8 * self.size))
        if self.own_state:
            state = self.shadow
            odd = self._odd(state, reads=reads)
        elif self.own_shadow:
            shadow = builder.gep(self.shadow, [number], inbounds=True)
            if reads:
                state = builder.load(shadow)
                mark(builder, state, "shadow", KINDS)
                state = builder.select(inside, state, self._written(state.type))
                odd = self._odd(state, reads=True)
        elif self.kind != "lane":  # an own array without room for a shadow has none
            there = self._has_shadow()
            looked_up = builder.and_(inside, there)
            kind = ir.IntType(8 * self.size)
            address = builder.add(builder.ptrtoint(place, _I64), self.shadow)
            shadow = builder.inttoptr(address, kind.as_pointer(GLOBAL))
            somewhere = builder.inttoptr(builder.extract_value(self.where, 0), shadow.type)
            state = builder.load(builder.select(looked_up, shadow, somewhere), align=self.size)
            mark(builder, state, "shadow", KINDS)
            state = builder.select(looked_up, state, self._written(kind))
            odd = self._odd(state, reads=reads)
            usable = builder.and_(inside, builder.not_(self._is_freed(state)))
        self.check(inside, odd, state, reads=reads)
        if not writes:
            return builder.select(usable, made(place), nothing)
        entry = builder.block
        with builder.if_then(usable, likely=True):
            value = made(place)
            if shadow is not None:
                self._mark(shadow, there)
            then = builder.block
        if nothing is None:
            return self.context.get_dummy_value()
        result = builder.phi(nothing.type)
        result.add_incoming(value, then)
        result.add_incoming(nothing, entry)
        return result

    def _has_shadow(self) -> Any:
        return self.builder.icmp_unsigned("!=", self.shadow, _word(0))

    def _written(self, kind: Any) -> Any:
        return ir.Constant(kind, int.from_bytes([WRITTEN] * self.size, "little"))

    def _is_freed(self, state: Any) -> Any:
        """Whether an element was freed: all its bytes were, or none."""
        builder = self.builder
        freed = builder.and_(state, ir.Constant(state.type, FREED))
        return builder.icmp_unsigned("!=", freed, ir.Constant(state.type, 0))

    def _odd(self, state: Any, *, reads: bool) -> Any:
        """What is wrong with an element's state, in 32 bits: that nothing wrote it, unless it may be so; or a free."""
        builder, wide = self.builder, state.type
        written = self._written(wide)
        if wide == _I64:
            # One instruction for both halves: of the states there are, two have all bits of "written" in common only if
            # both are written.
            low, high = builder.trunc(state, _I32), builder.trunc(builder.lshr(state, _word(32)), _I32)
            state, written = builder.and_(low, high), builder.trunc(written, _I32)
        elif wide.width < 32:
            state, written = builder.zext(state, _I32), builder.zext(written, _I32)
        freed = builder.and_(state, ir.Constant(_I32, FREED))
        return builder.select(self._unsaid(), builder.xor(state, written), freed) if reads else freed

    def _unsaid(self) -> Any:
        """Whether the source does not say that what is read may be unwritten."""
        builder = self.builder
        said = builder.and_(builder.extract_value(self.where, 1), _word(_ALLOWED))
        return builder.icmp_unsigned("==", said, _word(0))

    def _mark(self, shadow: Any, there: Any) -> None:
        """Say that the element is written; ``there``: whether there is a shadow, None where there is always one."""
        builder = self.builder
        written = self._written(shadow.type.pointee)
        if there is None:
            mark(builder, builder.store(written, shadow), "shadow", KINDS)
            return
        with builder.if_then(there):
            mark(builder, builder.store(written, shadow, align=self.size), "shadow", KINDS)


#: registers of PTX, and types of moves between them
_REGISTERS = {
    _I32: ("r", "b32"), _I64: ("l", "b64"), ir.FloatType(): ("f", "f32"), ir.DoubleType(): ("d", "f64"),
}  # fmt: skip
_ZEROS = {"f": "0f00000000", "d": "0d0000000000000000"}


def _constant_element(builder: Any, place: Any, inside: Any) -> Any:
    """Value at a place that does not change, in at least 32 bits; 0 where it is not inside.

    Not a load that LLVM knows as one of something constant: that may be moved to before the wait for the predecessor.
    """
    item = place.type.pointee
    narrow = isinstance(item, ir.IntType) and item.width < 32
    kind = _I32 if narrow else item
    name = f"u{item.width}" if isinstance(item, ir.IntType) else _REGISTERS[kind][1]
    return _if(builder, inside, kind, "0", f"ld.global.{name} $0, [$1];", builder.ptrtoint(place, _I64))


def _constant_state(builder: Any, address: Any, looked_up: Any, size: int) -> Any:
    """State of a place whose shadow does not change; written where it is not looked up."""
    written = str(int.from_bytes([WRITTEN] * size, "little"))
    kind = _I64 if size == 8 else _I32
    return _if(builder, looked_up, kind, written, f"ld.global.u{8 * size} $0, [$1];", address)


def _if(builder: Any, condition: Any, kind: Any, other: str, text: str, address: Any) -> Any:
    """What an instruction gives that changes nothing, and is done where a condition holds; elsewhere ``other``."""
    register, name = _REGISTERS[kind]
    first = f"mov.{name} $0, {_ZEROS.get(register, other)};"
    whole = f"{{ .reg .pred rf_p; setp.ne.b32 rf_p, $2, 0; {first} @rf_p {text} }}"
    signature = ir.FunctionType(kind, [_I64, _I32])
    code = ir.InlineAsm(signature, whole, f"=&{register},l,r", side_effect=False)
    return builder.call(code, [address, builder.zext(condition, _I32)], attrs=_PURE)


def _cleared(builder: Any, number: Any, value: Any) -> Any:
    """A value, 0 unless a number is: a choice that the compiler does not move behind what comes of it."""
    register, name = _REGISTERS[value.type]
    text = (
        f"{{ .reg .pred rf_p; setp.ne.b32 rf_p, $2, 0; @rf_p mov.{name} $0, {_ZEROS.get(register, '0')}; }}"
    )
    signature = ir.FunctionType(value.type, [value.type, _I32])
    code = ir.InlineAsm(signature, text, f"={register},0,r", side_effect=False)
    return builder.call(code, [value, number], attrs=_PURE)
