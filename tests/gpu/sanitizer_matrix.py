"""Planted faults under compute-sanitizer beside what level trap finds: one row a fault, one process a fault and tool.

usage: python tests/gpu/sanitizer_matrix.py [--jobs 24] [--tools memcheck,initcheck,racecheck] [--twins] [NAME ...]
       (needs a GPU and compute-sanitizer; PREPARED as for run.py)

A child launches the plain kernel on buffers in one arena, without redzones: poison around them would hide from
initcheck what nothing wrote. ``--twins`` runs the repaired twins under the tools, too. NAME: faults whose name has it.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]

import gpu_prepared
from planted_faults import PLANTED, Planted
from trap_world import World

from instrumentation.devices.cuda import CudaDevice
from instrumentation.levels import Level

TOOLS = ("memcheck", "initcheck", "racecheck")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_FIRST = re.compile(r"========= ((?:Invalid|Uninitialized|Error: Race|Warning: Race|Program hit)[^\n]*)")
_DONE = "child ran"


def child(name: str, kind: str) -> int:
    """Launch one fault, or its twin, as plain kernel."""
    gpu_prepared.use()
    (fault,) = (each for each in PLANTED if each.name == name)
    world = World(level=Level.OFF, device=CudaDevice())
    try:
        world.launch(fault.kernel, fault.grid_of(kind), fault.arguments(kind))
    except Exception as error:  # noqa: BLE001 - a tool that ends the context is what is looked at
        print(f"{type(error).__name__}: {error}")
    print(_DONE)
    sys.stdout.flush()
    os._exit(0)  # what a lost context says at its end is not of interest


def under(tool: str, fault: Planted, kind: str) -> str:
    """What a tool says of a fault, in few words; ``-`` for nothing."""
    command = [
        "compute-sanitizer", "--tool", tool, sys.executable, "-W", "ignore", __file__, "--child", kind, fault.name,
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    except subprocess.TimeoutExpired:
        return "no answer in 180 s"
    text = ran.stdout + ran.stderr
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    if not counts or _DONE not in text:
        return f"failed: {' '.join(text.split())[-120:]}"
    first = _FIRST.search(text)
    return (first[1][:44] if first is not None else f"{counts[-1]} errors") if counts[-1] else "-"


def ours(fault: Planted, kind: str) -> str:
    """Codes that level trap gives; ``-`` for none."""
    found = World(device=CudaDevice()).launch(fault.kernel, fault.grid_of(kind), fault.arguments(kind))
    return " ".join(finding.code for finding in found) or "-"


def matrix(faults: list[Planted], tools: list[str], jobs: int, kind: str) -> None:
    """One row a fault, then who alone found what."""
    print(f"\n{kind}\n| fault | ours | {' | '.join(tools)} |\n|{'---|' * (2 + len(tools))}")
    only_we, only_they = [], []
    with ThreadPoolExecutor(jobs) as pool:
        asked = [[pool.submit(under, tool, fault, kind) for tool in tools] for fault in faults]
        for fault, answers in zip(faults, asked, strict=True):
            try:
                we = ours(fault, kind)
            except Exception as error:  # noqa: BLE001 - the other rows count
                we = f"{type(error).__name__}: {error}"[:80]
            they = [answer.result() for answer in answers]
            print(f"| {fault.name} | {we} | {' | '.join(they)} |", flush=True)
            seen = any(each != "-" and not each.startswith(("failed", "no answer")) for each in they)
            found = we.startswith("MEM")
            if found and not seen:
                only_we.append(fault.name)
            if seen and not found:
                only_they.append(fault.name)
    print(f"\nonly we ({len(only_we)}): {'; '.join(only_we) or 'none'}")
    print(f"only they ({len(only_they)}): {'; '.join(only_they) or 'none'}", flush=True)


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("--child", default="")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if given.child:
        return child(" ".join(given.names), given.child)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path; it comes with the CUDA toolkit")
        return 2
    gpu_prepared.use()
    faults = [f for f in PLANTED if not given.names or any(name in f.name for name in given.names)]
    started = time.perf_counter()
    for kind in ("bad", "fixed") if given.twins else ("bad",):
        matrix(faults, given.tools.split(","), given.jobs, kind)
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
