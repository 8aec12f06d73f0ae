"""Device calls counted where they arrive, whatever fault sites there are.

A sweep is complete when each call has its site. So the calls are counted here by other code than the code that asks
for a fault: streams and events at the call, reservations at the ``Reservation`` that each one must return.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from instrumentation.devices.host import HostDevice, HostEvent, HostStream
from instrumentation.faults import KINDS, FaultInjector, FaultKind, Site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instrumentation.allocator import Allocator
    from instrumentation.faults import FaultPlan
    from instrumentation.ownership import Owner


#: kinds of calls that an engine makes on the host device, on which sweeps run: it has no library there
SWEPT_KINDS: tuple[FaultKind, ...] = tuple(kind for kind in KINDS if kind != "library")


class Recorder(FaultInjector):
    """An injector that remembers every site that it counted."""

    def __init__(self, plan: FaultPlan | None = None) -> None:
        super().__init__(plan)
        self.passed: list[Site] = []

    def refusal(self, kind: FaultKind, detail: str) -> str | None:
        """Count a site and remember it."""
        if self.enabled and kind in self.plan.kinds:
            self.passed.append(Site(len(self.passed) + 1, kind, detail))
        return super().refusal(kind, detail)


def first_failure(plan: FaultPlan, sites: Sequence[Site]) -> Site | None:
    """Site that a plan fails first in a run that passes ``sites``; up to there a run is as if nothing failed."""
    injector = FaultInjector(plan)
    for site in sites:
        injector.refusal(site.kind, site.detail)
        if injector.fired:
            return injector.fired[0]
    return None


def owner_of(site: Site) -> str:
    """Owner of the memory that a site asks for, or the name of its stream; empty when the site names neither."""
    if site.kind == "reserve":
        return site.detail.partition("/")[0]
    return site.detail.rpartition(" on ")[2] if " on " in site.detail else ""


class CountingStream(HostStream):
    """A stream that counts the calls that reach it."""

    device: CountingDevice

    def launch(self, *given: Any, **named: Any) -> None:
        """Count, then launch."""
        self.device.count("launch")
        super().launch(*given, **named)

    def copy_in(self, *given: Any, **named: Any) -> None:
        """Count, then copy."""
        self.device.count("copy")
        super().copy_in(*given, **named)

    def copy_out(self, *given: Any, **named: Any) -> None:
        """Count, then copy."""
        self.device.count("copy")
        super().copy_out(*given, **named)

    def copy(self, *given: Any, **named: Any) -> None:
        """Count, then copy."""
        self.device.count("copy")
        super().copy(*given, **named)

    def fill(self, *given: Any, **named: Any) -> None:
        """Count, then fill."""
        self.device.count("copy")
        super().fill(*given, **named)

    def record(self, *given: Any, **named: Any) -> None:
        """Count, then record."""
        self.device.count("event")
        super().record(*given, **named)

    def wait(self, *given: Any, **named: Any) -> None:
        """Count, then wait."""
        self.device.count("event")
        super().wait(*given, **named)

    def begin_capture(self) -> None:
        """Count, then begin."""
        self.device.count("graph")
        super().begin_capture()

    def end_capture(self, name: str) -> Any:
        """Count, then end."""
        self.device.count("graph")
        return super().end_capture(name)

    def replay(self, *given: Any, **named: Any) -> None:
        """Count, then replay."""
        self.device.count("graph")
        super().replay(*given, **named)


class CountingDevice(HostDevice):
    """A host device that counts calls, and knows what was taken from it and not given back."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self.counting = True
        self.calls: Counter[FaultKind] = Counter()
        #: bytes by address
        self.allocated: dict[int, int] = {}
        self.events: list[HostEvent] = []
        #: memory given back while work was queued that may name it, in words
        self.too_early: list[str] = []

    def count(self, kind: FaultKind) -> None:
        """One call of a kind."""
        if self.counting:
            self.calls[kind] += 1

    def watch(self, allocator: Allocator, **checks: Any) -> None:
        """Count every reservation of an allocator too."""
        super().watch(allocator, **checks)
        # Whatever hands out memory hands out a Reservation, and only the heap makes one.
        heap = allocator._heap  # noqa: SLF001 - a second count must not share the code of the first
        make = heap.reservation

        def counted(*given: Any, **named: Any) -> Any:
            self.count("reserve")
            return make(*given, **named)

        heap.reservation = counted  # type: ignore[method-assign]

    def allocate(self, nbytes: int) -> int:
        """Allocate and keep account."""
        address = super().allocate(nbytes)
        self.allocated[address] = nbytes
        return address

    def release(self, address: int) -> None:
        """Give back and keep account."""
        waiting = sum(stream.pending for stream in self.streams)
        if waiting:
            self.too_early.append(
                f"{self.allocated[address]} bytes were given back with {waiting} operations queued"
            )
        super().release(address)
        del self.allocated[address]

    def create_stream(self, *, owner: Owner, name: str) -> CountingStream:
        """A counting stream."""
        stream = CountingStream(self, owner, name)
        self.streams.add(stream)
        return stream

    def create_event(self, *, owner: Owner, name: str) -> HostEvent:
        """Count, then create."""
        self.count("event")
        event = super().create_event(owner=owner, name=name)
        self.events.append(event)
        return event

    def left(self) -> list[str]:
        """What was taken and never given back, in words."""
        left = []
        if self.allocated:
            left.append(
                f"{sum(self.allocated.values())} bytes of device memory in {len(self.allocated)} pieces"
            )
        left += [f"stream {stream.name}" for stream in sorted(self.streams, key=lambda s: s.handle)]
        left += [f"event {event.name}" for event in self.events if not event.destroyed]
        return left
