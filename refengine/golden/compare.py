"""Two recordings side by side: the first tensor in execution order that differs, where, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.errors import BadInputError
from refengine.golden.case import layer_of, nmse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.golden.case import Array, Recording

#: names of tensors that a line lists
_MAX_NAMES = 12


@dataclass(frozen=True)
class Worst:
    """The element that is farthest off."""

    index: tuple[int, ...]
    seen: float
    wanted: float

    def __str__(self) -> str:
        place = ", ".join(map(str, self.index))
        return f"[{place}] is {self.seen:.9g}, want {self.wanted:.9g}"


@dataclass(frozen=True)
class Difference:
    """A tensor that differs. ``row``: the first row that does, of ``n_rows``; ``worst`` None: no elements compared."""

    tensor: str
    what: str
    row: int | None = None
    n_rows: int = 0
    worst: Worst | None = None
    nmse: float = 0.0

    @property
    def layer(self) -> int | None:
        """Layer of the tensor; None outside the layers."""
        return layer_of(self.tensor)

    def __str__(self) -> str:
        places = [f"layer {self.layer}"] if self.layer is not None else []
        if self.row is not None:
            places.append(f"row {self.row} of {self.n_rows}")
        where = f" ({', '.join(places)})" if places else ""
        how = f": worst {self.worst}, NMSE {self.nmse:.2e}" if self.worst is not None else ""
        return f"{self.tensor} {self.what}{where}{how}"


@dataclass(frozen=True)
class Comparison:
    """What comparing ``found`` with ``wanted`` gave."""

    name: str
    #: bits, or NMSE
    exact: bool
    n_compared: int
    differences: tuple[Difference, ...]
    #: tokens that differ, and the like, a line each
    others: tuple[str, ...] = ()
    #: tensors computed behind the last one that agrees, up to the first that differs: "name (operation)"
    suspects: tuple[str, ...] = ()
    agrees_before: str | None = None

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.others

    def lines(self) -> Iterator[str]:
        """For people."""
        tier = "bits" if self.exact else "NMSE"
        if self.same:
            yield f"{self.name}: ok, {self.n_compared} tensors ({tier})"
            return
        n = len(self.differences)
        yield f"{self.name}: {n} of {self.n_compared} tensors differ ({tier})"
        if self.differences:
            yield f"  first: {self.differences[0]}"
            if self.agrees_before is not None:
                yield f"  agrees before it: {self.agrees_before}"
            if len(self.suspects) > 1:
                yield f"  computed in between: {_listed(self.suspects)}"
            if n > 1:
                yield f"  then: {_listed([other.tensor for other in self.differences[1:]])}"
        for line in self.others:
            yield f"  {line}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "case": self.name,
            "same": self.same,
            "tier": "exact" if self.exact else "tolerance",
            "compared": self.n_compared,
            "differences": [_difference_as_json(each) for each in self.differences],
            "others": list(self.others),
            "agrees_before": self.agrees_before,
            "suspects": list(self.suspects),
        }


def _difference_as_json(each: Difference) -> dict[str, Any]:
    worst = each.worst
    return {
        "tensor": each.tensor, "what": each.what, "layer": each.layer, "row": each.row,
        "index": list(worst.index) if worst else None,
        "seen": _number(worst.seen) if worst else None,
        "wanted": _number(worst.wanted) if worst else None,
        "nmse": _number(each.nmse),
    }  # fmt: skip


def _number(value: float) -> float | str:
    return value if isfinite(value) else str(value)  # JSON has no infinity


def _listed(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def compare(
    found: Recording,
    wanted: Recording,
    *,
    exact: bool,
    tolerance: float | None = None,
    shared_only: bool = False,
) -> Comparison:
    """Hold a recording against another one, tensor after tensor as they were computed.

    ``exact``: bits; otherwise the NMSE that ``wanted`` allows each tensor, or ``tolerance`` for all; whole numbers are
    compared exactly. Of arrays with unequal numbers of rows the last ones are compared. ``shared_only``: a tensor that
    one of them lacks is no difference. Raises ``BadInputError`` for a ``tolerance`` that is negative or not finite.
    """
    if tolerance is not None and not 0 <= tolerance < inf:
        raise BadInputError(f"tolerance is {tolerance}; give a finite NMSE of 0 or more")
    differences: list[Difference] = []
    agreed: list[str] = []
    for name, array in wanted.tensors.items():
        seen = found.tensors.get(name)
        if seen is None:
            if not shared_only:
                differences.append(Difference(name, "is missing"))
            continue
        limit = wanted.tolerance_of(name) if tolerance is None else tolerance
        difference = _tensor_difference(name, seen, array, limit=None if exact else limit)
        if difference is not None:
            differences.append(difference)
        else:
            agreed.append(name)
    if not shared_only:
        extra = [name for name in found.tensors if name not in wanted.tensors]
        differences += [Difference(name, "is there, and not in the recording") for name in extra]
    others = [
        line
        for label, a, b in (
            ("prompt", found.tokens, wanted.tokens),
            ("greedy", found.greedy, wanted.greedy),
            ("generated", found.generated, wanted.generated),
        )
        if a is not None and b is not None and (line := _tokens_difference(label, a, b)) is not None
    ]
    steps = {step.name: i for i, step in enumerate(wanted.steps)}
    if steps:
        differences.sort(key=lambda each: steps.get(each.tensor, len(steps)))
    before, suspects = _between(differences, agreed, wanted, steps)
    n_compared = len(agreed) + len(differences)
    return Comparison(wanted.name, exact, n_compared, tuple(differences), tuple(others), suspects, before)


def _between(
    differences: list[Difference], agreed: list[str], wanted: Recording, steps: dict[str, int]
) -> tuple[str | None, tuple[str, ...]]:
    """The last tensor that agrees before the first that differs, and what is computed behind it up to that."""
    if not differences or differences[0].tensor not in steps:
        return None, ()
    end = steps[differences[0].tensor]
    places = [(steps[name], name) for name in agreed if steps.get(name, end) < end]
    start, before = max(places, default=(-1, None))
    between = wanted.steps[start + 1 : end + 1]
    return before, tuple(f"{step.name} ({step.op})" for step in between)


def _tensor_difference(name: str, found: Array, wanted: Array, limit: float | None) -> Difference | None:
    """None when they agree: in each bit, or with ``limit`` in NMSE up to that."""
    if found.dtype != wanted.dtype or found.ndim != wanted.ndim or found.shape[1:] != wanted.shape[1:]:
        return Difference(name, f"is {found.dtype} {found.shape}, want {wanted.dtype} {wanted.shape}")
    n_rows = min(len(found), len(wanted))
    first = len(wanted) - n_rows
    found, wanted = found[len(found) - n_rows :], wanted[first:]
    if found.tobytes() == wanted.tobytes() or not found.size:
        return None
    bits = (found.view(np.int32) != wanted.view(np.int32)).reshape(n_rows, -1)
    error = nmse(found, wanted)
    whole = wanted.dtype.kind == "i"
    if limit is not None and not whole and error <= limit:
        return None
    rows = bits.any(axis=1)
    if limit is not None and not whole:
        beyond = np.array(
            [bool(r) and nmse(a, b) > limit for r, a, b in zip(rows, found, wanted, strict=True)]
        )
        rows = beyond if beyond.any() else rows
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).reshape(n_rows, -1)
    distance = np.where(np.isnan(distance), np.inf, distance)
    flat = int(np.argmax(np.where(bits, distance, -1.0)))
    row, *rest = (int(i) for i in np.unravel_index(flat, wanted.shape))
    worst = Worst((first + row, *rest), float(found.reshape(-1)[flat]), float(wanted.reshape(-1)[flat]))
    return Difference(name, "differs", first + int(np.argmax(rows)), first + n_rows, worst, error)


def _tokens_difference(label: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    if found == wanted:
        return None
    for i, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if a != b:
            return f"{label} token {i} is {a}, want {b}"
    return f"{len(found)} {label} tokens, want {len(wanted)}"
