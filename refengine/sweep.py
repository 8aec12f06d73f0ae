"""Fail every device call of a scripted workload, and see that nothing is lost.

The workload loads a model, answers a request, answers a shorter second one and unloads. A run fails some of its calls
by a plan, and behaves when

* the first call that failed is the one that the plan means, and mode ``nth`` failed it alone;
* each step ends in a typed error that names the call that failed in it, or with the tokens and logits of an
  undisturbed run; a step in which no call failed may not end in an error;
* after each request the KV cache is empty, nothing waits on a stream, and no memory is held that an undisturbed run
  would not hold by then;
* when no more calls fail, the engine (after a failed load: the device, with a new engine) gives the undisturbed
  answers and then holds exactly what an undisturbed engine holds;
* unloading gives back every byte, stream and event, and nothing was found at any time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from instrumentation.errors import Error
from instrumentation.faults import KINDS, FaultInjector, FaultKind, FaultPlan, Site
from refengine.kernels.kv_types import PAGE
from refengine.sweep_counting import Recorder, first_failure
from refengine.sweep_script import Answer, Books, Script, Step, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

Mode: TypeAlias = Literal["nth", "from", "random"]
MODES: tuple[Mode, ...] = get_args(Mode)
Outcome: TypeAlias = Literal["load failed", "request failed", "identical"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: failures to expect of a run in mode ``random``, and the most probable that each call may be to fail
EXPECTED_FAILURES = 2.0
MOST_PROBABLE = 0.5
#: the arena whose size may follow what is computed
GROWING = "compute"


class SweepError(Error):
    """A sweep cannot be run or believed: its undisturbed run went wrong, or a process of it died."""


@dataclass(frozen=True)
class Run:
    """One disturbed run. ``wrong`` says what did not hold; empty when the run behaved."""

    mode: Mode
    number: int
    #: of the call that failed first, or should have
    kind: str
    site: str
    fired: int
    outcome: Outcome
    wrong: tuple[str, ...]

    def __post_init__(self) -> None:
        assert self.mode in MODES, self
        assert self.outcome in OUTCOMES, self


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: its answers, its fault sites, and its device calls as another count has them."""

    answers: tuple[Answer, ...]
    passed: tuple[Site, ...]
    calls: Counter[FaultKind]
    #: what was held after loading and after each request
    books: tuple[Books, ...]
    #: what was held after all requests were answered once more
    settled: Books

    @property
    def sites(self) -> Counter[FaultKind]:
        """Fault sites by kind."""
        return Counter(site.kind for site in self.passed)

    def uncounted(self) -> list[str]:
        """Kinds of calls whose fault sites are not as many as the calls, in words."""
        sites = self.sites
        return [
            f"{kind}: {sites[kind]} fault sites for {self.calls[kind]} calls"
            for kind in KINDS
            if sites[kind] != self.calls[kind]
        ]


def plan_of(
    mode: Mode, number: int, kinds: tuple[FaultKind, ...], sites: tuple[Site, ...], seed: int = 0
) -> FaultPlan:
    """What fails in run ``number``, from 1 on, of a mode. A random run is one in which something fails."""
    if mode == "nth":
        return FaultPlan.nth(number, *kinds)
    if mode == "from":
        return FaultPlan.from_nth(number, *kinds)
    assert sites, "a run without sites fails nothing"
    probability = min(MOST_PROBABLE, EXPECTED_FAILURES / len(sites))
    draw = (seed << 40) + (number << 16)
    while True:
        plan = FaultPlan.at_random(probability, draw, *kinds)
        if first_failure(plan, sites) is not None:
            return plan
        draw += 1


def reference(workload: Workload, kinds: tuple[FaultKind, ...] = KINDS) -> Reference:
    """Run undisturbed. Raises ``SweepError`` when that goes wrong, and what loading raises."""
    recorder = Recorder(FaultPlan(kinds))
    script = Script(workload, recorder)
    script.engine = script.open()
    books, steps = [script.books()], []
    for number in script.requests:
        steps.append(script.request(number))
        books.append(script.books())
    answers = tuple(step.answer for step in steps if step.answer is not None)
    script.disturb(on=False)
    steps += [script.request(number) for number in script.requests]
    settled = script.books()
    script.disturb(on=True)
    steps.append(script.unload())
    wrong = [f"{step.name}: {step.error}" for step in steps if step.error is not None]
    if [step.answer for step in steps if step.answer is not None] != [*answers, *answers]:
        wrong.append("asked again, it answers differently")
    wrong += _judge_end(script)
    if wrong:
        raise SweepError(f"the undisturbed run went wrong: {'; '.join(wrong)}")
    calls = Counter({kind: script.device.calls[kind] for kind in kinds})
    return Reference(answers, tuple(recorder.passed), calls, tuple(books), settled)


def disturbed(
    workload: Workload,
    wanted: Reference,
    mode: Mode,
    number: int,
    kinds: tuple[FaultKind, ...],
    seed: int = 0,
) -> Run:
    """One run with failures, judged against the undisturbed one."""
    plan = plan_of(mode, number, kinds, wanted.passed, seed)
    script = Script(workload, FaultInjector(plan))
    verdict = _Verdict(script, wanted)
    verdict.judge()
    fired, meant = script.injector.fired, first_failure(plan, wanted.passed)
    verdict.wrong += _judge_failures(mode, fired, meant)
    # The same complaint after each request is one complaint.
    wrong = tuple(dict.fromkeys(verdict.wrong))
    site = fired[0] if fired else meant
    assert site is not None, (mode, number)
    return Run(mode, number, site.kind, str(site), len(fired), verdict.outcome, wrong)


@dataclass
class _Verdict:
    """A script as it runs, with what was wrong so far."""

    script: Script
    wanted: Reference
    outcome: Outcome = "identical"
    wrong: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Run the script to its end."""
        script = self.script
        loaded = script.load()
        self.wrong += _judge_step(loaded, None)
        if script.engine is None:
            self.outcome = "load failed"
            # What the failed load left is asked before anything else can take it away.
            self.wrong += _judge_end(script)
            script.disturb(on=False)
            again = script.load()
            if script.engine is None:
                self.wrong.append(f"afterwards the device cannot load the model: {again.error}")
                return
        else:
            for number in script.requests:
                self._judge_request(number)
        script.disturb(on=False)
        self._judge_recovery()
        script.disturb(on=True)
        self.wrong += _judge_step(script.unload(), None)
        self.wrong += _judge_end(script)

    def _judge_request(self, number: int) -> None:
        step = self.script.request(number)
        if step.error is not None:
            self.outcome = "request failed"
        self.wrong += _judge_step(step, self.wanted.answers[number - 1])
        self.wrong += _judge_idle(self.script, step.name)
        loaded, usual, held = self.wanted.books[0], self.wanted.books[number], self.script.books()
        if not loaded.reserved <= held.reserved <= usual.reserved:
            self.wrong.append(
                f"after {step.name} {held.reserved} bytes are reserved; undisturbed they are {loaded.reserved} "
                f"after loading and {usual.reserved} now"
            )
        if _fixed(held) != _fixed(loaded):
            self.wrong.append(f"after {step.name} arenas hold {_fixed(held)}; after loading {_fixed(loaded)}")
        if held.overlays > usual.overlays:
            self.wrong.append(
                f"after {step.name} there are {held.overlays} overlays; undisturbed {usual.overlays}"
            )

    def _judge_recovery(self) -> None:
        for number in self.script.requests:
            step = self.script.request(number)
            if step.error is not None:
                self.wrong.append(f"afterwards {step.name} fails: {step.error}")
            elif step.answer != self.wanted.answers[number - 1]:
                self.wrong.append(f"afterwards {step.name} gives other tokens or logits")
            self.wrong += _judge_idle(self.script, f"{step.name}, asked again,")
        held = self.script.books()
        if held != self.wanted.settled:
            self.wrong.append(f"afterwards the engine holds {held}; undisturbed {self.wanted.settled}")


def _fixed(books: Books) -> dict[str, int]:
    return {name: nbytes for name, nbytes in books.arenas.items() if name != GROWING}


def _judge_step(step: Step, wanted: Answer | None) -> Iterator[str]:
    if step.error is None:
        if step.answer != wanted:
            yield f"{step.name} gave other tokens or logits and no error"
        return
    if not step.typed:
        yield f"{step.name} raised what no failed call may become: {step.error}"
    if not step.fired:
        yield f"{step.name} failed although no call in it did: {step.error}"
    elif str(step.fired[0]) not in step.error:
        yield f"the error of {step.name} does not name {step.fired[0]}: {step.error}"


def _judge_idle(script: Script, name: str) -> Iterator[str]:
    """Between two requests an engine holds no positions and has nothing to do."""
    engine = script.engine
    assert engine is not None
    cache = engine.context.cache
    for sequence in range(cache.shape.n_sequences):
        if cache.length(sequence):
            yield f"after {name} the KV cache holds {cache.length(sequence)} positions of sequence {sequence}"
    capacity = cache.shape.n_pages * PAGE
    if cache.free_positions != capacity:
        yield f"after {name} {cache.free_positions} of {capacity} positions of the KV cache are free"
    for stream in script.device.streams:
        if stream.pending:
            yield f"after {name} {stream.pending} operations wait on stream {stream.name}"
    try:
        engine.check_integrity()  # findings arrive by callback
    except Exception as error:  # noqa: BLE001 - books that contradict each other are what a sweep looks for
        yield f"after {name} check_integrity: {type(error).__name__}: {error}"


def _judge_end(script: Script) -> Iterator[str]:
    """After unloading, or a load that failed, nothing is left, and nothing was found at any time."""
    yield from (f"{what} is left" for what in script.device.left())
    yield from script.device.too_early
    if script.engine is not None:
        held = script.engine.allocator.snapshot()
        if held.reserved or held.used.current:
            yield f"the ledger has {held.reserved} bytes reserved and {held.used.current} in buffers"
    yield from (f"{finding.code}: {finding.message}" for finding in script.found)


def _judge_failures(mode: Mode, fired: list[Site], meant: Site | None) -> Iterator[str]:
    if mode == "nth" and len(fired) != 1:
        yield f"the fault fired {len(fired)} times, not once"
    seen = fired[0] if fired else None
    if seen != meant:
        yield f"the first call that failed is {seen or 'none'}; in the undisturbed run it is {meant or 'none'}"
