"""An engine under the drill: its calls are numbered and can be changed on their way, and its findings are timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from instrumentation.devices.launch import next_number
from instrumentation.faults import FaultInjector
from instrumentation.findings import Finding
from instrumentation.view import View

if TYPE_CHECKING:
    from instrumentation.buffer import Buffer
    from instrumentation.devices.base import Stream
    from instrumentation.devices.captured import CapturedGraph
    from instrumentation.handles import LibraryCall
    from instrumentation.ownership import Owner
    from refengine.context import Context
    from refengine.engine import Engine
    from refengine.executor import Executable

#: calls that a distance counts
WORK = frozenset({"launch", "call", "copy_in", "copy_out", "copy", "fill", "replay"})
CALLS = (*sorted(WORK), "record", "wait", "synchronize", "begin_capture", "end_capture", "abandon_capture")
_ARGUMENTS = 2


@dataclass
class Call:
    """A call of a stream that is about to be made. ``given`` can be changed, and the call left out."""

    role: str
    kind: str
    given: list[Any]
    #: among all calls of the run that are work
    number: int
    #: whether its stream is being captured
    captured: bool
    left_out: bool = False

    @property
    def views(self) -> dict[str, View]:
        """What it touches, by argument; of a replay all that its launches do."""
        if self.kind == "launch":
            return {name: value for name, value in self.given[_ARGUMENTS].items() if isinstance(value, View)}
        if self.kind == "call":
            call: LibraryCall = self.given[0]
            return call.views
        if self.kind == "replay":
            graph: CapturedGraph = self.given[0]
            return {str(i): access.view for i, access in enumerate(graph.every_access())}
        return {str(i): value for i, value in enumerate(self.given) if isinstance(value, View)}

    @property
    def writes(self) -> frozenset[str]:
        """Arguments of a launch that it writes."""
        return frozenset(self.given[0].writes) if self.kind == "launch" else frozenset()

    def names(self, buffer: Buffer) -> bool:
        """Whether it touches a buffer."""
        return any(view.buffer is buffer for view in self.views.values())

    def exchange(self, argument: str, value: object) -> None:
        """Give a launch something else for an argument."""
        self.given[_ARGUMENTS] = {**self.given[_ARGUMENTS], argument: value}

    def where(self, argument: str | None = None) -> str:
        """For people: ``launch gather_hidden(hidden) on draft``."""
        inside = f"({argument})" if argument is not None else ""
        named = " ".join(filter(None, (self.kind, f"{_name(self.given)}{inside}")))
        return f"{named} on {self.role}"


def _name(given: list[Any]) -> str:
    for each in given:
        name = getattr(each, "name", None)
        if isinstance(name, str):
            return name
    return ""


Where: TypeAlias = Callable[[Call], bool]
Act: TypeAlias = Callable[[Call], None]


@dataclass
class _Hook:
    """Acts once, at the first call that it is for."""

    kind: str
    role: str
    act: Act
    where: Where
    behind: bool


@dataclass(frozen=True)
class Report:
    """A finding, or an error that has a code, and how far the run was when it came."""

    code: str
    #: which check: the headline of the finding
    check: str
    #: where the run was
    place: str
    #: calls between the cause and the report; None when it came without a cause that is known
    distance: int | None
    finding: Finding | None = None


@dataclass
class _Ran:
    """A call that was made: numbers of launches between ``low`` and ``high`` are its own."""

    call: Call
    low: int = 0
    high: int = 0


@dataclass
class Scene:
    """What a plant has before it. Hooks act once: on calls of the streams ``target``, ``draft`` and a plant's own."""

    #: fails calls when a plant says so
    injector: FaultInjector = field(default_factory=FaultInjector)
    #: undone before the engine is closed
    undo: ExitStack = field(default_factory=ExitStack)
    reports: list[Report] = field(default_factory=list)
    #: what the run is at, for reports that name no call
    phase: str = "load"
    #: where the fault was planted, for people
    planted: str = ""
    _engine: Engine | None = None
    _hooks: list[_Hook] = field(default_factory=list)
    _calls: list[_Ran] = field(default_factory=list)
    _cause: int | None = None
    _current: _Ran | None = None
    _cause_is_work: bool = False
    _capturing: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.injector.enabled = False

    # --- the engine

    def enter(self, engine: Engine) -> None:
        """The engine is loaded: number its calls from here on."""
        self._engine = engine
        for context in (self.target, self.draft):
            self._watch(context.stream, context.plan.role)

    @property
    def engine(self) -> Engine:
        """The engine."""
        assert self._engine is not None, "not loaded yet"
        return self._engine

    @property
    def target(self) -> Context:
        """The target context."""
        return self.engine.context

    @property
    def draft(self) -> Context:
        """The draft context."""
        assert self.engine.draft is not None
        return self.engine.draft

    @property
    def hidden(self) -> View:
        """The target's hidden states, which it lends to the draft."""
        return self.target.kept["hidden"]

    def executable(self, inputs: View) -> Executable:
        """The target's, by the view of its inputs."""
        return next(each for each in self.target.executor.executables if each.inputs is inputs)

    # --- what a plant makes

    def stream(self, owner: Owner, name: str) -> Stream:
        """One more stream, whose calls are numbered as well."""
        stream = self.engine.device.create_stream(owner=owner, name=name)
        self.undo.callback(stream.destroy)
        self._watch(stream, name)
        return stream

    def scratch(self, name: str, nbytes: int, owner: Owner) -> Buffer:
        """A buffer in an arena of its own, which goes when the run is over."""
        allocator = self.engine.allocator
        arena = allocator.reserve_arena(1 << 16, owner=owner, name=name).unwrap()
        self.undo.callback(arena.release)
        buffer = arena.reserve(nbytes, owner=owner, name=name).unwrap()
        self.undo.callback(lambda: None if buffer.freed else buffer.free())
        return buffer

    def before(self, kind: str, role: str, act: Act, where: Where = lambda _call: True) -> None:
        """Act before the first call of a kind that ``where`` is true of."""
        self._hooks.append(_Hook(kind, role, act, where, behind=False))

    def behind(self, kind: str, role: str, act: Act, where: Where = lambda _call: True) -> None:
        """As ``before``, when the call was made."""
        self._hooks.append(_Hook(kind, role, act, where, behind=True))

    # --- cause and report

    def caused(self, planted: str, call: Call | None = None) -> None:
        """The bad thing happens with a call; without one, now."""
        self.planted = self.planted or planted
        if self._cause is None:
            self._cause_is_work = call is not None and call.kind in WORK and not call.left_out
            self._cause = len(self._calls) if call is None else call.number

    def caused_by_first(self, role: str, buffer: Buffer) -> None:
        """The bad thing happens with the next call of a context that touches a buffer."""
        for kind in sorted(WORK):
            self.before(kind, role, lambda call: self.caused("", call), lambda call: call.names(buffer))

    def found(self, finding: Finding) -> None:
        """Something was found now."""
        at = self._at(finding)
        distance = None if self._cause is None else self._distance(self._cause, at, finding)
        self.reports.append(Report(finding.code, finding.kind, self._place(finding), distance, finding))

    def failed(self, error: BaseException) -> bool:
        """A request, or loading, ended in an error: those with a code in its chain are reports. Whether one has."""
        known = {id(report.finding) for report in self.reports}
        explained = False
        each: BaseException | None = error
        while each is not None:
            finding, code = getattr(each, "finding", None), getattr(each, "code", None)
            explained = explained or isinstance(finding, Finding) or isinstance(code, str)
            if isinstance(finding, Finding) and id(finding) not in known:
                place = f"kernel {finding.kernel}" if finding.kernel is not None else self.phase
                self.reports.append(Report(finding.code, finding.kind, place, self._now(), finding))
            elif isinstance(code, str):
                what = f"reservation of {getattr(each, 'name', '')} of {getattr(each, 'owner', '')}"
                self.reports.append(Report(code, "error of the request", what, self._now()))
            each = each.__cause__
        return explained

    def _now(self) -> int | None:
        return None if self._cause is None else max(0, self._last - self._cause)

    @property
    def _last(self) -> int:
        """Number that a report has which comes with no call."""
        return len(self._calls) - self._cause_is_work

    def _at(self, finding: Finding) -> int:
        """Number of the call that a finding is about, or else of the one that is being made, or of the next one."""
        if finding.launch is not None:
            for ran in reversed(self._calls):
                if ran.low < finding.launch < (ran.high or finding.launch + 1):
                    return ran.call.number
        current = self._current
        return current.call.number if current is not None and current.call.kind in WORK else self._last

    def _distance(self, cause: int, at: int, finding: Finding) -> int:
        """Calls between the two; within a graph that is looked at as a whole, launches up to its end."""
        if finding.launch is None and cause < len(self._calls) and self._calls[cause].call.captured:
            low, high = self._calls[cause].low, self._calls[cause].high
            for ran in reversed(self._calls):
                if ran.call.kind == "replay":
                    numbers = [work.number for work in ran.call.given[0].captured]
                    inside = [i for i, number in enumerate(numbers) if low < number < high]
                    if inside:
                        return len(numbers) - 1 - inside[0]
        return max(0, at - cause)

    def _place(self, finding: Finding) -> str:
        if finding.kernel is not None:
            inside = f"({finding.argument})" if finding.argument is not None else ""
            return f"{finding.kernel}{inside} on {finding.stream}"
        if self._current is not None:
            return self._current.call.where()
        return self.phase

    # --- calls on their way

    def _watch(self, stream: Stream, role: str) -> None:
        for kind in CALLS:
            setattr(stream, kind, functools.partial(self._made, role, kind, getattr(stream, kind)))

    def _made(self, role: str, kind: str, call: Callable[..., Any], *given: Any) -> Any:
        made = Call(role, kind, list(given), len(self._calls), role in self._capturing)
        ran = _Ran(made)
        outer, self._current = self._current, ran
        try:
            self._act(made, behind=False)
            if made.left_out:
                return None
            if kind in WORK:
                made.number = len(self._calls)
                self._calls.append(ran)
            ran.low = next_number()
            result = call(*made.given)
            self._note_capture(role, kind)
            ran.high = next_number()
            self._act(made, behind=True)
            return result
        finally:
            ran.high = ran.high or next_number()
            self._current = outer

    def _note_capture(self, role: str, kind: str) -> None:
        if kind == "begin_capture":
            self._capturing.add(role)
        elif kind in ("end_capture", "abandon_capture"):
            self._capturing.discard(role)

    def _act(self, call: Call, *, behind: bool) -> None:
        for hook in list(self._hooks):
            if (hook.kind, hook.role, hook.behind) != (call.kind, call.role, behind) or not hook.where(call):
                continue
            self._hooks.remove(hook)
            hook.act(call)
