"""Operations that a kernel needs and Numba lacks on one side: each is a pair, for CUDA and for the host.

A kernel calls the object itself (``f16_to_f32(bits)``); each lowering puts its own half in its place. Called from
plain Python, the object computes the same value with NumPy, so that twins can use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic as host_intrinsic

Emit = Callable[[Any, list[Any]], Any]


class Intrinsic:
    """One operation with a host half, a CUDA half and a NumPy meaning."""

    def __init__(self, name: str, result: Any, arguments: tuple[Any, ...], emit: Emit, meaning: Any) -> None:
        self.name = name
        self.host = self._build(host_intrinsic, name, result, arguments, emit)
        self._cuda: Any = None
        self._parts = (name, result, arguments, emit)
        self._meaning = meaning

    @property
    def cuda(self) -> Any:
        """The CUDA half, built on first use: importing numba.cuda's extension layer takes time."""
        if self._cuda is None:
            from numba.cuda.extending import intrinsic as cuda_intrinsic  # noqa: PLC0415

            self._cuda = self._build(cuda_intrinsic, *self._parts)
        return self._cuda

    def __call__(self, *arguments: Any) -> Any:
        """Value by NumPy, of numbers or arrays."""
        return self._meaning(*arguments)

    def __repr__(self) -> str:
        return f"intrinsic {self.name}"

    @staticmethod
    def _build(make: Any, name: str, result: Any, arguments: tuple[Any, ...], emit: Emit) -> Any:
        names = ", ".join(f"a{i}" for i in range(len(arguments)))

        def typed(*given: Any) -> Any:
            wanted = tuple(g if a is None else a for a, g in zip(arguments, given, strict=True))
            signature = (result if result is not None else wanted[0])(*wanted)

            def generate(_context: Any, builder: Any, _signature: Any, values: list[Any]) -> Any:
                return emit(builder, values)

            return signature, generate

        # Numba reads an intrinsic's arity from its signature, so the wrapper is made with named parameters.
        namespace: dict[str, Any] = {"typed": typed}
        exec(f"def {name}(typing_context, {names}):\n    return typed({names})\n", namespace)  # noqa: S102
        return make(namespace[name])


_F16, _F32, _I16, _I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)


def _widen(builder: Any, value: Any) -> Any:
    return builder.zext(value, _I32) if value.type.width < 32 else builder.trunc(value, _I32)


def _bits(builder: Any, values: list[Any]) -> Any:
    value, shift, mask = values
    value = _widen(builder, value) if value.type.width != 32 else value
    return builder.and_(builder.lshr(value, shift), mask)


f16_to_f32 = Intrinsic(
    "f16_to_f32",
    types.float32,
    (types.uint16,),
    lambda b, v: b.fpext(b.bitcast(v[0], _F16), _F32),
    lambda v: np.asarray(v, np.uint16).view(np.float16).astype(np.float32),
)
f32_to_f16 = Intrinsic(
    "f32_to_f16",
    types.uint16,
    (types.float32,),
    lambda b, v: b.bitcast(b.fptrunc(v[0], _F16), _I16),
    lambda v: np.asarray(v, np.float32).astype(np.float16).view(np.uint16),
)
bf16_to_f32 = Intrinsic(
    "bf16_to_f32",
    types.float32,
    (types.uint16,),
    lambda b, v: b.bitcast(b.shl(b.zext(v[0], _I32), ir.Constant(_I32, 16)), _F32),
    lambda v: (np.asarray(v, np.uint16).astype(np.uint32) << 16).view(np.float32),
)
f32_bits = Intrinsic(
    "f32_bits",
    types.int32,
    (types.float32,),
    lambda b, v: b.bitcast(v[0], _I32),
    lambda v: np.asarray(v, np.float32).view(np.int32),
)
f32_from_bits = Intrinsic(
    "f32_from_bits",
    types.float32,
    (types.int32,),
    lambda b, v: b.bitcast(v[0], _F32),
    lambda v: np.asarray(v, np.int32).view(np.float32),
)
# Numba widens every integer operation to 64 bits; this one stays in 32, which doubles the lanes of a vector.
bit_field = Intrinsic(
    "bit_field",
    types.int32,
    (None, types.int32, types.int32),
    _bits,
    lambda value, shift, mask: (np.asarray(value).astype(np.int64) >> shift) & mask,
)
