"""Programs over streams, events and buffers in a few words, played on a device or on the race detector alone.

A program is steps with semicolons between. Bytes of a buffer of 64 are ``x``, or a part of it ``x[0:16]``; ``h`` to
``k`` are host arrays of 64 bytes, ``g`` with digits are graphs, ``e`` with digits are events.

    a fill x            a scale x > y       a copy x > y        a bump x (reads and writes)
    a put h > x         a get x > h         a record e          b wait e            e destroy
    a capture g bump x, scale x > y         b replay g          g destroy           a destroy
    host waits e        host syncs a        host syncs all
    host reads h        host writes h       host frees x        (host) new x

``read`` and ``write`` take a range, and play on the detector as well as on a device.
"""

import re
from typing import Any, NamedTuple

import numpy as np
from engines import TARGET, Bench, increment, scale_by

from instrumentation.findings import Finding, RefusedError
from instrumentation.happens_before.accesses import HOST, Conflict, HostTouch, Kind, Operation, Touch
from instrumentation.happens_before.detector import RaceDetector
from instrumentation.happens_before.footprint import Footprint
from instrumentation.levels import Level

NBYTES = 64
#: bytes from one name to the next on the detector
SPACING = 1 << 20
#: of the detector alone
GRAPHS = {
    "g1": (("read", "x[0:10]"), ("write", "x[10:20]"), ("write", "y"), ("read", "x[4:24]")),
    "g2": (("read", "x"), ("read", "y[0:4]"), ("write", "y[60:64]")),
}


class Step(NamedTuple):
    """``who`` does ``verb`` with ``words``."""

    who: str
    verb: str
    words: tuple[str, ...]


def parse(program: str) -> list[Step]:
    steps = []
    for text in program.split(";"):
        who, verb, *words = text.replace(">", " ").split()
        steps.append(Step(who, verb, tuple(words)))
    return steps


def parse_range(text: str) -> tuple[str, int, int]:
    """``x[0:16]`` as its name and bytes."""
    found = re.fullmatch(r"(\w+?)(?:\[(\d+):(\d+)\])?", text)
    assert found is not None, text
    name, start, stop = found.groups()
    return name, int(start or 0), int(stop or NBYTES)


class Player:
    """Plays programs on a device, at level audit unless given. What is named is made on first use."""

    def __init__(self, device: Any = None, level: Level = Level.AUDIT) -> None:
        self.bench = Bench(level, device=device, threads=None if device is not None else 1)
        self.arena = self.bench.arena()
        self.streams: dict[str, Any] = {}
        self.events: dict[str, Any] = {}
        self.graphs: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self._played: set[str] = set()
        #: what fills and the host write
        self.value = 1

    @property
    def findings(self) -> list[Finding]:
        return list(self.bench.findings)

    def play(self, program: str) -> Finding | None:
        """The finding that refused the last step; None when all went through. No other step may be refused."""
        steps = parse(program)
        for i, step in enumerate(steps):
            refusal = self.refusal(step)
            if refusal is not None:
                assert i == len(steps) - 1, f"step {i} of {program!r} was refused: {refusal.message}"
                assert self.findings == [refusal]
                return refusal
        assert self.findings == []
        return None

    def refusal(self, step: Step) -> Finding | None:
        try:
            self.do(step)
        except RefusedError as error:
            return error.finding
        return None

    def play_again(self, program: str, before: str = "") -> Finding | None:
        """As ``play``, after findings that were looked at. ``before`` is played when it can be."""
        self.bench.findings.clear()
        if before and before not in self._played:
            assert self.play(before) is None
            self._played.add(before)
        return self.play(program)

    def close(self) -> None:
        """Everything that was queued can run, and be given back."""
        self.bench.device.synchronize()
        for graph in self.graphs.values():
            graph.destroy()
        for buffer in self.buffers.values():
            if not buffer.freed:
                buffer.free()
        for event in self.events.values():
            event.destroy()
        for stream in (*self.streams.values(), self.bench.stream):
            stream.destroy()
        self.arena.release()
        assert self.bench.allocator.close() == []

    def stream(self, name: str) -> Any:
        if name not in self.streams:
            self.streams[name] = self.bench.device.create_stream(owner=TARGET, name=name)
        return self.streams[name]

    def event(self, name: str) -> Any:
        if name not in self.events:
            self.events[name] = self.bench.device.create_event(owner=TARGET, name=name)
        return self.events[name]

    def buffer(self, name: str) -> Any:
        if name not in self.buffers or self.buffers[name].freed:
            self.buffers[name] = self.arena.reserve(NBYTES, owner=TARGET, name=name).unwrap()
        return self.buffers[name]

    def array(self, text: str) -> Any:
        name, start, stop = parse_range(text)
        return self.arrays.setdefault(name, np.zeros(NBYTES, np.uint8))[start:stop]

    def view(self, text: str, dtype: Any = np.uint8) -> Any:
        name, start, stop = parse_range(text)
        size = np.dtype(dtype).itemsize
        return self.buffer(name).view(dtype, (stop - start) // size, offset=start)

    def do(self, step: Step) -> None:
        if step.who == "host":
            self.host(step.verb, step.words)
        elif step.verb == "destroy":
            for kind in (self.events, self.graphs, self.streams):
                if step.who in kind:
                    kind.pop(step.who).destroy()
        else:
            self.queue(self.stream(step.who), step.verb, step.words)

    def host(self, verb: str, words: tuple[str, ...]) -> None:
        device, name = self.bench.device, words[0]
        if verb == "waits":
            self.event(name).synchronize()
        elif verb == "syncs":
            (device if name == "all" else self.stream(name)).synchronize()
        elif verb == "frees" and name in self.buffers:
            self.buffers[name].free()
        elif verb == "new":
            assert self.buffer(name) is not None
        else:
            device.host_access(self.array(name), {"reads": "read", "writes": "write", "frees": "free"}[verb])
            if verb == "writes":
                self.array(name)[:] = self.value

    def queue(self, stream: Any, verb: str, words: tuple[str, ...]) -> None:
        if verb == "capture":
            launches = [launch.split() for launch in " ".join(words[1:]).split(",")]
            # What is named here for the first time is reserved before the capture.
            for name in [name for _, *arguments in launches for name in arguments]:
                self.view(name)
            stream.begin_capture()
            for kind, *arguments in launches:
                self.queue(stream, kind, tuple(arguments))
            self.graphs[words[0]] = stream.end_capture(words[0])
        elif verb == "replay":
            stream.replay(self.graphs[words[0]])
        elif verb in ("record", "wait"):
            getattr(stream, verb)(self.event(words[0]))
        elif verb in ("fill", "write"):
            stream.fill(self.view(words[0]), self.value)
        elif verb == "read":
            source = self.view(words[0])
            target = self.buffer(f"{stream.name}_out").view(np.uint8, source.nbytes)
            stream.copy(target, source)
        elif verb == "copy":
            stream.copy(self.view(words[1]), self.view(words[0]))
        elif verb == "put":
            stream.copy_in(self.view(words[1]), self.array(words[0]))
        elif verb == "get":
            stream.copy_out(self.array(words[1]), self.view(words[0]))
        elif verb == "bump":
            stream.launch(increment, 1, {"y": self.view(words[0], np.float32)})
        else:
            assert verb == "scale", verb
            x, y = (self.view(word, np.float32) for word in words)
            stream.launch(scale_by, 1, {"x": x, "y": y, "factor": 2.0, "offset": 0})


class CorePlayer:
    """Plays programs on a race detector: only read, write, free, put, get, replay, and what orders them.

    A stream ``gpu1.a`` is one of device gpu1; ``default`` is a device's legacy default stream, ``blocking1`` is
    ordered with it.
    """

    def __init__(self) -> None:
        self.detector = RaceDetector()
        self.streams: dict[str, Any] = {}
        self.graphs: dict[str, Footprint] = {}

    def stream(self, name: str) -> Any:
        if name not in self.streams:
            device, _, own = name.rpartition(".")
            self.streams[name] = self.detector.order.create_stream(
                device or "gpu0",
                name,
                "target",
                blocking=own.startswith("blocking"),
                default=own == "default",
            )
        return self.streams[name]

    def play(self, program: str) -> Conflict | None:
        """The conflict that refused the last step; None when all went through. No other step may be refused."""
        steps = parse(program)
        for i, step in enumerate(steps):
            conflict = self.do(step)
            if conflict is not None:
                assert i == len(steps) - 1, f"step {i} of {program!r} was refused: {conflict}"
                return conflict
        return None

    def do(self, step: Step) -> Conflict | None:
        order = self.detector.order
        if step.verb == "destroy":
            if step.who in self.streams:
                order.destroy_stream(self.streams.pop(step.who))
            order.destroy_event(step.who)
        elif step.who == "host":
            return self.host(step.verb, step.words)
        elif step.verb == "record":
            order.record(step.words[0], self.stream(step.who))
        elif step.verb == "wait":
            order.wait(self.stream(step.who), step.words[0])
        else:
            return self.queue(self.stream(step.who), step.verb, step.words, step)
        return None

    def host(self, verb: str, words: tuple[str, ...]) -> Conflict | None:
        order, name = self.detector.order, words[0]
        if verb == "waits":
            order.host_waits_event(name)
        elif verb == "syncs" and name.startswith("all"):
            order.host_waits_device(name.removeprefix("all.") if "." in name else "gpu0")
        elif verb == "syncs":
            order.host_waits_stream(self.stream(name))
        else:
            space, start, stop = self.extent(name)
            kind = {"reads": Kind.READ, "writes": Kind.WRITE, "frees": Kind.FREE}[verb]
            return self.detector.check_host(HostTouch(space, start, stop, kind, (), words))
        self.detector.host_waited()
        return None

    @staticmethod
    def extent(text: str) -> tuple[str, int, int]:
        """Names are single letters; ``h`` to ``k`` are host arrays, the others buffers of one device."""
        name, start, stop = parse_range(text)
        base = SPACING * ord(name)
        return HOST if name in "hijk" else "memory", base + start, base + stop

    def replay(self, op: Operation, graph: str) -> Conflict | None:
        if graph not in self.graphs:
            touches = [
                Touch(op, *self.extent(where), Kind[verb.upper()], (verb, where))
                for verb, where in GRAPHS[graph]
            ]
            self.graphs[graph] = Footprint("memory", touches)
        conflict = self.detector.check_footprint(op, self.graphs[graph])
        if conflict is None:
            self.detector.commit_footprint(op, self.graphs[graph])
        return conflict

    def queue(self, stream: Any, verb: str, words: tuple[str, ...], detail: Any) -> Conflict | None:
        self.detector.enter(stream)
        op = Operation(stream)
        if verb == "replay":
            return self.replay(op, words[0])
        kinds = {
            "read": Kind.READ,
            "write": Kind.WRITE,
            "free": Kind.FREE,
            "put": Kind.READ,
            "get": Kind.READ,
        }
        operations = [op]
        touches = [Touch(op, *self.extent(words[0]), kinds[verb], detail)]
        if verb == "put":
            touches.append(Touch(op, *self.extent(words[1]), Kind.WRITE, detail))
        if verb == "get":
            operations.append(Operation(stream.landing))
            touches.append(Touch(operations[1], *self.extent(words[1]), Kind.WRITE, detail))
        conflict = self.detector.check(touches)
        if conflict is None:
            self.detector.commit(operations, touches)
        return conflict
