"""llama.cpp #12798: a captured graph went on with the addresses of a copy whose buffer lies elsewhere by now.

Each step plans its tensors anew. Pointers of some kinds of copy were updated in the captured graph, those of
``CONT`` and ``DUP`` nodes were not, so a replay read and wrote where they had been. Here a graph names views of
one layout of the compute memory; replayed under another one it is refused before it runs.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, scale_by

from instrumentation.allocator import BufferRequest
from instrumentation.errors import FindingError

N = 16


class Decoder:
    """Layouts of the compute memory by number of tokens, and the launches captured for them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.arena = self.bench.arena(1 << 14)
        self.layouts, self.graphs = {}, {}
        for n_tokens in (1, 2):
            requests = [
                BufferRequest(4 * N * n_tokens, TARGET, f"{name}-{n_tokens}") for name in ("src", "cont")
            ]
            name = f"compute {n_tokens}"
            self.layouts[n_tokens] = self.arena.reserve_overlay(requests, owner=TARGET, name=name).unwrap()

    def views(self, n_tokens: int):
        return [buffer.view(np.float32, N * n_tokens) for buffer in self.layouts[n_tokens].buffers]

    def capture(self, n_tokens: int):
        source, target = self.views(n_tokens)
        stream = self.bench.stream
        stream.begin_capture()
        stream.launch(scale_by, n_tokens, {"x": source, "y": target, "factor": 2.0, "offset": 0})
        return stream.end_capture(f"decode {n_tokens}")

    def step(self, n_tokens: int, key: int):
        """Run the graph kept under ``key`` with ones as its input; what it computed."""
        self.layouts[n_tokens].activate()
        source, target = self.views(n_tokens)
        self.bench.stream.copy_in(source, np.ones(N * n_tokens, np.float32))
        if key not in self.graphs:
            self.graphs[key] = self.capture(n_tokens)
        self.bench.stream.replay(self.graphs[key])
        return self.bench.get(target)

    def faulty(self, n_tokens: int):
        """One graph for all: its addresses are taken to be right still."""
        return self.step(n_tokens, 0)

    def repaired(self, n_tokens: int):
        """A graph for each layout."""
        return self.step(n_tokens, n_tokens)


def test_the_first_report_names_the_kernel_and_the_tensor_that_has_moved(bench):
    decoder = Decoder(bench)
    np.testing.assert_array_equal(decoder.faulty(1), np.full(N, 2))
    with pytest.raises(FindingError, match="MEM004"):
        decoder.faulty(2)
    [finding] = decoder.bench.findings
    assert finding.code == "MEM004"
    assert finding.kind == "use of a dormant buffer"
    assert (finding.kernel, finding.argument, finding.buffer.name) == ("scale_by", "x", "src-1")
    assert (finding.stream, finding.actor) == ("target", "target")
    assert "Decoder.step" in {frame.function for frame in finding.access}


def test_repaired_steps_of_both_sizes_take_turns(bench):
    decoder = Decoder(bench)
    for n_tokens in (1, 2, 1, 2):
        np.testing.assert_array_equal(decoder.repaired(n_tokens), np.full(N * n_tokens, 2))
    assert decoder.bench.findings.list() == ()
