"""Formats of numbers as they lie in memory, and how one sees in their bits that a number is not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrumentation.view import View


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format whose sign, exponent and first fraction bits are in the element's highest two bytes.

    NaN and infinity have all bits of the exponent set. NaN that has fraction bits in the lower bytes alone, which no
    arithmetic makes, is taken for an infinity where the two are told apart.
    """

    nbytes: int
    #: of the highest two bytes
    exponent: int
    fraction: int

    @property
    def words(self) -> int:
        """Two-byte words of an element."""
        return self.nbytes // 2


FORMATS = {
    "f16": Format(2, 0x7C00, 0x03FF),
    "bf16": Format(2, 0x7F80, 0x007F),
    "f32": Format(4, 0x7F80, 0x007F),
    "f64": Format(8, 0x7FF0, 0x000F),
}
_OF_DTYPE = {"float16": "f16", "float32": "f32", "float64": "f64"}


def format_of(view: View) -> Format | None:
    """Format of a view's numbers; None when they are integers, which are always finite."""
    name = view.bits or _OF_DTYPE.get(view.dtype.name, "")
    return FORMATS.get(name)
