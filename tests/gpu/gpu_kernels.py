"""Every kernel through the CUDA device: against its float64 twin, against itself, against the host's bits."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import Bench
from gpu_prepared import answers
from kernel_cases import Case, cases, distance
from kernel_runner import run

from instrumentation.devices.cuda import CudaDevice
from instrumentation.kernel.cuda_image import compile_image
from instrumentation.reservation import BufferRequest
from refengine.kernels import all_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_report import Report

LIMIT = 1e-11


def compile_share(first: int, step: int, capability: tuple[int, int]) -> int:
    """Put every ``step``-th kernel into the cache on disk, for the GPU and for the host."""
    share = list(all_kernels())[first::step]
    for kernel in share:
        compile_image(kernel, capability)
        kernel.host()
    return len(share)


def compile_all(capability: tuple[int, int]) -> None:
    """Compile every kernel on all processors: one after the other they take a quarter of an hour."""
    started, n = (
        time.perf_counter(),
        os.process_cpu_count() if sys.version_info >= (3, 13) else os.cpu_count(),
    )
    workers = max(1, n or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, first, workers, capability) for first in range(workers)]
        done = sum(share.result() for share in shares)
    print(
        f"{done} kernels compiled by {workers} processes in {time.perf_counter() - started:.0f} s", flush=True
    )


def kernels(report: Report) -> None:
    """One row a kernel; ``us`` is a prepared launch, queued 50 times and waited for."""
    print("| kernel | NMSE | twice | host bits | load s | us |")
    print("|---|---|---|---|---|---|")
    bench = Bench(device=CudaDevice())
    held = answers("kernels")
    if held is None:
        compile_all(bench.device.context.compute_capability)
    equal = total = 0
    for name, key, case in keyed_cases():
        with report.part(name):
            started = time.perf_counter()
            bench.device.context.function(case.kernel)
            seconds = time.perf_counter() - started
            first, second = (bench.run(case.kernel, case.grid, **case.arguments) for _ in range(2))
            worst = max(distance(first[output], wanted) for output, wanted in case.expected.items())
            again = all(first[o].tobytes() == second[o].tobytes() for o in first)
            known = held is not None and all(f"{key} {o}" in held for o in case.expected)
            host = {o: held[f"{key} {o}"] for o in case.expected} if known else run_host(case)
            same = all(first[o].tobytes() == host[o].tobytes() for o in host)
            us = microseconds(bench, case)
            ok = worst <= LIMIT and again
            report.count(name, ok)
            equal += same
            total += 1
            mark = "" if ok else " MISSED"
            words = "|".join("y" if each else "NO" for each in (again, same))
            print(f"|{name}|{worst:.1e}|{words}|{seconds:.1f}|{us:.1f}|{mark}", flush=True)
    report.check("host bits", equal == total, f"{equal} of {total} kernels have the host's bits")


def keyed_cases() -> Iterator[tuple[str, str, Case]]:
    """Cases with their kernel's name, and a key that says which of that name's it is."""
    seen: Counter[str] = Counter()
    for case in cases():
        name = case.kernel.name
        yield name, f"{name} {seen[name]}", case
        seen[name] += 1


def run_host(case: Case) -> dict[str, Any]:
    """Outputs of the host lowering."""
    arguments = {name: copy.deepcopy(case.arguments[name]) for name in case.kernel.signature}
    run(case.kernel, case.grid, *arguments.values())
    return {name: arguments[name] for name in case.expected}


def microseconds(bench: Bench, case: Case) -> float:
    """Time of one of 50 launches in a row, the best of 3 rows."""
    arrays = {name: value for name, value in case.arguments.items() if isinstance(value, np.ndarray)}
    requests = [BufferRequest(max(1, a.nbytes), bench.stream.owner, name) for name, a in arrays.items()]
    arena = bench.arena(bench.allocator.arena_size(requests))
    views = {name: bench.put(arena, array, name) for name, array in arrays.items()}
    prepared = bench.stream.prepare(case.kernel, case.grid, {**case.arguments, **views})
    times = []
    for _ in range(3):
        bench.stream.synchronize()
        started = time.perf_counter()
        for _ in range(50):
            prepared.queue(bench.device.context.driver, bench.stream.handle)
        bench.stream.pending = True
        bench.stream.synchronize()
        times.append((time.perf_counter() - started) / 50 * 1e6)
    for view in views.values():
        view.buffer.free()
    arena.release()
    return min(times)
