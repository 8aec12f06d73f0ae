"""The exhaustive sweep: fail each device call of a scripted workload once, and see that nothing is lost.

The workload loads a model, answers a request, answers a second one and unloads. A run behaves when every request
ends in a typed error or with the tokens and logits of an undisturbed run; the error names the site; nothing leaks;
nothing is found; and the engine, once no more calls fail, answers with the undisturbed bits. A fault that fires and
leaves no trace in an error is a lost failure, unless what came out is right all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import refengine
from instrumentation.devices.host import HostDevice, HostEvent, HostStream
from instrumentation.errors import Error
from instrumentation.faults import KINDS, FaultInjector, FaultKind, FaultPlan

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from instrumentation.ownership import Owner
    from refengine.engine import Engine

Mode = Literal["nth", "from", "random"]
MODES: tuple[Mode, ...] = ("nth", "from", "random")
#: probability of a failure at each site in mode ``random``
PROBABILITY = 0.05


@dataclass(frozen=True)
class Workload:
    """A model, how it is loaded, and the prompts of its requests as token ids."""

    model: Path
    options: Mapping[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    n_predict: int = 3


@dataclass(frozen=True)
class Answer:
    """What one request gave: its tokens and logits, or its error."""

    tokens: tuple[int, ...] = ()
    logits: bytes = b""
    error: str = ""
    typed: bool = True


@dataclass(frozen=True)
class Run:
    """One disturbed run. ``wrong`` says what did not hold; empty when the run behaved."""

    mode: Mode
    number: int
    kind: str
    site: str
    fired: int
    outcome: str
    wrong: tuple[str, ...]


@dataclass
class Reference:
    """The undisturbed run: answers, fault sites by kind, and device calls counted without the injector."""

    answers: list[Answer]
    sites: Counter[FaultKind]
    calls: Counter[FaultKind]


@dataclass
class Calls:
    """Device calls as the device itself sees them."""

    counts: Counter[FaultKind] = field(default_factory=Counter)


class CountingStream(HostStream):
    """A stream that counts the calls that reach it, whatever fault sites there are."""

    calls: Calls

    def launch(self, *given: Any, **named: Any) -> None:
        """Count, then launch."""
        self.calls.counts["launch"] += 1
        super().launch(*given, **named)

    def copy_in(self, target: Any, source: Any) -> None:
        """Count, then copy."""
        self.calls.counts["copy"] += 1
        super().copy_in(target, source)

    def copy_out(self, target: Any, source: Any) -> None:
        """Count, then copy."""
        self.calls.counts["copy"] += 1
        super().copy_out(target, source)

    def copy(self, target: Any, source: Any) -> None:
        """Count, then copy."""
        self.calls.counts["copy"] += 1
        super().copy(target, source)

    def fill(self, target: Any, value: int) -> None:
        """Count, then fill."""
        self.calls.counts["copy"] += 1
        super().fill(target, value)

    def record(self, event: Any) -> None:
        """Count, then record."""
        self.calls.counts["event"] += 1
        super().record(event)

    def wait(self, event: Any) -> None:
        """Count, then wait."""
        self.calls.counts["event"] += 1
        super().wait(event)

    def begin_capture(self) -> None:
        """Count, then begin."""
        self.calls.counts["graph"] += 1
        super().begin_capture()

    def end_capture(self, name: str) -> Any:
        """Count, then end."""
        self.calls.counts["graph"] += 1
        return super().end_capture(name)

    def replay(self, graph: Any) -> None:
        """Count, then replay."""
        self.calls.counts["graph"] += 1
        super().replay(graph)


class CountingDevice(HostDevice):
    """A host device whose streams and events count their calls."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.calls = Calls()

    def create_stream(self, *, owner: Owner, name: str) -> CountingStream:
        """A counting stream."""
        stream = CountingStream(self, owner, name)
        stream.calls = self.calls
        self.streams.add(stream)
        return stream

    def create_event(self, *, owner: Owner, name: str) -> HostEvent:
        """Count, then create."""
        self.calls.counts["event"] += 1
        return super().create_event(owner=owner, name=name)


def _load(workload: Workload, device: HostDevice, injector: FaultInjector) -> Engine:
    return refengine.load(workload.model, device=device, faults=injector, **workload.options)


def _answer(engine: Engine, prompt: tuple[int, ...], n_predict: int) -> Answer:
    try:
        made = engine.generate(
            list(prompt), n_predict=n_predict, temperature=0, ignore_eos=True, return_logits=True
        )
    except Error as error:
        return Answer(error=str(error))
    except Exception as error:  # noqa: BLE001 - what is not typed is what the sweep looks for
        return Answer(error=f"{type(error).__name__}: {error}", typed=False)
    logits: npt.NDArray[Any] | None = made.logits
    return Answer(tuple(made.tokens), b"" if logits is None else logits.tobytes())


def reference(workload: Workload, kinds: tuple[FaultKind, ...] = KINDS) -> Reference:
    """Run undisturbed; raises what goes wrong."""
    device, injector = CountingDevice(workload.options.get("threads")), FaultInjector(FaultPlan(kinds))
    engine = _load(workload, device, injector)
    answers = [_answer(engine, prompt, workload.n_predict) for prompt in workload.prompts]
    calls = device.calls.counts
    calls["reserve"] = engine.allocator.snapshot().reservations
    engine.close()
    assert not any(answer.error for answer in answers), answers
    counted = Counter({kind: calls[kind] for kind in kinds if calls[kind]})
    return Reference(answers, +injector.counts, counted)


def plan_of(mode: Mode, number: int, kinds: tuple[FaultKind, ...], seed: int) -> FaultPlan:
    """What fails in run ``number`` of a mode."""
    if mode == "nth":
        return FaultPlan.nth(number, *kinds)
    if mode == "from":
        return FaultPlan.from_nth(number, *kinds)
    return FaultPlan.at_random(PROBABILITY, seed + number, *kinds)


def disturbed(
    workload: Workload, wanted: Reference, mode: Mode, number: int, kinds: tuple[FaultKind, ...], seed: int = 0
) -> Run:
    """One run with failures, judged against the undisturbed one."""
    injector = FaultInjector(plan_of(mode, number, kinds, seed))
    device = HostDevice(workload.options.get("threads"))
    wrong: list[str] = []
    answers: list[Answer] = []
    loaded = ""
    engine: Engine | None = None
    try:
        engine = _load(workload, device, injector)
    except Error as error:
        loaded = str(error)
    except Exception as error:  # noqa: BLE001 - what is not typed is what the sweep looks for
        loaded = f"{type(error).__name__}: {error}"
        wrong.append(f"loading raised {loaded}")
    if engine is not None:
        answers = [_answer(engine, prompt, workload.n_predict) for prompt in workload.prompts]
        wrong += _judge_answers(answers, wanted)
        injector.enabled = False
        wrong += _judge_after(engine, workload, wanted)
    else:
        injector.enabled = False
        wrong += _judge_fresh(workload, device, wanted)
    errors = [loaded, *(answer.error for answer in answers)]
    wrong += _judge_sites(mode, injector, errors)
    site = injector.fired[0] if injector.fired else None
    outcome = "load failed" if loaded else "request failed" if any(errors) else "identical"
    return Run(
        mode, number, site.kind if site else "", str(site or ""), len(injector.fired), outcome, tuple(wrong)
    )


def _judge_answers(answers: list[Answer], wanted: Reference) -> Iterator[str]:
    for i, (seen, right) in enumerate(zip(answers, wanted.answers, strict=True)):
        if seen.error and not seen.typed:
            yield f"request {i} raised {seen.error}"
        elif not seen.error and seen != right:
            yield f"request {i} gave other tokens or logits and no error"


def _judge_after(engine: Engine, workload: Workload, wanted: Reference) -> Iterator[str]:
    """The engine answers as if nothing had been, then unloads without a trace."""
    again = [_answer(engine, prompt, workload.n_predict) for prompt in workload.prompts]
    if again != wanted.answers:
        yield f"afterwards the engine answers differently: {[a.error for a in again]}"
    yield from _judge_close(engine)


def _judge_close(engine: Engine) -> Iterator[str]:
    allocator, device = engine.allocator, engine.device
    found = [*engine.check_integrity()]
    try:
        engine.close()
    except Error as error:
        yield f"close: {error}"
    left = allocator.snapshot()
    if left.reserved or left.used.current:
        yield f"{left.reserved} bytes of device memory and {left.used.current} of buffers are left"
    if device.streams:
        yield f"streams are left: {sorted(stream.name for stream in device.streams)}"
    for finding in {*found, *engine.findings}:
        yield f"{finding.code}: {finding.message}"


def _judge_fresh(workload: Workload, device: HostDevice, wanted: Reference) -> Iterator[str]:
    """A failed load gives everything back, and the same device loads the model afterwards."""
    if device.streams:
        yield f"streams are left: {sorted(stream.name for stream in device.streams)}"
    engine = _load(workload, device, FaultInjector())
    yield from _judge_after(engine, workload, wanted)


def _judge_sites(mode: Mode, injector: FaultInjector, errors: list[str]) -> Iterator[str]:
    if mode == "nth" and len(injector.fired) != 1:
        yield f"the fault fired {len(injector.fired)} times, not once"
    for site in injector.fired[:1]:
        if any(errors) and not any(str(site) in error for error in errors):
            yield f"no error names {site}"

