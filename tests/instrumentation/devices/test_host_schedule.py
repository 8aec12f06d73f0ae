"""Random legal orders: right programs give one result, a wait that is missing shows for some seed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engines import TARGET, Bench, increment, same_bits, scale_by, write_from
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.devices import open_device
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, FindingError
from instrumentation.levels import Level

SEEDS = range(12)
N = 40


def bench_of(seed: int | None, level: Level = Level.GUARD) -> Bench:
    return Bench(level, device=HostDevice(1, schedule_seed=seed))


class Program:
    """Streams a, b and c of one device, each with a buffer; what the steps do is a matter of order alone."""

    def __init__(self, seed: int | None, level: Level = Level.GUARD) -> None:
        self.bench = bench_of(seed, level)
        device, arena = self.bench.device, self.bench.arena()
        self.streams = [device.create_stream(owner=TARGET, name=name) for name in "abc"]
        self.views = [self.bench.put(arena, np.full(N, i, np.float32), f"buffer {i}") for i in range(3)]
        self.outs = []

    def handing_over(self, *, waits: bool) -> np.ndarray:
        """Stream a writes, b reads what it wrote."""
        (a, b, _), (x, y, _) = self.streams, self.views
        event = self.bench.device.create_event(owner=TARGET, name="written")
        for _ in range(3):
            a.launch(increment, 2, {"y": x})
        a.record(event)
        if waits:
            b.wait(event)
        b.launch(scale_by, 2, {"x": x, "y": y, "factor": 2.0, "offset": 0})
        out = np.empty(N, np.float32)
        b.copy_out(out, y)
        b.synchronize()
        self.bench.device.synchronize()
        return out

    def step(self, kind: str, i: int, j: int) -> None:
        """One step of stream i with the buffer j, which is behind whatever another stream did with it."""
        stream, view = self.streams[i], self.views[j]
        if kind == "host waits":
            stream.synchronize()
            return
        for other in self.streams:
            if other is not stream:
                event = self.bench.device.create_event(owner=TARGET, name="order")
                other.record(event)
                stream.wait(event)
        if kind == "add":
            stream.launch(increment, 2, {"y": view})
        elif kind == "double":
            stream.launch(scale_by, 2, {"x": view, "y": self.views[j - 1], "factor": 2.0, "offset": 1})
        elif kind == "fill":
            stream.fill(view, 0)
        elif kind == "copy":
            stream.copy(self.views[j - 1], view)
        else:
            self.outs.append(np.zeros(N, np.float32))
            stream.copy_out(self.outs[-1], view)

    def results(self) -> list[np.ndarray]:
        self.bench.device.synchronize()
        assert self.bench.findings.list() == ()
        return [*self.outs, *(self.bench.get(view) for view in self.views)]


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "double", "fill", "copy", "out", "host waits"]),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        max_size=14,
    ),
    seed=st.integers(0, 2**64 - 1),
)
def test_ordered_programs_give_the_same_bits_in_any_order(steps: list[tuple[str, int, int]], seed: int):
    programs = [Program(None, Level.AUDIT), Program(seed, Level.AUDIT)]
    for program in programs:
        for step in steps:
            program.step(*step)
    plain, random = (program.results() for program in programs)
    assert all(same_bits(a, b) for a, b in zip(plain, random, strict=True))


def test_a_missing_wait_shows_for_some_seed_and_never_with_the_wait():
    right = [Program(seed).handing_over(waits=True).tolist() for seed in SEEDS]
    assert right == [[6.0] * N] * len(SEEDS)
    wrong = {tuple(Program(seed).handing_over(waits=False)) for seed in SEEDS}
    assert len(wrong) > 1, "in each order the same"
    assert wrong <= {(2.0 * n,) * N for n in range(4)}, "an order that no stream had"


def test_a_seed_gives_the_same_order_each_time():
    for seed in SEEDS:
        first, again = (Program(seed).handing_over(waits=False) for _ in range(2))
        assert same_bits(first, again)


def test_work_may_run_when_it_is_queued_and_not_before_somebody_waits():
    seen = set()
    for seed in SEEDS:
        bench = bench_of(seed)
        y = bench.put(bench.arena(), np.zeros(N, np.float32), "y")
        source = np.ones(N, np.float32)
        bench.stream.copy_in(y, source)
        bench.stream.fill(y.buffer.view(np.float32, 0), 0)
        source[:] = 5
        bench.stream.synchronize()
        seen.add(float(bench.get(y)[0]))
    assert seen == {1.0, 5.0}


def test_other_streams_may_lag_when_one_is_synchronised():
    lags = set()
    for seed in SEEDS:
        program = Program(seed)
        (a, b, _), (x, y, _) = program.streams, program.views
        a.launch(increment, 2, {"y": x})
        b.launch(increment, 2, {"y": y})
        b.synchronize()
        assert b.pending == 0
        lags.add(a.pending)
        program.bench.device.synchronize()
        assert a.pending == 0
    assert lags == {0, 1}


@pytest.mark.parametrize("seed", range(4))
def test_an_event_is_waited_for_by_the_host_as_it_was_recorded(seed: int):
    program = Program(seed)
    (a, b, _), (x, y, _) = program.streams, program.views
    event = program.bench.device.create_event(owner=TARGET, name="e")
    a.launch(increment, 2, {"y": x})
    a.record(event)
    b.wait(event)
    b.copy(y, x)
    b.record(event)
    a.launch(increment, 2, {"y": x})
    event.synchronize()
    assert b.pending == 0
    raw = np.frombuffer(program.bench.device.read_bytes(y.address, y.nbytes), np.float32)
    assert raw[0] in (1.0, 2.0), "behind the first launch; nothing orders the second"


def test_what_a_callback_raises_comes_to_who_waits_for_that_stream():
    """Whichever stream the host waits for first, and the work behind it runs."""

    class CallbackError(Exception):
        pass

    def raising(_finding):
        raise CallbackError

    outcomes = set()
    for seed in SEEDS:
        program = Program(seed)
        a, b, _ = program.streams
        x, y, _ = program.views
        program.bench.findings._on_finding = raising
        a.launch(write_from, 2, {"x": program.views[2], "y": x, "first": 1, "count": N})
        b.launch(increment, 2, {"y": y})
        a.launch(increment, 2, {"y": x})
        b.synchronize()
        outcomes.add(a.pending)
        with pytest.raises(CallbackError):
            a.synchronize()
        assert a.pending == 0
        assert [finding.code for finding in program.bench.findings] == ["MEM002"]
    assert len(outcomes) > 1


@pytest.mark.parametrize("seed", range(3))
def test_threads_may_use_streams_of_one_device_at_once(seed: int):
    program = Program(seed)

    def work(i: int) -> float:
        stream, view = program.streams[i], program.views[i]
        for _ in range(30):
            stream.launch(increment, 2, {"y": view})
            own = program.bench.device.create_stream(owner=TARGET, name=f"own {i}")
            own.destroy()
            stream.synchronize()
        return float(program.bench.get(view, stream)[0])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [30, 31, 32]


def test_a_stream_whose_handle_was_changed_keeps_its_place():
    program = Program(1)
    a, b, _ = program.streams
    x, y, _ = program.views
    a.launch(increment, 2, {"y": x})
    b.launch(increment, 2, {"y": y})
    handle, a.handle = a.handle, None
    b.synchronize()
    a.handle = handle
    a.synchronize()
    assert (program.bench.get(x) == 1).all()


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "1", True, [1]])
def test_bad_seeds_are_refused(seed: object):
    with pytest.raises(BadInputError, match=r"schedule_seed is .*; give a whole number from 0 to"):
        HostDevice(1, schedule_seed=seed)


def test_only_the_host_device_has_a_schedule():
    assert open_device("host", threads=1, schedule_seed=3).schedule is not None
    assert open_device("host", threads=1).schedule is None
    for name in ("auto", "cuda", "cuda:1"):
        with pytest.raises(BadInputError, match=f"host device, not of {name}; use device host"):
            open_device(name, schedule_seed=3)
    with pytest.raises(BadInputError, match="with an open device; give it to HostDevice"):
        open_device(HostDevice(1), schedule_seed=3)


def test_audit_refuses_what_the_fuzzer_shows():
    with pytest.raises(FindingError, match="STR011"):
        Program(None, Level.AUDIT).handing_over(waits=False)
