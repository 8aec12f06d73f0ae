"""Make a folder with which tests/gpu/run.py needs no compiler and no host results. No GPU is needed for it.

usage: python tests/gpu/prepare.py FOLDER [images | kernels | models | FILE.gguf] ...

``images``: every kernel for compute capability 9.0. ``kernels``: the host's outputs of every case. ``models``: images
and host results of the small models. A file: images of what a benchmark of it launches. Without any: the first three.
Then, with the GPU: PREPARED=FOLDER python tests/gpu/run.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tests" / "support"), str(ROOT)]

import gpu_kernels
import gpu_models
import numpy as np
from engines import DATA
from fake_cuda import FakeDriver, fake_image
from gpu_prepared import image_file
from kernel_cases import cases

import refengine
from instrumentation.devices.cuda import CudaDevice
from instrumentation.kernel import Kernel, cuda_image
from refengine.batch import Batch
from refengine.kernels import all_kernels

CAPABILITY = (9, 0)


def write_image(place: Path, kernel: Kernel) -> None:
    """Compile a kernel unless its image is there."""
    file = image_file(place, kernel)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        image = cuda_image.build_image(kernel.name, kernel.ptx(CAPABILITY), CAPABILITY)
        cuda_image._write(file, image)


class Recorder(FakeDriver):
    """Takes launches and runs none of them."""

    def launch(self, function: Any, _grid: Any, _block: Any, stream: Any, _at: int, **_rest: Any) -> None:
        if stream.capture is not None:
            stream.capture.append(function)

    def replay(self, _graph: Any, _stream: Any) -> None:
        pass


def launched(model: Path, batches: list[tuple[int, int, Any, int]], **options: Any) -> list[Kernel]:
    """Kernels of decodes: (position, tokens, wanted rows, candidates) of each, in order."""
    found: dict[str, Kernel] = {}

    def compiled(kernel: Kernel, capability: tuple[int, int]) -> Any:
        found[kernel.name] = kernel
        return fake_image(kernel, capability)

    for check in ("off", "guard"):
        device = CudaDevice(driver=Recorder(total=1 << 34), compile_kernel=compiled)
        with (
            refengine.load(model, device=device, check=check, **options) as engine,
            engine.exclusive() as context,
        ):
            for position, n_tokens, wanted, n_best in batches:
                if position == 0:
                    context.keep(-1)
                context.require(context.decode(Batch.of([1] * n_tokens, position, 0, wanted, n_best=n_best)))
    return list(found.values())


def prepare_models(place: Path) -> None:
    """The small models; images of those without drafts, which launch little else."""
    arrays = {}
    for name, options in gpu_models.MODELS:
        with np.load(DATA / f"{name}.npz") as recorded:
            n = len(recorded["tokens"])
        one = [
            (0, n, "all", 0),
            (0, n, "last", 0),
            *((n + i, 1, "last", k) for i, k in enumerate((0, 1, 16))),
        ]
        more = [(0, n, "last", 1), (0, n, "last", 16)]
        if not options:
            for kernel in launched(DATA / f"{name}.gguf", one + more, **gpu_models.OPTIONS):
                write_image(place, kernel)
        label = gpu_models.label_of(name, options)
        logits, made, _, _, chosen = gpu_models.results(name, "host", **options)
        arrays |= {
            f"{label} logits": logits,
            f"{label} made": made.logits,
            f"{label} chosen": np.array(chosen),
        }
        print(label, flush=True)
    np.savez_compressed(place / "models.npz", **arrays)


def prepare_kernels(place: Path) -> None:
    """The host's outputs of every case."""
    arrays = {}
    for number, case in enumerate(cases()):
        for output, array in gpu_kernels.run_host(case).items():
            arrays[f"{number} {case.kernel.name} {output}"] = array
    np.savez_compressed(place / "kernels.npz", **arrays)


def main(given: list[str]) -> int:
    """Make what is asked for."""
    if not given or given[0].startswith("-"):
        print(__doc__)
        return 2
    place = Path(given[0])
    place.mkdir(parents=True, exist_ok=True)
    for what in given[1:] or ["images", "kernels", "models"]:
        started = time.perf_counter()
        if what == "images":
            for kernel in all_kernels():
                write_image(place, kernel)
        elif what == "kernels":
            prepare_kernels(place)
        elif what == "models":
            prepare_models(place)
        else:
            shapes = [(0, 512, "last", 0), (512, 1, "last", 1), (0, 1, "last", 1), (1, 1, "last", 0)]
            for kernel in launched(Path(what), shapes, n_ctx=1024):
                write_image(place, kernel)
        print(f"{what}: {time.perf_counter() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
