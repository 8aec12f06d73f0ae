"""What a fault of the drill is: what is planted, at which level it is found, and where it cannot be had."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from instrumentation.catalogue import CATALOGUE
from instrumentation.levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from refengine.context_plan import ContextPlan
    from refengine.drill.scene import Scene

#: puts a fault into an engine that has answered already
Plant: TypeAlias = "Callable[[Scene], None]"
#: changes the plans of target and draft before anything is reserved
Plans: TypeAlias = "Callable[[list[ContextPlan]], list[ContextPlan]]"
#: what is asked of the engine behind the plant: see ``refengine.drill.workloads``
Workload = Literal["text", "saturated", "shapes"]
NOTHING: Mapping[str, Any] = MappingProxyType({})
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, planted in place by ``plans`` when the engine is loaded, or by ``plant`` when it has warmed up."""

    name: str
    #: code of the catalogue that must be reported
    code: str
    #: lowest level at which it is
    level: Level
    #: what is planted, and where: one sentence
    what: str
    plant: Plant | None = None
    plans: Plans | None = None
    #: of ``plans``: where that is, for people
    planned: str = "plan"
    #: options of the engine beside the drill's own
    options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    workload: Workload = "text"
    #: lowest level at which it may run: below it nothing stops what it does to the process
    safe_from: Level = Level.OFF
    #: codes of what the fault brings about beside its own
    consequences: frozenset[str] = frozenset()
    #: codes as which other levels report the same
    otherwise: frozenset[str] = frozenset()
    #: kind of device -> why it cannot be had there
    not_on: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    #: of the two incidents, which it is: ``I1`` or ``I2``
    incident: str = ""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), self.name
        assert self.code in CATALOGUE, self
        assert CATALOGUE.keys() >= self.consequences | self.otherwise, self
        assert self.code not in self.consequences | self.otherwise, self
        assert (self.plant is None) != (self.plans is None), self.name
        assert self.safe_from <= self.level, self

    @property
    def found_at(self) -> str:
        """The level that it is found at, with the switch that this takes."""
        return f"{self.level}, --check-numerics" if self.options.get("check_numerics") else str(self.level)
