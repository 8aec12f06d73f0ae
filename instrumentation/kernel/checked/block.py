"""What generated code calls where a block's threads are checked against each other: its races, and its promises."""

# ruff: noqa: ARG001 - Numba reads the number of an intrinsic's arguments from its signature
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic

from instrumentation.kernel.checked.races import CLOCK, RECORD_WORDS, SHARED_BYTES
from instrumentation.kernel.checked.report import DIVERGED, key_of, recorder

_I64 = ir.IntType(64)

__all__ = ["begin_races", "diverged", "end_races", "shared_records"]


def _word(value: int) -> Any:
    return ir.Constant(_I64, value)


def _native(name: str, n_words: int) -> Any:
    """A function of ``checked.races``, which takes words and gives one."""

    def call(builder: Any, values: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64] * n_words)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

    return call


touch = _native("refengine_touch", 10)
_begin, _end = _native("refengine_begin", 1), _native("refengine_end", 2)


@intrinsic
def begin_races(_typing: Any, tables: Any) -> Any:
    """Address of a table for this call, and the time that it is."""
    result = UniTuple(types.int64, 2)
    signature = result(types.int64)

    def generate(context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        table = _begin(builder, values)
        time = cgutils.alloca_once_value(builder, _word(0))
        with builder.if_then(builder.icmp_unsigned("!=", table, _word(0))):
            words = builder.inttoptr(table, _I64.as_pointer())
            builder.store(builder.load(builder.gep(words, [_word(CLOCK)])), time)
        return context.make_tuple(builder, result, [table, builder.load(time)])

    return signature, generate


@intrinsic
def end_races(_typing: Any, table: Any, now: Any) -> Any:
    """Give a table back."""
    signature = types.int64(types.int64, types.int64)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        return _end(builder, values)

    return signature, generate


@intrinsic
def shared_records(_typing: Any, table: Any, first: Any) -> Any:
    """Address of the records of a shared array, whose first is that of a number; 0 where there is no table."""
    signature = types.int64(types.int64, types.int64)

    def generate(_context: Any, builder: Any, _sig: Any, values: Any) -> Any:
        begin = builder.add(builder.mul(values[1], _word(8 * RECORD_WORDS)), _word(SHARED_BYTES))
        none = builder.icmp_unsigned("==", values[0], _word(0))
        return builder.select(none, _word(0), builder.add(values[0], begin))

    return signature, generate


@intrinsic
def diverged(
    _typing: Any,
    block: Any,
    other: Any,
    first: Any,
    last: Any,
    count: Any,
    threads: Any,
    site: Any,
    where: Any,
) -> Any:
    """Report that ``count`` threads have another value than the block: ``first``, which has ``other``, to ``last``."""
    numbers = (types.int64,) * 5
    signature = types.void(block, other, *numbers, where)

    def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        floats = isinstance(sig.args[0], types.Float) or isinstance(sig.args[1], types.Float)
        wanted = types.float64 if floats else types.int64
        seen = [context.cast(builder, values[i], sig.args[i], wanted) for i in (0, 1)]
        if floats:
            seen = [builder.bitcast(value, _I64) for value in seen]
        report, chain, number = (builder.extract_value(values[7], i) for i in range(3))
        places = [*seen, values[4], values[3], values[5], _word(int(floats)), _word(0), _word(0)]
        words = [key_of(builder, chain, values[6], DIVERGED), number, values[2], *places, *[_word(0)] * 3]
        target = builder.inttoptr(report, _I64.as_pointer())
        builder.call(recorder(builder.module), [target, *words])
        return context.get_dummy_value()

    return signature, generate
