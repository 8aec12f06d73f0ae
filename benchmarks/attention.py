"""Microseconds a launch of attention and of the delta rule takes, in the device's form and with one warp a block.

usage: python benchmarks/attention.py [--device NAME] [--types TYPE] [--narrow]

Each case is captured ``REPEATS`` times in a row into one graph that is replayed, so no launch from Python is in it;
consecutive runs read the same memory, which a cache may keep. Shapes: one token of 8 heads, 2 of keys; 16 value heads.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.allocator import Allocator
from instrumentation.devices import open_device
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest
from refengine.kernels import ATTENTION_WARPS, DELTA_WARPS
from refengine.kernels.attention import SPAN, attention, attention_merge, attention_whole
from refengine.kernels.gated_delta import columns_per_block, gated_delta
from refengine.kernels.kv_types import KV_TYPES, PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instrumentation.kernel import Kernel
    from refengine.kernels.kv_types import CacheType

REPEATS = 20
ROUNDS = 10
N_HEAD, N_HEAD_KV = 8, 2
N_DELTA = 16
Launch = tuple["Kernel", tuple[int, ...], dict[str, Any]]


def attention_launches(
    rng: np.random.Generator, kind: CacheType, head_dim: int, n_positions: int, *, wide: bool
) -> Iterator[Launch]:
    """Launches that attend to ``n_positions`` positions from the last."""
    n_pages = -(-n_positions // PAGE)
    stored = KV_TYPES[kind]
    shapes = stored.keys(n_pages, N_HEAD_KV, head_dim), stored.values(n_pages, N_HEAD_KV, head_dim)
    # Bits of zeros: what is multiplied does not change how long it takes.
    k_cache, v_cache = (np.zeros(shape, stored.dtype) for shape in shapes)
    position = np.array([n_positions - 1], np.int32)
    shared: dict[str, Any] = {
        "q": rng.standard_normal((1, N_HEAD, head_dim)).astype(np.float32), "k_cache": k_cache, "v_cache": v_cache,
        "pages": rng.permutation(n_pages).astype(np.int32)[None].copy(), "sequence": np.zeros(1, np.int32),
        "position": position, "scale": head_dim**-0.5,
    }  # fmt: skip
    warps, n_spans = ATTENTION_WARPS[wide], -(-n_positions // SPAN)
    if n_spans == 1:
        gate = np.zeros((1, N_HEAD, 2 * head_dim), np.float32)
        y = np.zeros((1, N_HEAD, 1, head_dim), np.float32)
        made = attention_whole(kind, kind, head_dim, warps, gated=True)
        yield made, (N_HEAD, 1), {**shared, "q_gate": gate, "y": y}
        return
    partial = np.zeros((1, N_HEAD, n_spans, head_dim + 2), np.float32)
    yield attention(kind, kind, head_dim, warps), (N_HEAD, 1, n_spans), {**shared, "partial": partial}
    merge = attention_merge(head_dim, -(-head_dim // 32) if wide else 1)
    out = np.zeros((1, N_HEAD, head_dim), np.float32)
    yield merge, (N_HEAD, 1), {"partial": partial, "position": position, "out": out, "scale": head_dim**-0.5}


def delta_launch(rng: np.random.Generator, size: int, n_rows: int, *, wide: bool) -> Launch:
    """One sequence of ``n_rows`` rows, its state read and written."""
    arguments = {
        "qkv": rng.standard_normal((n_rows, 3 * N_DELTA * size)).astype(np.float32),
        "gates": rng.uniform(0.1, 0.9, (n_rows, 2, N_DELTA)).astype(np.float32),
        "segments": np.array([[0, n_rows, 0, 0, 0]], np.int32),
        "states": np.zeros((1, 1, N_DELTA, size * size), np.float32),
        "y": np.zeros((n_rows, N_DELTA * size), np.float32),
        "eps": 1e-6,
    }
    return gated_delta(size, DELTA_WARPS[wide]), (size // columns_per_block(size), N_DELTA, 1), arguments


class Timer:
    """A stream on a device, and memory for one launch at a time."""

    def __init__(self, name: str) -> None:
        self.device = open_device(name)
        self.owner = Owner("benchmark")
        self.allocator = Allocator(self.device, level=Level.OFF, findings=FindingLog())
        self.stream = self.device.create_stream(owner=self.owner, name="benchmark")

    def microseconds(self, launch: Launch) -> float:
        """Time of one of ``REPEATS`` launches in a replayed graph, the best of ``ROUNDS``."""
        kernel, grid, arguments = launch
        arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
        requests = [BufferRequest(max(1, a.nbytes), self.owner, name) for name, a in arrays.items()]
        nbytes = self.allocator.arena_size(requests)
        arena = self.allocator.reserve_arena(nbytes, owner=self.owner, name="operands").unwrap()
        views = {}
        for request, (name, array) in zip(requests, arrays.items(), strict=True):
            buffer = arena.reserve(request.nbytes, owner=self.owner, name=name).unwrap()
            views[name] = buffer.view(array.dtype, array.shape)
            self.stream.copy_in(views[name], array)
        self.stream.synchronize()
        self.stream.begin_capture()
        for _ in range(REPEATS):
            self.stream.launch(kernel, grid, {**arguments, **views})
        graph = self.stream.end_capture(kernel.name)
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
        return min(times) / REPEATS * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--types", default="f16", choices=list(KV_TYPES), help="of keys and of values")
    parser.add_argument(
        "--narrow", action="store_true", help="one warp a block also where the device has more"
    )
    given = parser.parse_args()
    timer, rng = Timer(given.device), np.random.default_rng(0)
    wide = timer.device.wide_loads and not given.narrow
    print(timer.device.describe())
    print("| kernel | rows or positions | us |")
    print("|---|---|---|")
    for head_dim in (64, 128, 256):
        for n_positions in (64, 256, 1024, 4096):
            for launch in attention_launches(rng, given.types, head_dim, n_positions, wide=wide):
                print(f"| {launch[0].name} | {n_positions} | {timer.microseconds(launch):.1f} |", flush=True)
    for size in (64, 128):
        for n_rows in (1, 512):
            launch = delta_launch(rng, size, n_rows, wide=wide)
            print(f"| {launch[0].name} | {n_rows} | {timer.microseconds(launch):.1f} |", flush=True)


if __name__ == "__main__":
    main()
