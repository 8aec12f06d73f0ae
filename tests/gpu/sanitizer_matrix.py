"""Planted faults under compute-sanitizer beside what level trap finds: one row a fault, one process a fault and tool.

usage: python tests/gpu/sanitizer_matrix.py [--jobs 24] [--tools memcheck,...] [--twins] [-o FILE.json] [NAME ...]
       (needs a GPU and compute-sanitizer; PREPARED as for run.py)

Faults of memory under memcheck, initcheck and racecheck; faults of order inside a block, which level trap finds on the
host, under racecheck and synccheck. A child launches the plain kernel on buffers in one arena, without redzones: poison
around them would hide from initcheck what nothing wrote. ``--twins`` runs the repaired twins under the tools, too.
NAME: faults whose name has it. The README's table reads the file that ``-o`` writes (tests/data).
"""

from __future__ import annotations

import argparse
import json
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
from planted_order import FAULTS, Fault
from trap_world import World

from instrumentation.devices.cuda import CudaDevice
from instrumentation.levels import Level

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
#: which are asked of faults of memory, and of faults of order
ASKED = {Planted: TOOLS[:3], Fault: TOOLS[2:]}
#: that a child is given; a block of which a part waits at a barrier may wait for ever
MOST_SECONDS = 120
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_FIRST = re.compile(
    r"========= ((?:Invalid|Uninitialized|Error: |Warning: |Barrier error|Potential|Program hit)[^\n]*)"
)
_DONE = "child ran"


def grid_of(fault: Planted | Fault, kind: str) -> object:
    """What a fault, or its twin, is launched with."""
    return fault.grid_of(kind) if isinstance(fault, Planted) else fault.grid


def child(name: str, kind: str) -> int:
    """Launch one fault, or its twin, as plain kernel."""
    gpu_prepared.use()
    (fault,) = (each for each in (*PLANTED, *FAULTS) if each.name == name)
    world = World(level=Level.OFF, device=CudaDevice())
    try:
        world.launch(fault.kernel, grid_of(fault, kind), fault.arguments(kind))
    except Exception as error:  # noqa: BLE001 - a tool that ends the context is what is looked at
        print(f"{type(error).__name__}: {error}")
    print(_DONE)
    sys.stdout.flush()
    os._exit(0)  # what a lost context says at its end is not of interest


def under(tool: str, fault: Planted | Fault, kind: str) -> str:
    """What a tool says of a fault, in few words; ``-`` for nothing."""
    command = [
        "compute-sanitizer", "--tool", tool, sys.executable, "-W", "ignore", __file__, "--child", kind, fault.name,
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        first = _FIRST.search(out.decode(errors="replace") if isinstance(out, bytes) else out)
        return first[1][:44] if first is not None else f"failed: no answer in {MOST_SECONDS} s"
    text = ran.stdout + ran.stderr
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    if not counts or _DONE not in text:
        return f"failed: {' '.join(text.split())[-120:]}"
    first = _FIRST.search(text)
    return (first[1][:44] if first is not None else f"{counts[-1]} errors") if counts[-1] else "-"


def ours(fault: Planted | Fault, kind: str) -> str:
    """Codes that level trap gives; ``-`` for none. Faults of order are the host's: see tests/support/found_by.py."""
    if isinstance(fault, Fault):
        return f"{fault.code} (host)" if kind == "bad" else "-"
    found = World(device=CudaDevice()).launch(fault.kernel, grid_of(fault, kind), fault.arguments(kind))
    return " ".join(finding.code for finding in found) or "-"


def saw(answer: str) -> bool:
    """Whether an answer of a tool is a report."""
    return answer != "-" and not answer.startswith("failed")


def matrix(
    faults: list[Planted | Fault], tools: list[str], jobs: int, kind: str
) -> dict[str, dict[str, str]]:
    """One row a fault, then who alone found what; what each tool said."""
    print(f"\n{kind}\n| fault | ours | {' | '.join(tools)} |\n|{'---|' * (2 + len(tools))}")
    only_we, only_they, said = [], [], {}
    with ThreadPoolExecutor(jobs) as pool:
        asked = [
            {tool: pool.submit(under, tool, fault, kind) for tool in tools if tool in ASKED[type(fault)]}
            for fault in faults
        ]
        for fault, answers in zip(faults, asked, strict=True):
            try:
                we = ours(fault, kind)
            except Exception as error:  # noqa: BLE001 - the other rows count
                we = f"{type(error).__name__}: {error}"[:80]
            they = {tool: answer.result() for tool, answer in answers.items()}
            said[fault.name] = they
            print(f"| {fault.name} | {we} | {' | '.join(they.get(t, '') for t in tools)} |", flush=True)
            seen, found = any(map(saw, they.values())), we.startswith(("MEM", "RAC", "SYN"))
            if found and not seen:
                only_we.append(fault.name)
            if seen and not found:
                only_they.append(fault.name)
    print(f"\nonly we ({len(only_we)}): {'; '.join(only_we) or 'none'}")
    print(f"only they ({len(only_they)}): {'; '.join(only_they) or 'none'}", flush=True)
    return said


def version() -> str:
    """What compute-sanitizer says of itself."""
    ran = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False)
    return next((line.strip() for line in ran.stdout.splitlines() if line.startswith("Version")), "unknown")


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--twins", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
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
    faults = [
        f for f in (*PLANTED, *FAULTS) if not given.names or any(name in f.name for name in given.names)
    ]
    started = time.perf_counter()
    held: dict[str, object] = {
        "version": version(), "device": CudaDevice().describe(), "date": time.strftime("%Y-%m-%d")
    }  # fmt: skip
    for kind in ("bad", "fixed") if given.twins else ("bad",):
        held[kind] = matrix(faults, given.tools.split(","), given.jobs, kind)
    if given.output is not None:
        given.output.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
