"""Level trap on the GPU: planted faults and their twins, every kernel checked against plain, small models."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engines import DATA, same_bits
from gguf import GGMLQuantizationType
from gpu_models import DRAFTS, OPTIONS
from gpu_prepared import folder
from gpu_report import Report
from kernel_cases import cases
from numba import cuda, float32
from planted_faults import PLANTED, N, Planted
from planted_kernels import line_at, shifted
from trap_world import World

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

import refengine
from benchmarks.attention import attention_launches, delta_launch
from benchmarks.products import OWNER, Place, measure
from instrumentation.allocator import Allocator
from instrumentation.devices.cuda import CudaDevice
from instrumentation.findings import Finding, FindingLog
from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_1d, i32
from instrumentation.levels import Level
from instrumentation.reservation import BufferRequest
from refengine.kernels import NORM_WARPS, elementwise, norm

#: one of each architecture, and quantised ones
TRAP_MODELS = ("llama", "qwen35", "qwen35moe", "qwen3", "qwen35-Q4_K_M", "llama-Q4_1")
#: what every kernel is to keep within
LIMIT = 2.4
ROUNDS, REPEATS = 5, 20
#: how plain kernels run, and checked ones: where the host knows what is written, and where all shadows are looked up
PLAIN, KNOWN, SHADOWS = "plain", "known", "shadows"
FORMS = (PLAIN, KNOWN, SHADOWS)
#: of a 0.8B model
PRODUCT_TYPES = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16)
PRODUCT_SHAPES = ((1024, 3584), (3584, 1024), (32768, 1024))
PRODUCT_ROWS = (1, 8)


@kernel(block=32)
def wait_long(y: f32_1d, rounds: i32) -> None:
    """Keeps a stream busy."""
    v = y[0]
    for _ in range(rounds):
        v = cuda.fma(v, float32(0.999), float32(0.001))
    y[0] = v


# --- planted faults


def facts(found: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """What must be the same on every device."""
    return [
        {
            "code": f.code,
            "argument": f.argument,
            "lines": [frame.line for frame in f.access if "planted_kernels" in frame.file],
            "message": f.message,
            "block": list(f.block or ()),
            "thread": list(f.thread or ()),
        }
        for f in found
    ]


def host_facts() -> dict[str, list[dict[str, Any]]]:
    """What the host finds of each fault; by ``prepare.py``, where it made them."""
    place = folder()
    if place is not None and (place / "faults.json").exists():
        held: dict[str, list[dict[str, Any]]] = json.loads((place / "faults.json").read_text())
        return held
    return {
        fault.name: facts(World().launch(fault.kernel, fault.grid_of("bad"), fault.arguments("bad")))
        for fault in PLANTED
    }


def _fault(fault: Planted, wanted: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    world = World(device=CudaDevice())
    found = world.launch(fault.kernel, fault.grid_of("bad"), fault.arguments("bad"))
    seen, wrong = facts(found), []
    if tuple(f["code"] for f in seen) != fault.codes:
        wrong.append(f"codes {[f['code'] for f in seen]} and not {list(fault.codes)}")
    elif seen[0]["argument"] != fault.argument or seen[0]["lines"][:1] != [line_at(fault.marks[0])]:
        wrong.append(f"{seen[0]['argument']} at {seen[0]['lines']}")
    if seen != wanted:
        pairs = zip(seen, wanted, strict=False)
        differ = [f"{k}: {a[k]}, host {b[k]}" for a, b in pairs for k in a if a[k] != b[k]]
        wrong.append("; ".join(differ) or "another number of findings than the host's")
    if world.allocator.check_integrity():
        wrong.append("damage")
    twin = World(device=world.device)
    others = twin.launch(fault.kernel, fault.grid_of("fixed"), fault.arguments("fixed"))
    if others:
        wrong.append(f"its twin: {[f.code for f in others]}")
    return seen, wrong


def faults(report: Report) -> None:
    """One row a fault: what was found first, and whether all is as on the host; then faults of time."""
    wanted = host_facts()
    print("| fault | codes | argument | lines | block | thread | as the host |")
    print("|---|---|---|---|---|---|---|")
    for fault in PLANTED:
        with report.part(fault.name):
            seen, wrong = _fault(fault, wanted[fault.name])
            first = seen[0] if seen else dict.fromkeys(("argument", "lines", "block", "thread"), "-")
            codes = " ".join(f["code"] for f in seen)
            shown = "|".join(str(first[key]) for key in ("argument", "lines", "block", "thread"))
            report.count(fault.name, not wrong)
            print(f"|{fault.name}|{codes}|{shown}|{' / '.join(wrong) or 'y'}|", flush=True)
    for part in (_freed, _graph, _stale, _flood):
        with report.part(part.__name__):
            part(report)


def _line(world: World, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"x": np.arange(N, dtype=np.float32), "y": np.zeros(N, np.float32), "n": N}
    return world.bind(given | {"load_at": 0, "store_at": 0} | more)


def _busy(world: World) -> None:
    """Some 50 ms of work, so that what is queued behind it waits."""
    view = world.array("busy", np.ones(1, np.float32))
    world.stream.synchronize()
    for _ in range(5):
        world.stream.launch(wait_long, 1, {"y": view, "rounds": 4_000_000})


def _freed(report: Report) -> None:
    for argument in ("x", "y"):
        world = World(device=CudaDevice())
        world.allocator.watch_frees(None)
        arguments = _line(world)
        _busy(world)
        world.stream.launch(shifted, 2, arguments)
        arguments[argument].buffer.free()
        world.device.settle()
        world.stream.synchronize()
        seen = [(f.code, f.argument, f.count, bool(f.free)) for f in world.findings]
        report.check(f"{argument} freed under queued work", seen == [("MEM013", argument, N, True)], seen)


def _graph(report: Report) -> None:
    world = World(device=CudaDevice())
    world.allocator.watch_frees(None)
    arguments = _line(world, n=N + 1)
    world.stream.synchronize()
    world.stream.begin_capture()
    world.stream.launch(shifted, 2, arguments)
    graph = world.stream.end_capture("step")
    for _ in range(3):
        world.stream.replay(graph)
    world.stream.synchronize()
    seen = [(f.code, f.argument, f.count) for f in world.findings]
    report.check("a graph reports its replays", seen == [("MEM010", "x", 3), ("MEM011", "y", 3)], seen)
    _busy(world)
    world.stream.replay(graph)
    x = arguments["x"]
    x.buffer.arena.shadow.mark(x.address, x.nbytes, 0x80)
    world.device.settle()
    world.stream.synchronize()
    seen = [(f.code, f.argument, f.count) for f in world.findings if f.code == "MEM013"]
    report.check("a stale graph", seen == [("MEM013", "x", N)], seen)
    graph.destroy()


def _stale(report: Report) -> None:
    world = World(device=CudaDevice())
    prepared = world.stream.prepare(shifted, 2, _line(world))
    world.stream.synchronize()
    prepared.launch.views["y"].buffer.free()
    world.stream._queue_launch(prepared)
    world.stream.synchronize()
    seen = [(f.code, f.argument, f.count) for f in world.findings]
    report.check("a stale view", seen == [("MEM013", "y", N)], seen)


def _flood(report: Report) -> None:
    """Millions of bad accesses: all are counted, and the lowest thread is shown."""
    world = World(device=CudaDevice())
    n = 1 << 22
    started = time.perf_counter()
    found = world.launch(
        shifted,
        n // 32,
        {"x": np.ones(32, np.float32), "y": ("float32", (N,)), "n": n, "load_at": 0, "store_at": 0},
    )
    seconds = time.perf_counter() - started
    seen = [(f.code, f.count, f.block, f.thread) for f in found]
    wanted = [("MEM010", n - 32, (1, 0, 0), (0, 0, 0)), ("MEM011", n - N, (1, 0, 0), (8, 0, 0))]
    report.check("millions of bad accesses", seen == wanted, f"{seconds:.2f} s {seen}")


# --- kernels


class Timed:
    """A device in one of ``FORMS``."""

    def __init__(self, form: str) -> None:
        self.device = CudaDevice()
        self.findings = FindingLog()
        level = Level.AUDIT if form == PLAIN else Level.TRAP
        self.allocator = Allocator(self.device, level=level, findings=self.findings)
        self.device.watch(self.allocator)
        if form == SHADOWS:
            # Who does not know that nothing is freed under a launch looks at every shadow.
            self.allocator.watch_frees(None)
        self.stream = self.device.create_stream(owner=OWNER, name="timed")
        self._seen = 0

    def found(self) -> list[Finding]:
        """Findings since the last call."""
        new = list(self.findings)[self._seen :]
        self._seen += len(new)
        return new

    def run(
        self, made: Kernel, grid: Any, arguments: dict[str, Any], repeats: int
    ) -> tuple[dict[str, Any], float]:
        """What one launch writes, and microseconds of one of ``repeats`` in a replayed graph."""
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        requests = [BufferRequest(max(1, a.nbytes), OWNER, name) for name, a in arrays.items()]
        size = self.allocator.arena_size(requests)
        arena = self.allocator.reserve_arena(size, owner=OWNER, name="operands").unwrap()
        views = {}
        for request, (name, array) in zip(requests, arrays.items(), strict=True):
            buffer = arena.reserve(request.nbytes, owner=OWNER, name=name).unwrap()
            views[name] = buffer.view(array.dtype, array.shape)
            if array.nbytes:
                self.stream.copy_in(views[name], np.ascontiguousarray(array))
        self.stream.launch(made, grid, {**arguments, **views})
        outputs = {name: np.empty_like(arrays[name]) for name in sorted(made.writes)}
        for name, array in outputs.items():
            self.stream.copy_out(array, views[name])
        self.stream.synchronize()
        self.stream.begin_capture()
        for _ in range(repeats):
            self.stream.launch(made, grid, {**arguments, **views})
        graph = self.stream.end_capture(made.name)
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.stream.replay(graph)
            self.stream.synchronize()
            times.append(time.perf_counter() - started)
        graph.destroy()
        for view in views.values():
            view.buffer.free()
        arena.release()
        return outputs, min(times) / repeats * 1e6


def kernels(report: Report) -> None:
    """One row a case of every kernel: bits and times; then a summary of the ratios."""
    timed = {form: Timed(form) for form in FORMS}
    print("| kernel | same bits | plain us | checked | with all shadows | findings |")
    print("|---|---|---|---|---|---|")
    ratios: list[tuple[float, str]] = []
    for case in cases():
        name = case.kernel.name
        with report.part(name):
            ran = {form: t.run(case.kernel, case.grid, case.arguments, REPEATS) for form, t in timed.items()}
            plain, us = ran[PLAIN]
            same = all(o[key].tobytes() == plain[key].tobytes() for o, _ in ran.values() for key in plain)
            found = [(f.code, f.argument) for t in timed.values() for f in t.found()]
            known, shadows = (ran[form][1] / us for form in (KNOWN, SHADOWS))
            ratios.append((known, name))
            report.count(f"trap {name}", same and not found)
            print(
                f"|{name}|{'y' if same else 'NO'}|{us:.2f}|{known:.2f}|{shadows:.2f}|{found[:3] or ''}|",
                flush=True,
            )
    ratios.sort(reverse=True)
    print(
        f"{sum(r <= LIMIT for r, _ in ratios)} of {len(ratios)} cases within {LIMIT}; the slowest: {ratios[:8]}"
    )


def large_launches() -> Iterator[tuple[str, Kernel, Any, dict[str, Any]]]:
    """Launches but for products at sizes of a 0.8B model: what they are, kernel, grid, arguments."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    for n_positions in (1024, 4096):
        for made, grid, arguments in attention_launches(rng, "f16", 256, n_positions, wide=True):
            yield f"{n_positions} positions", made, grid, arguments
    for n_rows in (1, 512):
        made, grid, arguments = delta_launch(rng, 128, n_rows, wide=True)
        yield f"{n_rows} rows", made, grid, arguments
    for n_rows in (1, 512):
        x = normal(n_rows, 1024)
        for warps in NORM_WARPS:
            arguments = {"x": x, "weight": normal(1024), "y": np.zeros_like(x), "eps": 1e-5}
            yield f"{n_rows} rows", norm.rms_norm(warps), (n_rows,), arguments
        n = n_rows * 3584
        arguments = {"gate": normal(n), "up": normal(n), "y": np.zeros(n, np.float32)}
        yield f"{n_rows} rows", elementwise.swiglu, (-(-n // elementwise.SPAN),), arguments


def large(report: Report) -> None:
    """Times at sizes that matter, checked against plain."""
    timed = {form: Timed(form) for form in FORMS}
    rows: list[tuple[float, str]] = []

    def row(name: str, size: str, times: list[float], same: str) -> None:
        plain, known, shadows = times
        rows.append((known / plain, f"{name} {size}"))
        print(f"|{name}|{size}|{plain:.1f}|{known / plain:.2f}|{shadows / plain:.2f}|{same}|", flush=True)

    print("| kernel | size | plain us | checked | with all shadows | same bits |")
    print("|---|---|---|---|---|---|")
    for size, made, grid, arguments in large_launches():
        with report.part(f"{made.name} {size}"):
            ran = [timed[form].run(made, grid, arguments, REPEATS) for form in FORMS]
            same = all(o[key].tobytes() == ran[0][0][key].tobytes() for o, _ in ran for key in o)
            report.count(f"large {made.name} {size}", same)
            row(made.name, size, [us for _, us in ran], "y" if same else "NO")
    places = [Place(t.device, t.allocator, t.stream) for t in timed.values()]
    for kind in PRODUCT_TYPES:
        for n_out, n_in in PRODUCT_SHAPES:
            for n_rows in PRODUCT_ROWS:
                size = f"{n_out}x{n_in}, {n_rows} rows"
                with report.part(f"{kind.name} {size}"):
                    measured = [measure(place, kind, n_out, n_in, n_rows, None) for place in places]
                    row(measured[0][0], size, [seconds * 1e6 for _, seconds, _ in measured], "")
    slow = sorted((r for r in rows if r[0] > LIMIT), reverse=True)
    found = [(f.code, f.kernel, f.argument) for t in timed.values() for f in t.findings]
    report.check("no finding", not found, found[:5])
    print(f"{len(rows) - len(slow)} of {len(rows)} within {LIMIT}; slower: {slow}")


# --- models


def _outputs(name: str, check: str, **options: Any) -> tuple[Any, Any, list[int], list[str], float]:
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens = recorded["tokens"].tolist()
    with refengine.load(DATA / f"{name}.gguf", device="cuda", check=check, **(OPTIONS | options)) as engine:
        logits = engine.logits(tokens)
        made = engine.generate(tokens, n_predict=32, temperature=0, return_logits=True)
        engine.drop_prefixes()
        engine.generate(tokens, n_predict=2, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        again = engine.generate(tokens, n_predict=62, temperature=0, ignore_eos=True)
        rate = len(again.tokens) / (time.perf_counter() - started)
        found = [f"{f.code} {f.kernel}:{f.argument}" for f in (*engine.findings, *engine.check_integrity())]
    return logits, made.logits, again.tokens, found, rate


def models(report: Report) -> None:
    """Small models at level trap, graphs on and off: the bits of off, and nothing found."""
    _compare(report, [(name, {}) for name in TRAP_MODELS])


def drafts(report: Report) -> None:
    """As ``models``, while drafts are verified. ``prepare.py`` makes no images for them."""
    _compare(report, [("qwen35", DRAFTS | {"n_slots": 2})])


def _compare(report: Report, chosen: list[tuple[str, dict[str, Any]]]) -> None:
    print("| model | graphs | same bits | findings | off t/s | trap t/s | s |")
    print("|---|---|---|---|---|---|---|")
    for name, options in chosen:
        label = f"{name}{'+drafts' if options else ''}"
        with report.part(label):
            plain = _outputs(name, "off", **options)
            for graphs in (True, False):
                started = time.perf_counter()
                checked = _outputs(name, "trap", cuda_graphs=graphs, **options)
                same = same_bits(checked[0], plain[0]) and same_bits(checked[1], plain[1])
                same = same and checked[2] == plain[2]
                report.count(f"trap {label} graphs {graphs}", same and not checked[3])
                cells = [label, "on" if graphs else "off", "y" if same else "NO", str(checked[3][:3] or 0)]
                cells += [f"{plain[4]:.0f}", f"{checked[4]:.0f}", f"{time.perf_counter() - started:.1f}"]
                print(f"|{'|'.join(cells)}|", flush=True)
