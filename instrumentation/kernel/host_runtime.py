"""What generated host code calls: typed loads and stores, lane storage, shuffles, atomics.

Kernel parameters reach the host function as raw pointers with their extents beside them, so no array object, no
reference count and no negative-index wrap stands between LLVM and the memory. Each access says to which of three
disjoint classes it belongs (``lane``: storage on the host stack for per-thread values, shared and local arrays;
``ro``: parameters only read; ``rw``: parameters written): the launcher refuses overlapping arguments, so LLVM may
vectorise lane loops without run-time alias checks.
"""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.core.types.misc import CPointer, unliteral
from numba.extending import intrinsic

_I64 = ir.IntType(64)
KINDS = ("lane", "ro", "rw")

__all__ = [
    "argument_pointer", "argument_scalar", "atomic_add", "atomic_and", "atomic_cas", "atomic_exch", "atomic_max",
    "atomic_min", "atomic_or", "atomic_sub", "atomic_xor", "call_blocks", "fma", "load_lane", "load_ro", "load_rw",
    "poison", "shuffle_down", "shuffle_index", "shuffle_up", "shuffle_xor", "shuffled", "stack_array", "store_lane",
    "store_rw",
]  # fmt: skip


def mark(builder: Any, instruction: Any, kind: str, kinds: tuple[str, ...] = KINDS) -> None:
    """Attach the alias class of an access, one of disjoint ``kinds``, as scoped no-alias metadata."""
    module = builder.module
    domain = module.add_metadata([ir.MetaDataString(module, "refengine")])
    scopes = {k: module.add_metadata([ir.MetaDataString(module, k), domain]) for k in kinds}
    instruction.set_metadata("alias.scope", module.add_metadata([scopes[kind]]))
    instruction.set_metadata("noalias", module.add_metadata([scopes[k] for k in kinds if k != kind]))


def read_element(builder: Any, place: Any, item: Any, kind: str, kinds: tuple[str, ...] = KINDS) -> Any:
    """Value of type ``item`` at a place of one alias class."""
    value = builder.load(place)
    mark(builder, value, kind, kinds)
    if isinstance(item, types.Boolean):  # a byte in memory, one bit in a register
        return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
    return value


def write_element(
    builder: Any, place: Any, item: Any, value: Any, kind: str, kinds: tuple[str, ...] = KINDS
) -> None:
    """Put a value of type ``item`` at a place of one alias class."""
    if isinstance(item, types.Boolean):
        value = builder.zext(value, ir.IntType(8))
    mark(builder, builder.store(value, place), kind, kinds)


def _element(context: Any, builder: Any, pointer: Any, index: Any, index_type: Any) -> Any:
    offset = context.cast(builder, index, index_type, types.int64)
    return builder.gep(pointer, [offset], inbounds=True)


def want_integer(index: Any) -> None:
    """Refuse an index that is no whole number."""
    if not isinstance(index, types.Integer | types.Boolean):
        raise TypingError(f"an index of type {index}: indices are whole numbers")


def _access(kind: str) -> tuple[Any, Any]:
    @intrinsic
    def load(_typing: Any, pointer: Any, index: Any) -> Any:
        want_integer(index)
        signature = pointer.dtype(pointer, index)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            place = _element(context, builder, values[0], values[1], sig.args[1])
            return read_element(builder, place, sig.return_type, kind)

        return signature, generate

    @intrinsic
    def store(_typing: Any, pointer: Any, index: Any, value: Any) -> Any:
        want_integer(index)
        signature = types.void(pointer, index, value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            item = sig.args[0].dtype
            stored = context.cast(builder, values[2], sig.args[2], item)
            place = _element(context, builder, values[0], values[1], sig.args[1])
            write_element(builder, place, item, stored, kind)
            return context.get_dummy_value()

        return signature, generate

    return load, store


load_lane, store_lane = _access("lane")
load_ro, _ = _access("ro")
load_rw, store_rw = _access("rw")


@intrinsic
def argument_pointer(_typing: Any, slots: Any, index: Any, element: Any) -> Any:
    """Pointer stored in slot ``index`` of the argument block, to elements of a Numba scalar type."""
    result = CPointer(element.instance_type)
    signature = result(slots, types.int64, element)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        slot = builder.gep(values[0], [values[1]])
        return builder.load(builder.bitcast(slot, context.get_value_type(result).as_pointer()))

    return signature, generate


@intrinsic
def argument_scalar(_typing: Any, slots: Any, index: Any, element: Any) -> Any:
    """Scalar stored in the first bytes of slot ``index`` of the argument block."""
    result = element.instance_type
    signature = result(slots, types.int64, element)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        slot = builder.gep(values[0], [values[1]])
        return builder.load(builder.bitcast(slot, context.get_value_type(result).as_pointer()))

    return signature, generate


@intrinsic(prefer_literal=True)
def stack_array(_typing: Any, element: Any, length: Any) -> Any:
    """Uninitialised storage on the stack of the calling function; ``length`` is a literal."""
    if not isinstance(length, types.IntegerLiteral):
        return None
    count = length.literal_value
    result = CPointer(element.instance_type)
    signature = result(element, length)  # the literal: one body per length

    def generate(context: Any, builder: Any, _sig: Any, _values: Any) -> Any:
        item = context.get_data_type(result.dtype)
        with builder.goto_entry_block():
            storage = builder.alloca(ir.ArrayType(item, count))
            storage.align = 64
        return builder.bitcast(storage, item.as_pointer())

    return signature, generate


@intrinsic
def poison(_typing: Any, pointer: Any, length: Any) -> Any:
    """Fill ``length`` elements with 0xFF bytes, which are NaN as floats and -1 as integers."""
    signature = types.void(pointer, types.int64)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        size = context.get_abi_sizeof(context.get_data_type(sig.args[0].dtype))
        nbytes = builder.mul(values[1], ir.Constant(_I64, size))
        cgutils.memset(builder, values[0], nbytes, 0xFF)
        return context.get_dummy_value()

    return signature, generate


def _permutation(kind: str, offset: int) -> list[int]:
    """For each lane of a warp, the lane whose value a shuffle by 0-31 brings (PTX ISA, ``shfl.sync``)."""
    assert 0 <= offset < 32, offset
    if kind == "xor":
        return [lane ^ offset for lane in range(32)]
    if kind == "index":
        return [offset] * 32
    if kind == "up":
        return [lane - offset if lane >= offset else lane for lane in range(32)]
    return [lane + offset if lane + offset < 32 else lane for lane in range(32)]


def _shuffle(kind: str) -> Any:
    @intrinsic(prefer_literal=True)
    def shuffle(_typing: Any, target: Any, source: Any, warp: Any, offset: Any) -> Any:
        if not isinstance(offset, types.IntegerLiteral):
            return None
        if target != source:
            raise TypingError(f"a shuffle from {source} to {target}")
        lanes = _permutation(kind, offset.literal_value)
        signature = types.void(target, source, types.int64, offset)  # the literal: one body per offset

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            item = context.get_data_type(sig.args[0].dtype)
            vector = ir.VectorType(item, 32)
            base = builder.mul(values[2], ir.Constant(_I64, 32))
            ends = [builder.bitcast(builder.gep(p, [base]), vector.as_pointer()) for p in values[:2]]
            size = context.get_abi_sizeof(item)
            loaded = builder.load(ends[1], align=size)
            mark(builder, loaded, "lane")
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 32), lanes)
            moved = builder.shuffle_vector(loaded, loaded, mask)
            mark(builder, builder.store(moved, ends[0], align=size), "lane")
            return context.get_dummy_value()

        return signature, generate

    return shuffle


# Move one warp's values by a literal offset as one vector permutation.
shuffle_xor, shuffle_up, shuffle_down = _shuffle("xor"), _shuffle("up"), _shuffle("down")
shuffle_index = _shuffle("index")


@intrinsic
def shuffled(_typing: Any, value: Any, offset: Any) -> Any:
    """Type of a shuffled value; stands for the shuffle while types are inferred."""
    value = unliteral(value)
    if value not in (types.int32, types.int64, types.float32, types.float64):
        raise TypingError(f"a shuffle of {value}: it moves int32, int64, float32 and float64")
    if not isinstance(offset, types.Integer):
        raise TypingError(f"a shuffle by {offset}: the offset is a whole number")
    signature = value(value, offset)

    def generate(_context: Any, _builder: Any, _sig: Any, values: Any) -> Any:
        return values[0]

    return signature, generate


_ATOMIC_INTEGERS = (types.int32, types.uint32, types.int64, types.uint64)
_ATOMIC_NUMBERS = (*_ATOMIC_INTEGERS, types.float32, types.float64)


def want_atomic(operation: str, pointer: Any) -> None:
    """Refuse what numba.cuda has no atomic for."""
    wanted = _ATOMIC_NUMBERS if operation in ("add", "sub", "min", "max") else _ATOMIC_INTEGERS
    if pointer.dtype not in wanted:
        raise TypingError(f"atomic {operation} on {pointer.dtype}: it works on {', '.join(map(str, wanted))}")


def atomic_update(builder: Any, operation: str, item: Any, place: Any, operand: Any) -> Any:
    """Change the value of type ``item`` at a place; what was there before."""
    if isinstance(item, types.Float) and operation in ("add", "sub", "min", "max"):
        operation = "f" + operation
    elif operation in ("min", "max") and not item.signed:
        operation = "u" + operation
    return builder.atomic_rmw(operation, place, operand, "monotonic")


def atomic_exchange(builder: Any, place: Any, old: Any, new: Any) -> Any:
    """Put ``new`` where ``old`` is; what was there before."""
    return builder.extract_value(builder.cmpxchg(place, old, new, "monotonic", "monotonic"), 0)


def _atomic(operation: str) -> Any:
    @intrinsic
    def atomic(_typing: Any, pointer: Any, index: Any, value: Any) -> Any:
        want_integer(index)
        want_atomic(operation, pointer)
        signature = pointer.dtype(pointer, index, value)

        def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            item = sig.args[0].dtype
            place = _element(context, builder, values[0], values[1], sig.args[1])
            operand = context.cast(builder, values[2], sig.args[2], item)
            return atomic_update(builder, operation, item, place, operand)

        return signature, generate

    return atomic


atomic_add, atomic_sub = _atomic("add"), _atomic("sub")
atomic_min, atomic_max = _atomic("min"), _atomic("max")
atomic_and, atomic_or, atomic_xor = _atomic("and"), _atomic("or"), _atomic("xor")
atomic_exch = _atomic("xchg")


@intrinsic
def atomic_cas(_typing: Any, pointer: Any, index: Any, expected: Any, value: Any) -> Any:
    """Compare and swap; returns what was there before."""
    want_integer(index)
    want_atomic("cas", pointer)
    signature = pointer.dtype(pointer, index, expected, value)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        item = sig.args[0].dtype
        place = _element(context, builder, values[0], values[1], sig.args[1])
        old = context.cast(builder, values[2], sig.args[2], item)
        new = context.cast(builder, values[3], sig.args[3], item)
        return atomic_exchange(builder, place, old, new)

    return signature, generate


@intrinsic
def fma(_typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding, in the widest type of the three."""
    result = types.float32 if all(t == types.float32 for t in (a, b, c)) else types.float64
    signature = result(result, result, result)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        kind = values[0].type
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [kind, kind, kind]),
            f"llvm.fma.{'f32' if kind == ir.FloatType() else 'f64'}",
        )
        return builder.call(function, values)

    return signature, generate


@intrinsic
def call_blocks(_typing: Any, entry: Any, slots: Any, begin: Any, end: Any) -> Any:
    """Call a compiled kernel's entry point for blocks ``begin`` to ``end`` (exclusive)."""
    signature = types.void(types.int64, types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        pointer = _I64.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I64, _I64])
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, [builder.inttoptr(values[1], pointer), values[2], values[3]])
        return context.get_dummy_value()

    return signature, generate
