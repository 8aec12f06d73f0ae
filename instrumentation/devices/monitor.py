"""Level ``guard``: every buffer that work names is live, and its owner's to use, before the work is queued.

At level ``audit`` a lease that does not cover an access has a code of its own, and so has a graph whose memory is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from instrumentation.findings import Finding, capture_stack
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.devices.captured import CapturedGraph
    from instrumentation.devices.launch import Work
    from instrumentation.findings import FindingLog
    from instrumentation.ownership import Mode, Owner
    from instrumentation.view import View


@dataclass(frozen=True, slots=True)
class Access:
    """One view that a launch, copy or graph reads or writes. ``what`` says who, for people."""

    what: str
    view: View
    mode: Mode
    kernel: str | None = None
    argument: str | None = None
    launch: int | None = None


def work_accesses(work: Work) -> list[Access]:
    """One access for each array argument; a parameter that is read and written counts as written."""
    name, writes = work.name, work.writes
    return [
        Access(name, view, "write" if argument in writes else "read", name, argument, work.number)
        for argument, view in work.views.items()
    ]


def allowed(view: View, mode: Mode, owner: Owner) -> bool:
    """Whether ``owner`` may access a view in ``mode`` now: what ``AccessMonitor.check`` raises for, as an answer."""
    buffer = view.buffer
    return view.generation == buffer.generation and buffer.live and buffer.permits(owner, mode)


class Standing:
    """Accesses that are made again and again by one owner, with all that their last check relied on.

    Of a buffer can change whether it is freed or shared, which its heap counts, whether its overlay is active, and for
    one of another owner which leases there are. The rest of it is for good.
    """

    def __init__(self, accesses: Iterable[Access]) -> None:
        self.accesses = tuple(accesses)
        buffers = {access.view.buffer for access in self.accesses}
        self._heaps = tuple({buffer.heap for buffer in buffers})
        self._overlays = tuple({buffer.overlay for buffer in buffers if buffer.overlay is not None})
        self._owner: Owner | None = None
        self._lent: tuple[Access, ...] = ()
        self._changes = -1

    @property
    def lent(self) -> tuple[Access, ...]:
        """Those to buffers of others that the last check which passed relied on leases for."""
        return self._lent

    @property
    def changes(self) -> int:
        """Changes of all heaps up to now."""
        return sum(heap.changes for heap in self._heaps)

    def holds(self, owner: Owner) -> bool:
        """Whether a check for this owner would pass as the last one did."""
        return (
            owner == self._owner
            and self._changes == self.changes
            and all(overlay.active for overlay in self._overlays)
            and all(access.view.buffer.permits(owner, access.mode) for access in self._lent)
        )

    def passed(self, owner: Owner, changes: int) -> None:
        """A check for this owner passed that began after so many changes."""
        self._owner, self._changes = owner, changes
        self._lent = tuple(
            access
            for access in self.accesses
            if access.view.buffer.owner != owner and not access.view.buffer.read_only
        )


class AccessMonitor:
    """Refuses what would touch a dead buffer (MEM004) or one of another owner (OWN001).

    ``audits``: a lease that there is, or was, and that does not cover the access is OWN010, and a graph that names a
    dead buffer is GRA001.
    """

    def __init__(self, findings: FindingLog, device: str, *, audits: bool = False) -> None:
        self.findings = findings
        self.device = device
        self.audits = audits

    def check(self, accesses: Iterable[Access], owner: Owner, stream: str | None) -> None:
        """Raise ``FindingError`` for the first access that ``owner`` may not make now."""
        for access in accesses:
            access.view.check_live(
                kernel=access.kernel,
                argument=access.argument,
                launch=access.launch,
                stream=stream,
                actor=owner.name,
            )
            if not access.view.buffer.permits(owner, access.mode):
                self._refuse(access, owner, stream)

    def check_graph(self, graph: CapturedGraph, owner: Owner, stream: str) -> None:
        """As ``check``, at once when nothing is otherwise than when it passed last."""
        standing = graph.standing
        if not standing.holds(owner):
            changes = standing.changes
            if self.audits:
                self._require_in_place(graph, owner, stream)
            self.check(standing.accesses, owner, stream)
            standing.passed(owner, changes)

    def _require_in_place(self, graph: CapturedGraph, owner: Owner, stream: str) -> None:
        """Refuse (GRA001) a graph whose memory was given up, or belongs to another plan now."""
        for access in graph.accesses:
            view, buffer = access.view, access.view.buffer
            if view.generation == buffer.generation and buffer.live:
                continue
            if buffer.freed:
                kind, why = "replay into a freed buffer", "which was freed"
            else:
                active = buffer.arena.active
                overlay = buffer.overlay.name if buffer.overlay is not None else "nothing"
                now = f"overlay {active.name}" if active is not None else "nobody"
                kind = "replay after its memory was planned anew"
                why = (
                    f"but its memory belongs to {now} now; activate {overlay} first, or capture the graph of the plan "
                    "that is active"
                )
            finding = Finding(
                code="GRA001",
                kind=kind,
                message=f"graph {graph.name} of {owner} names {view.name} of {buffer.owner}, {why}",
                buffer=buffer.facts(),
                kernel=access.kernel,
                argument=access.argument,
                launch=access.launch,
                stream=stream,
                actor=owner.name,
                device=self.device,
                access=capture_stack(),
                allocation=buffer.allocation,
                free=buffer.free_stack,
            )
            self.findings.append(finding)
            raise refused(finding)

    def _refuse(self, access: Access, owner: Owner, stream: str | None) -> NoReturn:
        view, buffer = access.view, access.view.buffer
        state = "shared read-only" if buffer.read_only else f"owned by {buffer.owner} and not lent to {owner}"
        through = f" through {access.argument}" if access.argument is not None else ""
        lease = None if buffer.read_only else buffer.last_lease(owner)
        # A lease to read does not help who wants to write.
        if any(lease.to == owner for lease in buffer.leases):
            state = f"owned by {buffer.owner} and lent to {owner} for reading only"
        elif lease is not None:
            state = f"owned by {buffer.owner} and no longer lent to {owner}"
        of_lease = self.audits and lease is not None
        finding = Finding(
            code="OWN010" if of_lease else "OWN001",
            message=f"{access.what} of {owner} would {access.mode} {view.name}{through}, which is {state}",
            buffer=buffer.facts(),
            kernel=access.kernel,
            argument=access.argument,
            launch=access.launch,
            stream=stream,
            actor=owner.name,
            device=self.device,
            access=capture_stack(),
            previous=lease.ended_at or lease.made_at if lease is not None else (),
            allocation=buffer.allocation,
        )
        self.findings.append(finding)
        raise refused(finding)
