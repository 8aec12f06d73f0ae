"""What generated CUDA code calls to look at many indices or states at a time: see ``checked.cuda``."""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.cuda.extending import _intrinsic, intrinsic

from instrumentation.kernel.checked.cuda_access import GLOBAL, KINDS, SHARED, Address
from instrumentation.kernel.checked.runtime import NEVER, WRITTEN
from instrumentation.kernel.host_runtime import mark, want_integer

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
#: states that are looked at together
_WORD = 8


@intrinsic
def all_within(_typing: Any, indices: Any, extents: Any) -> Any:
    """Whether each index is one of its axis."""
    for index in indices:
        want_integer(index)
    signature = types.boolean(indices, extents)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        result = cgutils.true_bit
        for i, kinds in enumerate(zip(sig.args[0], sig.args[1], strict=True)):
            index, extent = (
                context.cast(builder, builder.extract_value(group, i), kind, types.int64)
                for group, kind in zip(values, kinds, strict=True)
            )
            result = builder.and_(result, builder.icmp_unsigned("<", index, extent))
        return result

    return signature, generate


def _written_word(builder: Any, words: Any, at: Any, unread: Any) -> Any:
    """States of eight elements; those that are not read count as written."""
    word = builder.load(builder.gep(words, [at], inbounds=True), align=_WORD)
    mark(builder, word, "shadow", KINDS)
    return builder.or_(word, unread)


@_intrinsic(target="cuda", prefer_literal=True)
def all_written(_typing: Any, shadow: Any, low: Any, high: Any, most: Any) -> Any:
    """Whether elements ``low`` to ``high`` of a shared array are written; ``most``: words of states, 0 if unknown."""
    if not isinstance(most, types.IntegerLiteral) or not isinstance(shadow, Address):
        return None
    signature = types.boolean(shadow, types.int64, types.int64, most)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        words = builder.bitcast(values[0], _I64.as_pointer(SHARED))
        low, high = values[1:3]
        three, seven, one = (ir.Constant(_I64, n) for n in (3, 7, 1))
        first, last = builder.lshr(low, three), builder.lshr(high, three)
        ones, none = ir.Constant(_I64, -1), ir.Constant(_I64, 0)
        bit = builder.shl(builder.and_(low, seven), three)
        before = builder.sub(builder.shl(one, bit), one)
        bit = builder.or_(builder.shl(builder.and_(high, seven), three), seven)
        behind = builder.shl(builder.shl(ones, bit), one)
        result = cgutils.alloca_once_value(builder, ones)

        def look(at: Any, unread: Any) -> None:
            word = _written_word(builder, words, at, unread)
            builder.store(builder.and_(builder.load(result), word), result)

        n_words = most.literal_value
        for i in range(n_words):
            at = builder.add(first, ir.Constant(_I64, i))
            unread = before if i == 0 else none
            if i >= n_words - 2:  # one of these is the last, by where the first lies
                beyond = builder.icmp_signed(">", at, last)
                is_last = builder.icmp_signed("==", at, last)
                unread = builder.or_(unread, builder.select(is_last, behind, none))
                unread = builder.select(beyond, ones, unread)
                at = builder.select(beyond, last, at)
            look(at, unread)
        if n_words == 0:
            count = builder.add(builder.sub(last, first), one)
            with cgutils.for_range(builder, count, intp=_I64) as loop:
                at = builder.add(first, loop.index)
                unread = builder.select(builder.icmp_signed("==", at, first), before, none)
                is_last = builder.icmp_signed("==", at, last)
                look(at, builder.or_(unread, builder.select(is_last, behind, none)))
        wanted = ir.Constant(_I64, int.from_bytes([WRITTEN] * _WORD, "little"))
        return builder.icmp_unsigned("==", builder.and_(builder.load(result), wanted), wanted)

    return signature, generate


@_intrinsic(target="cuda", prefer_literal=True)
def below(_typing: Any, value: Any, extent: Any) -> Any:
    """A number that is below a power of two, said so that the compiler knows."""
    if not isinstance(extent, types.IntegerLiteral):
        return None
    signature = value(value, extent)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.and_(values[0], ir.Constant(values[0].type, extent.literal_value - 1))

    return signature, generate


@intrinsic
def own_state(_typing: Any, bits: Any, number: Any) -> Any:
    """State of an own element, of which a bit says whether it is written."""
    want_integer(number)
    signature = types.uint8(types.uint64, number)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at = context.cast(builder, values[1], sig.args[1], types.uint64)
        bit = builder.and_(builder.lshr(values[0], at), ir.Constant(_I64, 1))
        written, never = (ir.Constant(_I8, state) for state in (WRITTEN, NEVER))
        return builder.select(builder.trunc(bit, ir.IntType(1)), written, never)

    return signature, generate


def _elements_state(pointer: Any) -> tuple[Any, int]:
    """Type of an element's state as a word, and the state of one that is written, in 32 bits."""
    size = pointer.dtype.bitwidth // 8 if hasattr(pointer.dtype, "bitwidth") else 1
    return ir.IntType(8 * size), int.from_bytes([WRITTEN] * min(size, 4), "little")


@intrinsic
def common_states(_typing: Any, states: Any, pointer: Any, number: Any, shadow: Any) -> Any:
    """Bits that states have in common, in 32 bits, and with them that of an element of a parameter.

    Of the states there are, several have all bits of "written" in common only if all are that.
    """
    want_integer(number)
    signature = types.int32(types.int32, pointer, number, types.int64)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind, _ = _elements_state(sig.args[1])
        first = builder.add(builder.ptrtoint(values[1], _I64), values[3])
        at = context.cast(builder, values[2], sig.args[2], types.int64)
        size = kind.width // 8
        place = builder.gep(builder.inttoptr(first, kind.as_pointer(GLOBAL)), [at])
        state = builder.load(place, align=size)
        mark(builder, state, "shadow", KINDS)
        if kind.width > _I32.width:
            low = builder.trunc(state, _I32)
            state = builder.and_(low, builder.trunc(builder.lshr(state, ir.Constant(kind, 32)), _I32))
        elif kind.width < _I32.width:
            state = builder.zext(state, _I32)
        return builder.and_(values[0], state)

    return signature, generate


@intrinsic
def are_written(_typing: Any, states: Any, pointer: Any) -> Any:
    """Whether what states of an array's elements have in common is that they are written."""
    signature = types.boolean(types.int32, pointer)

    def generate(_context: Any, builder: Any, sig: Any, values: Any) -> Any:
        wanted = ir.Constant(_I32, _elements_state(sig.args[1])[1])
        return builder.icmp_unsigned("==", builder.and_(values[0], wanted), wanted)

    return signature, generate
