"""What devices have in common beyond memory: whose work is checked, against what, and how findings are raised."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from instrumentation.devices.monitor import AccessMonitor
from instrumentation.findings import Finding, capture_stack
from instrumentation.levels import Level
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from instrumentation.allocator import Allocator
    from instrumentation.faults import Faults
    from instrumentation.findings import FindingLog
    from instrumentation.ownership import Owner


class WatchedDevice:
    """A device whose streams check their work: owners and liveness before it, canaries after it."""

    #: which kind of device this is, for people
    kind: ClassVar[str]
    name: str

    def __init__(self) -> None:
        #: whose canaries are compared; None below level ``guard``
        self.allocator: Allocator | None = None
        self.monitor: AccessMonitor | None = None
        self.findings: FindingLog | None = None
        #: which calls fail on purpose
        self.faults: Faults | None = None

    def watch(self, allocator: Allocator) -> None:
        """Check work against an allocator of this device, from level ``guard`` on."""
        self.findings = allocator.findings
        guarded = allocator.level >= Level.GUARD
        self.allocator = allocator if guarded else None
        self.monitor = AccessMonitor(allocator.findings, self.name) if guarded else None

    def refuse(self, code: str, message: str, owner: Owner, stream: str | None = None) -> NoReturn:
        """Report and raise a finding about a stream or event."""
        finding = Finding(
            code=code,
            message=message,
            stream=stream,
            actor=owner.name,
            device=self.name,
            access=capture_stack(),
        )
        if self.findings is not None:
            self.findings.append(finding)
        raise refused(finding)
