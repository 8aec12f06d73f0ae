"""The engine with a library's products, over fake CUDA: near the kernels' logits, nothing left, failures kept apart."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from engines import DATA, nmse
from fake_cublas import HANDLE_NBYTES, blas_device
from fake_cuda import fake_device

import refengine
from instrumentation.devices.host import HostDevice
from instrumentation.errors import BadInputError, DeviceError, OutOfMemoryError
from instrumentation.faults import FaultInjector, FaultPlan, InjectedFaultError
from instrumentation.findings import RefusedError
from instrumentation.ownership import Owner
from refengine.errors import ComputeError
from refengine.gguf_file import GGUFFile
from refengine.inspection import memory_plan
from refengine.library_products import LEAST_ROWS, WORKSPACE_NBYTES
from refengine.options import EngineOptions

OPTIONS = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128}
DRAFTS = {"spec_type": "draft-mtp", "draft_n_max": 3, "n_slots": 2}
TARGET, DRAFT = Owner("target"), Owner("draft")


def load(name: str, device, **options) -> refengine.Engine:
    return refengine.load(DATA / f"{name}.gguf", device=device, **({"gemm": "cublas"} | OPTIONS | options))


def recorded(name: str):
    with np.load(DATA / f"{name}.npz") as held:
        return held["tokens"].tolist(), held["logits"], held["greedy"].tolist()


def recorded_draft(name: str):
    with np.load(DATA / f"{name}.npz") as held:
        return held["mtp_logits"]


def library_of(device):
    return device.blas().calls


@functools.cache
def kernels_logits(name: str):
    tokens, _, _ = recorded(name)
    with load(name, fake_device(), gemm="kernels") as engine:
        return engine.logits(tokens)


@pytest.mark.parametrize("check", ["off", "audit"])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("llama-Q4_K_M", {"n_slots": 2}), ("qwen35", DRAFTS)]
)
def test_logits_are_those_of_the_kernels(name, options, graphs, check):
    tokens, _, greedy = recorded(name)
    device = blas_device()
    driver, library = device.context.driver, library_of(device)
    with load(name, device, check=check, cuda_graphs=graphs, **options) as engine:
        # The first run of a shape is never captured, and the third is a replay.
        for _ in range(3):
            assert nmse(engine.logits(tokens), kernels_logits(name)) <= 5e-4
        assert library.calls["sgemm"] > 0
        made = engine.generate(tokens, n_predict=32, temperature=0)
        assert made.tokens == greedy
        assert engine.check_integrity() == []
        assert engine.findings == []
        before = library.calls["sgemm"]
        engine.logits(tokens)
        assert (library.calls["sgemm"] == before) == graphs
        rows = {(row.owner, row.name): row.nbytes for row in engine.allocator.table()}
        for owner in (TARGET, DRAFT) if options == DRAFTS else (TARGET,):
            assert rows[owner, "gemm.workspace"] == WORKSPACE_NBYTES
            assert rows[owner, "gemm.weights"] > 0
            assert rows[owner, "handle gemm"] == HANDLE_NBYTES
    assert (len(driver.memory), len(driver.pinned), len(driver.streams)) == (1, 1, 1)
    assert (driver.events, driver.graphs, library.states, driver.hidden) == (set(), [], {}, 0)
    assert not device.library_handles


def test_products_of_few_rows_are_the_kernels():
    tokens, _, _ = recorded("llama")
    device = blas_device()
    with load("llama", device) as engine:
        engine.logits(tokens[: LEAST_ROWS - 1])
        assert library_of(device).calls["sgemm"] == 0
        engine.logits(tokens[:LEAST_ROWS])
        assert library_of(device).calls["sgemm"] > 0


def test_a_context_whose_batches_are_small_has_no_handle():
    device = blas_device()
    with load("llama", device, n_ubatch=LEAST_ROWS - 1) as engine:
        assert not device.library_handles
        assert not any(row.name.startswith("gemm") for row in engine.allocator.table())


@pytest.mark.parametrize(("name", "options"), [("llama", {}), ("qwen35", DRAFTS)])
def test_the_plan_is_what_is_reserved(name, options):
    device = blas_device()
    given = {"gemm": "cublas", **OPTIONS, **options}
    with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
        plan = memory_plan(
            gguf, EngineOptions(device=device, **given), fewest_launches=True, chooses=device.behind_bus
        )
    with load(name, device, **options) as engine:
        assert engine.allocator.snapshot().reserved == plan.total(engine.level)
    limit = plan.total(engine.level)
    load(name, blas_device(), device_memory_limit=limit, **options).close()
    with pytest.raises(OutOfMemoryError, match=rf"the smallest limit that works is {limit}"):
        load(name, blas_device(), device_memory_limit=limit - 1, **options)


class TestFailures:
    @pytest.mark.parametrize("graphs", [True, False])
    @pytest.mark.parametrize("status", ["EXECUTION_FAILED", "ALLOC_FAILED"])
    def test_a_call_that_fails_ends_its_request_and_nothing_else(self, status, graphs):
        tokens, _, greedy = recorded("llama")
        device = blas_device()
        with load("llama", device, check="audit", cuda_graphs=graphs) as engine:
            for turn in range(3):  # a direct run, a capture, a replay
                if turn == 2 and graphs:
                    break
                library_of(device).fail("sgemm", status, nth=3)
                with pytest.raises(
                    ComputeError, match=rf"cublasSgemm of handle gemm of target failed with \w+_{status}"
                ):
                    engine.generate(tokens, n_predict=4, temperature=0)
                assert engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy
                engine.drop_prefixes()
            assert engine.findings == []
        assert len(device.context.driver.memory) == 1

    @pytest.mark.parametrize("call", ["create", "set_stream", "set_workspace"])
    def test_a_handle_that_cannot_be_made_is_an_error_of_loading(self, call):
        device = blas_device()
        library_of(device).fail(call, "NOT_INITIALIZED")
        with pytest.raises(
            DeviceError, match=r"cuda:0: cublas\w+ of handle gemm of target failed with CUBLAS_STATUS_NOT"
        ):
            load("llama", device)
        driver = device.context.driver
        assert (len(driver.memory), len(driver.streams), driver.hidden) == (1, 1, 0)
        assert not device.library_handles
        load("llama", device).close()

    def test_a_handle_that_cannot_be_destroyed_is_told_when_all_else_is_given_back(self):
        device = blas_device()
        engine = load("llama", device)
        library_of(device).fail("destroy", "INTERNAL_ERROR")
        with pytest.raises(DeviceError, match="cublasDestroy of handle gemm of target failed"):
            engine.close()
        driver = device.context.driver
        assert (len(driver.memory), len(driver.streams)) == (1, 1)
        assert engine.allocator.table() == ()

    def test_a_lost_device_ends_requests_and_the_engine_closes_quietly(self):
        tokens, _, _ = recorded("llama")
        device = blas_device()
        engine = load("llama", device, check="audit")
        engine.logits(tokens)
        device.context.driver.lost = "CUDA_ERROR_ILLEGAL_ADDRESS"
        for _ in range(2):
            with pytest.raises((ComputeError, DeviceError), match=r"ILLEGAL_ADDRESS|device lost"):
                engine.logits(tokens)
        calls = library_of(device).calls.total()
        engine.close()
        assert library_of(device).calls.total() == calls
        assert engine.findings == []
        assert engine.allocator.table() == ()
        assert not device.library_handles

    def test_a_fault_ends_its_request_and_nothing_else(self):
        tokens, _, greedy = recorded("llama")
        injector = FaultInjector(FaultPlan.nth(2, "library"))
        injector.enabled = False
        device = blas_device()
        with load("llama", device, check="guard", faults=injector) as engine:
            injector.enabled = True
            with pytest.raises(ComputeError) as caught:
                engine.generate(tokens, n_predict=4, temperature=0)
            assert isinstance(caught.value.__cause__, InjectedFaultError)
            assert engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy
            assert engine.findings == []
        assert len(device.context.driver.memory) == 1

    def test_what_is_done_to_the_handle_is_found_before_the_call(self):
        tokens, _, greedy = recorded("llama")
        device = blas_device()
        engine = load("llama", device, check="audit", cuda_graphs=False)
        [handle] = device.library_handles
        other = device.create_stream(owner=DRAFT, name="other")
        library = device.blas()

        def refused(code: str) -> None:
            before = library.calls.calls["sgemm"]
            with pytest.raises(RefusedError) as caught:
                engine.generate(tokens, n_predict=4, temperature=0)
            assert caught.value.finding.code == code
            assert library.calls.calls["sgemm"] == before

        library.set_stream(handle.value, other.handle)
        refused("LIB001")
        handle.set_stream(engine.context.stream)
        library.set_stream(handle.value, engine.context.stream.handle)
        refused("LIB002")
        handle.set_stream(engine.context.stream)
        workspace = handle.workspace
        handle.set_workspace(workspace.buffer.view(np.uint8, 1024))
        refused("LIB002")
        handle.set_workspace(workspace)
        assert engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy
        other.destroy()
        engine.close()
        assert [finding.code for finding in engine.findings] == ["LIB001", "LIB002", "LIB002"]

    def test_the_targets_handle_in_the_drafts_place(self):
        tokens, _, _ = recorded("qwen35")
        device = blas_device()
        with load("qwen35", device, check="guard", **DRAFTS) as engine:
            executor = engine.draft.executor
            own = executor.operations
            executor.operations = replace(own, library=engine.context.executor.operations.library)
            with pytest.raises(RefusedError, match="OWN002 library handle of another owner"):
                engine.draft_logits(tokens)
            executor.operations = own
            assert nmse(engine.draft_logits(tokens), recorded_draft("qwen35")) <= 5e-4

    def test_a_graph_pins_the_workspace(self):
        tokens, _, _ = recorded("llama")
        device = blas_device()
        with load("llama", device, check="audit") as engine:
            for _ in range(2):
                engine.logits(tokens[:LEAST_ROWS])
            [handle] = device.library_handles
            with pytest.raises(RefusedError, match="GRA001"):
                handle.workspace.buffer.free()


class TestBadOptions:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"gemm": "mkl"}, "gemm 'mkl' is unknown; use one of kernels, cublas"),
            ({"gemm": 1}, "gemm is 1; give text"),
            (
                {"gemm": "cublas", "check": "trap"},
                (
                    "gemm cublas with check level trap: nobody sees what a library's kernels access; use audit, or "
                    "gemm kernels"
                ),
            ),
            (
                {"gemm": "cublas", "device": "host"},
                "gemm cublas: device host has no cuBLAS; use device cuda, or gemm kernels",
            ),
        ],
    )
    def test_options(self, options, said):
        with pytest.raises(BadInputError) as caught:
            EngineOptions(**options)
        assert str(caught.value) == said

    def test_a_host_device_that_is_open(self):
        with pytest.raises(BadInputError, match="gemm cublas: device host has no cuBLAS"):
            load("llama", HostDevice(1))

    def test_no_library(self, monkeypatch):
        monkeypatch.setattr("instrumentation.devices.cublas._WHEELS", ())
        device = fake_device()
        with pytest.raises(
            BadInputError, match=r"^gemm cublas: no cuBLAS library is installed; install the extra cublas"
        ):
            load("llama", device)
        assert len(device.context.driver.memory) == 1
