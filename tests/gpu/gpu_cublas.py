"""cuBLAS on a real GPU: its products against our kernels', and what is done to its handle found before it is called.

``MODEL``: a file whose prompt of 512 tokens is timed with both.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DATA, DRAFT, TARGET, Bench, nmse, same_bits
from gpu_models import DRAFTS, load

import refengine
from instrumentation.blas import product
from instrumentation.devices.cuda import CudaDevice
from instrumentation.findings import FindingError, RefusedError
from instrumentation.handles import LibraryHandle
from instrumentation.levels import Level
from refengine.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpu_report import Report

    from instrumentation.view import View

MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama-Q4_1", {}),
    ("qwen35-Q4_K_M", DRAFTS),
)
MOST_NMSE = 5e-4
N_PROMPT = 512
WORKSPACE = 4 << 20


class Blas:
    """A handle of the target with its stream and workspace, and a product of 96 rows with a matrix [160, 128]."""

    def __init__(self, level: Level = Level.AUDIT) -> None:
        self.bench = Bench(level, device=CudaDevice())
        self.device, self.stream = self.bench.device, self.bench.stream
        self.library = self.device.blas()
        rng = np.random.default_rng(5)
        x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 128), (160, 128)))
        self.wanted = x.astype(np.float64) @ weight.astype(np.float64).T
        arena = self.bench.arena()
        self.x, self.weight = self.bench.put(arena, x, "x"), self.bench.put(arena, weight, "weight")
        self.y = self.bench.put(arena, np.zeros((96, 160), np.float32), "y")
        self.handle = LibraryHandle(self.device, self.library, TARGET, "gemm")
        self.workspace = self.reserve("gemm.workspace")
        self.handle.set_workspace(self.workspace)
        self.handle.set_stream(self.stream)

    def reserve(self, name: str, owner: Any = TARGET) -> View:
        """A workspace in an arena of its own."""
        arena = self.bench.arena(WORKSPACE + 4096, owner=owner)
        view: View = arena.reserve(WORKSPACE, owner=owner, name=name).unwrap().view(np.uint8, WORKSPACE)
        return view

    def call(self, stream: Any = None) -> None:
        """Queue the product."""
        (stream or self.stream).call(product(self.handle, self.x, self.weight, self.y))

    def error(self) -> float:
        """NMSE of what is in y."""
        return nmse(self.bench.get(self.y), self.wanted)


def cublas(report: Report) -> None:
    """All of it."""
    with report.part("library"):
        library = CudaDevice().blas()
        print(f"cuBLAS {'.'.join(map(str, library.calls.version))}")  # type: ignore[attr-defined]
    for part in (_handle, _refusals, _graph, _costs, _models, _prompt):
        with report.part(part.__name__.strip("_")):
            part(report)


def _handle(report: Report) -> None:
    blas = Blas()
    blas.call()
    report.check("a product", blas.error() < 1e-10, f"NMSE {blas.error():.1e}")
    held = {name: usage.device for _, name, usage in blas.device.account.rows if name.startswith("handle")}
    print(f"a handle takes {held} bytes beside its workspace")
    free = blas.device.memory_info().free
    for _ in range(500):
        blas.call()
    blas.stream.synchronize()
    grown = free - blas.device.memory_info().free
    report.check("500 calls take no memory", grown < 2 << 20, f"{grown} bytes")
    report.check("no findings", not len(blas.bench.findings), [each.code for each in blas.bench.findings])
    blas.handle.destroy()
    returned = blas.device.memory_info().free - free
    print(f"destroying the handle gave {returned} bytes back")
    report.check("it left the account", not blas.device.library_handles)


def _foreign(blas: Blas) -> None:
    blas.library.calls.set_stream(blas.handle.value, _other(blas, DRAFT).handle)


def _default(blas: Blas) -> None:
    blas.library.calls.set_stream(blas.handle.value, 0)


def _destroyed(blas: Blas) -> None:
    other = _other(blas, TARGET)
    blas.handle.set_stream(other)
    other.destroy()


def _overwritten(blas: Blas) -> None:
    blas.handle.value = 0x5555_1234


def _reset(blas: Blas) -> None:
    blas.library.set_stream(blas.handle.value, blas.stream.handle)


def _freed(blas: Blas) -> None:
    blas.workspace.buffer.free()


def _freed_and_given_again(blas: Blas) -> None:
    arena = blas.workspace.buffer.arena
    blas.workspace.buffer.free()
    arena.release()
    blas.reserve("kv.k.0", DRAFT)


def _of_the_draft(blas: Blas) -> None:
    blas.handle.set_workspace(blas.reserve("draft.workspace", DRAFT))


def _told_otherwise(blas: Blas) -> None:
    blas.library.set_workspace(blas.handle.value, blas.workspace.address, 2 * WORKSPACE)


def _other(blas: Blas, owner: Any) -> Any:
    return blas.device.create_stream(owner=owner, name="other")


#: what is done to a handle, and what it is found as
FAULTS: tuple[tuple[Callable[[Blas], None], str], ...] = (
    (_foreign, "LIB001"), (_default, "LIB001"), (_destroyed, "LIB001"), (_overwritten, "LIB001"),
    (_reset, "LIB002"), (_freed, "LIB002"), (_freed_and_given_again, "LIB002"), (_of_the_draft, "LIB002"),
    (_told_otherwise, "LIB002"),
)  # fmt: skip


def _refusals(report: Report) -> None:
    for fault, code in FAULTS:
        name = fault.__name__.strip("_").replace("_", " ")
        with report.part(name):
            blas = Blas()
            blas.call()  # all is well
            blas.stream.synchronize()
            fault(blas)
            blas.stream.fill(blas.y, 0)
            try:
                blas.call()
                report.missed(name, "called")
            except RefusedError as error:
                found = error.finding
                ran = bool(blas.bench.get(blas.y).any())
                report.check(name, found.code == code and not ran, f"{found.code} {found.message}")
            if blas.handle.workspace is not None and not blas.handle.workspace.buffer.freed:
                blas.handle.value = blas.handle.given
                blas.handle.set_workspace(blas.workspace)
                blas.handle.set_stream(blas.stream)
                blas.call()
                report.check(f"{name}, repaired", blas.error() < 1e-10, f"NMSE {blas.error():.1e}")
    with report.part("past every record"):
        blas = Blas()
        blas.library.calls.set_stream(blas.handle.value, blas.stream.handle)
        blas.call()
        clean = not len(blas.bench.findings)
        report.check("past every record", blas.error() < 1e-10 and clean, f"NMSE {blas.error():.1e}")
    with report.part("another context's handle"):
        blas = Blas()
        try:
            blas.call(_other(blas, DRAFT))
            report.missed("another context's handle", "called")
        except RefusedError as error:
            report.check("another context's handle", error.finding.code == "OWN002", error.finding.message)
    with report.part("a shared workspace"):
        blas = Blas()
        other, first = _other(blas, TARGET), blas.handle
        blas.call()
        blas.handle = LibraryHandle(blas.device, blas.library, TARGET, "second")
        blas.handle.set_workspace(first.workspace or blas.workspace)
        blas.handle.set_stream(other)
        try:
            blas.call(other)
            report.missed("a shared workspace", "called")
        except RefusedError as error:
            report.check("a shared workspace", error.finding.code == "LIB002", error.finding.message)


def _graph(report: Report) -> None:
    blas = Blas()
    blas.call()  # a capture would not let the library load its kernels
    direct = blas.bench.get(blas.y)
    blas.stream.begin_capture()
    blas.call()
    graph = blas.stream.end_capture("step")
    same = []
    for _ in range(3):
        blas.stream.fill(blas.y, 0)
        blas.stream.replay(graph)
        same.append(same_bits(blas.bench.get(blas.y), direct))
    report.check("a captured call gives the same bits", all(same), f"{same}, NMSE {blas.error():.1e}")
    try:
        blas.workspace.buffer.free()
        report.missed("a graph pins the workspace", "freed")
    except FindingError as error:
        report.check("a graph pins the workspace", "GRA001" in str(error), str(error).splitlines()[0])
    graph.destroy()
    blas.stream.begin_capture()
    blas.call()
    blas.library.set_stream(blas.handle.value, blas.stream.handle)
    try:
        blas.stream.end_capture("reset")
        report.missed("reset before a capture ends", "captured")
    except RefusedError as error:
        report.check("reset before a capture ends", error.finding.code == "LIB002", error.finding.message)


def _costs(_report: Report) -> None:
    print("| level | us a call | us with its share of the wait |\n|---|---|---|")
    for level in (Level.OFF, Level.GUARD, Level.AUDIT):
        blas = Blas(level)
        queued, total = [], []
        for _ in range(6):
            started = time.perf_counter()
            for _ in range(200):
                blas.call()
            queued.append((time.perf_counter() - started) * 5e3)
            blas.stream.synchronize()
            total.append((time.perf_counter() - started) * 5e3)
        print(f"|{level}|{np.median(queued[1:]):.1f}|{np.median(total[1:]):.1f}|", flush=True)


def _models(report: Report) -> None:
    """One row a model: NMSE against our kernels with and without graphs, then checks, y everywhere."""
    print("| model | NMSE | NMSE without graphs | direct as replayed | audit as off | greedy | clean | s |")
    print("|---|---|---|---|---|---|---|---|")
    for name, options in MODELS:
        with report.part(f"cublas {name}"), np.load(DATA / f"{name}.npz") as recorded:
            started = time.perf_counter()
            tokens, greedy = recorded["tokens"].tolist(), recorded["greedy"].tolist()
            with load(name, "cuda", **options) as engine:
                ours = engine.logits(tokens)
            found: dict[tuple[str, bool], list[Any]] = {}
            holds = []
            for check, graphs in (("off", True), ("off", False), ("audit", True)):
                with load(name, "cuda", gemm="cublas", check=check, cuda_graphs=graphs, **options) as engine:
                    # The first run of a shape is direct, the second one is captured, the third replayed.
                    found[check, graphs] = [engine.logits(tokens) for _ in range(3)]
                    holds.append(engine.generate(tokens, n_predict=32, temperature=0).tokens == greedy)
                    holds.append(engine.check_integrity() == [] and engine.findings == [])
            with_graphs, without = found["off", True], found["off", False]
            errors = [max(nmse(each, ours) for each in runs) for runs in (with_graphs, without)]
            shown = [
                all(same_bits(each, without[0]) for each in (*with_graphs, *without)),
                all(same_bits(each, with_graphs[0]) for each in found["audit", True]),
                all(holds[0::2]),
                all(holds[1::2]),
            ]
            report.count(f"cublas {name}", max(errors) <= MOST_NMSE and all(shown))
            marks = "|".join("y" if each else "NO" for each in shown)
            seconds = time.perf_counter() - started
            print(f"|{name}|{errors[0]:.1e}|{errors[1]:.1e}|{marks}|{seconds:.1f}|", flush=True)


def _prompt(report: Report) -> None:
    """Milliseconds of a prompt, the best of five once all is warm."""
    model = os.environ.get("MODEL")
    if model is None:
        print("no MODEL: prompts are not timed")
        return
    tokens = np.random.default_rng(7).integers(1, 200, N_PROMPT).tolist()
    logits: dict[str, Any] = {}
    print("| products | check | ms of 512 tokens | t/s |\n|---|---|---|---|")
    for gemm, check in (("kernels", "off"), ("cublas", "off"), ("cublas", "audit")):
        with report.part(f"prompt {gemm} {check}"):
            times, logits[f"{gemm} {check}"] = _timed(model, tokens, gemm, check)
            best = min(times)
            print(f"|{gemm}|{check}|{best * 1e3:.1f}|{N_PROMPT / best:.0f}|", flush=True)
    error = nmse(logits["cublas off"], logits["kernels off"])
    report.check("a prompt's NMSE", error <= MOST_NMSE, f"{error:.1e}")


def _timed(model: str | Path, tokens: list[int], gemm: str, check: str) -> tuple[list[float], Any]:
    options: dict[str, Any] = {"n_ctx": 1024, "n_batch": N_PROMPT, "n_ubatch": N_PROMPT}
    with (
        refengine.load(model, device="cuda", gemm=gemm, check=check, **options) as engine,
        engine.exclusive() as context,
    ):
        times = []
        for _ in range(8):
            context.keep(-1)
            started = time.perf_counter()
            context.require(context.decode(Batch.of(tokens, 0, 0, "last")))
            times.append(time.perf_counter() - started)
        return times[3:], context.logits.copy()
