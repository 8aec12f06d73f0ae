"""Fail every device call of a scripted workload, and see that nothing is lost.

The workload loads a model, answers rounds of requests and unloads. A run fails some of its calls by a plan, and
behaves when

* the first call that failed is the one that the plan means, and mode ``nth`` failed it alone;
* loading ends in a typed error that names the first call that failed in it, or in an engine; each request in one that
  names a call that failed in its round and that no other request names, or with the tokens and logits of an
  undisturbed run. Calls for drafts, which are those of the draft context and of handing hidden states over, end no
  request;
* the engine has counted as many failed decodes of each context as calls of them failed;
* after each round, when prefixes are dropped, caches and recurrent states of every context are empty, nothing is
  lent, runs or waits, and no memory is held that an undisturbed run would not hold by then;
* when no more calls fail, the engine (after a failed load: the device, with a new engine) gives the undisturbed
  answers and then holds exactly what an undisturbed engine holds;
* unloading gives back every byte, stream and event, and nothing was found at any time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from instrumentation.errors import Error
from instrumentation.faults import FaultInjector, FaultKind, FaultPlan, Site
from refengine.kernels.kv_types import PAGE
from refengine.sweep.counting import SWEPT_KINDS, Recorder, first_failure, owner_of
from refengine.sweep.script import NOTHING, Answer, Books, Script, Step, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.context import Context
    from refengine.engine import Engine

Mode: TypeAlias = Literal["nth", "from", "random"]
MODES: tuple[Mode, ...] = get_args(Mode)
Outcome: TypeAlias = Literal["load failed", "request failed", "identical"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
#: failures to expect of a run in mode ``random``, and the most probable that each call may be to fail
EXPECTED_FAILURES = 2.0
MOST_PROBABLE = 0.5
#: arenas whose size may follow what is computed, of every owner
GROWING = "/compute"


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

    #: of each round
    answers: tuple[tuple[Answer | None, ...], ...]
    passed: tuple[Site, ...]
    calls: Counter[FaultKind]
    #: what was held after loading and after each round
    books: tuple[Books, ...]
    #: what was held after all rounds were asked once more
    settled: Books
    preemptions: int = 0
    #: decodes that verified drafts
    verifications: int = 0
    #: prompt tokens that a slot held already
    reused: int = 0

    @property
    def sites(self) -> Counter[FaultKind]:
        """Fault sites by kind."""
        return Counter(site.kind for site in self.passed)

    def uncounted(self) -> list[str]:
        """Kinds of calls whose fault sites are not as many as the calls, in words."""
        sites = self.sites
        return [
            f"{kind}: {sites[kind]} fault sites for {self.calls[kind]} calls"
            for kind in SWEPT_KINDS
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


def reference(workload: Workload, kinds: tuple[FaultKind, ...] = SWEPT_KINDS) -> Reference:
    """Run undisturbed. Raises ``SweepError`` when that goes wrong, and what loading raises."""
    recorder = Recorder(FaultPlan(kinds))
    script = Script(workload, recorder)
    engine = script.engine = script.open()
    books, steps = [script.books()], []
    wrong: list[str] = []

    def ask(number: int) -> None:
        steps.append(script.ask(number))
        wrong.extend(_judge_idle(script, steps[-1].name))
        books.append(script.books())

    for number in script.rounds:
        ask(number)
    answers = tuple(step.answers for step in steps)
    statistics = engine.scheduler.statistics
    seen = statistics.preemptions, statistics.draft.blocks, statistics.reused_tokens
    script.disturb(on=False)
    for number in script.rounds:
        ask(number)
    script.disturb(on=True)
    asked = tuple(steps)
    steps.append(script.unload())
    wrong += [f"{ending.name}: {ending.error}" for step in steps for ending in step.failed]
    if tuple(step.answers for step in asked) != (*answers, *answers):
        wrong.append("asked again, it answers differently")
    if script.reports() != NOTHING:
        wrong.append(f"no call failed, and it counted {script.reports()}")
    wrong += _judge_end(script)
    if wrong:
        raise SweepError(f"the undisturbed run went wrong: {'; '.join(wrong)}")
    calls = Counter({kind: script.device.calls[kind] for kind in kinds})
    usual = tuple(books[: 1 + len(answers)])
    return Reference(answers, tuple(recorder.passed), calls, usual, books[-1], *seen)


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
        self.wrong += _judge_alone(loaded)
        if script.engine is None:
            self.outcome = "load failed"
            # What the failed load left is asked before anything else can take it away.
            self.wrong += _judge_end(script)
            script.disturb(on=False)
            again = script.load()
            if script.engine is None:
                self.wrong.append(f"afterwards the device cannot load the model: {again.endings[0].error}")
                return
        else:
            for number in script.rounds:
                self._judge_round(number)
        script.disturb(on=False)
        self._judge_recovery()
        script.disturb(on=True)
        self.wrong += _judge_alone(script.unload())
        self.wrong += _judge_end(script)

    def _judge_round(self, number: int) -> None:
        step = self.script.ask(number)
        if step.failed:
            self.outcome = "request failed"
        self.wrong += _judge_answers(step, self.wanted.answers[number - 1])
        self.wrong += _judge_reports(step)
        self.wrong += _judge_idle(self.script, step.name)
        loaded, usual, held = self.wanted.books[0], self.wanted.books[number], self.script.books()
        if not loaded.reserved <= held.reserved <= usual.reserved:
            self.wrong.append(
                f"after {step.name} {held.reserved} bytes are reserved; undisturbed they are {loaded.reserved} "
                f"after loading and {usual.reserved} now"
            )
        if _fixed(held) != _fixed(loaded):
            self.wrong.append(f"after {step.name} arenas hold {_fixed(held)}; after loading {_fixed(loaded)}")

    def _judge_recovery(self) -> None:
        for number in self.script.rounds:
            step = self.script.ask(number)
            for ending, wanted in zip(step.endings, self.wanted.answers[number - 1], strict=True):
                if ending.error is not None:
                    self.wrong.append(f"afterwards {ending.name} fails: {ending.error}")
                elif ending.answer != wanted:
                    self.wrong.append(f"afterwards {ending.name} gives other tokens or logits")
            self.wrong += _judge_reports(step)
            self.wrong += _judge_idle(self.script, f"{step.name}, asked again,")
        held = self.script.books()
        if held != self.wanted.settled:
            self.wrong.append(f"afterwards the engine holds {held}; undisturbed {self.wanted.settled}")


def _fixed(books: Books) -> dict[str, int]:
    return {name: nbytes for name, nbytes in books.arenas.items() if not name.endswith(GROWING)}


def _is_for_drafts(site: Site) -> bool:
    """Whether a call of a request serves drafts alone, so that its failure may end nothing."""
    return site.kind == "event" or owner_of(site) == "draft"


def _judge_alone(step: Step) -> Iterator[str]:
    """Loading or unloading: an error must name the first call that failed."""
    for ending in step.failed:
        assert ending.error is not None
        if not ending.typed:
            yield f"{ending.name} raised what no failed call may become: {ending.error}"
        if not step.fired:
            yield f"{ending.name} failed although no call in it did: {ending.error}"
        elif str(step.fired[0]) not in ending.error:
            yield f"the error of {ending.name} does not name {step.fired[0]}: {ending.error}"


def _judge_answers(step: Step, wanted: tuple[Answer | None, ...]) -> Iterator[str]:
    """Each request of a round has its answer, or an error of its own that a failed call explains."""
    causes = [site for site in step.fired if not _is_for_drafts(site)]
    spared = f", only {step.fired[0]}" if step.fired and not causes else ""
    unused = list(causes)
    for ending, answer in zip(step.endings, wanted, strict=True):
        if ending.error is None:
            if ending.answer != answer:
                yield f"{ending.name} gave other tokens or logits and no error"
            continue
        if not ending.typed:
            yield f"{ending.name} raised what no failed call may become: {ending.error}"
        named = [site for site in unused if str(site) in ending.error]
        if named:
            unused.remove(named[0])
        elif not causes:
            yield f"{ending.name} failed although no call that may end it did{spared}: {ending.error}"
        else:
            others = f" or another of {len(causes)}" if len(causes) > 1 else ""
            yield f"the error of {ending.name} does not name {causes[0]}{others}: {ending.error}"


def _judge_reports(step: Step) -> Iterator[str]:
    """A decode ends at its first call that fails: so many calls failed, so many failed decodes were counted."""
    for_drafts = [site for site in step.fired if _is_for_drafts(site)]
    causes = [site for site in step.fired if not _is_for_drafts(site)]
    for role, fired, counted in (
        ("target", causes, step.reports.target),
        ("draft", for_drafts, step.reports.draft),
    ):
        if len(fired) != counted:
            first = f", the first {fired[0]}," if fired else ""
            yield (
                f"{len(fired)} calls for the {role} context failed in {step.name}{first} and it counted {counted} "
                "failed decodes"
            )


def _judge_idle(script: Script, name: str) -> Iterator[str]:
    """Between two rounds an engine has nothing to do, and without prefixes it holds no positions."""
    engine = script.engine
    assert engine is not None
    if not engine.scheduler.is_idle:
        yield f"after {name} requests wait or run"
    yield from _judge_books(engine, name)
    engine.drop_prefixes()
    for context in (engine.context, engine.draft):
        if context is not None:
            yield from _judge_empty(context, name)
    for stream in sorted(script.device.streams, key=lambda s: s.handle):
        if stream.pending:
            yield f"after {name} {stream.pending} operations wait on stream {stream.name}"
    for arena in engine.allocator.arenas:
        for buffer in arena.all_buffers():
            for lease in buffer.leases:
                yield f"after {name} {buffer.name} of {buffer.owner} is still lent to {lease.to}"
    yield from _judge_books(engine, f"{name} and without prefixes")


def _judge_empty(context: Context, name: str) -> Iterator[str]:
    """A context holds nothing of any sequence."""
    cache, states, owner = context.cache, context.states, context.owner
    for sequence in range(cache.shape.n_sequences):
        if cache.length(sequence):
            yield (
                f"after {name} the KV cache of {owner} holds {cache.length(sequence)} positions of sequence {sequence}"
            )
        if states is not None and states.length(sequence):
            yield (
                f"after {name} the recurrent state of {owner} has seen {states.length(sequence)} tokens of sequence "
                f"{sequence}"
            )
    capacity = cache.shape.n_pages * PAGE
    if cache.free_positions != capacity:
        yield f"after {name} {cache.free_positions} of {capacity} positions of the KV cache of {owner} are free"


def _judge_books(engine: Engine, name: str) -> Iterator[str]:
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
