"""What tests of any engine hold their tensors against: ``Golden``, the value of the fixture ``golden``."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.errors import BadInputError
from refengine.golden import case
from refengine.golden.case import Recording
from refengine.golden.compare import compare
from refengine.golden.files import NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from refengine.golden.case import Array

#: the engine of recordings that tests made
ENGINE = "pytest"


class GoldenError(AssertionError):
    """Tensors are not those of the recording, or there is none."""


class Golden:
    """Recordings in one folder. ``update``: record what is checked."""

    def __init__(self, folder: Path, *, update: bool = False) -> None:
        self.folder = folder
        self.update = update

    def check(
        self,
        name: str,
        tensors: Mapping[str, npt.ArrayLike],
        *,
        tokens: Sequence[int] = (),
        tolerance: float | None = None,
        exact: bool = False,
    ) -> None:
        """Hold tensors, given in execution order, against the recording ``name``.

        Floats are compared as float32, whole numbers as int32 and exactly. ``tolerance``: NMSE up to which a tensor
        agrees, by default the recorded one, which is ``tolerance`` or 1e-6; ``exact``: every bit must be the same.
        The recording may be one of ``refengine golden record``, with more tensors and rows; then those that
        ``tensors`` has are compared, of each the last rows.

        Raises ``GoldenError``, an ``AssertionError`` that names the first tensor that differs, and ``BadInputError``
        for arrays or files that cannot be used.
        """
        __tracebackhide__ = True
        if not NAME.fullmatch(name):
            raise BadInputError(f"golden {name!r}: want letters, digits, and '_', '.', '-' between them")
        arrays = {tensor: _as_array(tensor, value) for tensor, value in tensors.items()}
        if not arrays:
            raise BadInputError(f"golden {name}: there are no tensors to check; give at least one")
        limit = case.TOLERANCE if tolerance is None else tolerance
        found = Recording(
            name, ENGINE, arrays, MappingProxyType(dict.fromkeys(arrays, limit)), tokens=tuple(tokens)
        )
        folder = self.folder / name
        if self.update:
            self._record(found, folder)
            return
        if not (folder / case.CASE).is_file():
            raise GoldenError(f"golden {name} is not in {self.folder}; record it with --golden-update")
        wanted = case.read(folder)
        of_engine = bool(wanted.steps)
        result = compare(found, wanted, exact=exact, tolerance=tolerance, shared_only=of_engine)
        if not result.n_compared:
            raise GoldenError(
                f"golden {name} has none of {', '.join(arrays)}; it has {', '.join(list(wanted.tensors)[:12])}"
            )
        if not result.same:
            raise GoldenError("\n".join(result.lines()))

    def _record(self, found: Recording, folder: Path) -> None:
        if (folder / case.CASE).is_file() and case.read(folder).engine != ENGINE:
            raise BadInputError(
                f"golden {found.name} is of refengine golden record; record it again with that"
            )
        case.write(found, folder, overwrite=True)


def _as_array(tensor: str, value: npt.ArrayLike) -> Array:
    """As float32 or int32, in C order."""
    if not NAME.fullmatch(tensor):
        raise BadInputError(f"tensor {tensor!r}: want letters, digits, and '_', '.', '-' between them")
    array: npt.NDArray[Any] = np.asarray(value)
    if array.ndim < 1 or array.dtype.kind not in "fiu":
        raise BadInputError(f"tensor {tensor} is {array.dtype} {array.shape}; give an array of numbers")
    if array.dtype.kind == "f":
        return np.ascontiguousarray(array, np.float32)
    if array.size and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        raise BadInputError(f"tensor {tensor} has whole numbers beyond int32; give smaller ones, or floats")
    return np.ascontiguousarray(array, np.int32)
