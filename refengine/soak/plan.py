"""What a soak is to do: how many clients, until when, what fails on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from instrumentation.errors import BadInputError
from instrumentation.faults import FaultKind, FaultPlan

Unit: TypeAlias = Literal["seconds", "retries", "requests"]
UNITS: tuple[Unit, ...] = get_args(Unit)
MAX_CLIENTS = 1024
MAX_POOL = 100_000
MAX_END = 1e9


@dataclass(frozen=True)
class End:
    """When clients stop asking; what they have asked for is finished after that."""

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        assert self.unit in UNITS, self
        if not math.isfinite(self.amount) or not 0 < self.amount <= MAX_END:
            raise BadInputError(
                f"a soak of {self.amount} {self.unit}; give more than 0, at most {MAX_END:.0e}"
            )

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    """Everything that a soak draws or decides follows from this. Raises ``BadInputError`` naming the value."""

    end: End
    clients: int = 10
    seed: int = 0
    #: different requests that clients choose from; each is computed alone once to verify the rest
    pool: int = 200
    #: probability that a device call of ``fail_kinds`` fails
    fail_rate: float = 0.0
    fail_kinds: tuple[FaultKind, ...] = ("reserve",)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("clients", 1, MAX_CLIENTS),
            ("pool", 1, MAX_POOL),
            ("seed", 0, (1 << 63) - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise BadInputError(f"{name} is {value!r}; give a whole number from {low} to {high}")
        rate = self.fail_rate
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0.0 <= rate <= 1.0:
            raise BadInputError(f"fail_rate is {rate!r}; give a probability from 0 to 1")
        _ = self.faults  # refuses unknown kinds

    @property
    def faults(self) -> FaultPlan:
        """Which device calls fail while the soak runs."""
        return FaultPlan(self.fail_kinds, probability=float(self.fail_rate), seed=self.seed)
