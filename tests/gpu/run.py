"""Run every kernel on a CUDA device: against its float64 twin, against itself, against the host's bits.

usage: python tests/gpu/run.py        (needs a GPU and the cu12 or cu13 extra)
Prints one line a kernel and a table; exits 1 when any kernel misses NMSE 1e-11 or gives other bits the second time.
"""

from __future__ import annotations

import copy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]  # works from a checkout, installed or not

from kernel_cases import Case, cases, distance
from kernel_runner import run
from numba import cuda
from numba.core import types as nb

from instrumentation.kernel.lower_cuda import cuda_function

LIMIT = 1e-11


def run_cuda(compiled: Any, case: Case) -> tuple[dict[str, Any], float]:
    """Outputs of a fresh run on the device, and microseconds a launch (median of event-timed launches)."""
    kinds = case.kernel.signature
    arguments = []
    on_device = {}
    for name, kind in kinds.items():
        value = case.arguments[name]
        if isinstance(kind, nb.Array):
            on_device[name] = cuda.to_device(value)
            arguments.append(on_device[name])
        else:
            arguments.append(np.dtype(str(kind)).type(value))
    launch = compiled[case.grid, case.kernel.block]
    launch(*arguments)
    cuda.synchronize()
    outputs = {name: on_device[name].copy_to_host() for name in case.expected}
    times = []
    for _ in range(20):
        begin, end = cuda.event(), cuda.event()
        begin.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return outputs, float(np.median(times))


def run_host(case: Case) -> dict[str, Any]:
    """Outputs of the host lowering."""
    arguments = {name: copy.deepcopy(case.arguments[name]) for name in case.kernel.signature}
    run(case.kernel, case.grid, *arguments.values())
    return {name: arguments[name] for name in case.expected}


def main() -> int:
    """Check every case; 0 when all hold."""
    warnings.simplefilter("ignore")  # small grids are the point of small cases
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    print(f"{name}, compute capability {device.compute_capability}")
    print("| kernel | NMSE against float64 | same bits twice | bits equal to host | compile s | us |")
    print("|---|---|---|---|---|---|")
    bad = equal = total = 0
    for case in cases():
        started = time.perf_counter()
        compiled = cuda.jit(cuda_function(case.kernel.function, case.kernel.parsed))
        first, us = run_cuda(compiled, case)
        seconds = time.perf_counter() - started
        second, _ = run_cuda(compiled, case)
        host = run_host(case)
        worst = 0.0
        for output, wanted in case.expected.items():
            worst = max(worst, distance(first[output], wanted))
        again = all(first[o].tobytes() == second[o].tobytes() for o in first)
        same = all(first[o].tobytes() == host[o].tobytes() for o in first)
        ok = worst <= LIMIT and again
        bad += not ok
        equal += same
        total += 1
        mark = "" if ok else " MISSED"
        print(
            f"| {case.kernel.name} | {worst:.1e} | {again} | {same} | {seconds:.1f} | {us:.1f} |{mark}",
            flush=True,
        )
    print(f"{total} kernels, {bad} missed, {equal} with the host's bits")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
