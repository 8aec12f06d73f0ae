"""The machine, the checks of level guard, what errors say, a device that is lost, the command line."""

# No "from __future__ import annotations": the types of a kernel's parameters are read at run time.
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from engines import DATA, DRAFT, TARGET, Bench, increment, write_from
from gpu_report import Report
from numba import cuda

from instrumentation.devices import open_device
from instrumentation.devices.cuda import CudaDevice
from instrumentation.devices.cuda_driver import open_driver
from instrumentation.errors import DeviceError, Error
from instrumentation.kernel import cuda_image, kernel
from instrumentation.kernel.types import f32_1d, i64
from instrumentation.levels import Level
from instrumentation.reservation import BufferRequest

ROOT = Path(__file__).resolve().parent.parent.parent
N = 16


@kernel(block=32)
def write_far(y: f32_1d, distance: i64) -> None:
    """Writes to unmapped memory."""
    y[distance + cuda.threadIdx.x] = 1.0


def machine(report: Report) -> None:
    """What is there."""
    names = (
        "numba",
        "numba-cuda",
        "cuda-core",
        "cuda-bindings",
        "nvidia-nvjitlink",
        "nvidia-nvvm",
        "numpy",
        "torch",
    )
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} -")
    print(f"python {sys.version.split()[0]}, {', '.join(found)}")
    print(f"driver for CUDA {open_driver().version()}")
    device = open_device("auto")
    report.check("auto is cuda", device.name == "cuda:0", device.describe())
    image = cuda_image.compile_image(increment, device.context.compute_capability)
    print(f"images are {image.kind} of {len(image.data)} bytes")
    for wrong in ("cuda:99", "cuda:x"):
        try:
            open_device(wrong)
            report.missed(wrong, "opened")
        except Error as error:
            print(f"{wrong}: {type(error).__name__}: {error}")
    with report.part("ptx by the driver"):
        ptx = increment.ptx(device.context.compute_capability)
        version = re.search(r"\.version (\S+)", ptx)
        entry, _ = cuda_image.entry_of("increment", ptx)
        with device.context.calls("a test"):
            try:
                device.context.driver.load(ptx.encode() + b"\0", entry)
                print(f"the driver compiles PTX {version and version[1]}")
            except Exception as error:  # noqa: BLE001 - information: the linker is there so that it need not
                print(f"the driver refuses PTX {version and version[1]}: {str(error)[:150]}")
    with report.part("a broken image"):
        try:
            with device.context.calls("a test"):
                device.context.driver.load(b".version 8.0\n.target sm_90\nnonsense\n\0", "k")
            report.missed("a broken image", "loaded")
        except DeviceError as error:
            print(f"a broken image: {str(error)[:200]}")
    with report.part("numba's context"):
        context = cuda.current_context()
        ours = int(device.context.handle)
        theirs = int(getattr(context.handle, "value", None) or int(context.handle))
        report.check("numba has the same context", ours == theirs, f"{ours:#x} {theirs:#x}")
    with report.part("torch"):
        try:
            import torch  # noqa: PLC0415
        except ImportError:
            print("torch is not installed")
            return
        bench = Bench(Level.OFF, device=device)
        tensor = torch.arange(1000, device="cuda", dtype=torch.float32)
        y = bench.put(bench.arena(), np.zeros(64, np.float32), "y")
        bench.stream.launch(increment, 2, {"y": y})
        total = float(tensor.sum())
        report.check("torch beside us", total == 499500.0 and (bench.get(y) == 1).all(), total)


class Three:
    """Buffers left, y and right beside each other, and x elsewhere."""

    def __init__(self, level: Level = Level.GUARD) -> None:
        self.bench = Bench(level, device=CudaDevice())
        arena = self.bench.arena()
        zeros = np.zeros(N, np.float32)
        self.left, self.y, self.right = (
            self.bench.put(arena, zeros, name) for name in ("left", "y", "right")
        )
        self.x = self.bench.put(self.bench.arena(), np.array([7.5], np.float32), "x")
        self.stream = self.bench.stream

    def write(self, first: int, count: int = 1) -> None:
        self.stream.launch(write_from, 1, {"x": self.x, "y": self.y, "first": first, "count": count})


def _writes(report: Report) -> None:
    for how in ("direct", "graph"):
        for first, count, code, offset in (
            (N, 1, "MEM002", 4 * N),
            (-1, 1, "MEM001", -4),
            (N + 2, 3, "MEM002", 4 * N + 8),
        ):
            with report.part(f"{how} write at {first}"):
                three = Three()
                if how == "graph":
                    three.stream.begin_capture()
                three.stream.launch(increment, 1, {"y": three.left})
                three.write(first, count)
                three.stream.launch(increment, 1, {"y": three.right})
                if how == "graph":
                    three.stream.replay(three.stream.end_capture("bad"))
                three.stream.synchronize()
                seen = [(f.code, f.kernel, f.buffer.name, f.offset, f.size) for f in three.bench.findings]
                ok = seen == [(code, "write_from", "y", offset, 4 * count)]
                ok = (
                    ok
                    and (three.bench.get(three.right) == 1).all()
                    and three.bench.allocator.check_integrity() == []
                )
                report.check(f"{how} write at {first}", ok, seen)


def _blame(report: Report) -> None:
    with report.part("first blamed"):
        three = Three()
        for first in (0, N, 2, N + 1, -1):
            three.write(first)
        three.stream.synchronize()
        found = [(f.code, f.launch) for f in three.bench.findings]
        report.check("the first launch is blamed", len(found) == 2 and found[1][1] - found[0][1] == 3, found)


def _after_free(report: Report) -> None:
    with report.part("written after free"):
        three = Three()
        address, view = three.y.address, three.y
        three.y.buffer.free()
        three.bench.device.fill_bytes(address + 8, 4, 1)
        codes = [f.code for f in three.bench.allocator.check_integrity()]
        report.check("written after free", codes == ["MEM003"], f"{codes} {view.name}")


def _events(report: Report) -> None:
    with report.part("events"):
        three = Three(Level.OFF)
        other = three.bench.device.create_stream(owner=TARGET, name="other")
        wrong = 0
        for turn in range(200):
            event = three.bench.device.create_event(owner=TARGET, name="ready")
            for _ in range(20):
                three.stream.launch(increment, 1, {"y": three.y})
            three.stream.record(event)
            other.wait(event)
            out = np.empty(N, np.float32)
            other.copy_out(out, three.y)
            other.synchronize()
            wrong += not (out == 20 * (turn + 1)).all()
            event.destroy()
        report.check("events order two streams", wrong == 0, f"{wrong} of 200 wrong")


def _staging(report: Report) -> None:
    with report.part("staging"):
        three = Three(Level.OFF)
        source, outs = np.zeros(N, np.float32), []
        for turn in range(3000):
            source[:] = turn
            three.stream.copy_in(three.y, source)
            outs.append(np.empty(N, np.float32))
            three.stream.copy_out(outs[-1], three.y)
        three.stream.synchronize()
        report.check("arrays may change at once", all((o == i).all() for i, o in enumerate(outs)), len(outs))


def _threads(report: Report) -> None:
    with report.part("threads"):
        three = Three()
        streams = [three.bench.device.create_stream(owner=TARGET, name=f"{i}") for i in range(4)]
        views = [three.bench.put(three.bench.arena(), np.zeros(N, np.float32), f"t{i}") for i in range(4)]

        def work(i: int) -> None:
            for _ in range(300):
                streams[i].launch(increment, 1, {"y": views[i]})
            streams[i].synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sums = [float(three.bench.get(view)[0]) for view in views]
        report.check(
            "four threads, four streams", sums == [300.0] * 4 and not len(three.bench.findings), sums
        )


def _overlays(report: Report) -> None:
    with report.part("overlays"):
        bench = Bench(device=CudaDevice())
        arena = bench.arena()
        overlays = [
            arena.reserve_overlay(
                [BufferRequest(64, TARGET, f"{n}{i}") for i in range(40)], owner=TARGET, name=n
            ).unwrap()
            for n in "ab"
        ]
        for turn in range(20):
            overlay = overlays[turn % 2]
            overlay.activate()
            view = overlay.buffers[turn].view(np.float32, N)
            bench.stream.fill(view, 0)
            bench.stream.launch(increment, 1, {"y": view})
            bench.stream.synchronize()
        report.check("overlays", not len(bench.findings) and bench.allocator.check_integrity() == [])


def _out_of_memory(report: Report) -> None:
    with report.part("out of memory"):
        device = CudaDevice()
        try:
            device.allocate(1 << 44)
            report.missed("out of memory", "allocated")
        except Error as error:
            report.check("out of memory", type(error).__name__ == "OutOfMemoryError", error)


def _owners(report: Report) -> None:
    with report.part("owners"):
        three = Three()
        draft = three.bench.device.create_stream(owner=DRAFT, name="draft")
        try:
            draft.launch(increment, 1, {"y": three.y})
            report.missed("owners", "launched")
        except Error as error:
            report.check("owners", "OWN001" in str(error), str(error).splitlines()[0])


def checks(report: Report) -> None:
    """Findings, order, copies: what the fake driver of the tests shows, on the real one."""
    for part in (
        _writes,
        _blame,
        _after_free,
        _events,
        _staging,
        _threads,
        _overlays,
        _out_of_memory,
        _owners,
    ):
        part(report)


LOST = """
import numpy as np, refengine
from engines import DATA, TARGET, Bench, increment
from gpu_checks import write_far
from instrumentation.devices.cuda import CudaDevice
from instrumentation.levels import Level
device = CudaDevice()
engine = refengine.load(DATA / "llama.gguf", device=device, check="guard", n_ctx=128)
before = engine.generate([1, 2, 3], n_predict=4, temperature=0).tokens
stream = device.create_stream(owner=TARGET, name="bad")
arena = engine.allocator.reserve_arena(4096, owner=TARGET, name="bad").unwrap()
y = arena.reserve(64, owner=TARGET, name="y").unwrap().view(np.float32, 16)
stream.launch(write_far, 1, {"y": y, "distance": 1 << 44})
for what in (stream.synchronize, stream.synchronize, lambda: stream.fill(y, 0),
             lambda: engine.generate([1, 2, 3], n_predict=4, temperature=0)):
    try:
        print("returned", what())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
stream.destroy()
y.buffer.free()
arena.release()
engine.close()
print("findings", [finding.code for finding in engine.findings])
try:
    CudaDevice()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
print("closed")
"""


def _child(*arguments: str) -> "subprocess.CompletedProcess[str]":
    folders = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "gpu")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


def lost(report: Report) -> None:
    """An illegal address, in a process of its own: one report, then one short line a call, and a quiet end."""
    child = _child("-W", "ignore", "-c", LOST)
    lines = child.stdout.strip().splitlines()
    for line in lines:
        print(f"  {line[:210]}")
    told = sum("device lost" in line for line in lines)
    ends = lines[-1:] == ["closed"] and child.returncode == 0 and "findings []" in lines and told >= 3
    report.check("a lost device", ends and "Traceback" not in child.stderr, child.stderr[-400:])


def cli(report: Report) -> None:
    """The commands that people type."""
    model = str(DATA / "llama.gguf")
    for arguments in (
        ["doctor"],
        [
            "generate",
            "-m",
            model,
            "-p",
            "a",
            "-n",
            "8",
            "--temp",
            "0",
            "--device",
            "cuda",
            "--check",
            "guard",
        ],
        ["generate", "-m", model, "-p", "a", "-n", "8", "--temp", "0", "--device", "cuda:99"],
    ):
        with report.part(arguments[0]):
            child = _child("-m", "refengine", *arguments)
            text = f"{child.stdout}\n{child.stderr}"
            shown = (
                [line for line in text.splitlines() if "cuda" in line.lower()]
                if arguments == ["doctor"]
                else text.splitlines()
            )
            wanted = 2 if arguments[-1] == "cuda:99" else 0
            for line in [line for line in shown if line.strip()][-4:]:
                print(f"  {line[:160]}")
            report.check(
                " ".join(arguments[-2:]), child.returncode == wanted, f"exit code {child.returncode}"
            )
