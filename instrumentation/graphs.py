"""Captured graphs of one device, and captures under way: at level ``audit`` each is known until it is destroyed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, Stack, capture_stack

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from instrumentation.devices.captured import CapturedGraph
    from instrumentation.findings import FindingLog
    from instrumentation.ownership import Owner

#: graphs that a report names
_NAMED = 8
#: what two captures have in common that would do the same to the same memory
Contents: TypeAlias = "tuple[Hashable, ...]"


@dataclass(frozen=True, slots=True)
class Kept:
    """A graph that was captured and not destroyed yet. Holds no memory of it."""

    name: str
    owner: Owner
    stream: str
    launches: int
    contents: Contents
    captured_at: Stack

    def __str__(self) -> str:
        return f"{self.name} of {self.owner} ({self.launches} launches, captured on stream {self.stream})"


class GraphRegistry:
    """Which graphs there are, how many an owner keeps, and which streams are being captured. Thread-safe.

    Nothing here is refused: too many graphs, a capture that was not needed, and memory that is asked for during one
    harm nobody's data, so they are reported and the call goes on.
    """

    def __init__(self, findings: FindingLog, device: str) -> None:
        self.findings = findings
        self.device = device
        self._lock = threading.Lock()
        self._kept: dict[int, Kept] = {}
        self._bounds: dict[Owner, int] = {}
        self._capturing: dict[object, tuple[str, Owner, Stack]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, owner: Owner) -> tuple[Kept, ...]:
        """Graphs of an owner, oldest first."""
        with self._lock:
            return tuple(kept for kept in self._kept.values() if kept.owner == owner)

    def bound(self, owner: Owner, at_most: int) -> None:
        """Say how many graphs an owner keeps at a time. Raises ``BadInputError`` below 1."""
        if at_most < 1:
            raise BadInputError(f"a cache of {at_most} graphs of {owner}; give a bound of at least 1")
        self._bounds[owner] = at_most

    # --- graphs

    def add(self, graph: CapturedGraph, owner: Owner, stream: str) -> None:
        """A graph was captured. Reports (GRA002) one more than its owner's bound, and one that is there already."""
        contents = tuple(work.contents for work in graph.captured)
        made = Kept(graph.name, owner, stream, graph.launches, contents, capture_stack())
        with self._lock:
            others = [kept for kept in self._kept.values() if kept.owner == owner]
            same = next((kept for kept in self._kept.values() if kept.contents == contents), None)
            self._kept[graph.serial] = made
            bound = self._bounds.get(owner)
        if same is not None:
            self._report(
                "identical graph captured again",
                f"graph {made} does what graph {same} does, which is kept: replay that one, or destroy it first",
                made,
                previous=same.captured_at,
            )
        elif bound is not None and len(others) >= bound:
            self._report(
                "graph cache beyond its bound",
                f"graph {made} is number {len(others) + 1} that {owner} keeps, and its cache is bounded at {bound}; "
                "destroy the one that was used least recently first",
                made,
                previous=others[0].captured_at,
                notes=_holders(others),
            )

    def remove(self, graph: CapturedGraph) -> None:
        """A graph was destroyed."""
        with self._lock:
            self._kept.pop(graph.serial, None)

    def leaks(self, stack: Stack) -> list[Finding]:
        """GRA002 for each graph that is left at the end, for the caller to report; they are forgotten."""
        with self._lock:
            left, self._kept = list(self._kept.values()), {}
        return [
            Finding(
                code="GRA002",
                kind="captured graph never destroyed",
                message=f"graph {kept} is still there at close; call destroy() on it",
                actor=kept.owner.name,
                device=self.device,
                stream=kept.stream,
                access=stack,
                allocation=kept.captured_at,
            )
            for kept in left
        ]

    def _report(
        self, kind: str, message: str, made: Kept, previous: Stack, notes: tuple[str, ...] = ()
    ) -> None:
        self.findings.append(
            Finding(
                code="GRA002",
                kind=kind,
                message=message,
                actor=made.owner.name,
                device=self.device,
                stream=made.stream,
                access=made.captured_at,
                previous=previous,
                notes=notes,
            )
        )

    # --- captures

    def begin(self, stream: object, name: str, owner: Owner) -> None:
        """A stream is being captured from here on."""
        with self._lock:
            self._capturing[stream] = (name, owner, capture_stack())

    def end(self, stream: object) -> None:
        """The capture of a stream is over, or was given up."""
        with self._lock:
            self._capturing.pop(stream, None)

    def during_capture(self, what: str, owner: Owner, stream: object = None) -> None:
        """Report (GRA003) what ``owner`` does while ``stream``, or any one, is captured; nothing when none is."""
        if not self._capturing:
            return
        with self._lock:
            captures = [self._capturing.get(stream)] if stream is not None else [*self._capturing.values()]
        for capture in captures[:1]:
            if capture is None:
                continue
            name, of, begun = capture
            self.findings.append(
                Finding(
                    code="GRA003",
                    message=f"{what} of {owner} came while stream {name} of {of} was captured; do it before that",
                    actor=owner.name,
                    device=self.device,
                    stream=name,
                    access=capture_stack(),
                    previous=begun,
                )
            )


def _holders(others: Sequence[Kept]) -> tuple[str, ...]:
    named = [f"kept: graph {kept}" for kept in others[:_NAMED]]
    if len(others) > _NAMED:
        named.append(f"and {len(others) - _NAMED} more")
    return tuple(named)
