"""What a check has to say: findings, the call stacks they carry, and the log that keeps them."""

from __future__ import annotations

import itertools
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from instrumentation import catalogue
from instrumentation.errors import FindingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

_OURS = str(Path(__file__).resolve().parent)
#: programs that show findings: callers, although they are part of the package
_PROGRAMS = str(Path(_OURS) / "catalogue_programs")
_log = structlog.get_logger("instrumentation")


class Frame(NamedTuple):
    """One call: where in the source it stood."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]

# A stack is taken at every reservation, so whether a code object is ours is remembered by the object.
_is_ours: dict[CodeType, bool] = {}
_REMEMBERED = 8192


def _look_up(code: CodeType) -> bool:
    if len(_is_ours) >= _REMEMBERED:
        _is_ours.clear()
    file = code.co_filename
    ours = file.startswith(_OURS) and not file.startswith(_PROGRAMS)
    _is_ours[code] = ours
    return ours


def _walk(limit: int) -> list[FrameType]:
    """Innermost ``limit`` frames of whoever called the caller, innermost first, without this package's own."""
    frames: list[FrameType] = []
    known = _is_ours
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the traceback module costs a hundred times as much
    while frame is not None:
        code = frame.f_code
        ours = known.get(code)
        if ours is None:
            ours = _look_up(code)
        if not ours:
            frames.append(frame)
            if len(frames) >= limit:
                break
        frame = frame.f_back
    return frames


def capture_stack(limit: int = 8) -> Stack:
    """Take the innermost ``limit`` frames of the caller, innermost first, without this package's own.

    Costs a few microseconds: source text is read only when a report is rendered.
    """
    return tuple(
        Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname) for frame in _walk(limit)
    )


class CallSite:
    """As ``capture_stack``, at half the price, for who needs a stack seldom: lines are looked up by ``stack``."""

    __slots__ = ("_places",)

    def __init__(self, limit: int = 8) -> None:
        self._places = [(frame.f_code, frame.f_lasti) for frame in _walk(limit)]

    @property
    def stack(self) -> Stack:
        """The frames."""
        return tuple(
            Frame(code.co_filename, _line(code, offset), code.co_qualname) for code, offset in self._places
        )


def _line(code: CodeType, offset: int) -> int:
    positions = next(itertools.islice(code.co_positions(), offset // 2, None), (None,))
    return positions[0] or code.co_firstlineno


@dataclass(frozen=True, slots=True)
class BufferFacts:
    """A buffer as it was when the finding was made; keeps no memory alive."""

    name: str
    owner: str
    address: int
    nbytes: int

    def __post_init__(self) -> None:
        assert self.nbytes > 0, self


@dataclass(frozen=True, slots=True)
class MemoryWindow:
    """Bytes of memory around damage: ``data`` from ``address`` on, damaged in ``[first, stop)``."""

    address: int
    data: bytes
    first: int
    stop: int

    def __post_init__(self) -> None:
        assert self.address <= self.first < self.stop, (self.address, self.first, self.stop)
        assert self.first < self.address + len(self.data), (self.address, len(self.data), self.first)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One violation, with everything that is known about its cause. Fields that do not apply stay empty."""

    #: a code of the catalogue
    code: str
    #: one sentence: what was seen, and what was wanted
    message: str
    #: a few words for the headline; the catalogue's title unless given
    kind: str = ""
    #: bytes accessed or damaged
    size: int | None = None
    #: first such byte, counted from the buffer's first byte; negative lies left of it
    offset: int | None = None
    buffer: BufferFacts | None = None
    #: the buffer beside ``buffer`` on the side of the damage, and whether the damage runs into its redzone
    neighbour: BufferFacts | None = None
    reached_neighbour: bool = False
    #: the owner that made the access, where that is not the buffer's
    actor: str | None = None
    access: Stack = ()
    #: the other one of two accesses or calls that conflict
    previous: Stack = ()
    allocation: Stack = ()
    free: Stack = ()
    window: MemoryWindow | None = None
    device: str | None = None
    kernel: str | None = None
    #: number of the launch since the start
    launch: int | None = None
    #: the kernel's source line that made the access
    source: Frame | None = None
    #: where in that line the access stands, from 1
    column: int | None = None
    argument: str | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    stream: str | None = None
    notes: tuple[str, ...] = ()
    #: how often this site was found
    count: int = 1

    def __post_init__(self) -> None:
        entry = catalogue.entry(self.code)
        assert self.message, self.code
        assert self.size is None or self.size >= 0, self.size
        assert self.count >= 1, self.count
        assert not (self.reached_neighbour and self.neighbour is None), self
        if not self.kind:
            object.__setattr__(self, "kind", entry.title)

    @property
    def site(self) -> tuple[object, ...]:
        """What findings of one cause have in common."""
        buffer = (self.buffer.owner, self.buffer.name) if self.buffer else None
        stack = self.access or self.allocation
        # Of two accesses in a kernel both say what races; of two calls the later one alone.
        stack += self.previous if self.source is not None else ()
        return (self.code, self.kind, buffer, self.actor, self.kernel, self.argument, self.source, stack)


class RefusedError(FindingError):
    """A call was refused. ``finding`` says why; the message is its text report."""

    def __init__(self, finding: Finding, report: str) -> None:
        super().__init__(report)
        self.finding = finding


class FindingLog:
    """Findings in the order in which their sites were first seen. Safe to use from any thread.

    ``on_finding`` is called for every finding, merged or not, outside the log's lock; what it raises
    reaches the caller whose access was found. A site's first finding is also logged.
    """

    #: sites kept apart; what comes after them is counted in ``omitted``, so that a soak stays bounded
    max_sites = 10_000

    def __init__(self, on_finding: Callable[[Finding], None] | None = None) -> None:
        self._on_finding = on_finding
        self._first: dict[tuple[object, ...], Finding] = {}
        self._count: dict[tuple[object, ...], int] = {}
        self.omitted = 0
        # Re-entrant: a reservation dropped by the garbage collector appends from within any call.
        self._lock = threading.RLock()

    def append(self, finding: Finding) -> None:
        """Keep ``finding``, or count it where its site is known."""
        site = finding.site
        with self._lock:
            known = self._count.get(site)
            if known is not None:
                self._count[site] = known + finding.count
            elif len(self._first) < self.max_sites:
                self._first[site] = finding
                self._count[site] = finding.count
            else:
                self.omitted += finding.count
        if known is None:
            _log.error(
                "finding",
                code=finding.code,
                kind=finding.kind,
                message=finding.message,
                buffer=finding.buffer.name if finding.buffer else None,
                owner=finding.buffer.owner if finding.buffer else finding.actor,
            )
        if self._on_finding is not None:
            self._on_finding(finding)

    def __iter__(self) -> Iterator[Finding]:
        with self._lock:
            merged = [
                finding if finding.count == self._count[site] else replace(finding, count=self._count[site])
                for site, finding in self._first.items()
            ]
        return iter(merged)

    def __len__(self) -> int:
        return len(self._first)

    @property
    def total(self) -> int:
        """Findings with their repetitions, and those that were omitted."""
        with self._lock:
            return sum(self._count.values()) + self.omitted

    def of(self, code: str) -> tuple[Finding, ...]:
        """Return the findings of one code."""
        catalogue.entry(code)
        return tuple(finding for finding in self if finding.code == code)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._first.clear()
            self._count.clear()
            self.omitted = 0

    def list(self) -> tuple[Finding, ...]:
        """One finding per site, each with its ``count``."""
        return tuple(self)
