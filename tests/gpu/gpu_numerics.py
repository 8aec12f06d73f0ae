"""``--check-numerics`` on a GPU: planted NaN and infinities, launched and captured; whole models; what it costs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DATA, TARGET, Bench, same_bits, scale_by
from gguf import GGUFReader

import refengine
from instrumentation.devices.cuda import CudaDevice
from instrumentation.levels import Level

if TYPE_CHECKING:
    from gpu_report import Report

OPTIONS: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128}
DRAFTS: dict[str, Any] = {"spec_type": "draft-mtp", "draft_n_max": 3, "n_slots": 2}
N = 1000
#: elements of x that are large, and what is found of y = 1e30 x: place and how many
PLANTED = ([], [0], [999], [31, 32], list(range(400, 700)))


def numerics(report: Report) -> None:
    """Three tables: planted, models, costs. About 15 s beside what models take to load and compile."""
    print("| level | how | planted | found at | of | as planted |")
    print("|---|---|---|---|---|---|")
    for level in (Level.OFF, Level.GUARD, Level.AUDIT):
        for how in ("direct", "graph"):
            for places in PLANTED:
                with report.part(f"numerics {level} {how} {places[:2]}"):
                    _planted(report, level, how, places)
    print("\n| model | options | findings | same bits | t/s off | t/s with it |")
    print("|---|---|---|---|---|---|")
    for name, options in (
        ("llama", {}),
        ("qwen35", DRAFTS),
        ("qwen35", {"cuda_graphs": False}),
        ("qwen35moe", {}),
    ):
        with report.part(f"numerics {name} {options}"):
            _clean(report, name, options)
    print()
    for graphs in (True, False):
        with report.part(f"numerics poisoned {graphs}"):
            _poisoned(report, cuda_graphs=graphs)
    print("\n| replay of 100 launches | us |")
    print("|---|---|")
    for numeric in (False, True):
        with report.part(f"numerics costs {numeric}"):
            _cost(check_numerics=numeric)


def _bench(level: Level, *, check_numerics: bool = True) -> Bench:
    bench = Bench(level, device=CudaDevice())
    bench.device.watch(bench.allocator, check_numerics=check_numerics)
    return bench


def _planted(report: Report, level: Level, how: str, places: list[int]) -> None:
    bench = _bench(level)
    arena = bench.arena()
    x = np.ones(N, np.float32)
    x[places] = 1e20
    views = {"x": bench.put(arena, x, "x"), "y": bench.put(arena, np.full(N, np.nan, np.float32), "y")}
    stale = bench.put(arena, np.zeros(N, np.float32), "z")
    # y holds NaN everywhere, which nobody made: z becomes finite, then infinite where x is large.
    arguments = {"x": views["x"], "y": stale, "factor": 1e30, "offset": 0}
    if how == "graph":
        bench.stream.begin_capture()
    bench.stream.launch(scale_by, 32, arguments)
    bench.stream.launch(scale_by, 32, {**arguments, "x": stale, "y": views["y"]})
    if how == "graph":
        graph = bench.stream.end_capture("planted")
        for _ in range(2):
            bench.stream.replay(graph)
    bench.stream.synchronize()
    found = bench.findings.list()
    first, of = "-", "-"
    holds = not found and not places
    if found and places:
        number = len(places)
        wanted = f"z, element {places[0]} is infinite: kernel scale_by is the first that made any; {number} element"
        first, of = str(places[0]), str(number)
        holds = len(found) == 1 and found[0].message.startswith(wanted) and found[0].actor == TARGET.name
        holds = holds and found[0].notes[0].startswith("all numbers that the kernel reads are finite")
    report.count(f"numerics {level} {how} {places[:2]}", holds)
    text = found[0].message if found and not holds else ""
    print(f"|{level}|{how}|{len(places)}|{first}|{of}|{'y' if holds else f'NO {text}'}|", flush=True)
    if how == "graph":
        graph.destroy()


def _run(name: str, **options: Any) -> tuple[Any, Any, list[Any], float]:
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens = recorded["tokens"].tolist()
    device = CudaDevice()
    with refengine.load(DATA / f"{name}.gguf", device=device, **(OPTIONS | options)) as engine:
        logits = engine.logits(tokens)
        made = engine.generate(tokens, n_predict=24, temperature=0, return_logits=True, ignore_eos=True)
        started = time.perf_counter()
        again = engine.generate(tokens, n_predict=24, temperature=0, ignore_eos=True)
        rate = len(again.tokens) / (time.perf_counter() - started)
        return logits, made.logits, engine.findings, rate


def _clean(report: Report, name: str, options: dict[str, Any]) -> None:
    plain = _run(name, check="off", **options)
    found = _run(name, check="guard", check_numerics=True, **options)
    same = same_bits(plain[0], found[0]) and same_bits(plain[1], found[1])
    report.count(f"numerics {name} {options}", same and found[2] == [])
    shown = [each.message for each in found[2]]
    print(
        f"|{name}|{options}|{shown or 0}|{'y' if same else 'NO'}|{plain[3]:.0f}|{found[3]:.0f}|", flush=True
    )


def _poisoned(report: Report, *, cuda_graphs: bool) -> None:
    source = DATA / "llama.gguf"
    data = bytearray(source.read_bytes())
    (info,) = [each for each in GGUFReader(source).tensors if each.name == "blk.1.ffn_norm.weight"]
    np.frombuffer(data, np.float32, info.n_elements, info.data_offset)[5] = np.nan
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "poisoned.gguf"
        file.write_bytes(data)
        device = CudaDevice()
        options = OPTIONS | {"cuda_graphs": cuda_graphs, "check_numerics": True}
        with refengine.load(file, device=device, **options) as engine:
            engine.logits(list(range(1, 20)))
            found = engine.findings
    holds = len(found) == 1 and "layer 1 is NaN" in found[0].message
    holds = holds and "blk.1.ffn_norm.weight" in found[0].notes[-2 if len(found[0].notes) > 1 else 0]
    detail = [(each.message, each.notes) for each in found]
    report.check(f"a weight that is NaN, {'graphs' if cuda_graphs else 'launches'}", holds, detail)


def _cost(*, check_numerics: bool) -> None:
    bench = _bench(Level.OFF, check_numerics=check_numerics)
    arena = bench.arena()
    x, y = (bench.put(arena, np.ones(N, np.float32), name) for name in "xy")
    bench.stream.begin_capture()
    for _ in range(100):
        bench.stream.launch(scale_by, 32, {"x": x, "y": y, "factor": 0.5, "offset": 1})
    graph = bench.stream.end_capture("costs")
    times = []
    for _ in range(20):
        started = time.perf_counter()
        bench.stream.replay(graph)
        bench.stream.synchronize()
        times.append((time.perf_counter() - started) * 1e6)
    print(f"|{'with' if check_numerics else 'without'} --check-numerics|{np.median(times):.0f}|", flush=True)
    graph.destroy()
