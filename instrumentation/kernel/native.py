"""Words of memory by address, in native code: what Numba's own language has no access to."""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_I64 = ir.IntType(64)


def _place(builder: Any, values: Any) -> Any:
    return builder.gep(builder.inttoptr(values[0], _I64.as_pointer()), [values[1]])


@intrinsic
def get_word(_typing: Any, address: Any, index: Any) -> Any:
    """Word ``index`` of those at an address."""
    signature = types.int64(types.int64, types.int64)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return builder.load(_place(builder, values))

    return signature, generate


@intrinsic
def put_word(_typing: Any, address: Any, index: Any, value: Any) -> Any:
    """Change a word."""
    signature = types.void(types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        builder.store(values[2], _place(builder, values))
        return context.get_dummy_value()

    return signature, generate


def _ordered(operation: str) -> Any:
    @intrinsic
    def access(_typing: Any, address: Any, index: Any, value: Any) -> Any:
        signature = types.int64(types.int64, types.int64, types.int64)

        def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
            place = _place(builder, values)
            if operation == "load":
                return builder.load_atomic(place, "seq_cst", 8)
            if operation == "store":
                builder.store_atomic(values[2], place, "seq_cst", 8)
                return values[2]
            return builder.atomic_rmw("add", place, values[2], "seq_cst")

        return signature, generate

    return access


# Sequentially consistent accesses to one word, by address and index.
load_word, store_word, add_word = _ordered("load"), _ordered("store"), _ordered("add")


@intrinsic
def swap_word(_typing: Any, address: Any, index: Any, expected: Any, value: Any) -> Any:
    """Replace a word that holds ``expected``; returns what it held."""
    signature = types.int64(types.int64, types.int64, types.int64, types.int64)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        place = _place(builder, values)
        return builder.extract_value(builder.cmpxchg(place, values[2], values[3], "seq_cst", "seq_cst"), 0)

    return signature, generate
