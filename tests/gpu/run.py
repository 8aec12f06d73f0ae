"""Everything that only a GPU can show: kernels, whole models, checks, failures and costs, each on its own.

usage: python tests/gpu/run.py [SECTION ...]        (needs a GPU and the cu12 or cu13 extra)
Prints a table for each section; exits 1 when a check missed. One that raises does not hide the others. Times are wall
times of this run; nothing depends on them. ``PREPARED`` may name a folder that tests/gpu/prepare.py made, for short
runs. ``MODEL`` may name a model file whose prompt the section cublas times.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]  # works from a checkout, installed or not

import gpu_checks
import gpu_costs
import gpu_cublas
import gpu_drill
import gpu_golden
import gpu_kernels
import gpu_models
import gpu_numerics
import gpu_prepared
import gpu_trap
import gpu_trap_times
from gpu_report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

#: in the order in which they run: what others stand on comes first
SECTIONS: dict[str, Callable[[Report], None]] = {
    "machine": gpu_checks.machine,
    "checks": gpu_checks.checks,
    "costs": gpu_costs.costs,
    "cublas": gpu_cublas.cublas,
    "lost": gpu_checks.lost,
    "cli": gpu_checks.cli,
    "numerics": gpu_numerics.numerics,
    "models": gpu_models.models,
    "golden": gpu_golden.golden,
    "memory": gpu_models.memory,
    "kernels": gpu_kernels.kernels,
    "trap-faults": gpu_trap.faults,
    "trap-kernels": gpu_trap_times.kernels,
    "trap-large": gpu_trap_times.large,
    "trap-models": gpu_trap.models,
    "trap-drafts": gpu_trap.drafts,
    "drill": gpu_drill.drill,
}


class _Both:
    """What is printed, in a file too: the end of a long output may be all that a reader is shown."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._shown = sys.stdout

    def write(self, text: str) -> int:
        self._file.write(text)
        return self._shown.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._shown.flush()


def main(names: list[str]) -> int:
    """Run sections; 0 when all that was checked holds. A folder named by ``OUT`` gets all that is printed."""
    if os.environ.get("OUT"):
        sys.stdout = _Both(Path(os.environ["OUT"]) / "gpu.txt")  # type: ignore[assignment]
    warnings.simplefilter("ignore")  # small grids are the point of small cases
    # Findings are planted here by the dozen; their lines would push the tables out.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    unknown = set(names) - set(SECTIONS)
    if unknown:
        print(f"unknown: {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}")
        return 2
    gpu_prepared.use()
    report = Report()
    for name, section in SECTIONS.items():
        if names and name not in names:
            continue
        started = time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            section(report)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            report.missed(name, "".join(traceback.format_exception(error)[-3:]))
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    print(
        f"\n{report.passed} checks passed, {len(report.failed)} missed: {', '.join(report.failed) or 'none'}"
    )
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
