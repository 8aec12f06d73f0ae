"""What level trap costs on the GPU: every kernel checked, plain, and plain under NVIDIA's memcheck, in one run.

usage: compute-sanitizer --tool memcheck python tests/gpu/gpu_trap_times.py kernels|large
       (as the sections trap-kernels and trap-large run it, where compute-sanitizer is: a line for each launch)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]

import gpu_prepared
import numpy as np
from gguf import GGMLQuantizationType
from kernel_cases import cases

from benchmarks.attention import attention_launches, delta_launch
from benchmarks.products import OWNER, Place, measure
from instrumentation.allocator import Allocator
from instrumentation.devices.cuda import CudaDevice
from instrumentation.findings import Finding, FindingLog
from instrumentation.levels import Level
from instrumentation.reservation import BufferRequest
from refengine.kernels import NORM_WARPS, elementwise, norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpu_report import Report

    from instrumentation.kernel import Kernel

#: what every kernel is to keep within
LIMIT = 2.4
ROUNDS, REPEATS = 5, 20
#: that memcheck is given
MOST_SECONDS = 150
#: how plain kernels run, and checked ones: where the host knows what is written, and where all shadows are looked up
PLAIN, KNOWN, SHADOWS = "plain", "known", "shadows"
FORMS = (PLAIN, KNOWN, SHADOWS)
#: of a 0.8B model
PRODUCT_TYPES = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q4_1, GGMLQuantizationType.F16)
PRODUCT_SHAPES = ((1024, 3584), (3584, 1024), (32768, 1024))
PRODUCT_ROWS = (1, 8)


class Timed:
    """A device in one of ``FORMS``."""

    def __init__(self, form: str) -> None:
        self.device = CudaDevice()
        self.findings = FindingLog()
        level = Level.AUDIT if form == PLAIN else Level.TRAP
        self.allocator = Allocator(self.device, level=level, findings=self.findings)
        self.device.watch(self.allocator)
        if form == SHADOWS:
            # Who does not know that nothing is freed under a launch looks at every shadow.
            self.allocator.watch_frees(None)
        self.stream = self.device.create_stream(owner=OWNER, name="timed")
        self._seen = 0

    def found(self) -> list[Finding]:
        """Findings since the last call."""
        new = list(self.findings)[self._seen :]
        self._seen += len(new)
        return new

    def run(
        self, made: Kernel, grid: Any, arguments: dict[str, Any], repeats: int
    ) -> tuple[dict[str, Any], float]:
        """What one launch writes, and microseconds of one of ``repeats`` in a replayed graph."""
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        requests = [BufferRequest(max(1, a.nbytes), OWNER, name) for name, a in arrays.items()]
        size = self.allocator.arena_size(requests)
        arena = self.allocator.reserve_arena(size, owner=OWNER, name="operands").unwrap()
        views = {}
        for request, (name, array) in zip(requests, arrays.items(), strict=True):
            buffer = arena.reserve(request.nbytes, owner=OWNER, name=name).unwrap()
            views[name] = buffer.view(array.dtype, array.shape)
            if array.nbytes:
                self.stream.copy_in(views[name], np.ascontiguousarray(array))
        self.stream.launch(made, grid, {**arguments, **views})
        outputs = {name: np.empty_like(arrays[name]) for name in sorted(made.writes)}
        for name, array in outputs.items():
            self.stream.copy_out(array, views[name])
        self.stream.synchronize()
        self.stream.begin_capture()
        for _ in range(repeats):
            self.stream.launch(made, grid, {**arguments, **views})
        graph = self.stream.end_capture(made.name)
        times = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.stream.replay(graph)
            self.stream.synchronize()
            times.append(time.perf_counter() - started)
        graph.destroy()
        for view in views.values():
            view.buffer.free()
        arena.release()
        return outputs, min(times) / repeats * 1e6


def case_launches() -> Iterator[tuple[str, str, Kernel, Any, dict[str, Any]]]:
    """Every case of every kernel: which it is, what its size is called, kernel, grid, arguments."""
    for number, case in enumerate(cases()):
        yield f"{case.kernel.name} #{number}", "small", case.kernel, case.grid, case.arguments


def large_launches() -> Iterator[tuple[str, str, Kernel, Any, dict[str, Any]]]:
    """Launches but for products at sizes of a 0.8B model, as ``case_launches``."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    for n_positions in (1024, 4096):
        for made, grid, arguments in attention_launches(rng, "f16", 256, n_positions, wide=True):
            yield f"{made.name} {n_positions} positions", f"{n_positions} positions", made, grid, arguments
    for n_rows in (1, 512):
        made, grid, arguments = delta_launch(rng, 128, n_rows, wide=True)
        yield f"{made.name} {n_rows} rows", f"{n_rows} rows", made, grid, arguments
    for n_rows in (1, 512):
        x = normal(n_rows, 1024)
        for warps in NORM_WARPS:
            arguments = {"x": x, "weight": normal(1024), "y": np.zeros_like(x), "eps": 1e-5}
            made = norm.rms_norm(warps)
            yield f"{made.name} {n_rows} rows", f"{n_rows} rows", made, (n_rows,), arguments
        n = n_rows * 3584
        arguments = {"gate": normal(n), "up": normal(n), "y": np.zeros(n, np.float32)}
        grid = (-(-n // elementwise.SPAN),)
        yield f"swiglu {n_rows} rows", f"{n_rows} rows", elementwise.swiglu, grid, arguments


LAUNCHES = {"kernels": case_launches, "large": large_launches}


def large_products() -> Iterator[tuple[str, GGMLQuantizationType, int, int, int]]:
    """Products at sizes of a 0.8B model: what is measured, type, outputs, inputs, rows."""
    for kind in PRODUCT_TYPES:
        for n_out, n_in in PRODUCT_SHAPES:
            for n_rows in PRODUCT_ROWS:
                yield f"{kind.name} {n_out}x{n_in}, {n_rows} rows", kind, n_out, n_in, n_rows


def _line(name: str, us: float) -> None:
    print(json.dumps({"name": name, "us": us}), flush=True)


def child(what: str) -> None:
    """Plain launches, timed under whatever tool this process runs: a JSON line each."""
    gpu_prepared.use()
    timed = Timed(PLAIN)
    for name, _, made, grid, arguments in LAUNCHES[what]():
        _line(name, timed.run(made, grid, arguments, REPEATS)[1])
    if what == "large":
        place = Place(timed.device, timed.allocator, timed.stream)
        for name, kind, n_out, n_in, n_rows in large_products():
            _line(name, measure(place, kind, n_out, n_in, n_rows, None)[1] * 1e6)


def under_memcheck(what: str) -> dict[str, float]:
    """Microseconds of each plain launch under NVIDIA's memcheck; of those that it reached in ``MOST_SECONDS``."""
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the path: no column of memcheck")
        return {}
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-W", "ignore", __file__, what]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=MOST_SECONDS, check=False)
        out, said = ran.stdout, ran.stderr
    except subprocess.TimeoutExpired as late:
        out, said = late.stdout or b"", late.stderr or b""
    lines = out.decode(errors="replace").splitlines()
    found = {(row := json.loads(line))["name"]: row["us"] for line in lines if line.startswith("{")}
    others = [line for line in [*lines, *said.decode(errors="replace").splitlines()] if line[:1] != "{"]
    print(f"memcheck: {len(found)} launches; it says {' | '.join(others)[-300:]}", flush=True)
    return found


HEAD = "| kernel | size | same bits | plain us | checked | with all shadows | memcheck | findings |"


class Table:
    """Rows of times, and a summary of their ratios."""

    def __init__(self, what: str) -> None:
        self.memcheck = under_memcheck(what)
        self.rows: list[tuple[float, float, str]] = []
        print(f"{HEAD}\n{'|---' * HEAD.count(' | ')}|---|")

    def row(self, name: str, kernel: str, size: str, times: list[float], same: str, found: str = "") -> None:
        """Print and keep one; ``times``: plain, checked, with all shadows, in microseconds."""
        us, known, shadows = times[0], times[1] / times[0], times[2] / times[0]
        theirs = self.memcheck.get(name, 0) / us
        self.rows.append((known, theirs, name))
        memcheck = f"{theirs:.1f}" if theirs else ""
        print(f"|{kernel}|{size}|{same}|{us:.2f}|{known:.2f}|{shadows:.2f}|{memcheck}|{found}|", flush=True)

    def summary(self) -> None:
        """How many are within the limit, and the slowest."""
        slow = sorted((row for row in self.rows if row[0] > LIMIT), reverse=True)
        shown = ", ".join(f"{name} {known:.2f}" for known, _, name in slow[:40])
        print(f"{len(self.rows) - len(slow)} of {len(self.rows)} within {LIMIT}; slower: {shown or 'none'}")
        both = [(known, theirs) for known, theirs, _ in self.rows if theirs]
        if both:
            ours, theirs = (sorted(column)[len(both) // 2] for column in zip(*both, strict=True))
            print(f"medians of the {len(both)} that memcheck ran: checked {ours:.2f}, memcheck {theirs:.1f}")


def _launches(report: Report, what: str, timed: dict[str, Timed], table: Table) -> None:
    for name, size, made, grid, arguments in LAUNCHES[what]():
        with report.part(name):
            ran = [t.run(made, grid, arguments, REPEATS) for t in timed.values()]
            plain = ran[0][0]
            same = all(o[key].tobytes() == plain[key].tobytes() for o, _ in ran for key in plain)
            found = [(f.code, f.argument) for t in timed.values() for f in t.found()]
            report.count(f"trap {name}", same and not found)
            shown = str(found[:3]) if found else ""
            table.row(name, made.name, size, [us for _, us in ran], "y" if same else "NO", shown)


def kernels(report: Report) -> None:
    """One row a case of every kernel: bits and times; then a summary of the ratios."""
    table = Table("kernels")
    _launches(report, "kernels", {form: Timed(form) for form in FORMS}, table)
    table.summary()


def large(report: Report) -> None:
    """Times at sizes that matter, checked against plain."""
    table = Table("large")
    timed = {form: Timed(form) for form in FORMS}
    _launches(report, "large", timed, table)
    places = [Place(t.device, t.allocator, t.stream) for t in timed.values()]
    for name, kind, n_out, n_in, n_rows in large_products():
        with report.part(name):
            measured = [measure(place, kind, n_out, n_in, n_rows, None) for place in places]
            times = [seconds * 1e6 for _, seconds, _ in measured]
            found = [(f.code, f.argument) for t in timed.values() for f in t.found()]
            report.count(f"trap {name}", not found)
            shown = str(found[:3]) if found else ""
            table.row(name, measured[0][0], f"{n_out}x{n_in}, {n_rows} rows", times, "", shown)
    table.summary()


if __name__ == "__main__":
    child(sys.argv[1])
