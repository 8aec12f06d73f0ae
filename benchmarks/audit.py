"""What level audit costs: the race detector alone, and calls of a device at each level.

usage: python benchmarks/audit.py [--device NAME] [-m MODEL]

Microseconds. The detector: an access whose range is known, on a stream that has all that is in flight, on the one that
had it, and on one that waited for that, an access that cuts a range, and the replay of a graph of ``N_RANGES`` ranges
alone, in turn with another, and beside one on another stream. A device: host time until the call returns. A model: the
median of 480 decodes of one token, and the least.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.happens_before.accesses import Kind, Operation, Touch
from instrumentation.happens_before.detector import RaceDetector
from instrumentation.happens_before.footprint import Footprint
from instrumentation.levels import Level

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from engines import Bench, scale_by

import refengine
from instrumentation.devices import open_device
from refengine.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.happens_before.clocks import StreamClock

#: ranges of a decode step's graph; five to a launch
N_RANGES = 700
PER_LAUNCH = 5


def best(call: Callable[[], Any], n: int) -> float:
    """Microseconds of one of the ``n`` things that a call does."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) / n * 1e6


def touches(op: Operation, first: int, count: int, nbytes: int = 900) -> list[Touch]:
    """Ranges of a launch: the first is written."""
    return [
        Touch(op, "memory", 1000 * i, 1000 * i + nbytes, Kind.READ if i % PER_LAUNCH else Kind.WRITE)
        for i in range(first, first + count)
    ]


def launch_all(detector: RaceDetector, stream: StreamClock, nbytes: int = 900) -> None:
    """Each range once."""
    detector.enter(stream)
    for first in range(0, N_RANGES, PER_LAUNCH):
        op = Operation(stream)
        touched = touches(op, first, PER_LAUNCH, nbytes)
        assert detector.check(touched) is None
        detector.commit((op,), touched)


def replay(detector: RaceDetector, stream: StreamClock, footprint: Footprint) -> None:
    """One replay."""
    detector.enter(stream)
    op = Operation(stream)
    assert detector.check_footprint(op, footprint) is None
    detector.commit_footprint(op, footprint)


def detector_costs() -> None:
    """The detector alone."""
    detector = RaceDetector()
    order = detector.order
    one, other = (order.create_stream("gpu", name, name) for name in "ab")
    launch_all(detector, one)
    print(f"access, known range, one stream alone: {best(lambda: launch_all(detector, one), N_RANGES):.2f}")
    detector.enter(other)
    print(f"access, known range, same stream: {best(lambda: launch_all(detector, one), N_RANGES):.2f}")

    def in_turn() -> None:
        for stream, waiting in ((one, other), (other, one)):
            launch_all(detector, stream)
            order.record("e", stream)
            order.wait(waiting, "e")

    print(f"access, known range, another stream: {best(in_turn, 2 * N_RANGES):.2f}")
    sizes = iter(range(1, 900))
    cutting = best(lambda: launch_all(detector, one, next(sizes)), N_RANGES)
    print(f"access that cuts a range: {cutting:.2f}; {len(detector)} ranges then")
    order.host_waits_device("gpu")
    detector.host_waited()
    made = [Footprint("memory", touches(Operation(one), 0, N_RANGES)) for _ in range(2)]
    elsewhere = Footprint(
        "memory",
        [
            Touch(t.op, t.space, t.start + 10**7, t.stop + 10**7, t.kind)
            for t in touches(Operation(one), 0, N_RANGES)
        ],
    )
    print(f"replay of {N_RANGES} ranges: {best(lambda: replay(detector, one, made[0]), 1):.2f}")
    print(
        f"replay in turn with another: {best(lambda: [replay(detector, one, each) for each in made], 2):.2f}"
    )
    replay(detector, other, elsewhere)
    print(f"replay beside one on another stream: {best(lambda: replay(detector, one, made[0]), 1):.2f}")
    print(
        f"list of a graph, made once: {best(lambda: Footprint('memory', touches(Operation(one), 0, N_RANGES)), 1):.0f}"
    )


def device_costs(name: str) -> None:
    """Calls of a device at each level."""
    print("| what | off | guard | audit |")
    print("|---|---|---|---|")
    rows: dict[str, list[float]] = {}
    for level in (Level.OFF, Level.GUARD, Level.AUDIT):
        bench = Bench(level, device=open_device(name, threads=1 if name == "host" else None))
        stream, arena = bench.stream, bench.arena()
        x, y = (bench.put(arena, np.zeros(32, np.float32), each) for each in "xy")
        arguments = {"x": x, "y": y, "factor": 0.5, "offset": 1}
        stream.begin_capture()
        for _ in range(100):
            stream.launch(scale_by, 1, arguments)
        graph = stream.end_capture("g")
        event = bench.device.create_event(owner=stream.owner, name="e")
        array = np.zeros(32, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "launch": lambda s=stream, a=arguments: s.launch(scale_by, 1, a),
            "replay of 100": lambda s=stream, g=graph: s.replay(g),
            "copy_in": lambda s=stream, v=x, a=array: s.copy_in(v, a),
            "copy_out": lambda s=stream, v=x, a=array: s.copy_out(a, v),
            "record and wait": lambda s=stream, e=event: (s.record(e), s.wait(e)),
        }
        for what, call in calls.items():
            rows.setdefault(what, []).append(queued(call, stream.synchronize))
    for what, times in rows.items():
        print(f"| {what} | {' | '.join(f'{us:.1f}' for us in times)} |")


def queued(call: Callable[[], Any], wait: Callable[[], None], n: int = 200) -> float:
    """Microseconds until a call returns, the least of ten rounds."""
    times = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(n):
            call()
        times.append(time.perf_counter() - started)
        wait()
    return min(times) / n * 1e6


def decode_costs(model: str, device: str) -> None:
    """A decode of one token at each level."""
    for check in ("off", "guard", "audit"):
        threads = 1 if device == "host" else None
        with refengine.load(model, device=device, threads=threads, check=check, n_ctx=128) as engine:
            context = engine.context
            times = []
            for _ in range(9):
                context.remove(0)
                for position in range(60):
                    started = time.perf_counter()
                    context.require(context.decode(Batch.of([position % 5], position, 0, "all")))
                    times.append((time.perf_counter() - started) * 1e6)
            times = sorted(times[60:])
        print(f"decode at {check}: {times[len(times) // 2]:.0f}, at least {times[0]:.0f}")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="host", help="host, cuda or cuda:N (host)")
    parser.add_argument("-m", "--model", help="model to decode with")
    arguments = parser.parse_args()
    detector_costs()
    device_costs(arguments.device)
    if arguments.model is not None:
        decode_costs(arguments.model, arguments.device)


if __name__ == "__main__":
    main()
