"""Level audit: captured graphs and the memory that they name, how many there are, and what captures rule out."""

import numpy as np
import pytest
from engines import DATA, DRAFT, TARGET, Bench, increment, scale_by
from fake_cuda import fake_device

import refengine
from instrumentation.allocator import BufferRequest
from instrumentation.errors import BadInputError, DeviceError
from instrumentation.findings import RefusedError
from instrumentation.levels import Level
from refengine.executor import MAX_EXECUTABLES

N = 16


def make(kind: str, level: Level = Level.AUDIT) -> Bench:
    return Bench(
        level, device=fake_device() if kind == "cuda" else None, threads=None if kind == "cuda" else 1
    )


@pytest.fixture(params=["host", "cuda"])
def bench(request):
    return make(request.param)


@pytest.fixture
def arena(bench):
    return bench.arena()


def capture(bench, *views, name="step", stream=None, factor=None):
    stream = stream or bench.stream
    stream.begin_capture()
    for view in views:
        if factor is None:
            stream.launch(increment, 1, {"y": view})
        else:
            x, y = view
            stream.launch(scale_by, 1, {"x": x, "y": y, "factor": factor, "offset": 0})
    return stream.end_capture(name)


def overlays(arena):
    requests = {name: [BufferRequest(4 * N, TARGET, f"hidden.{name}")] for name in "ab"}
    return [
        arena.reserve_overlay(wanted, owner=TARGET, name=name).unwrap() for name, wanted in requests.items()
    ]


def codes(bench) -> list[str]:
    return [finding.code for finding in bench.findings]


class TestMemory:
    """GRA001."""

    @pytest.fixture
    def layouts(self, arena):
        return overlays(arena)

    def test_memory_that_was_planned_anew(self, bench, layouts):
        layouts[0].activate()
        graph = capture(bench, layouts[0].buffers[0].view(np.float32, N))
        bench.stream.replay(graph)
        bench.stream.synchronize()
        layouts[1].activate()
        with pytest.raises(RefusedError) as caught:
            bench.stream.replay(graph)
        finding = caught.value.finding
        assert (finding.code, finding.kind) == ("GRA001", "replay after its memory was planned anew")
        assert finding.message == (
            "graph step of target names hidden.a of target, but its memory belongs to overlay b now; activate a first, "
            "or capture the graph of the plan that is active"
        )
        assert (finding.kernel, finding.argument, finding.buffer.name) == ("increment", "y", "hidden.a")
        assert (finding.stream, finding.actor) == ("target", "target")
        layouts[0].activate()
        bench.stream.replay(graph)
        bench.stream.synchronize()
        assert codes(bench) == ["GRA001"]

    @pytest.mark.parametrize("kind", ["host", "cuda"])
    def test_at_level_guard_it_is_a_dormant_buffer(self, kind):
        bench = make(kind, Level.GUARD)
        layouts = overlays(bench.arena())
        layouts[0].activate()
        graph = capture(bench, layouts[0].buffers[0].view(np.float32, N))
        layouts[1].activate()
        with pytest.raises(RefusedError, match="MEM004"):
            bench.stream.replay(graph)

    def test_whatever_gives_a_named_buffer_up_is_refused(self, bench, arena, layouts):
        layouts[0].activate()
        y = bench.put(bench.arena(), np.zeros(N, np.float32), "y")
        graph = capture(bench, layouts[0].buffers[0].view(np.float32, N), y)
        for call in (layouts[0].release, arena.release, y.buffer.free, y.buffer.arena.release):
            bench.findings.clear()
            with pytest.raises(RefusedError, match=r"GRA001(.|\n)*pinned by graph step"):
                call()
            assert codes(bench) == ["GRA001"]
        bench.stream.replay(graph)
        bench.stream.synchronize()
        graph.destroy()
        y.buffer.free()
        layouts[0].release()
        assert codes(bench) == ["GRA001"]

    def test_a_graph_that_outlives_its_allocator(self, bench, arena):
        graph = capture(bench, bench.put(arena, np.zeros(N, np.float32), "y"))
        bench.allocator.close()
        bench.findings.clear()
        with pytest.raises(RefusedError, match="GRA001 replay into a freed buffer"):
            bench.stream.replay(graph)


class TestHowMany:
    """GRA002."""

    @pytest.fixture
    def views(self, bench, arena):
        return [bench.put(arena, np.zeros(N, np.float32), f"y{i}") for i in range(5)]

    def test_one_more_than_the_bound(self, bench, views):
        bench.device.bound_graphs(TARGET, 3)
        graphs = [capture(bench, view, name=f"g{i}") for i, view in enumerate(views[:3])]
        assert codes(bench) == []
        graphs[0].destroy()
        graphs.append(capture(bench, views[3], name="g3"))
        assert codes(bench) == []
        graphs.append(capture(bench, views[4], name="g4"))
        [finding] = bench.findings
        assert (finding.code, finding.kind) == ("GRA002", "graph cache beyond its bound")
        assert "number 4 that target keeps, and its cache is bounded at 3" in finding.message
        assert [note.split()[2] for note in finding.notes] == ["g1", "g2", "g3"]
        assert finding.access[0].function == "capture"
        # Reported, not refused.
        bench.stream.replay(graphs[-1])
        bench.stream.synchronize()
        np.testing.assert_array_equal(bench.get(views[4]), np.ones(N))

    def test_each_owner_has_a_bound_of_its_own(self, bench, views):
        bench.device.bound_graphs(TARGET, 1)
        mine = bench.put(bench.arena(owner=DRAFT), np.zeros(N, np.float32), "z", DRAFT)
        draft = bench.device.create_stream(owner=DRAFT, name="draft")
        capture(bench, views[0])
        capture(bench, mine, stream=draft)
        capture(bench, mine, mine, stream=draft)
        assert codes(bench) == []
        assert [kept.name for kept in bench.device.audit.graphs.of(DRAFT)] == ["step", "step"]
        with pytest.raises(BadInputError, match="at least 1"):
            bench.device.bound_graphs(TARGET, 0)

    def test_an_identical_one(self, bench, views):
        x, y, z, *_ = views
        first = capture(bench, (x, y), (y, z), factor=2.0, name="first")
        others = [
            capture(bench, (x, y), factor=2.0),
            capture(bench, (x, y), (y, z), factor=3.0),
            capture(bench, (x, z), (z, y), factor=2.0),
            capture(bench, (x.slice(0, 8), y), (y, z), factor=2.0),
        ]
        assert codes(bench) == []
        again = capture(bench, (x, y), (y, z), factor=2.0, name="again")
        [finding] = bench.findings
        assert (finding.code, finding.kind) == ("GRA002", "identical graph captured again")
        assert finding.message.startswith(
            "graph again of target (2 launches, captured on stream target) does what"
        )
        bench.findings.clear()
        for graph in (first, again):
            graph.destroy()
        capture(bench, (x, y), (y, z), factor=2.0)
        assert codes(bench) == []
        assert len(bench.device.audit.graphs) == len(others) + 1

    def test_those_that_are_left_at_close(self, bench, views):
        capture(bench, views[0], name="kept")
        capture(bench, views[1], name="given up").destroy()
        found = bench.allocator.close()
        [finding] = [finding for finding in found if finding.code == "GRA002"]
        assert finding.kind == "captured graph never destroyed"
        assert finding.message.startswith(
            "graph kept of target (1 launches, captured on stream target) is still there"
        )
        assert finding.allocation[0].function == "capture"
        assert bench.allocator.close() == []

    def test_what_a_callback_raises_leaves_no_graph(self, bench, views):
        def fail(finding):
            raise RuntimeError(finding.code)

        capture(bench, views[0])
        bench.findings._on_finding = fail
        with pytest.raises(RuntimeError, match="GRA002"):
            capture(bench, views[0])
        assert len(bench.device.audit.graphs) == 1
        assert views[0].buffer.pins == {"graph step": 1}

    @pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
    def test_at_lower_levels_nobody_counts(self, level):
        bench = make("host", level)
        bench.device.bound_graphs(TARGET, 1)
        view = bench.put(bench.arena(), np.zeros(N, np.float32), "y")
        graphs = [capture(bench, view) for _ in range(3)]
        assert codes(bench) == []
        for graph in graphs:
            graph.destroy()


class TestMeanwhile:
    """GRA003."""

    def test_what_changes_reservations(self, bench, arena):
        y, gone = (bench.put(arena, np.zeros(N, np.float32), name) for name in ("y", "gone"))
        whole, laid = bench.arena(), bench.arena()
        overlay = laid.reserve_overlay([BufferRequest(64, TARGET, "o")], owner=TARGET, name="o").unwrap()
        bench.stream.begin_capture()
        bench.stream.launch(increment, 1, {"y": y})
        for call, what in {
            lambda: arena.reserve(64, owner=DRAFT, name="more").unwrap(): "a reservation for more of draft",
            lambda: bench.allocator.reserve_arena(1 << 12, owner=TARGET, name="new").unwrap(): (
                "a reservation for arena new of target"
            ),
            lambda: laid.reserve_overlay([BufferRequest(64, TARGET, "p")], owner=TARGET, name="p").unwrap(): (
                "a reservation for overlay p of target"
            ),
            gone.buffer.free: "free() of gone of target",
            overlay.release: "release() of overlay o of target",
            whole.release: "release() of arena test of target",
        }.items():
            call()
            [finding] = bench.findings
            assert finding.code == "GRA003"
            assert (
                finding.message
                == f"{what} came while stream target of target was captured; do it before that"
            )
            assert finding.previous, "where the capture began"
            bench.findings.clear()
        graph = bench.stream.end_capture("step")
        gone = bench.put(arena, np.zeros(N, np.float32), "gone")
        bench.stream.replay(graph)
        np.testing.assert_array_equal(bench.get(y), np.ones(N))
        assert codes(bench) == []

    def test_host_copies_are_an_error_too(self, bench, arena):
        y = bench.put(arena, np.zeros(N, np.float32), "y")
        event = bench.device.create_event(owner=TARGET, name="event")
        bench.stream.begin_capture()
        for what, call in {
            "copy_in": lambda: bench.stream.copy_in(y, np.zeros(N, np.float32)),
            "copy_out": lambda: bench.stream.copy_out(np.zeros(N, np.float32), y),
        }.items():
            with pytest.raises(DeviceError, match=f"{what} during capture; only launches"):
                call()
            [finding] = bench.findings
            assert (finding.code, finding.stream, finding.actor) == ("GRA003", "target", "target")
            assert finding.message.startswith(f"{what} on stream target of target came while")
            bench.findings.clear()
        # What a capture could take elsewhere is an error alone.
        for call in (
            lambda: bench.stream.fill(y, 0),
            lambda: bench.stream.copy(y, y),
            lambda: bench.stream.record(event),
        ):
            with pytest.raises(DeviceError, match="only launches"):
                call()
        assert codes(bench) == []

    def test_waiting_for_the_stream(self, bench, arena):
        y = bench.put(arena, np.zeros(N, np.float32), "y")
        other = bench.device.create_stream(owner=TARGET, name="other")
        bench.stream.begin_capture()
        bench.stream.launch(increment, 1, {"y": y})
        other.synchronize()
        assert codes(bench) == []
        for call in (bench.stream.synchronize, bench.device.synchronize):
            call()
            [finding] = bench.findings
            assert finding.code == "GRA003"
            assert finding.message.startswith(
                "synchronize of stream target of target came while stream target"
            )
            bench.findings.clear()
        bench.stream.end_capture("step")
        bench.stream.synchronize()
        assert codes(bench) == []

    def test_a_capture_that_was_given_up(self, bench, arena):
        bench.stream.begin_capture()
        bench.stream.abandon_capture()
        arena.reserve(64, owner=TARGET, name="more").unwrap()
        bench.stream.synchronize()
        bench.stream.begin_capture()
        bench.stream.destroy()
        arena.reserve(64, owner=TARGET, name="more").unwrap()
        assert codes(bench) == []


def test_an_engine_says_how_many_graphs_it_keeps_and_keeps_to_it():
    options = {"device": "host", "threads": 1, "n_ctx": 256, "check": "audit"}
    with refengine.load(DATA / "llama.gguf", **options) as engine:
        for n in range(1, MAX_EXECUTABLES + 5):
            engine.logits(list(range(n)))
        assert len(engine.device.audit.graphs.of(TARGET)) == MAX_EXECUTABLES
        assert engine.findings == []
        registry = engine.device.audit.graphs
    assert len(registry) == 0
    assert engine.findings == []
