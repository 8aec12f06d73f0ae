"""What generated CUDA code calls where every access is checked: ``checked.runtime`` for a GPU.

An access branches as little as it can, and leaves a mark of what a report would say (``checked.cuda_ptx``). To the
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

from instrumentation.kernel.checked import runtime
from instrumentation.kernel.checked.cuda_access import GENERIC, GLOBAL, KINDS, SHARED, Access, Address
from instrumentation.kernel.checked.cuda_states import (
    all_within,
    all_written,
    are_written,
    below,
    common_states,
    own_state,
)
from instrumentation.kernel.checked.runtime import NEVER, WRITTEN
from instrumentation.kernel.host_runtime import mark, read_element, want_atomic, want_integer, write_element

_I8, _I64 = ir.IntType(8), ir.IntType(64)


called = intrinsic(runtime.called._defn)  # noqa: SLF001 - typed and written as on the host
unwritten_allowed = intrinsic(runtime.unwritten_allowed._defn)  # noqa: SLF001


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
    if name.startswith(("try_", "sure_", "load_", "store_")) or name.endswith("_array")
} | {
    each.__name__: each
    for each in (
        all_within, all_written, are_written, below, called, common_states, forget, own_state, unwritten_allowed,
    )
}  # fmt: skip
