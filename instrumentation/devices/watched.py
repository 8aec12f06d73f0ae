"""What devices have in common beyond memory: whose work is checked, against what, and how findings are raised."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from instrumentation.devices.monitor import Access, AccessMonitor
from instrumentation.devices.numerics import NumericsWatch
from instrumentation.devices.registry import HandleRegistry
from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, capture_stack
from instrumentation.globs import EVERY_BUFFER, EVERY_KERNEL
from instrumentation.happens_before.audit import DeviceAudit
from instrumentation.levels import Level
from instrumentation.memory_watch import MemoryWatch
from instrumentation.reports.text import refused
from instrumentation.view import View

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy.typing as npt

    from instrumentation.account import Account
    from instrumentation.allocator import Allocator
    from instrumentation.blas import BlasCalls
    from instrumentation.faults import Faults
    from instrumentation.findings import FindingLog
    from instrumentation.globs import Globs
    from instrumentation.handles import Library, LibraryHandle
    from instrumentation.happens_before.audit import HostUse
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Owner


class WatchedDevice:
    """A device whose streams check their work: owners and liveness before it, canaries after it."""

    #: which kind of device this is, for people
    kind: ClassVar[str]
    #: whether ``copy_in`` has taken what it needs of the host array when it returns
    stages_copies: ClassVar[bool]
    #: whether it counts free memory of its own, not the machine's
    own_memory: ClassVar[bool]
    #: whether it runs checked kernels
    traps: ClassVar[bool] = False
    name: str
    #: what was taken from the device
    account: Account

    def __init__(self) -> None:
        #: whose canaries are compared; None below level ``guard``
        self.allocator: Allocator | None = None
        self.monitor: AccessMonitor | None = None
        #: which work is ordered; None below level ``audit``
        self.audit: DeviceAudit | None = None
        #: whether memory grows beyond what is accounted for; None below level ``audit``, and on the host
        self.memory_watch: MemoryWatch | None = None
        #: handles of streams and events, compared from level ``guard`` on
        self.handles = HandleRegistry()
        #: handles of libraries that live, in the order in which they were made
        self.library_handles: dict[LibraryHandle[Any], None] = {}
        self.findings: FindingLog | None = None
        #: which launch makes the first number that is not finite; None: nobody looks
        self.numerics: NumericsWatch | None = None
        #: whether launches run checked kernels
        self.trap = False
        #: which of them do
        self.trap_kernels = EVERY_KERNEL
        #: which calls fail on purpose
        self.faults: Faults | None = None

    def watch(
        self,
        allocator: Allocator,
        *,
        check_numerics: bool = False,
        trap_kernels: Globs = EVERY_KERNEL,
        trap_buffers: Globs = EVERY_BUFFER,
    ) -> None:
        """Check work against an allocator of this device, from level ``guard`` on.

        ``check_numerics``, at any level: report the first launch that makes a NaN or an infinity (NUM001).
        ``trap_kernels``, ``trap_buffers``: those of level ``trap``. Other kernels run plain, and of other buffers no
        shadow is kept: bounds alone are checked.
        """
        trap = allocator.level >= Level.TRAP
        if trap and not self.traps:
            raise BadInputError(
                f"check level trap is not built yet for device {self.name}; use audit, or device host"
            )
        self.trap = trap
        self.trap_kernels = trap_kernels
        allocator.keep_shadows(trap, trap_buffers)
        self.findings = allocator.findings
        allocator.fill_fresh(check_numerics)
        self.numerics = NumericsWatch(allocator.findings, self.name) if check_numerics else None
        guarded = allocator.level >= Level.GUARD
        self.allocator = allocator if guarded else None
        audited = allocator.level >= Level.AUDIT
        self.monitor = AccessMonitor(allocator.findings, self.name, audits=audited) if guarded else None
        self.audit = DeviceAudit(self, allocator.findings) if audited else None
        allocator.watch_frees(self.audit)
        watches = allocator.level >= Level.AUDIT and self.own_memory
        self.memory_watch = MemoryWatch(allocator) if watches else None

    def traps_kernel(self, kernel: Kernel) -> bool:
        """Whether launches of a kernel run its checked form."""
        return self.trap and self.trap_kernels.matches(kernel.name)

    def look_at_memory(self) -> None:
        """The host has waited for a stream: a moment to compare device memory with the ledger."""
        if self.memory_watch is not None:
            self.memory_watch.tick()

    def bound_graphs(self, owner: Owner, at_most: int) -> None:
        """Say how many captured graphs ``owner`` keeps at a time: one more is reported (GRA002) at level ``audit``."""
        if self.audit is not None:
            self.audit.graphs.bound(owner, at_most)

    def host_access(
        self, array: npt.NDArray[Any] | View, use: HostUse = "read", *, owner: Owner | None = None
    ) -> None:
        """Say that the host is about to ``read``, ``write`` or ``free`` an array that copies were queued with.

        Raises ``RefusedError`` (STR013) at level ``audit`` when such a copy may still be under way. A view stands for
        device memory that the host reads or writes itself, for ``owner`` (that of its buffer unless given): refused as
        a launch of that owner would be, were it queued behind all that the host has waited for.
        """
        if use not in ("read", "write", "free"):
            raise BadInputError(f"host_access for {use!r}; use 'read', 'write' or 'free'")
        if isinstance(array, View):
            self._host_access_memory(array, use, owner or array.buffer.owner)
            return
        if not isinstance(array, np.ndarray):
            raise BadInputError(f"host_access of {type(array).__name__}; give a NumPy array or a view")
        if self.audit is not None:
            self.audit.host_access(array, use, owner)

    def _host_access_memory(self, view: View, use: HostUse, owner: Owner) -> None:
        if use == "free":
            raise BadInputError(f"host_access for 'free' of view {view.name}; free its buffer")
        if self.monitor is not None:
            self.monitor.check([Access(f"the host's {use}", view, use)], owner, None)
        if self.audit is not None:
            self.audit.host_access_memory(view, use, owner)

    def check_handle(self, thing: object, what: str, handle: Any, owner: Owner, stream: str | None) -> None:
        """Refuse (STR001) a stream or event whose handle is not what was given for it, from level ``guard`` on."""
        if self.monitor is not None:
            problem = self.handles.problem(thing, handle)
            if problem is not None:
                self.refuse("STR001", f"{what} of {owner} {problem}", owner, stream)

    # --- libraries

    @abstractmethod
    def blas(self) -> Library[BlasCalls]:
        """The library of products that works on this device's streams. Raises ``BadInputError`` without one."""

    def calls_of(self, _who: str) -> AbstractContextManager[object]:
        """Around calls of a library for ``who``: what they need, and how what the device fails with is raised."""
        return nullcontext()

    def free_memory(self) -> int:
        """Bytes of the device's own memory that nobody holds."""
        return 0

    @property
    def lost(self) -> bool:
        """Whether the device failed for good, so that nothing that is queued will run."""
        return False

    def given_handle(self, thing: object, what: str, handle: Any, owner: Owner) -> Any:
        """The handle to destroy a stream or event by: the one that was given for it. Another one is reported."""
        problem = self.handles.problem(thing, handle)
        if problem is not None and self.monitor is not None:
            self.report("STR001", f"{what} of {owner} {problem}", owner)
        return self.handles.given(thing)

    def refuse(self, code: str, message: str, owner: Owner, stream: str | None = None) -> NoReturn:
        """Report and raise a finding about a stream or event."""
        raise refused(self.report(code, message, owner, stream))

    def report(self, code: str, message: str, owner: Owner, stream: str | None = None) -> Finding:
        """Report a finding about a stream or event."""
        return self.keep(self._finding(code, message, owner, stream))

    def keep(self, finding: Finding) -> Finding:
        """Report a finding, where findings go."""
        if self.findings is not None:
            self.findings.append(finding)
        return finding

    def _finding(self, code: str, message: str, owner: Owner, stream: str | None) -> Finding:
        return Finding(
            code=code,
            message=message,
            stream=stream,
            actor=owner.name,
            device=self.name,
            access=capture_stack(),
        )
