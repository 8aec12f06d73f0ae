"""How fast products run: microseconds and GB/s by shape and format, as a decode has them.

usage: python benchmarks/products.py [--device NAME] [--types Q4_K,F16] [--shapes 1024x3584,...] [--rows 1,8]

Launches of one product with several matrices in turn, more bytes than a cache holds, are captured into one graph, so
that their time has no launch from Python in it. GB/s counts the packed matrix alone. ``--outputs`` and ``--tile``
measure other forms than those that the engine chooses.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest
from refengine.kernels.mul_mat import mul_mat
from refengine.kernels.quants import format_of
from refengine.operands import Call, Operands
from refengine.ops import OPS
from refengine.weights import Matrix

if TYPE_CHECKING:
    import numpy.typing as npt

    from instrumentation.devices.base import Stream
    from instrumentation.view import View

OWNER = Owner("model")
#: bytes of matrices that are gone through, by whether the device is a GPU
ROTATED = {True: 256 << 20, False: 64 << 20}
MOST_MATRICES, ROUNDS = 64, 5


@dataclass(frozen=True)
class Place:
    """A device and a stream of it."""

    device: Any
    allocator: Allocator
    stream: Stream

    def arena(self, arrays: dict[str, npt.NDArray[Any]]) -> tuple[Any, dict[str, View]]:
        """An arena with copies of arrays."""
        requests = [BufferRequest(array.nbytes, OWNER, name) for name, array in arrays.items()]
        arena = self.allocator.reserve_arena(
            self.allocator.arena_size(requests), owner=OWNER, name="products"
        ).unwrap()
        buffers = arena.reserve_all(requests).unwrap()
        views = {}
        for buffer, (name, array) in zip(buffers, arrays.items(), strict=True):
            views[name] = buffer.view(array.dtype, array.shape)
            self.stream.copy_in(views[name], array)
        self.stream.synchronize()
        return arena, views


def packed_arrays(kind: Any, n_out: int, n_in: int) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a packed matrix whose scales and floats are ordinary numbers."""
    shapes, rng = format_of(kind).packed_shapes(n_out, n_in), np.random.default_rng(0)
    return {
        "codes": rng.integers(0, 256, shapes.codes, np.uint8),
        "halves": np.full(shapes.halves, 0.01, np.float16).view(np.uint16),
        "words": np.full(shapes.words, 0.5, np.float32).view(np.uint32),
    }


def call_of(place: Place, matrix: Matrix, x: View, y: View, form: tuple[int, int] | None) -> Call:
    """The launch that the engine would make, or that of another wide form: rows of x of a warp, outputs."""
    operands = Operands(
        {"x": x},
        y,
        {},
        {"weight": matrix},
        {},
        None,
        None,
        ("f32", "f32"),
        (x, x),
        {},
        place.device.wide_loads,
    )
    if form is None:
        return OPS["mul_mat"](operands)
    tile, outputs = form
    pairs = x.buffer.view(np.uint64, (x.shape[0], x.shape[1] // 2))
    grid = (-(-matrix.n_out // outputs), -(-x.shape[0] // tile))
    return Call(mul_mat(matrix.type, tile, outputs), grid, {**matrix.wide_arguments, "x": pairs, "y": y})


def measure(
    place: Place, kind: Any, n_out: int, n_in: int, n_rows: int, form: tuple[int, int] | None
) -> tuple[str, float, int]:
    """Kernel's name, seconds of one product, bytes of its matrix."""
    arrays = packed_arrays(kind, n_out, n_in)
    nbytes = sum(array.nbytes for array in arrays.values() if array.shape != (1, 1))
    n_matrices = min(MOST_MATRICES, -(-ROTATED[place.device.wide_loads] // nbytes))
    named = {f"{name} {i}": array for i in range(n_matrices) for name, array in arrays.items()}
    x = np.random.default_rng(1).standard_normal((n_rows, n_in)).astype(np.float32)
    arena, views = place.arena({**named, "x": x, "y": np.zeros((n_rows, n_out), np.float32)})
    calls = [
        call_of(
            place,
            Matrix(kind, n_out, n_in, *(views[f"{name} {i}"] for name in arrays)),
            views["x"],
            views["y"],
            form,
        )
        for i in range(n_matrices)
    ]
    repeats = max(1, 16 // n_matrices)
    place.stream.begin_capture()
    for call in calls * repeats:
        place.stream.launch(call.kernel, call.grid, call.arguments)
    graph = place.stream.end_capture("products")
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        place.stream.replay(graph)
        place.stream.synchronize()
        seconds.append((time.perf_counter() - started) / (n_matrices * repeats))
    graph.destroy()
    for view in views.values():
        view.buffer.free()
    arena.release()
    return calls[0].kernel.name, min(seconds), nbytes


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--types", default="Q4_K,Q4_1,Q4_0,Q5_K,Q6_K,Q8_0,F16")
    parser.add_argument(
        "--shapes", default="1024x1024,1024x3584,3584x1024,6144x1024,32768x1024", help="n_out x n_in"
    )
    parser.add_argument("--rows", default="1", help="rows of x")
    parser.add_argument("--outputs", default="", help="outputs of a warp, several with commas; needs --tile")
    parser.add_argument("--tile", type=int, default=1, help="rows of x of a warp, with --outputs")
    given = parser.parse_args()
    device = open_device(given.device)
    allocator = Allocator(device, level=Level.OFF, findings=FindingLog())
    place = Place(device, allocator, device.create_stream(owner=OWNER, name="products"))
    forms = [(given.tile, int(n)) for n in given.outputs.split(",") if n] or [None]
    print(f"{device.describe()}\n\n| kernel | n_out x n_in | rows | us | GB/s |\n|---|---|---|---|---|")
    for name in given.types.split(","):
        for shape in given.shapes.split(","):
            n_out, n_in = (int(n) for n in shape.split("x"))
            for n_rows in (int(n) for n in given.rows.split(",")):
                for form in forms:
                    kernel, seconds, nbytes = measure(
                        place, GGMLQuantizationType[name], n_out, n_in, n_rows, form
                    )
                    rate = nbytes / seconds / 1e9
                    print(f"| {kernel} | {shape} | {n_rows} | {seconds * 1e6:.1f} | {rate:.0f} |", flush=True)


if __name__ == "__main__":
    main()
