"""Typed, exact views of a buffer: address, element type and shape, and nothing outside the payload."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from instrumentation.errors import BadInputError
from instrumentation.numbers import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from instrumentation.buffer import Buffer


def _as_index(index: int, name: str) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise BadInputError(f"view {name} is indexed with {index!r}; give a whole number") from None


def _as_shape(shape: int | Sequence[int], name: str) -> tuple[int, ...]:
    try:
        dims = shape if isinstance(shape, (tuple, list)) else (shape,)
        checked = tuple(operator.index(dim) for dim in dims)
    except TypeError:
        checked = (-1,)
    if any(dim < 0 for dim in checked):
        raise BadInputError(
            f"the shape of view {name} is {shape!r}; give whole numbers that are not negative"
        )
    return checked


def _as_dtype(dtype: npt.DTypeLike, name: str) -> np.dtype[np.generic]:
    try:
        checked = np.dtype(dtype)
    except TypeError as error:
        raise BadInputError(f"the element type of view {name} is {dtype!r}: {error}") from error
    if checked.hasobject or checked.itemsize == 0:
        raise BadInputError(f"the element type of view {name} is {checked}; give one of a fixed size")
    return checked


@dataclass(frozen=True, slots=True)
class View:
    """Elements of one type in C order, wholly inside ``buffer``. Made by ``Buffer.view``; parts are exact."""

    buffer: Buffer
    address: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    name: str
    #: the buffer's generation when the view was made; a buffer that was freed since has another
    generation: int
    #: of which numbers the elements are the bits, a name of ``numbers.FORMATS``; empty: of those of ``dtype``
    bits: str = ""
    #: the shape that goes with the name, whatever ``reshape`` made of it; empty: ``shape``
    named: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        start = self.address - self.buffer.address
        if start < 0 or start + self.nbytes > self.buffer.nbytes:
            raise BadInputError(
                f"view {self.name} of {self.dtype} {self.shape} needs bytes {start} to "
                f"{start + self.nbytes}, but buffer {self.buffer.name} has {self.buffer.nbytes}; "
                f"make the view smaller"
            )
        if self.address % self.dtype.alignment:
            raise BadInputError(
                f"view {self.name} of {self.dtype} starts at byte {start} of {self.buffer.name}; "
                f"give a multiple of {self.dtype.alignment}"
            )

    @classmethod
    def of(
        cls,
        buffer: Buffer,
        dtype: npt.DTypeLike,
        shape: int | Sequence[int],
        offset: int,
        name: str | None,
        bits: str = "",
    ) -> View:
        """View of ``buffer`` from byte ``offset`` on. Raises ``BadInputError``."""
        label = name if name is not None else buffer.name
        if bits and bits not in FORMATS:
            raise BadInputError(f"view {label} holds bits of {bits!r}; use one of {', '.join(FORMATS)}")
        try:
            start = operator.index(offset)
        except TypeError:
            raise BadInputError(f"the offset of view {label} is {offset!r}; give a whole number") from None
        checked = _as_dtype(dtype, label)
        extents = _as_shape(shape, label)
        return cls(buffer, buffer.address + start, checked, extents, label, buffer.generation, bits)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def offset(self) -> int:
        """First byte, counted from the buffer's first byte."""
        return self.address - self.buffer.address

    def row(self, index: int) -> View:
        """Element ``index`` of axis 0, without that axis. Raises ``BadInputError``."""
        rows, rest = self._rows()
        index = _as_index(index, self.name)
        if not 0 <= index < rows:
            raise BadInputError(f"view {self.name} has rows 0 to {rows - 1}, not {index!r}")
        return self._part(index, rest, f"{self.name}[{index}]")

    def slice(self, start: int, stop: int) -> View:
        """Rows ``[start, stop)`` along axis 0; may be empty. Raises ``BadInputError``."""
        rows, rest = self._rows()
        start, stop = _as_index(start, self.name), _as_index(stop, self.name)
        if not 0 <= start <= stop <= rows:
            raise BadInputError(f"view {self.name} has {rows} rows; [{start!r}, {stop!r}) are not among them")
        return self._part(start, (stop - start, *rest), f"{self.name}[{start}:{stop}]")

    def reshape(self, shape: int | Sequence[int]) -> View:
        """View the same elements under another shape of the same size. Raises ``BadInputError``."""
        wanted = _as_shape(shape, self.name)
        if math.prod(wanted) != self.size:
            raise BadInputError(
                f"view {self.name} has {self.size} elements, shape {wanted} has another number"
            )
        return replace(self, shape=wanted, named=self.named or self.shape)

    def check_live(
        self,
        *,
        kernel: str | None = None,
        argument: str | None = None,
        launch: int | None = None,
        stream: str | None = None,
        actor: str | None = None,
    ) -> None:
        """Raise ``FindingError`` (MEM004) unless the memory is the buffer's, now. The rest says who asks."""
        if self.generation != self.buffer.generation or not self.buffer.live:
            self.buffer.refuse_dead(
                f"view {self.name}",
                kernel=kernel,
                argument=argument,
                launch=launch,
                stream=stream,
                actor=actor,
            )

    def _rows(self) -> tuple[int, tuple[int, ...]]:
        if not self.shape:
            raise BadInputError(f"view {self.name} has no axes; there are no rows to take")
        return self.shape[0], self.shape[1:]

    def _part(self, index: int, shape: tuple[int, ...], name: str) -> View:
        stride = math.prod(self.shape[1:]) * self.itemsize
        return replace(self, address=self.address + index * stride, shape=shape, name=name, named=())
