"""What a launch, a replay and a decode's copies cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import Bench, scale_by
from numba import cuda

from instrumentation.devices.cuda import CudaDevice
from instrumentation.kernel.lower_cuda import cuda_function
from instrumentation.levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_report import Report


def costs(report: Report) -> None:
    """Microseconds of host time until the call returns, and with the wait behind 200 of them."""
    print("| what | us a call | us with its share of the wait |")
    print("|---|---|---|")
    for level in (Level.OFF, Level.GUARD, Level.AUDIT):
        with report.part(f"costs at {level}"):
            _device_costs(level)
    with report.part("costs of numba"):
        _numba_costs()
    with report.part("copies"):
        _bandwidth(report)


def _row(name: str, call: Callable[[], Any], wait: Callable[[], Any], n: int = 200) -> None:
    for _ in range(5):
        call()
    wait()
    queued, total = [], []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(n):
            call()
        queued.append((time.perf_counter() - started) / n * 1e6)
        wait()
        total.append((time.perf_counter() - started) / n * 1e6)
    print(f"|{name}|{np.median(queued):.1f}|{np.median(total):.1f}|", flush=True)


def _device_costs(level: Level) -> None:
    bench = Bench(level, device=CudaDevice())
    stream = bench.stream
    arena = bench.arena()
    x, y = (bench.put(arena, np.zeros(1000, np.float32), name) for name in "xy")
    arguments = {"x": x, "y": y, "factor": 0.5, "offset": 1}
    prepared = stream.prepare(scale_by, 32, arguments)
    driver = bench.device.context.driver
    if level == Level.OFF:
        _row(
            "driver call alone",
            lambda: prepared.queue(driver, stream.handle),
            lambda: driver.synchronize_stream(stream.handle),
        )
    _row(f"{level}: launch", lambda: stream.launch(scale_by, 32, arguments), stream.synchronize)
    _row(f"{level}: prepared launch", lambda: stream.launch_prepared(prepared), stream.synchronize)
    for n in (1, 100, 400):
        stream.begin_capture()
        for _ in range(n):
            stream.launch(scale_by, 32, arguments)
        graph = stream.end_capture(f"{n} launches")
        _row(f"{level}: replay of {n}", lambda graph=graph: stream.replay(graph), stream.synchronize, 50)
        stream.synchronize()
        graph.destroy()

    def capture() -> None:
        stream.begin_capture()
        for _ in range(100):
            stream.launch(scale_by, 32, arguments)
        stream.end_capture("capture").destroy()

    _row(f"{level}: capture of 100, instantiated and destroyed", capture, stream.synchronize, 3)
    small, out, view = np.zeros(4, np.int32), np.zeros(4, np.int32), x.buffer.view(np.int32, 4)

    def decode() -> None:
        for _ in range(5):
            stream.copy_in(view, small)
        stream.copy_out(out, view)
        stream.synchronize()

    _row(f"{level}: 5 copies in, 1 out, synchronize", decode, stream.synchronize, 50)


def _numba_costs() -> None:
    compiled = cuda.jit(cuda_function(scale_by.function, scale_by.parsed))
    x, y = cuda.to_device(np.zeros(1000, np.float32)), cuda.to_device(np.zeros(1000, np.float32))
    factor, offset = np.float32(0.5), np.int32(1)
    launcher = compiled[32, 32]
    _row("numba's own call", lambda: launcher(x, y, factor, offset), cuda.synchronize)


def _bandwidth(report: Report) -> None:
    bench = Bench(Level.OFF, device=CudaDevice())
    values = np.random.default_rng(0).integers(0, 256, 256 << 20, dtype=np.uint8)
    view = (
        bench.arena((256 << 20) + 4096)
        .reserve(values.nbytes, owner=bench.stream.owner, name="large")
        .unwrap()
    )
    view = view.view(np.uint8, values.shape)
    started = time.perf_counter()
    bench.stream.copy_in(view, values)
    bench.stream.synchronize()
    middle = time.perf_counter()
    back = bench.get(view)
    end = time.perf_counter()
    rates = [values.nbytes / seconds / 1e9 for seconds in (middle - started, end - middle)]
    report.check(
        "256 MiB there and back", np.array_equal(back, values), f"{rates[0]:.1f} and {rates[1]:.1f} GB/s"
    )
    started = time.perf_counter()
    found = bench.device.first_mismatch(view.address, values.nbytes, int(values[0]))
    seconds = time.perf_counter() - started
    wanted = int(np.flatnonzero(values != values[0])[0])
    report.check("first mismatch in 256 MiB", found == wanted, f"{seconds * 1e3:.1f} ms, first call")
    started = time.perf_counter()
    bench.device.first_mismatch(view.address, values.nbytes, int(values[0]))
    print(f"a second call takes {(time.perf_counter() - started) * 1e3:.2f} ms")
