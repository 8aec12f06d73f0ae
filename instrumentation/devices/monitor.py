"""Level ``guard``: every buffer that work names is live, and its owner's to use, before the work is queued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from instrumentation.findings import Finding, capture_stack
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.devices.launch import Launch
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


def launch_accesses(launch: Launch) -> list[Access]:
    """One access for each array argument; a parameter that is read and written counts as written."""
    name = launch.kernel.name
    return [
        Access(
            name, view, "write" if argument in launch.kernel.writes else "read", name, argument, launch.number
        )
        for argument, view in launch.views.items()
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
    """Refuses what would touch a dead buffer (MEM004) or one of another owner (OWN001)."""

    def __init__(self, findings: FindingLog, device: str) -> None:
        self.findings = findings
        self.device = device

    def check(self, accesses: Iterable[Access], owner: Owner, stream: str) -> None:
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

    def check_standing(self, standing: Standing, owner: Owner, stream: str) -> None:
        """As ``check``, at once when nothing is otherwise than when it passed last."""
        if not standing.holds(owner):
            changes = standing.changes
            self.check(standing.accesses, owner, stream)
            standing.passed(owner, changes)

    def _refuse(self, access: Access, owner: Owner, stream: str) -> NoReturn:
        view, buffer = access.view, access.view.buffer
        state = "shared read-only" if buffer.read_only else f"owned by {buffer.owner} and not lent to {owner}"
        through = f" through {access.argument}" if access.argument is not None else ""
        # A lease to read does not help who wants to write.
        if any(lease.to == owner for lease in buffer.leases):
            state = f"owned by {buffer.owner} and lent to {owner} for reading only"
        finding = Finding(
            code="OWN001",
            message=f"{access.what} of {owner} would {access.mode} {view.name}{through}, which is {state}",
            buffer=buffer.facts(),
            kernel=access.kernel,
            argument=access.argument,
            launch=access.launch,
            stream=stream,
            actor=owner.name,
            device=self.device,
            access=capture_stack(),
            allocation=buffer.allocation,
        )
        self.findings.append(finding)
        raise refused(finding)
