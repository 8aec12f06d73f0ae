"""Fail calls on purpose: every reservation, copy, launch, event, graph and library call is a numbered fault site.

A ``FaultPlan`` says which sites fail; a ``FaultInjector`` counts the sites as a run passes them and fails those. The
same run passes the same sites in the same order, so "the n-th" names one call.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from instrumentation.errors import BadInputError, DeviceError

FaultKind: TypeAlias = Literal["reserve", "copy", "launch", "event", "graph", "library"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True)
class Site:
    """One call of a run. ``number`` counts from 1 over the kinds that the plan looks at."""

    number: int
    kind: FaultKind
    detail: str

    def __str__(self) -> str:
        return f"fault site {self.number} ({self.kind} {self.detail})"


class InjectedFaultError(DeviceError):
    """A device call failed because a fault plan said so. The message names the site."""


class Faults(Protocol):
    """Decides which calls fail on purpose; asked once for each, before anything is touched."""

    def refusal(self, kind: FaultKind, detail: str) -> str | None:
        """Why this call fails; None when it shall not."""
        ...


def pass_site(faults: Faults | None, kind: FaultKind, detail: str) -> None:
    """Let a device call pass its fault site. Raises ``InjectedFaultError``."""
    reason = None if faults is None else faults.refusal(kind, detail)
    if reason is not None:
        raise InjectedFaultError(reason)


@dataclass(frozen=True)
class FaultPlan:
    """Which sites fail. Sites of other kinds than ``kinds`` are passed without being counted.

    ``first`` alone fails that site; ``first`` with ``last`` fails those from ``first`` to ``last`` (0: to the end);
    ``probability`` fails each site at random, by ``seed``.
    """

    kinds: tuple[FaultKind, ...] = KINDS
    first: int = 0
    last: int | None = None
    probability: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise BadInputError(f"fault kinds are {self.kinds}; give one or more of {', '.join(KINDS)}")
        if self.first < 0 or not 0.0 <= self.probability <= 1.0:
            raise BadInputError(f"{self}: give first >= 0 and a probability between 0 and 1")

    @classmethod
    def nth(cls, number: int, *kinds: FaultKind) -> FaultPlan:
        """Fail exactly the ``number``-th site."""
        return cls(kinds=kinds or KINDS, first=number)

    @classmethod
    def from_nth(cls, number: int, *kinds: FaultKind) -> FaultPlan:
        """Fail the ``number``-th site and every later one."""
        return cls(kinds=kinds or KINDS, first=number, last=0)

    @classmethod
    def at_random(cls, probability: float, seed: int, *kinds: FaultKind) -> FaultPlan:
        """Fail each site with a probability."""
        return cls(kinds=kinds or KINDS, probability=probability, seed=seed)

    def fails(self, number: int, draw: float) -> bool:
        """Whether the site of this number fails; ``draw`` is uniform in [0, 1)."""
        if self.first:
            last = self.first if self.last is None else self.last
            if number >= self.first and (last == 0 or number <= last):
                return True
        return draw < self.probability


class FaultInjector:
    """Counts the sites of a run and fails those of its plan. Give it to an allocator and to a device."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan or FaultPlan()
        self.enabled = True
        #: sites passed so far, by kind
        self.counts: Counter[FaultKind] = Counter()
        #: sites that failed
        self.fired: list[Site] = []
        self._random = random.Random(self.plan.seed)  # noqa: S311

    @property
    def sites(self) -> int:
        """Sites passed so far."""
        return self.counts.total()

    def refusal(self, kind: FaultKind, detail: str) -> str | None:
        """Count a site; the reason when it must fail, else None."""
        if not self.enabled or kind not in self.plan.kinds:
            return None
        self.counts[kind] += 1
        if not self.plan.fails(self.sites, self._random.random()):
            return None
        site = Site(self.sites, kind, detail)
        self.fired.append(site)
        return f"{site} failed on purpose"
