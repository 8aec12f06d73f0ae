"""PyTorch #196257: memory went back to the driver while a kernel of another device, queued before, was to write it.

A copy from one device to another runs on the source's stream and writes the target by peer access. Its result goes out
of scope at once; the allocator knows that the block was used on its own device's streams, waits for those, and frees.
The writer's stream is none of them. Here the free is refused, and names the writer.
"""

from __future__ import annotations

import numpy as np
import pytest
from engines import TARGET, Bench, scale_by

from instrumentation.errors import FindingError

N = 64


class Cache:
    """A caching allocator: blocks that are given back are kept until the cache is emptied."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.arena = bench.arena(1 << 14)
        #: block -> streams that it was used on, as far as the allocator was told
        self.blocks = {}
        self.made = 0

    def take(self):
        block = self.arena.reserve(4 * N, owner=TARGET, name=f"block.{self.made}").unwrap()
        self.made += 1
        self.blocks[block] = [self.bench.stream]
        return block

    def record_stream(self, block, stream) -> None:
        self.blocks[block].append(stream)

    def empty(self) -> None:
        """Nobody holds a block any more: wait for the streams that used it, and free it."""
        for block, streams in list(self.blocks.items()):
            for stream in streams:
                stream.synchronize()
            block.free()
            del self.blocks[block]


class Copier:
    """Brings what lies on another device, by kernels on that device's stream."""

    def __init__(self, bench: Bench) -> None:
        self.cache = Cache(bench)
        self.source = bench.put(bench.arena(), np.ones(N, np.float32), "source")
        self.peer = bench.device.create_stream(owner=TARGET, name="peer")

    def copied(self):
        block = self.cache.take()
        view = block.view(np.float32, N)
        launch = {"x": self.source, "y": view, "factor": 1.0, "offset": 0}
        self.peer.launch(scale_by, 2, launch)
        return block

    def faulty(self) -> None:
        self.copied()
        self.cache.empty()

    def repaired(self) -> None:
        """The allocator is told of the stream that writes."""
        self.cache.record_stream(self.copied(), self.peer)
        self.cache.empty()


def test_the_first_report_names_the_block_and_its_writer(audited):
    copier = Copier(audited)
    with pytest.raises(FindingError, match="STR012"):
        copier.faulty()
    [finding] = audited.findings
    assert (finding.code, finding.buffer.name) == ("STR012", "block.0")
    assert "would give up bytes [0, 256) of block.0" in finding.message
    assert "kernel scale_by" in finding.message
    assert "on stream peer may still write" in finding.message
    assert "the host has waited for nothing that stream peer did" in finding.notes[1]
    assert finding.access[0].function == "Cache.empty"
    assert finding.previous[0].function == "Copier.copied"
    [block] = copier.cache.blocks
    assert block.live, "refused, so that the writer finds its memory"


def test_repaired_the_writers_stream_is_waited_for(audited):
    copier = Copier(audited)
    for _ in range(3):
        copier.repaired()
    assert copier.cache.blocks == {}
    assert audited.findings.list() == ()
    assert audited.allocator.check_integrity() == []
