"""The order of work over streams and events of any number of devices, as the host's calls make it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from instrumentation.happens_before.clocks import Clock, StreamClock, join

if TYPE_CHECKING:
    from collections.abc import Hashable


class Snapshot(NamedTuple):
    """What an event stands for: all that its stream knew, itself included, when it was recorded last."""

    clock: Clock
    stream: StreamClock
    #: what had been queued to land in host arrays
    landing: int


class Order:
    """Clocks of streams, events and the host.

    The host's calls are taken as one sequence, whichever thread makes them. Whatever is queued happens after all that
    the host knew to be done when it queued it.
    """

    def __init__(self) -> None:
        self.host: Clock = {}
        self._epoch = 0
        self._streams: dict[StreamClock, None] = {}
        self._gone: list[StreamClock] = []
        self._events: dict[Hashable, Snapshot] = {}

    # --- streams

    def create_stream(
        self, device: str, name: str, owner: str, *, blocking: bool = False, default: bool = False
    ) -> StreamClock:
        """A new stream. ``default``: the device's legacy default stream; ``blocking``: ordered with that one."""
        stream = StreamClock(device, name, owner, {}, blocking=blocking, default=default)
        self._streams[stream] = None
        return stream

    def destroy_stream(self, stream: StreamClock) -> None:
        """No more work will come. What is queued is not waited for."""
        self._gone.append(stream)
        self._retire()

    def enter(self, stream: StreamClock) -> None:
        """Something is about to be queued: take in what the host knows, and what the default stream implies."""
        if stream.epoch != self._epoch:
            stream.epoch = self._epoch
            join(stream.clock, self.host)
        if stream.blocking:
            for other in self._streams:
                implied = other.blocking and (stream.default or other.default)
                if implied and other is not stream and other.device == stream.device:
                    join(stream.clock, other.clock)

    # --- events

    def record(self, event: Hashable, stream: StreamClock) -> None:
        """Let ``event`` stand for the work queued so far. What an earlier record stood for is forgotten."""
        self.enter(stream)
        stream.clock[stream.marks] = stream.marks.advance()
        self._events[event] = Snapshot(dict(stream.clock), stream, stream.landing.seq)

    def wait(self, stream: StreamClock, event: Hashable) -> None:
        """Let what is queued from here on come after the event as it is now; nothing when it was never recorded."""
        self.enter(stream)
        snapshot = self._events.get(event)
        if snapshot is not None:
            join(stream.clock, snapshot.clock)

    def snapshot(self, event: Hashable) -> Snapshot | None:
        """What an event stands for now; None when it was never recorded, or destroyed."""
        return self._events.get(event)

    def destroy_event(self, event: Hashable) -> None:
        """Forget an event. Who waited for it stays ordered; a new event of the same name was never recorded."""
        self._events.pop(event, None)

    @staticmethod
    def covers(clock: Clock, snapshot: Snapshot) -> bool:
        """Whether the record of an event, and so everything that it stands for, is done at a point with that clock."""
        return all(
            timeline.retired or clock.get(timeline, 0) >= seq for timeline, seq in snapshot.clock.items()
        )

    # --- the host

    def host_waits_event(self, event: Hashable) -> None:
        """The host waited for an event as it is now."""
        snapshot = self._events.get(event)
        if snapshot is not None:
            self._learn(snapshot.clock, snapshot.stream, snapshot.landing)

    def host_waits_stream(self, stream: StreamClock) -> None:
        """The host waited for all that a stream has queued; what is queued later is not covered."""
        if not stream.retired:
            self._learn(stream.clock, stream, stream.landing.seq)

    def host_waits_device(self, device: str) -> None:
        """The host waited for every stream of a device."""
        for stream in list(self._streams):
            if stream.device == device:
                self.host_waits_stream(stream)

    def in_flight(self) -> bool:
        """Whether the host does not know everything to be done."""
        host = self.host
        return any(
            host.get(timeline, 0) < timeline.seq for stream in self._streams for timeline in stream.timelines
        )

    def _learn(self, clock: Clock, stream: StreamClock, landing: int) -> None:
        join(self.host, clock)
        if landing and not stream.landing.retired:
            join(self.host, {stream.landing: landing})
        self._epoch += 1
        self._retire()

    def _retire(self) -> None:
        """Strike streams that are gone off every clock, once the host knows that their work is done."""
        host = self.host
        for stream in [s for s in self._gone if all(host.get(t, 0) >= t.seq for t in s.timelines)]:
            self._gone.remove(stream)
            self._streams.pop(stream, None)
            clocks = [host, *(s.clock for s in self._streams), *(e.clock for e in self._events.values())]
            for timeline in (*stream.timelines, stream.marks):
                timeline.retired = True
                for clock in clocks:
                    clock.pop(timeline, None)
