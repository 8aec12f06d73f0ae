"""Make a folder with which tests/gpu/run.py needs no compiler and no host results. No GPU is needed for it.

usage: python tests/gpu/prepare.py FOLDER [images|kernels|models|golden|faults|checked|drafts|drill|FILE.gguf] ...

``images``: every kernel for compute capability 9.0. ``kernels``: the host's outputs of every case. ``models``: images
and host results of the small models. ``golden``: the host's recordings of all their tensors. ``faults``: images of the
planted faults' kernels, plain and checked, and what the host finds of them. ``checked``: the checked form of every
kernel, of what is timed at large sizes, and of the small models; prints how long each takes. ``drill``: what the fault
drill launches, plain and checked. ``drafts``: what trap-drafts and benchmarks/drafts.py do. A file: images of what a
benchmark of it launches. Without any: the first four. JOBS=N compiles in N processes.
Then, with the GPU: PREPARED=FOLDER python tests/gpu/run.py
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]

import gpu_cublas
import gpu_drill
import gpu_golden
import gpu_kernels
import gpu_models
import gpu_trap
import gpu_trap_times
import numpy as np
import structlog
from engines import DATA, PAIRS, increment, scale_by, write_from
from fake_cublas import FakeCublas
from fake_cuda import FakeDriver, fake_image
from gpu_prepared import image_file
from planted_faults import PLANTED
from planted_order import FAULTS

import refengine
from benchmarks.drafts import pace
from instrumentation.allocator import Allocator
from instrumentation.devices.cuda import CudaDevice
from instrumentation.devices.host_memory import bytes_at
from instrumentation.devices.numerics import KERNELS as NUMERICS
from instrumentation.findings import FindingLog
from instrumentation.handles import Library
from instrumentation.kernel import Kernel, cuda_image
from instrumentation.levels import Level
from refengine.batch import Batch
from refengine.kernels import all_kernels

if TYPE_CHECKING:
    from collections.abc import Iterable

CAPABILITY = (9, 0)
JOBS = int(os.environ.get("JOBS", "1"))


def write_image(place: Path, kernel: Kernel, *, checked: bool = False) -> None:
    """Compile a kernel unless its image is there."""
    file = image_file(place, kernel, checked=checked)
    if not file.exists():
        started = time.perf_counter()
        file.parent.mkdir(parents=True, exist_ok=True)
        ptx = kernel.ptx(CAPABILITY, checked=checked)
        image = cuda_image.build_image(kernel.name, ptx, CAPABILITY)
        cuda_image._write(file, image)
        if checked:
            seconds = time.perf_counter() - started
            print(f"{kernel.name}: {seconds:.1f} s, PTX {len(ptx):,}, image {len(image.data):,}", flush=True)


def write_images(place: Path, wanted: Iterable[tuple[Kernel, bool]]) -> None:
    """Compile kernels, checked or plain, in ``JOBS`` processes."""
    each = list({(kernel.name, checked): (kernel, checked) for kernel, checked in wanted}.values())
    if JOBS == 1:
        for kernel, checked in each:
            write_image(place, kernel, checked=checked)
        return
    children = []
    for first in range(JOBS):
        if child := os.fork():
            children.append(child)
            continue
        code = 1
        try:
            for kernel, checked in each[first::JOBS]:
                write_image(place, kernel, checked=checked)
            code = 0
        except Exception:  # noqa: BLE001 - a process of its own
            traceback.print_exc()
        finally:
            os._exit(code)
    if failed := [child for child in children if os.waitpid(child, 0)[1]]:
        raise RuntimeError(f"{len(failed)} of {JOBS} processes failed")


class Recorder(FakeDriver):
    """Takes launches and runs none of them."""

    def launch(self, function: Any, _grid: Any, _block: Any, stream: Any, _at: int, **_rest: Any) -> None:
        if stream.capture is not None:
            stream.capture.append(function)

    def replay(self, _graph: Any, _stream: Any) -> None:
        pass


class Zeros(Recorder):
    """All memory holds zeros, of which an engine makes a text."""

    def fill(self, target: int, _value: int, nbytes: int, stream: Any) -> None:
        super().fill(target, 0, nbytes, stream)

    def allocate(self, nbytes: int) -> int:
        address = super().allocate(nbytes)
        bytes_at(address, nbytes)[:] = 0
        return address


class RecorderBlas(FakeCublas):
    """Takes calls and makes none of them."""

    def _enqueue(self, _stream: Any, _work: Any) -> None:
        pass


class Collected:
    """Devices that compile nothing and run nothing, and the kernels that they were asked for."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, bool], Kernel] = {}

    def compiled(self, kernel: Kernel, capability: tuple[int, int], *, checked: bool = False) -> Any:
        self.found[kernel.name, checked] = kernel
        return fake_image(kernel, capability, checked=checked)

    def device(self, driver: type[Recorder] = Recorder) -> CudaDevice:
        made = CudaDevice(driver=driver(total=1 << 34), compile_kernel=self.compiled)
        made.library = Library(RecorderBlas(made.context.driver))
        return made

    @property
    def kernels(self) -> list[Kernel]:
        return list({kernel.name: kernel for kernel in self.found.values()}.values())

    def write(self, place: Path) -> None:
        """Compile what was asked for, in the forms that were."""
        write_images(place, [(kernel, checked) for (_, checked), kernel in sorted(self.found.items())])


def launched(
    model: Path,
    batches: list[tuple[int, int, Any, int]],
    levels: tuple[str, ...] = ("off", "guard"),
    **options: Any,
) -> list[Kernel]:
    """Kernels of decodes: (position, tokens, wanted rows, candidates) of each, in order."""
    collected = Collected()
    for check in levels:
        with refengine.load(model, device=collected.device(), check=check, **options) as engine:
            with engine.exclusive() as context:
                for position, n_tokens, wanted, n_best in batches:
                    if position == 0:
                        context.keep(-1)
                    batch = Batch.of([1] * n_tokens, position, 0, wanted, n_best=n_best)
                    context.require(context.decode(batch))
            if engine.draft is not None:
                engine.draft_logits([1] * batches[0][1])
                engine.draft_logits([1, 1])
    return collected.kernels


def model_kernels(name: str, **options: Any) -> list[Kernel]:
    """What a small model launches."""
    with np.load(DATA / f"{name}.npz") as recorded:
        n = len(recorded["tokens"])
    one = [
        (0, n, "all", 0),
        (0, n, "last", 0),
        *((n + i, 1, "last", k) for i, k in enumerate((0, 1, 16))),
    ]
    more = [(0, n, "last", 1), (0, n, "last", 16)]
    return launched(DATA / f"{name}.gguf", one + more, **(gpu_models.OPTIONS | options))


def prepare_models(place: Path) -> None:
    """The small models; images of those without drafts, which launch little else."""
    arrays = {}
    for name, options in gpu_models.MODELS:
        if not options:
            write_images(place, [(kernel, False) for kernel in model_kernels(name)])
        label = gpu_models.label_of(name, options)
        logits, made, _, _, chosen = gpu_models.results(name, "host", **options)
        arrays |= {
            f"{label} logits": logits,
            f"{label} made": made.logits,
            f"{label} chosen": np.array(chosen),
        }
        print(label, flush=True)
    for name, options in gpu_cublas.MODELS:
        for gemm in ("kernels", "cublas"):
            write_images(place, [(k, False) for k in model_kernels(name, **options, gemm=gemm)])
    np.savez_compressed(place / "models.npz", **arrays)


def prepare_kernels(place: Path) -> None:
    """The host's outputs of every case."""
    arrays = {}
    for _, key, case in gpu_kernels.keyed_cases():
        for output, array in gpu_kernels.run_host(case).items():
            arrays[f"{key} {output}"] = array
    np.savez_compressed(place / "kernels.npz", **arrays)


def prepare_faults(place: Path) -> None:
    """Planted faults: images, and the host's findings."""
    both = [(fault.kernel, checked) for fault in PLANTED for checked in (False, True)]
    write_images(place, [*both, *((fault.kernel, False) for fault in FAULTS), (gpu_trap.wait_long, True)])
    (place / "faults.json").write_text(json.dumps(gpu_trap.host_facts()))


def large_products() -> list[Kernel]:
    """Kernels of the products that are timed at large sizes."""
    collected = Collected()
    device = collected.device()
    allocator = Allocator(device, level=Level.OFF, findings=FindingLog())
    stream = device.create_stream(owner=gpu_trap_times.OWNER, name="products")
    place = gpu_trap_times.Place(device, allocator, stream)
    for _, kind, n_out, n_in, n_rows in gpu_trap_times.large_products():
        gpu_trap_times.measure(place, kind, n_out, n_in, n_rows, None)
    return collected.kernels


def prepare_checked(place: Path) -> None:
    """Checked forms, and the plain ones that are timed beside them."""
    both = [made for _, _, made, _, _ in gpu_trap_times.large_launches()]
    both += large_products()
    for name in PAIRS:
        both += model_kernels(name)
    forms = [(kernel, checked) for kernel in both for checked in (True, False)]
    write_images(place, [*forms, *((kernel, True) for kernel in all_kernels())])


def prepare_drafts(place: Path) -> None:
    """What the section trap-drafts and benchmarks/drafts.py launch."""
    collected = Collected()
    for name, options in gpu_trap.DRAFT_MODELS:
        for check, graphs in (("off", True), ("trap", True), ("trap", False)):
            gpu_trap.outputs(name, check, device=collected.device(Zeros), cuda_graphs=graphs, **options)
    for options in ({}, *({"spec_type": "draft-mtp", "draft_n_max": n_max} for n_max in (1, 2, 3))):
        with refengine.load(device=collected.device(Zeros), n_ctx=512, **options) as engine:
            pace(engine, 128)
    collected.write(place)


def prepare_drill(place: Path) -> None:
    """What the drill launches; nothing runs here, so every fault meets every level."""
    collected = Collected()
    for row in gpu_drill.planned(lambda: collected.device(Zeros)).run():
        print(row.fault, row.status, flush=True)
    collected.write(place)


def main(given: list[str]) -> int:
    """Make what is asked for."""
    if not given or given[0].startswith("-"):
        print(__doc__)
        return 2
    # Engines whose memory holds zeros find damage everywhere; nobody is to read of it.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    place = Path(given[0])
    place.mkdir(parents=True, exist_ok=True)
    for what in given[1:] or ["images", "kernels", "models", "golden"]:
        started = time.perf_counter()
        if what == "images":
            every = (*all_kernels(), *NUMERICS, increment, scale_by, write_from)
            write_images(place, [(kernel, False) for kernel in every])
        elif what == "kernels":
            prepare_kernels(place)
        elif what == "models":
            prepare_models(place)
        elif what == "faults":
            prepare_faults(place)
        elif what == "checked":
            prepare_checked(place)
        elif what == "drill":
            prepare_drill(place)
        elif what == "drafts":
            prepare_drafts(place)
        elif what == "golden":
            gpu_golden.prepare(place)
        else:
            shapes = [(0, 512, "last", 0), (512, 1, "last", 1), (0, 1, "last", 1), (1, 1, "last", 0)]
            for gemm in ("kernels", "cublas"):
                write_images(
                    place, [(kernel, False) for kernel in launched(Path(what), shapes, n_ctx=1024, gemm=gemm)]
                )
        print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
