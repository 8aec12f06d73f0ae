"""Runs of the drill: each fault in an engine of its own, level by level, beside runs without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from instrumentation.devices import open_device
from instrumentation.errors import Error, FindingError
from instrumentation.levels import Level
from refengine import logs
from refengine.architectures import can_draft
from refengine.config import ModelConfig
from refengine.drill.scene import Report, Scene
from refengine.drill.verdict import Row
from refengine.drill.workloads import N_CELLS, N_CLIENTS, WORKLOADS, warm_up
from refengine.engine import Engine
from refengine.errors import ComputeError, UnsupportedModelError
from refengine.gguf_file import GGUFFile
from refengine.options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from instrumentation.devices.base import Device
    from refengine.context_plan import ContextPlan
    from refengine.drill.fault import Fault, Plans
    from refengine.drill.workloads import Texts

#: a context in which everything happens that happens in a large one
OPTIONS: dict[str, Any] = {
    "n_ctx": 128, "n_batch": 64, "n_ubatch": 32, "spec_type": "draft-mtp", "draft_n_max": 2,
}  # fmt: skip
SATURATED: dict[str, Any] = {"n_ctx": N_CELLS, "n_slots": N_CLIENTS}
#: name of a device, or what opens one for each run
DeviceChoice: TypeAlias = "str | Callable[[], Device]"


@dataclass(frozen=True, kw_only=True)
class _Options(EngineOptions):
    """Options whose plans a fault may change."""

    change: Plans | None = None

    def context_plans(
        self, config: ModelConfig, *, fewest_launches: bool = False, chooses: bool = False
    ) -> list[ContextPlan]:
        """See ``EngineOptions``."""
        plans = super().context_plans(config, fewest_launches=fewest_launches, chooses=chooses)
        return plans if self.change is None else self.change(plans)


@dataclass(frozen=True)
class _Outcome:
    """What one run gave."""

    texts: Texts
    reports: list[Report] = field(default_factory=list)
    planted: str = ""
    #: what went wrong beside what was reported, such as an exception that nobody raises on purpose
    broken: tuple[str, ...] = ()


class Drill:
    """A model on a device, and the faults that are planted in it. ``device``: a name, or what opens one for each run.

    ``only``: the one level to try. Raises what loading the model raises.
    """

    def __init__(
        self,
        model: Path,
        faults: Sequence[Fault],
        *,
        device: DeviceChoice = "auto",
        threads: int | None = None,
        only: Level | None = None,
    ) -> None:
        self.model = model
        self.faults = tuple(faults)
        self.device = device
        self.threads = threads
        self.only = only
        self._clean: dict[tuple[object, ...], _Outcome] = {}

    @cached_property
    def kind(self) -> str:
        """Which kind of device it is: ``host`` or ``cuda``."""
        device: Any = open_device(self._device())
        kind: str = device.kind
        return kind.lower()

    def run(
        self, starting: Callable[[Fault, Level], None] = lambda _fault, _level: None
    ) -> Generator[Row, None, None]:
        """A row for each fault, in order. ``starting`` is called before each run. Raises what loading raises."""
        with logs.lines(None), GGUFFile.open(self.model) as gguf:
            self._require_drafts(ModelConfig.from_gguf(gguf))
            Engine(gguf, self._options({}, Level.OFF, "text")).close()
        for fault in self.faults:
            with logs.lines(None):
                row = self._row(fault, starting)
            yield row

    def _require_drafts(self, config: ModelConfig) -> None:
        if not can_draft(config):
            raise UnsupportedModelError(
                f"{self.model}: this model ({config.architecture}) has no MTP head, whose drafts a drill needs; "
                "give one that has, such as the default model"
            )

    def _row(self, fault: Fault, starting: Callable[[Fault, Level], None]) -> Row:
        reason = fault.not_on.get(self.kind)
        if reason is not None:
            return Row(fault.name, fault.code, "not on this device", fault.incident, why=reason)
        levels = [level for level in Level if level >= fault.safe_from]
        if self.only is not None:
            if self.only < fault.level:
                why = f"found from {fault.found_at} on"
                return Row(fault.name, fault.code, "not at this level", fault.incident, why=why)
            levels = [self.only]
        false: list[str] = []
        tried: list[str] = []
        outcome = _Outcome([])
        for level in levels:
            starting(fault, level)
            tried.append(str(level))
            false += self._twin(fault, level)
            outcome = self._ran(fault, level, planted=True)
            codes = {fault.code} | (fault.otherwise if self.only is not None else set())
            known = {fault.code} | fault.consequences | fault.otherwise
            # What is said before the bad thing happens is not about it, whatever its code.
            caused = [report for report in outcome.reports if report.distance is not None]
            mine = [report for report in caused if report.code in codes]
            others = [
                report for report in outcome.reports if report not in caused or report.code not in known
            ]
            false += [f"{level}: {report.code} {report.check}, {report.place}" for report in others]
            if outcome.broken or (not mine and level >= fault.level):
                break
            if mine:
                first = mine[0]
                switch = ", --check-numerics" if fault.options.get("check_numerics") else ""
                return Row(
                    fault.name, fault.code, "found", fault.incident, outcome.planted, first.place, first.check,
                    f"{level}{switch}", tuple(tried), first.distance, tuple(false),
                )  # fmt: skip
        why = "; ".join(outcome.broken) or f"no {fault.code} at {', '.join(tried)}"
        return Row(
            fault.name, fault.code, "missed", fault.incident, outcome.planted, tried=tuple(tried),
            false_reports=tuple(false), why=why,
        )  # fmt: skip

    # --- runs

    def _twin(self, fault: Fault, level: Level) -> list[str]:
        """What is wrong with the run without the fault: the same for all faults of its options."""
        plain = self._without(fault, Level.OFF)
        found = self._without(fault, level)
        wrong = [f"{level}, without the fault: {report.code} {report.place}" for report in found.reports]
        wrong += [f"{level}, without the fault: {what}" for what in found.broken]
        if found.texts != plain.texts:
            wrong.append(f"{level}, without the fault: another text than at level off")
        return wrong

    def _without(self, fault: Fault, level: Level) -> _Outcome:
        key = (level, fault.workload, *sorted(fault.options.items()))
        if key not in self._clean:
            self._clean[key] = self._ran(fault, level, planted=False)
        return self._clean[key]

    def _ran(self, fault: Fault, level: Level, *, planted: bool) -> _Outcome:
        scene = Scene()
        texts: Texts = []
        broken: list[str] = []
        engine = None
        try:
            engine = self._loaded(fault, level, scene, planted=planted)
            scene.phase = "warm-up"
            texts += warm_up(engine)
            scene.phase = "the step behind the plant"
            if planted and fault.plant is not None:
                fault.plant(scene)
            texts += WORKLOADS[fault.workload](engine)
        except Error as error:
            # Numbers that a fault made are the request's own error, whether or not their cause was found.
            explained = scene.failed(error) or isinstance(error, ComputeError)
            if not planted or not explained:
                broken.append(f"{scene.phase}: {error}")
        except Exception as error:  # noqa: BLE001 - a crash is what the drill looks for
            broken.append(f"{type(error).__name__}: {error}")
        except BaseException:
            if engine is not None:
                self._ended(engine, scene)
            raise
        if engine is not None:
            broken += self._ended(engine, scene)
        return _Outcome(texts, scene.reports, scene.planted, tuple(broken))

    def _loaded(self, fault: Fault, level: Level, scene: Scene, *, planted: bool) -> Engine:
        change = fault.plans if planted else None
        options = self._options(dict(fault.options), level, fault.workload, change)
        if change is not None:
            scene.caused(fault.planned)
        with GGUFFile.open(self.model) as gguf:
            engine = Engine(gguf, options, on_finding=scene.found, faults=scene.injector)
        scene.enter(engine)
        return engine

    @staticmethod
    def _ended(engine: Engine, scene: Scene) -> list[str]:
        """Look at guard bytes, undo the plant, close; what fails that no finding says."""
        broken = []
        for phase, end in (
            ("check_integrity", engine.allocator.check_integrity),
            ("end of the fault", scene.undo.close),
            ("close", engine.close),
        ):
            scene.phase = phase
            try:
                end()
            except FindingError as error:
                scene.failed(error)
            except Exception as error:  # noqa: BLE001 - a crash is what the drill looks for
                broken.append(f"{phase}: {type(error).__name__}: {error}")
        left = engine.allocator.snapshot().reserved
        if left:
            broken.append(f"{left} bytes are still reserved behind close")
        return broken

    def _device(self) -> str | Device:
        return self.device if isinstance(self.device, str) else self.device()

    def _options(
        self, given: dict[str, Any], level: Level, workload: str, change: Plans | None = None
    ) -> _Options:
        sizes = SATURATED if workload == "saturated" else {}
        options = (
            OPTIONS | sizes | {"device": self._device(), "threads": self.threads, "check": str(level)} | given
        )
        return _Options(**options, change=change)
