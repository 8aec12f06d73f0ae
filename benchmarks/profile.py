"""Where the time of one decoded token goes: each kernel of the graph, replayed by itself.

usage: python benchmarks/profile.py -m MODEL [--device NAME] [-c N] [--rows N] [--position N] [--late]

A kernel is captured ``REPEATS`` times in a row into one graph, so its time has no launch from Python in it; consecutive
runs read the same weights, which a cache may keep. The last lines are a replay of the whole graph, and a decode.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

import refengine
from instrumentation.devices import cuda_stream
from refengine.batch import Batch
from refengine.graph import BatchShape
from refengine.models import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from refengine.context import Context

REPEATS = 20
ROUNDS = 5


def best(call: Callable[[], None], wait: Callable[[], None]) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def per_kernel(context: Context, executable: Any) -> dict[str, tuple[int, float]]:
    """Kernel and grid -> launches in the graph, seconds of one."""
    stream = context.stream
    calls = [context.executor.operations.call(node, executable.views) for node in executable.graph.nodes]
    groups = defaultdict(list)
    for call in calls:
        groups[f"{call.kernel.name} {call.grid}"].append(call)
    found = {}
    for name, group in groups.items():
        stream.begin_capture()
        for i in range(REPEATS):
            call = group[i % len(group)]
            stream.launch(call.kernel, call.grid, call.arguments)
        graph = stream.end_capture(name)
        seconds = best(lambda graph=graph: stream.replay(graph), stream.synchronize)
        found[name] = (len(group), seconds / REPEATS)
        graph.destroy()
    return found


def main() -> None:
    """Profile one model and print a table, most expensive first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-c", "--ctx-size", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1, help="tokens of the batch")
    parser.add_argument("--position", type=int, default=64, help="tokens before it")
    parser.add_argument(
        "--late", action="store_true", help="no kernel of a graph starts before its predecessor ends"
    )
    given = parser.parse_args()
    if given.late:
        cuda_stream.MOST_BLOCKS = 0
    rng = np.random.default_rng(0)
    with (
        refengine.load(resolve_model(given.model), device=given.device, n_ctx=given.ctx_size) as engine,
        engine.exclusive() as context,
    ):
        tokens = rng.integers(0, engine.config.n_vocab, given.position + given.rows).tolist()
        context.require(context.decode(Batch.of(tokens[: given.position], 0, 0, "none")))
        batch = Batch.of(tokens[given.position :], given.position, 0, "last")
        context.require(context.decode(batch))
        n_spans = context.settings.n_spans(given.position + given.rows)
        executable = context.executor.prepare(BatchShape(given.rows, 1, n_spans))
        rows = per_kernel(context, executable)
        print("| kernel, grid | launches | us each | us together |")
        print("|---|---|---|---|")
        for name, (n, seconds) in sorted(rows.items(), key=lambda row: -row[1][0] * row[1][1]):
            print(f"| {name} | {n} | {seconds * 1e6:.1f} | {n * seconds * 1e6:.0f} |")
        together = sum(n * seconds for n, seconds in rows.values())
        print(f"{sum(n for n, _ in rows.values())} launches, {together * 1e6:.0f} us one by one")
        replay = best(lambda: context.stream.replay(executable.captured), context.stream.synchronize)
        print(f"replay of the graph and wait: {replay * 1e6:.0f} us")
        decodes = []
        for _ in range(min(ROUNDS * 4, (given.ctx_size - context.length(0)) // given.rows)):
            batch = Batch.of(tokens[: given.rows], context.length(0), 0, "last", n_best=1)
            started = time.perf_counter()
            context.require(context.decode(batch))
            decodes.append(time.perf_counter() - started)
        print(f"decode of the likeliest token: {min(decodes) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
