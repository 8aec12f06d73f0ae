"""Lowering ``cuda``: the kernel's own function, handed to ``numba.cuda`` unchanged.

Only what its names stand for changes: device functions and intrinsics become their CUDA halves, and constants are
those that the parser saw.
"""

from __future__ import annotations

import threading
import types as python_types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from instrumentation.errors import DeviceError
from instrumentation.kernel.host_pipeline import no_collections
from instrumentation.kernel.intrinsics import Intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instrumentation.kernel.parse import ParsedFunction

_asking = threading.Lock()


def cuda_function(
    function: Any, parsed: ParsedFunction, compute_capability: tuple[int, int] | None = None
) -> Any:
    """Copy of a Python function whose captured device functions and intrinsics are their CUDA halves."""

    def half(value: Any) -> Any:
        if isinstance(value, Intrinsic):
            return value.cuda
        if hasattr(value, "parsed") and hasattr(value, "cuda_device"):
            return value.cuda_device(compute_capability)
        if isinstance(value, python_types.ModuleType) and _holds_pairs(value):
            return _Halves(value, half)
        return value

    code = function.__code__
    names = {name: half(parsed.captured[name]) for name in code.co_names if name in parsed.captured}
    cells = tuple(python_types.CellType(half(parsed.captured.get(name))) for name in code.co_freevars)
    return python_types.FunctionType(code, {**function.__globals__, **names}, function.__name__, None, cells)


def _holds_pairs(module: python_types.ModuleType) -> bool:
    return any(isinstance(v, Intrinsic) or hasattr(v, "cuda_device") for v in vars(module).values())


class _Halves(python_types.ModuleType):
    """A module as CUDA sees it: ``intrinsics.f16_to_f32`` is the CUDA half."""

    def __init__(self, module: python_types.ModuleType, half: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__["_half"] = half

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["_half"](getattr(self.__dict__["_module"], name))


def cuda_signature(signature: dict[str, Any]) -> Any:
    """``void(...)`` signature of a kernel's parameters."""
    from numba.core import types  # noqa: PLC0415

    return types.void(*signature.values())


@contextmanager
def _no_wraparound() -> Iterator[None]:
    """Let Numba take a negative index for what it is, an address before the array, as the host lowering does.

    Numba makes Python's meaning of it, an element from the end: three instructions at each access, and a
    wrong index that stays unseen since it stays inside the array.
    """
    from numba.cuda.np import arrayobj  # noqa: PLC0415

    def as_it_is(context: Any, builder: Any, kind: Any, index: Any, _size: Any) -> Any:
        from numba.core import types  # noqa: PLC0415

        return context.cast(builder, index, kind, types.intp if kind.signed else types.uintp)

    usual = arrayobj.fix_integer_index
    arrayobj.fix_integer_index = as_it_is
    try:
        yield
    finally:
        arrayobj.fix_integer_index = usual


def compile_ptx(
    function: Any, parsed: ParsedFunction, signature: Any, compute_capability: tuple[int, int]
) -> str:
    """PTX of a kernel, without a GPU: needs the toolkit wheels of the ``cu12`` or ``cu13`` extra.

    Raises ``DeviceError`` when the compiler cannot be loaded or refuses the kernel.
    """
    return compile_function(
        parsed.name,
        lambda: cuda_function(function, parsed, compute_capability),
        signature,
        compute_capability,
    )


def compile_function(
    name: str, make: Callable[[], Any], signature: Any, compute_capability: tuple[int, int]
) -> str:
    """PTX of the Python function that ``make`` returns; as ``compile_ptx``."""
    from numba import cuda  # noqa: PLC0415
    from numba.cuda import dispatcher  # noqa: PLC0415

    # A device function asks the current device which code it shall become; without a GPU we answer.
    stand_in = python_types.SimpleNamespace(compute_capability=compute_capability)
    with _asking, _no_wraparound(), no_collections():
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: stand_in
        try:
            text, _ = cuda.compile_ptx(make(), signature, cc=compute_capability)
        except Exception as error:
            raise DeviceError(
                f"{name}: no PTX for compute capability {compute_capability[0]}.{compute_capability[1]}: "
                f"{type(error).__name__}: {error}. The toolkit comes with the extras cu12 and cu13"
            ) from error
        finally:
            dispatcher.get_current_device = asked
    return str(text)
