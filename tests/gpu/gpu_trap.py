"""Level trap on the GPU: planted faults and their twins, and small models whose bits must be those of off."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from engines import DATA, PAIRS, same_bits
from gpu_models import DRAFTS, OPTIONS
from gpu_prepared import folder
from gpu_report import Report
from numba import cuda, float32
from planted_faults import PLANTED, N, Planted
from planted_kernels import line_at, shifted
from trap_world import World

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

import refengine
from instrumentation.devices.cuda import CudaDevice
from instrumentation.findings import Finding
from instrumentation.kernel import kernel
from instrumentation.kernel.types import f32_1d, i32

#: while drafts are verified
DRAFT_MODELS: list[tuple[str, dict[str, Any]]] = [("qwen35", DRAFTS | {"n_slots": 2})]


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


# --- models


def outputs(
    name: str, check: str, device: Any = "cuda", **options: Any
) -> tuple[Any, Any, list[int], list[str], float]:
    """Logits of the prompt, of a generation, its tokens once warm, findings, and tokens a second."""
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens = recorded["tokens"].tolist()
    with refengine.load(DATA / f"{name}.gguf", device=device, check=check, **(OPTIONS | options)) as engine:
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
    """Every small model at level trap, graphs on and off: the bits of off, and nothing found."""
    _compare(report, [(name, {}) for name in PAIRS])


def drafts(report: Report) -> None:
    """As ``models``, while drafts are verified."""
    _compare(report, DRAFT_MODELS)


def _compare(report: Report, chosen: list[tuple[str, dict[str, Any]]]) -> None:
    print("| model | graphs | same bits | findings | off t/s | trap t/s | s |")
    print("|---|---|---|---|---|---|---|")
    for name, options in chosen:
        label = f"{name}{'+drafts' if options else ''}"
        with report.part(label):
            plain = outputs(name, "off", **options)
            for graphs in (True, False):
                started = time.perf_counter()
                checked = outputs(name, "trap", cuda_graphs=graphs, **options)
                same = same_bits(checked[0], plain[0]) and same_bits(checked[1], plain[1])
                same = same and checked[2] == plain[2]
                report.count(f"trap {label} graphs {graphs}", same and not checked[3])
                cells = [label, "on" if graphs else "off", "y" if same else "NO", str(checked[3][:3] or 0)]
                cells += [f"{plain[4]:.0f}", f"{checked[4]:.0f}", f"{time.perf_counter() - started:.1f}"]
                print(f"|{'|'.join(cells)}|", flush=True)
