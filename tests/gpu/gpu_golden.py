"""Golden recordings across devices: whether every tensor of the small models has the host's bits, and the first not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from engines import DATA, PAIRS
from golden_runs import made
from gpu_prepared import folder

import refengine
from refengine.golden import case
from refengine.golden.compare import compare
from refengine.golden.record import again, device_id, record

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_report import Report

    from refengine.golden.case import Recording


def host_recording(name: str) -> Recording:
    """All tensors of a model on the host: prepared, or computed now."""
    place = folder()
    if place is not None and (place / "golden" / name).is_dir():
        return case.read(place / "golden" / name)
    return made(name, n_tokens=24, n_predict=8, tensors=("*",), cache_type_k="f32", cache_type_v="f32")


def prepare(place: Path) -> None:
    """Write what ``host_recording`` reads."""
    for name in PAIRS:
        case.write(host_recording(name), place / "golden" / name, overwrite=True)


def golden(report: Report) -> None:
    """One row a model. The columns behind tensors are checks, y everywhere, but for NMSE, the first and seconds."""
    print(
        "| model | tensors | host bits | worst NMSE | within 1e-6 | tokens | again | audit | clean | s | first |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in PAIRS:
        with report.part(f"golden {name}"):
            wanted = host_recording(name)
            options = dict(wanted.settings)
            started = time.perf_counter()
            with refengine.load(DATA / f"{name}.gguf", device="cuda", **options) as engine:
                found = record(engine, again(wanted), wanted.model)
                seconds = time.perf_counter() - started
                repeated = record(engine, again(found), wanted.model)
            with refengine.load(DATA / f"{name}.gguf", device="cuda", check="audit", **options) as engine:
                audit = record(engine, again(found), wanted.model)
                clean = engine.check_integrity() == [] and engine.findings == []
                is_cuda = device_id(engine).kind == "cuda"
            bits, near = compare(found, wanted, exact=True), compare(found, wanted, exact=False)
            holds = [
                not bits.differences,
                near.same,
                (found.greedy, found.generated) == (wanted.greedy, wanted.generated),
                compare(repeated, found, exact=True).same,
                compare(audit, found, exact=True).same,
                clean and is_cuda,
            ]
            report.count(f"golden {name}", all(holds))
            shown = ["y" if each else "NO" for each in holds]
            worst = max((each.nmse for each in bits.differences), default=0.0)
            first = str(bits.differences[0]) if bits.differences else "-"
            print(
                f"|{name}|{len(found.tensors)}|{shown[0]}|{worst:.1e}|{'|'.join(shown[1:])}|{seconds:.1f}|{first}|",
                flush=True,
            )
            if bits.differences:
                print(
                    f"  {name}: then {', '.join(each.tensor for each in bits.differences[1:20])}", flush=True
                )
