"""Indices as sums of terms with factors, and how large or small they are in a loop.

Quotients and remainders of such a sum by a number, shifts and bits of it too, are terms of other sums: they lie between
ends that follow from the sum's, as long as that is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: sums of larger factors, or of more turns, could wrap around: their ends are less than 2 ** 62 apart
MOST_FACTOR = 1 << 31


@dataclass(frozen=True)
class Part:
    """Quotient, remainder, shift or bits of a sum that a loop's variable is in, by a number that is not negative."""

    of: Sum
    #: one of ``//``, ``%``, ``>>``, ``&``
    operation: str
    by: int

    @classmethod
    def made(cls, of: Sum, operation: str, by: int) -> Part | None:
        """None for other operations, and numbers that those are not done with here."""
        least, most = {
            "//": (1, MOST_FACTOR),
            "%": (1, MOST_FACTOR),
            ">>": (0, 63),
            "&": (0, MOST_FACTOR),
        }.get(operation, (0, 0))
        return cls(of, operation, by) if least <= by < most else None

    @property
    def growth(self) -> int:
        """How far apart its values are at most, in ``MOST_FACTOR``."""
        if self.operation in ("%", "&"):
            return 1
        return self.of.growth // (self.by if self.operation == "//" else 1 << self.by) + 1

    def text(self) -> str:
        """Expression of it."""
        return f"({self.of.text()} {self.operation} {self.by})"

    def end(self, ends: Mapping[str, tuple[str, str]], *, largest: bool) -> str:
        """Text of a number that it is not less than, or not more, if what it is a part of is never negative."""
        if self.operation in ("//", ">>"):
            return f"({self.of.end(ends, largest=largest)} {self.operation} {self.by})"
        if not largest:
            return "0"
        return f"min({self.of.end(ends, largest=True)}, {self.by - (self.operation == '%')})"


@dataclass(frozen=True)
class Sum:
    """A whole number: terms with their factors, and a constant.

    A term is text that is valid before the loop, the text of the loop's variable, or a part of another sum.
    """

    factors: tuple[tuple[str | Part, int], ...] = ()
    constant: int = 0

    @classmethod
    def of(cls, factors: Mapping[str | Part, int], constant: int) -> Sum | None:
        """None where factors are too large."""
        kept = sorted(((term, factor) for term, factor in factors.items() if factor), key=_text_of_pair)
        made = cls(tuple(kept), constant)
        return None if max(made.growth, abs(constant)) >= MOST_FACTOR else made

    @property
    def growth(self) -> int:
        """How far apart its values are at most, in ``MOST_FACTOR``."""
        return sum(
            abs(factor) * (term.growth if isinstance(term, Part) else 1) for term, factor in self.factors
        )

    def plus(self, other: Sum, sign: int = 1) -> Sum | None:
        """Sum or difference of two."""
        factors = dict(self.factors)
        for term, factor in other.factors:
            factors[term] = factors.get(term, 0) + sign * factor
        return Sum.of(factors, self.constant + sign * other.constant)

    def times(self, factor: int) -> Sum | None:
        """Product with a number."""
        return Sum.of({term: factor * each for term, each in self.factors}, factor * self.constant)

    def depends_on(self, variable: str) -> bool:
        """Whether it may differ from turn to turn."""
        return any(isinstance(term, Part) or variable in term for term, _ in self.factors)

    def parts(self) -> Iterator[Part]:
        """All parts of other sums in it, and in those."""
        for term, _ in self.factors:
            if isinstance(term, Part):
                yield term
                yield from term.of.parts()

    def text(self) -> str:
        """Expression of it."""
        return self._written(term if isinstance(term, str) else term.text() for term, _ in self.factors)

    def end(self, ends: Mapping[str, tuple[str, str]], *, largest: bool) -> str:
        """Text of a number that it is not less than, or not more; ``ends``: least and largest values of some terms."""
        texts = []
        for term, factor in self.factors:
            upper = (factor > 0) == largest
            if isinstance(term, Part):
                texts.append(term.end(ends, largest=upper))
            else:
                texts.append(ends.get(term, (term, term))[upper])
        return self._written(texts)

    def _written(self, terms: Iterable[str]) -> str:
        parts = [
            term + (f" * {factor}" if factor != 1 else "")
            for term, (_, factor) in zip(terms, self.factors, strict=True)
        ]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return parts[0] if len(parts) == 1 else f"({' + '.join(parts)})"


def _text_of_pair(pair: tuple[str | Part, int]) -> str:
    term = pair[0]
    return term if isinstance(term, str) else term.text()


@dataclass(frozen=True)
class Capped:
    """The smaller one of two sums, of which the second stays as it is: ``min(k, n - 1)`` in a loop over k."""

    value: Sum
    cap: Sum
