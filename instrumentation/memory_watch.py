"""Device memory against the ledger: what grows after warm-up and is accounted for nowhere is finding ACC001.

What a leak takes never comes back, and it takes it again and again. So of all samples those count behind which memory
never was as little again: they are a staircase, of which all that comes within some seconds is one step. Memory grows
when there are several steps, and all but the highest together are more than the tolerance. Another process that starts,
or takes memory once, makes one step; one that takes and gives back makes none. One that keeps taking is not told apart
from a leak of this process: the device does not say who holds what.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import Finding, capture_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from instrumentation.allocator import Allocator
    from instrumentation.ledger import Row
    from instrumentation.ownership import Owner

MIB = 1 << 20
#: drivers take memory in pieces of this size, so anything smaller is no step
GRANULE = 2 * MIB
#: growth that is no finding
TOLERANCE = 8 * MIB
MIN_STEPS = 3
#: waits of the host after which a sample may be due, and after which warm-up is over unless somebody says so before
EVERY_WAITS, WARM_WAITS = 16, 512
#: seconds between two samples, and what comes within so many of them is one step
EVERY_SECONDS, SPACING_SECONDS = 1.0, 10.0
#: samples that are kept, and those that a finding shows
_KEPT, _SHOWN, _SHOWN_HOLDERS = 256, 12, 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Device memory at one moment."""

    #: since warm-up was over
    seconds: float
    #: bytes in use, as the device counts them, whoever has them
    used: int
    #: bytes in use that the ledger accounts for
    explained: int

    @property
    def unexplained(self) -> int:
        """Bytes in use that it does not: other processes' are among them."""
        return self.used - self.explained

    def __str__(self) -> str:
        return f"{self.seconds:8.1f} s  {_mib(self.used)} in use, {_mib(self.explained)} explained"


class MemoryWatch:
    """Samples of one allocator's device. ``begin`` says that warm-up is over; before that nothing is a finding.

    Streams call ``tick`` when the host has waited for them, which begins by itself after ``warm_waits`` calls and takes
    a sample every ``every`` seconds at most. What grows within ``spacing`` seconds is one step. Any thread may call it.
    """

    def __init__(
        self,
        allocator: Allocator,
        *,
        every: float = EVERY_SECONDS,
        spacing: float = SPACING_SECONDS,
        every_waits: int = EVERY_WAITS,
        warm_waits: int | None = WARM_WAITS,
        tolerance: int = TOLERANCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_waits < 1 or min(every, spacing, tolerance) < 0:
            raise BadInputError(
                f"a watch every {every} s and {every_waits} waits, spacing {spacing} s, tolerance {tolerance} bytes; "
                "give numbers that are not negative, and at least 1 wait"
            )
        self.allocator = allocator
        self.tolerance = tolerance
        self._every = every
        self._spacing = spacing
        self._every_waits = every_waits
        self._warm_waits = warm_waits
        self._clock = clock
        self._lock = threading.Lock()
        self._waits = 0
        self._due = 0.0
        self._began: float | None = None
        self._samples: list[Sample] = []
        #: the lowest, then for each step when it began and how high it is
        self._steps: list[Sample] = []
        self._warm_rows: dict[tuple[Owner, str], int] = {}

    @property
    def watching(self) -> bool:
        """Warm-up is over."""
        return self._began is not None

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples since warm-up; of many every second one is kept, again and again."""
        with self._lock:
            return tuple(self._samples)

    def begin(self) -> None:
        """Warm-up is over, now: what grows from here on is judged. A second call begins anew."""
        with self._lock:
            self._began = self._clock()
            self._samples.clear()
            self._steps.clear()
            self._warm_rows = _by_key(self.allocator.table(process=True))
        self.sample()

    def tick(self) -> None:
        """The host has waited for a stream: sample when it is time to. Costs nothing most times."""
        self._waits += 1
        if self._waits % self._every_waits:
            return
        if self._began is None:
            if self._warm_waits is not None and self._waits >= self._warm_waits:
                self.begin()
        elif self._clock() >= self._due:
            self.sample()

    def sample(self) -> Finding | None:
        """Compare now. The finding, when memory has grown: it is reported, and the next one begins from here."""
        began = self._began
        if began is None:
            return None
        memory = self.allocator.memory
        try:
            info = memory.memory_info()
        except DeviceError:
            return None  # a device that is lost is reported by what the host waits for
        with self._lock:
            now = self._clock()
            self._due = now + self._every
            sample = Sample(now - began, info.total - info.free, memory.account.shared.explained)
            self._keep(sample)
            if not self._grows():
                return None
            finding = self._finding(sample)
            self._steps = [sample]
        self.allocator.findings.append(finding)
        return finding

    def _keep(self, sample: Sample) -> None:
        self._samples.append(sample)
        if len(self._samples) > _KEPT:
            del self._samples[1::2]
        steps = self._steps
        while steps and steps[-1].unexplained > sample.unexplained:
            steps.pop()
        if not steps or sample.unexplained >= steps[-1].unexplained + GRANULE:
            if len(steps) > 1 and sample.seconds < steps[-1].seconds + self._spacing:
                sample = replace(sample, seconds=steps.pop().seconds)
            steps.append(sample)

    def _grows(self) -> bool:
        heights = [
            after.unexplained - before.unexplained
            for before, after in zip(self._steps, self._steps[1:], strict=False)
        ]
        return len(heights) >= MIN_STEPS and sum(heights) - max(heights) > self.tolerance

    def _finding(self, sample: Sample) -> Finding:
        first = self._steps[0]
        grown, seconds = sample.unexplained - first.unexplained, sample.seconds - first.seconds
        rate = f", {_mib(round(grown * 60 / seconds))} a minute" if seconds > 0 else ""
        device = self.allocator.memory.name
        return Finding(
            code="ACC001",
            message=(
                f"{device} has {_mib(grown)} more in use than {seconds:.1f} s ago{rate}, which came in "
                f"{len(self._steps) - 1} steps and is not in the ledger"
            ),
            size=grown,
            device=device,
            access=capture_stack(),
            notes=(*self._series(first), *self._grown_holders()),
        )

    def _series(self, first: Sample) -> Iterator[str]:
        since = [sample for sample in self._samples if sample.seconds >= first.seconds]
        for sample in _spread(since, _SHOWN):
            yield str(sample)

    def _grown_holders(self) -> Iterator[str]:
        """What grew in the ledger meanwhile: not what leaks, but who was busy."""
        now = self.allocator.table(process=True)
        grown = [
            (row.nbytes - self._warm_rows.get((row.owner, row.name), 0), f"{row.name} of {row.owner}")
            for row in now
        ]
        grown = sorted((pair for pair in grown if pair[0] > 0), reverse=True)
        if not grown:
            yield "no holder in the ledger has grown since warm-up"
        for nbytes, who in grown[:_SHOWN_HOLDERS]:
            yield f"grown in the ledger since warm-up: {who}, by {nbytes} bytes"


def _by_key(rows: Sequence[Row]) -> dict[tuple[Owner, str], int]:
    return {(row.owner, row.name): row.nbytes for row in rows}


def _spread(samples: Sequence[Sample], count: int) -> Sequence[Sample]:
    """``count`` of them, the first and the last among them."""
    if len(samples) <= count:
        return samples
    return [samples[round(i * (len(samples) - 1) / (count - 1))] for i in range(count)]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"
