"""The fault drill on the GPU: every fault of the catalogue in a run of target and draft, with captured graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engines import DATA

from refengine.drill import FAULTS, Drill
from refengine.drill.verdict import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_report import Report

    from instrumentation.devices.base import Device

MODEL = DATA / "qwen35.gguf"


def planned(device: str | Callable[[], Device]) -> Drill:
    """All faults in the smallest model with an MTP block."""
    return Drill(MODEL, FAULTS, device=device)


def drill(report: Report) -> None:
    """A row for each fault; what is wrong with it below the row."""
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---|---|---|---|---|---|---|---|")
    for row in planned("cuda").run():
        print(f"| {' | '.join(row.cells)} |", flush=True)
        report.count(f"drill {row.fault}", row.ok)
        for text in (*row.false_reports, *((row.why,) if row.status == "missed" else ())):
            print(f"MISSED {row.fault}: {text[:500]}", flush=True)
