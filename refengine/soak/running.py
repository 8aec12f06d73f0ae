"""The soak itself: clients in one thread that ask, wait, give up and ask again, and a judge of every answer."""

from __future__ import annotations

import bisect
import gc
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import refengine
from instrumentation.errors import Error, FindingError
from instrumentation.faults import FaultInjector
from instrumentation.reports.text import render
from refengine.engine import Engine
from refengine.errors import ContextSizeError
from refengine.gguf_file import GGUFFile
from refengine.inspection import memory_plan
from refengine.models import resolve_model
from refengine.soak.memory import MemoryPoint, growth
from refengine.soak.summary import Counts, Problem, ProblemKind, Summary
from refengine.soak.verification import Output, alone_options, compute_alone
from refengine.soak.workload import Planned, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from instrumentation.findings import Finding
    from refengine.gguf_values import Scalar
    from refengine.options import EngineOptions
    from refengine.request import Request
    from refengine.soak.plan import SoakPlan
    from refengine.weights import Progress

#: warm-up is over when this part of the soak is, and this many requests were completed
WARM_PART = 0.1
WARM_REQUESTS = 20
#: steps after which guard bytes and books are verified
_VERIFY_STEPS = 256
#: steps without progress that are a livelock; a longer context may take a step for each of its positions
STALLED_STEPS = 1000
_SITE = re.compile(r"fault site (\d+) ")


@dataclass
class _Client:
    planned: Planned | None = None
    request: Request | None = None


class Soak:
    """A loaded model with clients. Use it as a context manager: ``run``, then ``verify``, then ``summary``.

    ``summary`` may be asked for at any time. Raises what loading raises.
    """

    def __init__(
        self,
        path: str | Path,
        options: EngineOptions,
        plan: SoakPlan,
        *,
        override_kv: Mapping[str, Scalar] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path = resolve_model(path)
        self.options = options
        self.plan = plan
        self.override_kv = override_kv
        self.injector = FaultInjector(plan.faults)
        self.injector.enabled = False
        faults = self.injector if plan.fail_rate else None
        with GGUFFile.open(self.path, override_kv=override_kv) as gguf:
            self.engine = Engine(gguf, options, progress=progress, faults=faults)
            with ExitStack() as undo:
                undo.callback(self.engine.close)
                worst = memory_plan(gguf, replace(options, worst_case_reserve=True))
                self.workload = Workload(
                    self.engine.settings.n_ctx, self.engine.tokenizer.n_vocab, size=plan.pool, seed=plan.seed
                )
                undo.pop_all()
        #: what compute memory may grow to when it is not reserved at load
        self._may_reserve = 0 if options.worst_case_reserve else worst.total(self.engine.level)
        self.statistics = self.engine.scheduler.statistics
        self.counts = Counts()
        self.problems: list[Problem] = []
        #: first answer to each request of the pool, by its number, and which request that was
        self.outputs: dict[int, tuple[int, Output]] = {}
        self.verified = 0
        self._verifying: list[Finding] = []
        self._clients = [_Client() for _ in range(plan.clients)]
        self._points: dict[str, MemoryPoint | None] = {
            "load": MemoryPoint.of(self.engine), "warm-up": None, "end": None
        }  # fmt: skip
        self._warm_up = "not over"
        self._warmed_up = False
        self._stopped = False
        self._finished = False
        self._started = self._ended = 0.0
        self._limit = max(STALLED_STEPS, self.engine.settings.n_ctx)
        self._stalled = 0
        self._progress: tuple[int, int] = (0, 0)
        #: most positions that a running request ever held, by its number
        self._held: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model. A leak is among the findings."""
        try:
            self.engine.close()
        except FindingError:
            assert self.engine.findings

    # --- the run

    @property
    def seconds(self) -> float:
        """How long clients have been at work."""
        if not self._started:
            return 0.0
        return (self._ended or time.perf_counter()) - self._started

    @property
    def part(self) -> float:
        """How much of the soak is over: 1 when no more is asked."""
        end = self.plan.end
        done = {
            "seconds": self.seconds,
            "retries": self.statistics.retries,
            "requests": self.counts.asked,
        }
        return min(1.0, done[end.unit] / end.amount)

    def run(self, watch: Callable[[], None] = lambda: None) -> None:
        """Let clients ask until the end, and finish what they asked for. ``watch`` is called after each step."""
        self._started = time.perf_counter()
        self.injector.enabled = True
        try:
            while self._attend():
                self.engine.drive()
                self._watch_progress()
                if self.statistics.steps % _VERIFY_STEPS == 0:
                    self.engine.check_integrity()
                watch()
        finally:
            self.injector.enabled = False
            self._ended = time.perf_counter()
        self._finished = not any(problem.kind == "livelock" for problem in self.problems)
        self._settle_memory()

    def _attend(self) -> bool:
        """See to every client: take what has ended, give up, ask again. False when all is done."""
        waiting = False
        for client in self._clients:
            self._take(client)
            while client.request is None and not self._over():
                self._ask(client)
            waiting |= client.request is not None
        self._note_warm_up()
        return waiting

    def _over(self) -> bool:
        self._stopped = self._stopped or self.part >= 1.0
        return self._stopped

    def _ask(self, client: _Client) -> None:
        planned = self.workload.next()
        self.counts.asked += 1
        try:
            client.request = self.engine.submit(
                list(planned.prompt),
                n_predict=planned.n_predict,
                temperature=planned.temperature,
                seed=planned.seed,
                ignore_eos=True,
                return_logits=True,
                background=False,
            )
            client.planned = planned
        except ContextSizeError as error:
            self._failed(planned, str(self.counts.asked), error)

    def _take(self, client: _Client) -> None:
        request, planned = client.request, client.planned
        if request is None or planned is None:
            return
        enough = planned.cancel_after
        if not request.ended and enough is not None and len(request.tokens) >= enough:
            request.cancel()
        if not request.ended:
            return
        client.request = client.planned = None
        self._held.pop(request.number, None)
        if request.status == "cancelled":
            self.counts.cancelled += 1
        elif request.error is not None:
            self._failed(planned, str(request.number), request.error)
        else:
            self._completed(planned, request)

    def _completed(self, planned: Planned, request: Request) -> None:
        self.counts.completed += 1
        if planned.kind != "fits":
            self._wrong("difference", f"request {request.number} does not fit, and was completed")
            return
        self.counts.due += 1
        output = Output.of(request.generation())
        number, known = self.outputs.setdefault(planned.number, (request.number, output))
        found = output.difference(known)
        if found is not None:
            self._wrong(
                "difference", f"request {request.number} asks the same as request {number} did, and {found}"
            )

    def _failed(self, planned: Planned, name: str, error: Exception) -> None:
        text = str(error)
        if isinstance(error, ContextSizeError) and planned.kind != "fits":
            self.counts.refused += 1
            return
        self.counts.failed += 1
        if not self._is_injected(text):
            self.counts.due += planned.kind == "fits"
            self._wrong("incomplete", f"request {name} of {len(planned.prompt)}+{planned.n_predict}: {text}")
            return
        self.counts.hit += 1
        if not text.startswith("Compute error."):
            self._wrong("injection", f"request {name} ended with no Compute error. but: {text}")

    def _is_injected(self, text: str) -> bool:
        """Whether an error names a call that failed on purpose."""
        site, fired = _SITE.search(text), self.injector.fired
        if site is None:
            return False
        at = bisect.bisect_left(fired, int(site[1]), key=lambda each: each.number)
        return at < len(fired) and fired[at].number == int(site[1])

    def _watch_progress(self) -> None:
        """Count steps in which nothing came that was not there before: what is computed again does not count."""
        progress = (self.statistics.generated_tokens, self.counts.ended)
        moved = progress != self._progress
        self._progress = progress
        if not moved:
            for slot in self.engine.scheduler.slots:
                if slot.request is None:
                    continue
                number, held = slot.request.number, len(slot.held)
                if held > self._held.get(number, 0):
                    self._held[number] = held
                    moved = True
        self._stalled = 0 if moved else self._stalled + 1
        if self._stalled < self._limit:
            return
        waiting = [client.request for client in self._clients if client.request is not None]
        self._wrong(
            "livelock",
            f"no token was generated and none of a prompt decoded in {self._limit} steps, with "
            f"{len(waiting)} requests waiting",
        )
        self._stopped = True
        for client in self._clients:
            if client.request is not None:
                client.request.cancel()

    def _wrong(self, kind: ProblemKind, text: str) -> None:
        self.problems.append(Problem(kind, text))

    # --- memory

    def _note_warm_up(self) -> None:
        if self._points["warm-up"] is not None:
            return
        warm = self.part >= WARM_PART and self.counts.completed >= WARM_REQUESTS
        if warm or self._stopped:
            self._points["warm-up"] = MemoryPoint.of(self.engine)
            self._warmed_up = warm
            watch = self.engine.device.memory_watch
            if watch is not None and warm:
                watch.begin()
            self._warm_up = f"{self.counts.completed} completed requests, {self.seconds:.1f} s"

    def _settle_memory(self) -> None:
        """Verify the books and judge memory when nothing is left to do."""
        self.engine.drop_prefixes()
        self.engine.check_integrity()
        gc.collect()
        end = self._points["end"] = MemoryPoint.of(self.engine)
        warm = self._points["warm-up"]
        assert warm is not None, "a run that has ended was warm before"
        for text in growth(warm, end, may_reserve=self._may_reserve, warmed_up=self._warmed_up):
            self._wrong("growth", text)

    # --- verification

    def verify(self, watch: Callable[[], None] = lambda: None) -> None:
        """Unload the soaked model, and compute every request that was completed alone. Raises what loading raises."""
        self.close()
        if not self.outputs:
            return
        options = alone_options(self.options, self.engine.settings.n_ctx)
        engine = refengine.load(self.path, override_kv=self.override_kv, **options)
        try:
            for number in sorted(self.outputs):
                self._compare(engine, number)
                self.verified += 1
                watch()
        finally:
            self._verifying = engine.findings
            for finding in self._verifying:
                self._wrong("finding", f"of the engine that verifies: {render(finding)}")
            engine.close()

    def _compare(self, engine: Engine, number: int) -> None:
        first, output = self.outputs[number]
        try:
            found = output.difference(compute_alone(engine, self.workload.pool[number]))
        except Error as error:
            found = f"alone it ends with: {error}"
        if found is not None:
            self._wrong("difference", f"request {first}: beside others {found}")

    # --- what came of it

    def summary(self) -> Summary:
        """How it stands."""
        return Summary(
            end=str(self.plan.end),
            seed=self.plan.seed,
            clients=self.plan.clients,
            pool=self.plan.pool,
            seconds=self.seconds,
            finished=self._finished and self.verified == len(self.outputs),
            requests=replace(self.counts),
            injected_failures=len(self.injector.fired),
            distinct=len(self.outputs),
            verified=self.verified,
            warm_up=self._warm_up,
            memory=dict(self._points),
            problems=(*self.problems, *self._findings()),
            **self._of_scheduler(),
        )

    @property
    def found(self) -> list[Finding]:
        """What was found by now, in the engine that verifies as well."""
        return [*self.engine.findings, *self._verifying]

    def _findings(self) -> Iterator[Problem]:
        for finding in self.engine.findings:
            yield Problem("finding", render(finding))

    def _of_scheduler(self) -> dict[str, Any]:
        names = (
            "steps", "mean_busy_slots", "retries", "preemptions", "generated_tokens", "recomputed_tokens",
            "reused_tokens", "draft", "failed_decodes",
        )  # fmt: skip
        return {name: getattr(self.statistics, name) for name in names}
