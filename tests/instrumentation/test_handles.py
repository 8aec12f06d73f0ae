"""Library handles at level audit: each fault found before the call, beside its repaired twin, on both devices."""

import numpy as np
import pytest
from engines import DRAFT, TARGET, Bench, nmse
from fake_cublas import HANDLE_NBYTES, FakeCublas, blas_device
from fake_cuda import fake_device
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.blas import product, sgemm
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError
from instrumentation.faults import FaultInjector, FaultPlan, InjectedFaultError
from instrumentation.findings import FindingError, RefusedError
from instrumentation.handles import Library, LibraryHandle
from instrumentation.levels import Level

WORKSPACE = 1 << 16
ROWS, N_IN, N_OUT = 5, 8, 3


class Blas(Bench):
    """A handle of the target with stream and workspace, and a product that it can make."""

    def __init__(self, kind: str = "cuda", level: Level = Level.AUDIT, **options) -> None:
        super().__init__(
            level,
            device=blas_device() if kind == "cuda" else None,
            threads=None if kind == "cuda" else 1,
            **options,
        )
        rng = np.random.default_rng(3)
        arena = self.arena()
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, N_IN), (N_OUT, N_IN)))
        self.wanted = x @ weight.T
        self.x, self.weight = self.put(arena, x, "x"), self.put(arena, weight, "weight")
        self.y = self.put(arena, np.zeros((ROWS, N_OUT), np.float32), "y")
        self.handle = self.make("gemm")
        self.handle.set_stream(self.stream)
        self.handle.set_workspace(self.reserve("gemm.workspace"))

    @property
    def library(self) -> Library:
        return self.device.blas()

    def make(self, name: str, owner=TARGET) -> LibraryHandle:
        return LibraryHandle(self.device, self.library, owner, name)

    def reserve(self, name: str, nbytes: int = WORKSPACE, owner=TARGET):
        arena = self.arena(nbytes + 4096, owner=owner)
        return arena.reserve(nbytes, owner=owner, name=name).unwrap().view(np.uint8, nbytes)

    def stream_of(self, owner, name: str):
        return self.device.create_stream(owner=owner, name=name)

    def product(self, handle=None, y=None):
        return product(handle or self.handle, self.x, self.weight, y or self.y)

    def refused(self, stream=None, handle=None):
        """The finding of a call that is refused; nothing was queued."""
        self.findings.clear()
        with pytest.raises(RefusedError) as caught:
            (stream or self.stream).call(self.product(handle))
        assert len(self.findings) == 1
        return caught.value.finding

    def works(self) -> None:
        self.stream.call(self.product())
        assert nmse(self.get(self.y), self.wanted) < 1e-12


@pytest.fixture(params=["host", "cuda"])
def bench(request):
    return Blas(request.param)


def named(finding) -> tuple[str, str]:
    return finding.code, finding.kind


class TestProducts:
    def test_a_product(self, bench):
        bench.works()
        assert not len(bench.findings)

    @given(st.data())
    def test_any_sizes_and_layouts(self, data):
        bench = Blas("host")
        m, n, k = (data.draw(st.integers(1, 9)) for _ in range(3))
        trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
        alpha, beta = data.draw(st.sampled_from([1.0, 0.5])), data.draw(st.sampled_from([0.0, 1.0, -2.0]))
        rng = np.random.default_rng(0)
        stored = {"a": (k, m) if trans_a else (m, k), "b": (n, k) if trans_b else (k, n), "c": (m, n)}
        lds = {name: rows + data.draw(st.integers(0, 3)) for name, (rows, _) in stored.items()}
        arrays, views, matrices = {}, {}, {}
        arena = bench.arena()
        for name, (rows, columns) in stored.items():
            whole = rng.standard_normal((columns, lds[name])).astype(np.float32)
            # The last column need not be as long as the others are apart.
            arrays[name] = whole.reshape(-1)[: (columns - 1) * lds[name] + rows]
            views[name] = bench.put(arena, arrays[name], name)
            matrices[name] = whole.T[:rows].astype(np.float64)
        call = sgemm(
            bench.handle, views["a"], views["b"], views["c"], m=m, n=n, k=k, lda=lds["a"], ldb=lds["b"],
            ldc=lds["c"], trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta,
        )  # fmt: skip
        bench.stream.call(call)
        left = matrices["a"].T if trans_a else matrices["a"]
        right = matrices["b"].T if trans_b else matrices["b"]
        wanted = np.zeros((n, lds["c"]), np.float64)
        wanted.reshape(-1)[: arrays["c"].size] = arrays["c"]
        wanted.T[:m] = alpha * (left @ right) + beta * matrices["c"]
        found = bench.get(views["c"])
        assert np.allclose(found, wanted.reshape(-1)[: found.size], atol=1e-4)
        for name in ("a", "b", "c"):
            short = views[name].buffer.view(np.float32, arrays[name].size - 1)
            operands = [short if each == name else views[each] for each in "abc"]
            with pytest.raises(
                BadInputError, match=rf"argument {name}.* reaches element {short.size} of view {name}"
            ):
                sgemm(
                    bench.handle, *operands, m=m, n=n, k=k,
                    lda=lds["a"], ldb=lds["b"], ldc=lds["c"], trans_a=trans_a, trans_b=trans_b,
                )  # fmt: skip

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"m": 0}, "m is 0; give 1 to"),
            ({"n": 2**31}, "n is 2147483648; give 1 to"),
            ({"lda": 7}, "lda is 7; give 8, the rows of a"),
            ({"ldc": 2}, "ldc is 2; give 3, the rows of c"),
            (
                {"k": 9, "lda": 9, "ldb": 9},
                r"argument a, 9 x 3 with lda 9, reaches element 26 of view weight, .* 24",
            ),
            ({"n": 6}, r"argument b, 8 x 6 with ldb 8, reaches element 47 of view x, which has 40"),
        ],
    )
    def test_sizes_that_do_not_fit(self, bench, changed, said):
        sizes = {"m": N_OUT, "n": ROWS, "k": N_IN, "lda": N_IN, "ldb": N_IN, "ldc": N_OUT, "trans_a": True}
        sgemm(bench.handle, bench.weight, bench.x, bench.y, **sizes)
        with pytest.raises(BadInputError, match=said):
            sgemm(bench.handle, bench.weight, bench.x, bench.y, **(sizes | changed))

    def test_arguments_that_do_not_fit(self, bench):
        with pytest.raises(BadInputError, match=r"product of y \(5, 3\) and weight \(3, 8\) into y"):
            product(bench.handle, bench.y, bench.weight, bench.y)
        x = bench.x.buffer.view(np.int32, bench.x.shape, name="x")
        with pytest.raises(BadInputError, match=r"argument b is view x of int32; give a view of float32"):
            product(bench.handle, x, bench.weight, bench.y)
        with pytest.raises(BadInputError, match=r"arguments . \(x\) and . \(x\) overlap and one is written"):
            product(bench.handle, bench.x, bench.weight, bench.x.buffer.view(np.float32, (ROWS, N_OUT)))

    def test_a_workspace_that_is_an_operand(self, bench):
        bench.handle.set_workspace(bench.x.buffer.view(np.uint8, 64, name="w"))
        with pytest.raises(BadInputError, match=r"(x\) and workspace|workspace \(w\) and b)"):
            bench.product()
        with pytest.raises(BadInputError, match=r"workspace w begins at .*; give a multiple of 256"):
            bench.handle.set_workspace(bench.x.buffer.view(np.uint8, 64, offset=64, name="w"))

    def test_what_is_written_behind_the_result_is_found(self):
        bench = Blas()
        bench.library.calls.stray = 4
        bench.stream.call(bench.product())
        bench.stream.synchronize()
        [finding] = bench.findings
        assert (finding.code, finding.kernel, finding.buffer.name) == ("MEM002", "cublas.sgemm", "y")
        assert (finding.stream, finding.actor) == ("target", "target")


class TestStream:
    """LIB001, and whose handle it is."""

    def test_a_stream_of_another_owner(self, bench):
        draft = bench.stream_of(DRAFT, "draft")
        bench.library.set_stream(bench.handle.value, draft.handle)
        finding = bench.refused()
        assert named(finding) == ("LIB001", "library handle on another stream")
        assert finding.message == (
            f"{bench.library.name}.sgemm of target on stream target: handle gemm of target works on stream draft of "
            "draft; set the handle's stream to target once, and let no other code have the handle"
        )
        assert (finding.stream, finding.actor) == ("target", "target")
        assert finding.previous[0].function.endswith("test_a_stream_of_another_owner")
        bench.handle.set_stream(bench.stream)
        bench.works()

    def test_another_stream_of_its_owner(self, bench):
        other = bench.stream_of(TARGET, "other")
        bench.handle.set_stream(other)
        assert bench.refused().code == "LIB001"
        other.call(bench.product())
        other.synchronize()
        bench.handle.set_stream(bench.stream)
        bench.works()

    def test_a_stream_that_was_destroyed(self, bench):
        other = bench.stream_of(TARGET, "other")
        bench.handle.set_stream(other)
        other.destroy()
        finding = bench.refused()
        assert named(finding) == ("LIB001", "library handle on a destroyed stream")
        assert "works on stream other, which was destroyed" in finding.message
        bench.handle.set_stream(bench.stream)
        bench.works()

    def test_a_destroyed_stream_whose_handle_was_given_again(self, bench):
        other = bench.stream_of(TARGET, "other")
        bench.handle.set_stream(other)
        other.destroy()
        again = bench.stream_of(TARGET, "again")
        bench.device.handles.remove(again)
        again.handle = other.handle
        bench.device.handles.add(again, again.handle)
        finding = bench.refused(again)
        assert "works on stream other, which was destroyed, and whose handle again has now" in finding.message

    def test_a_stream_that_nobody_made(self, bench):
        bench.library.set_stream(bench.handle.value, 0x7F00DEAD0000)
        finding = bench.refused()
        assert f"stream 0x7f00dead0000, which device {bench.device.name} has not created" in finding.message

    def test_one_that_was_set_past_every_record(self, bench):
        bench.library.calls.set_stream(bench.handle.value, bench.stream_of(DRAFT, "draft").handle)
        finding = bench.refused()
        assert "works on stream draft of draft" in finding.message
        assert finding.previous == ()

    def test_a_handle_that_was_never_given_a_stream(self, bench):
        handle = bench.make("new")
        handle.set_workspace(bench.reserve("w"))
        assert "works on the default stream" in bench.refused(handle=handle).message

    def test_a_handle_whose_value_changed(self, bench):
        given, bench.handle.value = bench.handle.value, 0x5555_1234
        finding = bench.refused()
        assert named(finding) == ("LIB001", "library handle overwritten")
        assert f"is 0x55551234, and the library gave {given:#x} for it" in finding.message
        for use in (
            (bench.handle.set_stream, bench.stream),
            (bench.handle.set_workspace, bench.handle.workspace),
        ):
            with pytest.raises(RefusedError, match="LIB001 library handle overwritten"):
                use[0](use[1])
        bench.handle.destroy()
        assert given not in bench.library.calls.states

    def test_a_handle_that_was_destroyed(self, bench):
        bench.handle.destroy()
        bench.handle.destroy()
        assert named(bench.refused()) == ("LIB001", "destroyed library handle")
        for use in (
            (bench.handle.set_stream, bench.stream),
            (bench.handle.set_workspace, bench.handle.workspace),
        ):
            with pytest.raises(
                RefusedError, match=r"LIB001 destroyed library handle(.|\n)*handle gemm of target was d"
            ):
                use[0](use[1])

    @pytest.mark.parametrize("level", [Level.OFF, Level.GUARD])
    def test_what_would_end_the_process_is_refused_at_every_level(self, level):
        bench = Blas("cuda", level)
        given, bench.handle.value = bench.handle.value, 0x5555_1234
        assert named(bench.refused()) == ("LIB001", "library handle overwritten")
        bench.handle.value = given
        bench.works()
        bench.handle.destroy()
        assert named(bench.refused()) == ("LIB001", "destroyed library handle")

    def test_a_handle_of_another_device(self, bench):
        other = Blas("host")
        finding = bench.refused(handle=other.handle)
        assert named(finding) == ("LIB001", "library handle of another device")
        with pytest.raises(BadInputError, match="stream target is of another device"):
            bench.handle.set_stream(other.stream)

    def test_set_to_a_stream_that_is_no_more(self, bench):
        other = bench.stream_of(TARGET, "other")
        other.destroy()
        with pytest.raises(
            RefusedError, match=r"STR001(.|\n)*handle gemm of target: stream other was destroyed"
        ):
            bench.handle.set_stream(other)
        bench.stream.handle, given = 0x5555_1234, bench.stream.handle
        with pytest.raises(RefusedError, match=r"STR001(.|\n)*something overwrote it"):
            bench.handle.set_stream(bench.stream)
        bench.stream.handle = given
        bench.works()

    @pytest.mark.parametrize("level", [Level.GUARD, Level.AUDIT])
    def test_one_handle_for_two_contexts(self, level):
        bench = Blas("cuda", level)
        draft = bench.stream_of(DRAFT, "draft")
        finding = bench.refused(draft)
        assert named(finding) == ("OWN002", "library handle of another owner")
        assert (
            "cublas.sgemm of draft on stream draft: handle gemm of target belongs to target"
            in finding.message
        )


class TestWorkspace:
    """LIB002."""

    def test_a_change_of_the_stream_that_does_not_set_it_again(self, bench):
        bench.library.set_stream(bench.handle.value, bench.stream.handle)
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace reset")
        assert (
            "was given workspace gemm.workspace, and a change of the stream has taken it away"
            in finding.message
        )
        assert finding.previous[0].function.endswith("that_does_not_set_it_again")
        assert finding.buffer.name == "gemm.workspace"
        bench.handle.set_stream(bench.stream)
        bench.works()

    def test_none_was_set(self, bench):
        handle = bench.make("new")
        handle.set_stream(bench.stream)
        finding = bench.refused(handle=handle)
        assert named(finding) == ("LIB002", "library workspace not owned")
        assert "works in memory of the library, which is in no ledger" in finding.message
        handle.set_workspace(bench.reserve("w"))
        bench.stream.call(bench.product(handle))

    def test_it_was_freed(self, bench):
        workspace = bench.handle.workspace
        workspace.buffer.free()
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace freed")
        assert finding.free
        bench.handle.set_workspace(bench.reserve("w"))
        bench.works()

    @pytest.mark.parametrize("owner", [TARGET, DRAFT])
    def test_it_was_freed_and_reserved_again(self, owner):
        bench = Blas(quarantine_bytes=0)
        workspace = bench.handle.workspace
        workspace.buffer.free()
        again = workspace.buffer.arena.reserve(WORKSPACE, owner=owner, name="kv.k.0").unwrap()
        assert again.address == workspace.address
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace freed")
        assert f"gemm.workspace, which was freed: its memory is kv.k.0 of {owner} now" in finding.message
        bench.handle.set_workspace(bench.reserve("w"))
        bench.works()

    def test_it_belongs_to_another_context(self, bench):
        bench.handle.set_workspace(bench.reserve("draft.workspace", owner=DRAFT))
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace not owned")
        assert "works in draft.workspace of draft" in finding.message
        bench.findings.clear()
        with bench.handle.workspace.buffer.lend(to=TARGET, mode="write"):
            bench.works()
        assert not len(bench.findings)

    def test_it_is_too_small(self, bench):
        bench.handle.set_workspace(bench.reserve("small", 1024))
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace too small")
        assert finding.message.endswith("works in small, which has 1024 bytes; give at least 16384")

    def test_the_library_was_told_another_one(self, bench):
        workspace = bench.handle.workspace
        bench.library.set_workspace(bench.handle.value, workspace.address, 2 * workspace.nbytes)
        finding = bench.refused()
        assert named(finding) == ("LIB002", "library workspace not owned")
        assert f"was told to work in {2 * WORKSPACE} bytes at" in finding.message
        bench.handle.set_workspace(workspace)
        bench.works()

    def test_what_was_set_past_every_record_is_set_right(self, bench):
        """No library tells its workspace: it is given again before each call."""
        workspace = bench.handle.workspace
        bench.library.calls.set_stream(bench.handle.value, bench.stream.handle)
        assert bench.library.calls.states[bench.handle.value].workspace is None
        bench.works()
        state = bench.library.calls.states[bench.handle.value]
        assert state.workspace == (workspace.address, workspace.nbytes)
        assert not len(bench.findings)

    def test_two_handles_share_it_on_unordered_streams(self, bench):
        other, handle = bench.stream_of(TARGET, "other"), bench.make("second")
        handle.set_stream(other)
        handle.set_workspace(bench.handle.workspace)
        y = bench.put(bench.arena(), np.zeros((ROWS, N_OUT), np.float32), "y2")
        bench.stream.call(bench.product())
        with pytest.raises(RefusedError) as caught:
            other.call(bench.product(handle, y))
        finding = caught.value.finding
        assert named(finding) == ("LIB002", "library workspace shared by two handles")
        assert "of gemm.workspace" in finding.message
        assert finding.previous
        event = bench.device.create_event(owner=TARGET, name="done")
        bench.stream.record(event)
        other.wait(event)
        other.call(bench.product(handle, y))
        other.synchronize()
        assert nmse(bench.get(y), bench.wanted) < 1e-12

    def test_at_level_guard_a_freed_workspace_is_a_freed_buffer(self):
        bench = Blas("cuda", Level.GUARD)
        bench.handle.workspace.buffer.free()
        with pytest.raises(FindingError, match="MEM004"):
            bench.stream.call(bench.product())

    def test_a_free_under_queued_work(self):
        bench = Blas()
        bench.stream.call(bench.product())
        with pytest.raises(RefusedError, match="STR012"):
            bench.handle.workspace.buffer.free()
        bench.stream.synchronize()
        bench.handle.workspace.buffer.free()


STEPS = ("set_stream", "raw_same", "raw_other", "raw_workspace", "new_workspace", "free", "past", "call")


class TestAnySequence:
    """What is refused, and as what, is a function of stream, workspace and record, however they came about."""

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.sampled_from(STEPS), max_size=12), st.sampled_from(["host", "cuda"]))
    def test_of_settings_frees_and_calls(self, steps, kind):
        bench = Blas(kind)
        handle, library = bench.handle, bench.library
        other = bench.stream_of(DRAFT, "draft")
        #: the stream that the library has, and the workspace that it was told by way of the record
        own, told = True, handle.workspace
        for step in (*steps, "call"):
            if step == "set_stream":
                handle.set_stream(bench.stream)
                own, told = True, handle.workspace
            elif step in ("raw_same", "raw_other"):
                own, told = step == "raw_same", None
                library.set_stream(handle.value, (bench.stream if own else other).handle)
            elif step == "raw_workspace":
                told = handle.workspace
                library.set_workspace(handle.value, told.address, told.nbytes)
            elif step == "new_workspace":
                told = bench.reserve("another")
                handle.set_workspace(told)
            elif step == "free":
                bench.stream.synchronize()
                if not handle.workspace.buffer.freed:
                    handle.workspace.buffer.free()
            elif step == "past":
                library.calls.set_stream(handle.value, bench.stream.handle)
                own = True
            elif not own:
                assert bench.refused().code == "LIB001"
            elif told is None or told.buffer.freed:
                assert bench.refused().code == "LIB002"
            else:
                bench.works()
                assert library.calls.states[handle.value].workspace == (told.address, told.nbytes)


class TestOrder:
    """A call reads and writes as a launch does."""

    def test_its_operands_race_with_other_streams(self, bench):
        other = bench.stream_of(TARGET, "other")
        bench.stream.call(bench.product())
        with pytest.raises(RefusedError, match="STR01"):
            other.fill(bench.y, 0)
        with pytest.raises(RefusedError, match="STR01"):
            other.fill(bench.x, 0)
        bench.stream.synchronize()
        other.fill(bench.y, 0)

    def test_operands_of_another_owner(self, bench):
        y = bench.put(bench.arena(owner=DRAFT), np.zeros((ROWS, N_OUT), np.float32), "theirs", DRAFT)
        with pytest.raises(RefusedError, match=r"OWN001(.|\n)*theirs through c"):
            bench.stream.call(bench.product(y=y))

    def test_operands_that_were_freed(self, bench):
        call = bench.product()
        bench.y.buffer.free()
        with pytest.raises(FindingError, match="MEM004"):
            bench.stream.call(call)


class TestGraphs:
    def captured(self, bench, name="step"):
        bench.stream.begin_capture()
        bench.stream.call(bench.product())
        return bench.stream.end_capture(name)

    def test_a_captured_call_is_replayed_and_pins_the_workspace(self):
        bench = Blas()
        graph = self.captured(bench)
        for _ in range(2):
            bench.stream.fill(bench.y, 0)
            bench.stream.replay(graph)
            assert nmse(bench.get(bench.y), bench.wanted) < 1e-12
        with pytest.raises(RefusedError, match=r"GRA001(.|\n)*pinned by graph step"):
            bench.handle.workspace.buffer.free()
        graph.destroy()
        bench.handle.workspace.buffer.free()

    def test_two_graphs_that_work_in_one_workspace(self):
        bench = Blas()
        other, second = bench.stream_of(TARGET, "other"), bench.make("second")
        second.set_workspace(bench.handle.workspace)
        second.set_stream(other)
        y = bench.put(bench.arena(), np.zeros((ROWS, N_OUT), np.float32), "y2")
        first = self.captured(bench)
        other.begin_capture()
        other.call(bench.product(second, y))
        graph = other.end_capture("second")
        bench.stream.replay(first)
        with pytest.raises(RefusedError, match=r"STR010(.|\n)*gemm\.workspace through workspace"):
            other.replay(graph)
        bench.stream.synchronize()
        other.replay(graph)
        other.synchronize()
        assert nmse(bench.get(y), bench.wanted) < 1e-12
        for each in (first, graph):
            each.destroy()

    def test_a_handle_that_changes_between_the_call_and_the_capture(self):
        bench = Blas()
        bench.stream.begin_capture()
        bench.stream.call(bench.product())
        bench.library.set_stream(bench.handle.value, bench.stream.handle)
        with pytest.raises(RefusedError, match="LIB002 library workspace reset"):
            bench.stream.end_capture("step")
        bench.handle.set_stream(bench.stream)
        graph = self.captured(bench)
        bench.stream.replay(graph)
        assert nmse(bench.get(bench.y), bench.wanted) < 1e-12
        graph.destroy()

    def test_a_workspace_that_is_set_between_the_call_and_the_capture_is_the_one_that_is_pinned(self):
        bench = Blas()
        bench.stream.begin_capture()
        bench.stream.call(bench.product())
        old, new = bench.handle.workspace, bench.reserve("new")
        bench.handle.set_workspace(new)
        graph = bench.stream.end_capture("step")
        old.buffer.free()
        with pytest.raises(RefusedError, match="GRA001"):
            new.buffer.free()
        graph.destroy()

    def test_an_identical_capture_is_reported(self):
        bench = Blas()
        graphs = [self.captured(bench, name) for name in "ab"]
        assert [finding.code for finding in bench.findings] == ["GRA002"]
        for graph in graphs:
            graph.destroy()

    def test_a_call_that_fails_in_a_capture_leaves_nothing(self):
        bench = Blas()
        bench.library.calls.fail("sgemm", "EXECUTION_FAILED")
        with pytest.raises(
            DeviceError, match=r"cublasSgemm of handle gemm of target failed with CUBLAS_STATUS_EXEC"
        ):
            self.captured(bench)
        graph = self.captured(bench)
        graph.destroy()
        assert not len(bench.findings)
        assert bench.device.context.driver.graphs == []

    def test_the_host_device_captures_none(self):
        bench = Blas("host")
        bench.stream.begin_capture()
        with pytest.raises(
            DeviceError, match=r"numpy\.sgemm during capture; the host device captures launches of ke"
        ):
            bench.stream.call(bench.product())


class TestFailures:
    @pytest.mark.parametrize(
        ("call", "status", "kind"),
        [
            ("sgemm", "EXECUTION_FAILED", DeviceError),
            ("sgemm", "ALLOC_FAILED", OutOfMemoryError),
            ("stream_of", "NOT_INITIALIZED", DeviceError),
            ("set_workspace", "INVALID_VALUE", DeviceError),
        ],
    )
    def test_a_call_that_fails_is_a_typed_error_and_the_next_one_works(self, call, status, kind):
        bench = Blas()
        bench.library.calls.fail(call, status)
        name = {"sgemm": "Sgemm", "stream_of": "GetStream", "set_workspace": "SetWorkspace"}[call]
        said = rf"cuda:0: cublas{name} of handle gemm of target failed with CUBLAS_STATUS_{status}"
        with pytest.raises(kind, match=said):
            bench.stream.call(bench.product())
        bench.works()
        assert not len(bench.findings)

    def test_a_handle_that_cannot_be_made_leaves_nothing(self):
        bench = Blas()
        before = bench.device.account.rows
        bench.library.calls.fail("create", "ALLOC_FAILED")
        with pytest.raises(
            OutOfMemoryError, match=r"cublasCreate of handle new of target failed with .*ALLOC_FAILED"
        ):
            bench.make("new")
        assert bench.device.account.rows == before
        assert list(bench.device.library_handles) == [bench.handle]

    def test_each_call_has_its_site(self, bench):
        injector = FaultInjector(FaultPlan(kinds=("library",)))
        bench.device.faults = injector
        handle = bench.make("new")
        handle.set_stream(bench.stream)
        handle.set_workspace(bench.reserve("w"))
        bench.stream.call(bench.product(handle))
        assert injector.counts == {"library": 4}

        def all_of_it():
            again = bench.make("again")
            again.set_stream(bench.stream)
            again.set_workspace(handle.workspace)
            bench.stream.call(bench.product(again))

        for number in range(1, 5):
            bench.device.faults = FaultInjector(FaultPlan.nth(number, "library"))
            with pytest.raises(InjectedFaultError, match=rf"fault site {number} \(library"):
                all_of_it()
        bench.device.faults = None
        bench.works()

    def test_a_handle_that_cannot_be_destroyed_leaves_the_books(self):
        bench = Blas()
        bench.library.calls.fail("destroy", "INTERNAL_ERROR")
        with pytest.raises(
            DeviceError, match=r"cublasDestroy of handle gemm of target failed with .*INTERNAL_ERROR"
        ):
            bench.handle.destroy()
        bench.handle.destroy()
        assert not bench.device.library_handles
        assert not any(name.startswith("handle") for _, name, _ in bench.device.account.rows)

    def test_a_lost_device_lets_its_handles_go(self):
        bench = Blas()
        bench.stream.call(bench.product())
        bench.device.context.driver.lost = "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS.*the last launch was cublas\.sgemm \(call"):
            bench.stream.synchronize()
        with pytest.raises(DeviceError, match="device lost"):
            bench.stream.call(bench.product())
        bench.handle.destroy()
        assert bench.library.told(bench.handle.value).stream == 0
        assert not bench.device.library_handles


class TestLedger:
    def test_a_handle_is_in_the_account_until_it_is_destroyed(self):
        bench = Blas()

        def rows():
            return {
                name: usage.device
                for _, name, usage in bench.device.account.rows
                if name.startswith("handle")
            }

        assert rows() == {"handle gemm": HANDLE_NBYTES}
        names = {(row.owner, row.name): row.nbytes for row in bench.allocator.table()}
        assert names[TARGET, "gemm.workspace"] == WORKSPACE
        assert names[TARGET, "handle gemm"] == HANDLE_NBYTES
        bench.handle.destroy()
        assert rows() == {}
        assert bench.library.calls.states == {}

    def test_memory_that_a_first_call_takes_is_the_handles(self):
        bench = Blas()
        driver = bench.device.context.driver
        plain = FakeCublas.sgemm

        def loads(self, *arguments):
            driver.hidden += 1 << 20
            plain(self, *arguments)

        bench.library.calls.sgemm = loads.__get__(bench.library.calls)
        bench.stream.call(bench.product())
        [held] = [usage for _, name, usage in bench.device.account.rows if name == "handle gemm"]
        assert held.device == HANDLE_NBYTES + (1 << 20)


def test_a_device_without_the_library_says_so(monkeypatch):
    monkeypatch.setattr("importlib.metadata.files", lambda _name: None)
    with pytest.raises(
        BadInputError, match=r"^gemm cublas: no cuBLAS library is installed; install the extra cublas"
    ):
        fake_device().blas()
