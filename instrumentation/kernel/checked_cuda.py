"""What generated CUDA code calls where every access is checked: ``checked_runtime`` for a GPU.

An access branches as little as it can, and leaves a mark of what a report would say (``checked_cuda_ptx``). To the
compiler it changes no memory of the kernel's, so that loads on both sides of it are still one. Pointers have address
spaces: parameters lie in global memory.

Imported when a checked kernel is compiled for the first time: ``numba.cuda``'s extension layer takes time.
"""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.cuda import nvvmutils
from numba.cuda.extending import _intrinsic, intrinsic

from instrumentation.kernel import checked_runtime
from instrumentation.kernel.checked_cuda_access import GENERIC, GLOBAL, KINDS, SHARED, Access, Address
from instrumentation.kernel.checked_runtime import NEVER, WRITTEN
from instrumentation.kernel.host_runtime import mark, read_element, want_atomic, want_integer, write_element

_I8, _I64 = ir.IntType(8), ir.IntType(64)
#: states that are looked at together
_WORD = 8


called = intrinsic(checked_runtime.called._defn)  # noqa: SLF001 - typed and written as on the host
unwritten_allowed = intrinsic(checked_runtime.unwritten_allowed._defn)  # noqa: SLF001


@intrinsic
def global_array(_typing: Any, address: Any, element: Any) -> Any:
    """An array of a parameter, from its address."""
    result = Address(element.instance_type, GLOBAL)
    signature = result(types.int64, element)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(result))

    return signature, generate


@_intrinsic(target="cuda", prefer_literal=True)
def shared_array(_typing: Any, element: Any, length: Any) -> Any:
    """Storage that a block's threads share; ``length`` is a literal."""
    if not isinstance(length, types.IntegerLiteral):
        return None
    result = Address(element.instance_type, SHARED)
    signature = result(element, length)

    def generate(context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        item = context.get_data_type(result.dtype)
        kind = ir.ArrayType(item, length.literal_value)
        module, number = builder.module, 0
        # NVVM takes no dots in names, which are what makes names differ elsewhere.
        while f"refengine_shared_{number}" in module.globals:
            number += 1
        storage = ir.GlobalVariable(module, kind, f"refengine_shared_{number}", SHARED)
        storage.align = 16
        storage.initializer = ir.Constant(kind, ir.Undefined)
        return builder.bitcast(storage, item.as_pointer(SHARED))

    return signature, generate


@_intrinsic(target="cuda", prefer_literal=True)
def local_array(_typing: Any, element: Any, length: Any) -> Any:
    """Storage of one thread; ``length`` is a literal."""
    if not isinstance(length, types.IntegerLiteral):
        return None
    result = Address(element.instance_type, GENERIC)
    signature = result(element, length)

    def generate(context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        item = context.get_data_type(result.dtype)
        storage = cgutils.alloca_once(builder, ir.ArrayType(item, length.literal_value))
        return builder.bitcast(storage, item.as_pointer())

    return signature, generate


@intrinsic
def forget(_typing: Any, shadow: Any, index: Any) -> Any:
    """Say of one element of a shadow that nothing wrote it."""
    signature = types.void(shadow, types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        place = builder.gep(values[0], [values[1]], inbounds=True)
        mark(builder, builder.store(ir.Constant(_I8, NEVER), place), "shadow", KINDS)
        return context.get_dummy_value()

    return signature, generate


def _terms(pointer: Any, indices: Any, extents: Any, shadow: Any, where: Any) -> tuple[Any, ...]:
    """Types of what every checked access takes."""
    for index in indices:
        want_integer(index)
    if not isinstance(shadow, Address | types.Integer):
        raise TypingError(f"a shadow of type {shadow}")
    return (pointer, indices, extents, shadow, types.int64, where)


def _checked(kind: str, *, sure: bool = False) -> tuple[Any, Any]:
    @intrinsic
    def load(
        _typing: Any, pointer: Any, indices: Any, extents: Any, shadow: Any, site: Any, where: Any
    ) -> Any:
        signature = pointer.dtype(*_terms(pointer, indices, extents, shadow, where))

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = Access(context, builder, kind, sig, values, sure=sure)
            if kind == "ro":
                return access.load_constant()
            nothing = ir.Constant(context.get_value_type(access.item), 0)
            return access.make(
                lambda place: read_element(builder, place, access.item, kind, KINDS),
                reads=True,
                writes=False,
                nothing=nothing,
            )

        return signature, generate

    @intrinsic
    def store(
        _typing: Any,
        pointer: Any,
        indices: Any,
        extents: Any,
        shadow: Any,
        site: Any,
        where: Any,
        value: Any,
    ) -> Any:
        signature = types.void(*_terms(pointer, indices, extents, shadow, where), value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = Access(context, builder, kind, sig, values, sure=sure)
            stored = context.cast(builder, values[6], sig.args[6], access.item)
            return access.make(
                lambda place: write_element(builder, place, access.item, stored, kind, KINDS),
                reads=False,
                writes=True,
            )

        return signature, generate

    return load, store


try_load_lane, try_store_lane = _checked("lane")
try_load_ro, _ = _checked("ro")
try_load_rw, try_store_rw = _checked("rw")
sure_load_lane, sure_store_lane = _checked("lane", sure=True)
sure_load_ro, _ = _checked("ro", sure=True)
sure_load_rw, sure_store_rw = _checked("rw", sure=True)


@intrinsic
def load_known(_typing: Any, pointer: Any, number: Any) -> Any:
    """An element of a parameter that is known to be there, and written."""
    want_integer(number)
    signature = pointer.dtype(pointer, number)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        at = context.cast(builder, values[1], sig.args[1], types.int64)
        return read_element(builder, builder.gep(values[0], [at]), sig.return_type, "ro", KINDS)

    return signature, generate


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


@intrinsic
def load_own(_typing: Any, pointer: Any, index: Any) -> Any:
    """An element of a thread's own array that is known to be there, and written."""
    signature = pointer.dtype(pointer, types.int64)

    def generate(_context: Any, builder: Any, sig: Any, values: Any) -> Any:
        place = builder.gep(values[0], [values[1]], inbounds=True)
        return read_element(builder, place, sig.return_type, "lane", KINDS)

    return signature, generate


@intrinsic
def store_own(_typing: Any, pointer: Any, index: Any, shadow: Any, value: Any) -> Any:
    """Write an element of a thread's own array that is known to be there; ``shadow`` is 0 if it was written before."""
    signature = types.void(pointer, types.int64, shadow, value)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        item = sig.args[0].dtype
        stored = context.cast(builder, values[3], sig.args[3], item)
        place = builder.gep(values[0], [values[1]], inbounds=True)
        write_element(builder, place, item, stored, "lane", KINDS)
        if isinstance(sig.args[2], Address):
            state = builder.gep(values[2], [values[1]], inbounds=True)
            mark(builder, builder.store(ir.Constant(_I8, WRITTEN), state), "shadow", KINDS)
        return context.get_dummy_value()

    return signature, generate


def _kind_of(pointer: Any) -> str:
    return "rw" if pointer.space == GLOBAL else "lane"


def _atomic_update(builder: Any, operation: str, item: Any, place: Any, operand: Any) -> Any:
    """Change the value at a place as numba.cuda does; what was there before."""
    if isinstance(item, types.Float):
        # Functions of Numba's: they take pointers without an address space.
        declare = getattr(nvvmutils, f"declare_atomic_{operation}_float{item.bitwidth}")
        generic = builder.addrspacecast(place, place.type.pointee.as_pointer(), "generic")
        return builder.call(declare(builder.module), [generic, operand])
    if operation in ("min", "max") and not item.signed:
        operation = "u" + operation
    return builder.atomic_rmw(operation, place, operand, "monotonic")


def _atomic(operation: str) -> Any:
    @intrinsic
    def atomic(
        _typing: Any,
        pointer: Any,
        indices: Any,
        extents: Any,
        shadow: Any,
        site: Any,
        where: Any,
        value: Any,
    ) -> Any:
        want_atomic(operation, pointer)
        signature = pointer.dtype(*_terms(pointer, indices, extents, shadow, where), value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            access = Access(context, builder, _kind_of(sig.args[0]), sig, values)
            operand = context.cast(builder, values[6], sig.args[6], access.item)
            # An exchange is how a first value is put in place: it may find none.
            return access.make(
                lambda place: _atomic_update(builder, operation, access.item, place, operand),
                reads=operation != "xchg",
                writes=True,
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
        access = Access(context, builder, _kind_of(sig.args[0]), sig, values)
        old, new = (context.cast(builder, values[i], sig.args[i], access.item) for i in (6, 7))
        return access.make(
            lambda place: builder.extract_value(
                builder.cmpxchg(place, old, new, "monotonic", "monotonic"), 0
            ),
            reads=True,
            writes=True,
            nothing=ir.Constant(old.type, 0),
        )

    return signature, generate


#: names that generated code may use
RUNTIME: dict[str, Any] = {
    name: value
    for name, value in vars().items()
    if name.startswith(("try_", "sure_", "load_", "store_", "all_"))
    or name in ("below", "called", "unwritten_allowed", "forget", "own_state")
    or name in ("global_array", "shared_array", "local_array")
}
