"""What is checked of a launch before it runs, the same on every device."""

from __future__ import annotations

import functools
import itertools
import operator
import struct
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numba.core import types as nb

from instrumentation.errors import BadInputError
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from instrumentation.kernel import Kernel

Argument: TypeAlias = View | int | float
Grid: TypeAlias = int | tuple[int, ...]
#: CUDA's limits for blocks along x, and along y or z
MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65535
_numbers = itertools.count(1)


class Work(Protocol):
    """What a stream queues and a finding can blame: a launch of a kernel, or a call of a library."""

    @property
    def name(self) -> str:
        """Of the kernel, or of the library's function."""
        ...

    @property
    def number(self) -> int:
        """Among all launches and calls since the process started."""
        ...

    @property
    def views(self) -> dict[str, View]:
        """Array arguments by parameter."""
        ...

    @property
    def writes(self) -> frozenset[str]:
        """Parameters whose arrays are written."""
        ...

    @property
    def contents(self) -> Hashable:
        """What two have in common that would do the same to the same memory."""
        ...


def next_number() -> int:
    """Number of a launch or call that is made now."""
    return next(_numbers)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and arguments, checked: types, ranks and overlap."""

    kernel: Kernel
    #: blocks along x, y, z
    grid: tuple[int, int, int]
    arguments: dict[str, Argument]
    #: number of this launch since the process started
    number: int

    @property
    def name(self) -> str:
        """Of the kernel."""
        return self.kernel.name

    @property
    def writes(self) -> frozenset[str]:
        """Parameters whose arrays the kernel writes."""
        return self.kernel.writes

    @property
    def contents(self) -> Hashable:
        """See ``Work``."""
        return (
            self.kernel.name,
            id(self.kernel),
            self.grid,
            *(contents_of(value) for value in self.arguments.values()),
        )

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return prod(self.grid)

    @property
    def views(self) -> dict[str, View]:
        """Array arguments by parameter."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, View)}


def bind(kernel: Kernel, grid: Grid, arguments: Mapping[str, Argument]) -> Launch:
    """Check a launch's grid and arguments. Raises ``BadInputError`` naming the kernel and the argument."""
    extents = _checked_grid(kernel, grid)
    missing = sorted(set(kernel.signature) - set(arguments))
    unknown = sorted(set(arguments) - set(kernel.signature))
    if missing or unknown:
        raise BadInputError(
            f"{kernel.name}: missing arguments: {', '.join(missing) or 'none'}; unknown arguments: "
            f"{', '.join(unknown) or 'none'}; it takes {', '.join(kernel.signature)}"
        )
    for name, kind in kernel.signature.items():
        if isinstance(kind, nb.Array):
            _check_array(kernel, name, kind, arguments[name])
        else:
            _check_number(kernel, name, kind, arguments[name])
    ordered = {name: arguments[name] for name in kernel.signature}
    launch = Launch(kernel, extents, ordered, next_number())
    refuse_overlap(launch)
    return launch


@functools.cache
def dtype_of(kind: Any) -> np.dtype[np.generic]:
    """NumPy's type of a number's Numba type."""
    return np.dtype(str(kind))


def number_bits(kind: Any, value: float) -> int:
    """A number's bits as its parameter type has them, in the low bytes of a signed 64-bit integer."""
    if isinstance(kind, nb.Float):
        packed = struct.pack("<f" if kind.bitwidth == 32 else "<d", value)
        return int.from_bytes(packed.ljust(8, b"\0"), "little", signed=True)
    width: int = getattr(kind, "bitwidth", 64)
    bits = int(value) & ((1 << width) - 1)
    return bits - (1 << 64) if bits >> 63 else bits


def _checked_grid(kernel: Kernel, grid: Grid) -> tuple[int, int, int]:
    try:
        given = tuple(operator.index(n) for n in (grid if isinstance(grid, tuple | list) else (grid,)))
    except TypeError:
        given = ()
    x, y, z = (*given, 1, 1)[:3] if 1 <= len(given) <= 3 else (0, 0, 0)
    if not (1 <= x <= MAX_GRID_X and 1 <= y <= MAX_GRID_YZ and 1 <= z <= MAX_GRID_YZ):
        raise BadInputError(
            f"{kernel.name}: grid {grid!r}; give 1 to 3 whole numbers of blocks, 1 to {MAX_GRID_X} along x and "
            f"1 to {MAX_GRID_YZ} along y and z"
        )
    return x, y, z


def _check_array(kernel: Kernel, name: str, kind: Any, value: Argument) -> None:
    wanted = f"a view of {kind.dtype} with {kind.ndim} axes"
    if not isinstance(value, View):
        raise BadInputError(f"{kernel.name}: argument {name} is {type(value).__name__}; give {wanted}")
    if value.dtype != dtype_of(kind.dtype) or value.ndim != kind.ndim:
        raise BadInputError(
            f"{kernel.name}: argument {name} is view {value.name} of {value.dtype} {value.shape}; give {wanted}"
        )


def _check_number(kernel: Kernel, name: str, kind: Any, value: Argument) -> None:
    where = f"{kernel.name}: argument {name} is"
    if not isinstance(value, int | float | np.integer | np.floating):
        raise BadInputError(f"{where} {type(value).__name__}; give a number for {kind}")
    # An int may be too large for isfinite, but it is finite.
    finite = isinstance(value, int | np.integer) or isfinite(value)
    if isinstance(kind, nb.Integer):
        if not finite or int(value) != value or not kind.minval <= value <= kind.maxval:
            raise BadInputError(f"{where} {value}; give a whole number that fits {kind}")
    # NaN and infinity are values of their own; a number must not become one on its way.
    elif finite and abs(value) > float(np.finfo(str(kind)).max):
        raise BadInputError(f"{where} {value}; give a number that fits {kind}")


def contents_of(value: Argument) -> Hashable:
    """What an argument is to ``Work.contents``."""
    if isinstance(value, View):
        return value.address, value.dtype.str, value.shape
    return repr(value)


def refuse_overlap(work: Work) -> None:
    """A written argument overlaps no other: both the lowering and the hardware may reorder the accesses."""
    views = work.views
    spans = sorted((v.address, v.address + v.nbytes, name) for name, v in views.items() if v.nbytes)
    # What starts before the furthest end so far overlaps the span that has it.
    furthest, holder = 0, ""
    for start, stop, name in spans:
        if start < furthest and not work.writes.isdisjoint((name, holder)):
            raise BadInputError(
                f"{work.name}: arguments {holder} ({views[holder].name}) and {name} ({views[name].name}) overlap "
                "and one is written; give disjoint views"
            )
        furthest, holder = max((furthest, holder), (stop, name))
