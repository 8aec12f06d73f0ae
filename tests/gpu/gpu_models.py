"""Whole models on the GPU: recorded logits, the host's bits, levels, graphs, drafts, memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import DATA, PAIRS, fill_all, nmse, same_bits
from gpu_prepared import answers

import refengine
from instrumentation.devices.cuda import CudaDevice

if TYPE_CHECKING:
    from gpu_report import Report

#: as the recorded logits have it
OPTIONS: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128}
DRAFTS = {"spec_type": "draft-mtp", "draft_n_max": 3}
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PAIRS),
    *((name, DRAFTS | {"n_slots": 2}) for name in PAIRS if name.startswith("qwen35")),
]


def load(name: str, device: str, **options: Any) -> refengine.Engine:
    """A model with float32 caches, as its recorded logits have."""
    return refengine.load(DATA / f"{name}.gguf", device=device, **(OPTIONS | options))


def results(
    name: str, device: str, *, fill: int | None = None, **options: Any
) -> tuple[Any, Any, float, bool, list[int]]:
    """Prompt logits, the generation, tokens a second once all is warm, whether all was clean, tokens by its choice.

    ``fill``: what every byte of caches and states holds at first.
    """
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens = recorded["tokens"].tolist()
    with load(name, device, **options) as engine:
        if fill is not None:
            fill_all(engine, fill)
        logits = engine.logits(tokens)
        made = engine.generate(tokens, n_predict=32, temperature=0, return_logits=True)
        engine.drop_prefixes()
        first = engine.generate(tokens, n_predict=2, temperature=0, ignore_eos=True)
        started = time.perf_counter()
        again = engine.generate(tokens, n_predict=62, temperature=0, ignore_eos=True)
        rate = len(again.tokens) / (time.perf_counter() - started)
        clean = engine.check_integrity() == [] and engine.findings == [] and len(first.tokens) == 2
    return logits, made, rate, clean, again.tokens


def label_of(name: str, options: dict[str, Any]) -> str:
    """A model's name in tables."""
    return f"{name}{'+drafts' if options else ''}"


def host_results(name: str, options: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    """Prompt logits, the generation's logits, tokens by its choice, as the host has them: prepared, or computed now."""
    label, held = label_of(name, options), answers("models")
    if held is not None and f"{label} logits" in held:
        return held[f"{label} logits"], held[f"{label} made"], held[f"{label} chosen"].tolist()
    logits, made, _, _, chosen = results(name, "host", **options)
    return logits, made.logits, chosen


def models(report: Report) -> None:
    """One row a model. The columns are checks, y everywhere, but for the first and the last three."""
    print(
        "| model | NMSE | greedy | host bits | twice | no graphs | 0x3e | guard | audit | clean | load s | t/s "
        "| guard t/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for name, options in MODELS:
        label = label_of(name, options)
        with report.part(label), np.load(DATA / f"{name}.npz") as recorded:
            wanted, greedy = recorded["logits"], recorded["greedy"].tolist()
            started = time.perf_counter()
            logits, made, rate, clean, chosen = results(name, "cuda", **options)
            seconds = time.perf_counter() - started
            error = nmse(logits, wanted)
            twice = results(name, "cuda", **options)
            plain = results(name, "cuda", cuda_graphs=False, **options)
            filled = results(name, "cuda", fill=0x3E, **options)
            guard, audit = (results(name, "cuda", check=level, **options) for level in ("guard", "audit"))
            others = [
                host_results(name, options),
                *((each[0], each[1].logits, each[4]) for each in (twice, plain, filled, guard, audit)),
            ]
            same = [
                same_bits(each[0], logits) and same_bits(each[1], made.logits) and each[2] == chosen
                for each in others
            ]
            holds = [made.tokens == greedy, *same, clean and guard[3] and audit[3]]
            report.count(label, error < 1e-10 and all(holds))
            shown = "|".join("y" if each else "NO" for each in holds)
            print(f"|{label}|{error:.1e}|{shown}|{seconds:.1f}|{rate:.0f}|{guard[2]:.0f}|", flush=True)


def memory(report: Report) -> None:
    """Free device memory over thousands of decodes of changing shapes, after every shape was there once."""
    for check, n_decodes in (("off", 10_000), ("guard", 1_000)):
        with report.part(f"memory {check}"):
            device = CudaDevice()
            rng = np.random.default_rng(1)
            with load("llama", "cuda", check=check, n_slots=2) as engine:
                for n in range(1, 41):
                    engine.logits(list(range(1, n + 1)))
                before = device.memory_info().free
                started = time.perf_counter()
                for n in rng.integers(1, 41, n_decodes).tolist():
                    engine.logits(list(range(1, n + 1)))
                seconds = time.perf_counter() - started
                after = device.memory_info().free
                clean = engine.check_integrity() == [] and engine.findings == []
            grown = f"{before - after} bytes grew in {n_decodes:,} decodes ({seconds:.1f} s)"
            detail = f"{grown}, {len(engine.findings)} findings"
            # Tables of graphs come and go; the driver takes memory for itself in pieces of 2 MiB.
            report.check(f"memory {check}", clean and before - after <= 4 << 20, detail)
            left = device.memory_info().free
            with load("llama", "cuda", check=check):
                pass
            grown = left - device.memory_info().free
            report.check(f"memory of a second engine {check}", grown <= 4 << 20, f"{grown} bytes are kept")
