"""Races and barriers inside a block, on the host: planted faults are found where they are, their twins are not."""

from __future__ import annotations

import numpy as np
import planted_races
import pytest
from engines import Bench
from planted_order import FAULTS
from planted_races import in_each_block, line_at, neighbours, promises

from instrumentation.levels import Level
from instrumentation.reports.text import render


@pytest.fixture
def bench():
    return Bench(Level.TRAP, threads=1)


def launch(bench, kernel, grid, arguments):
    """Finish a launch; what was found, in the order of the source."""
    arena = bench.arena()
    bound = {
        name: bench.put(arena, value, name) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }
    bench.stream.launch(kernel, grid, bound)
    bench.stream.synchronize()
    return bench.findings.list()


def lines(frames, marks):
    """Whether a stack begins at the marked lines."""
    return [frame.line for frame in frames[: len(marks)]] == [line_at(mark) for mark in marks]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
class TestPlantedFaults:
    def test_a_fault_is_found_with_both_lines_and_threads(self, bench, fault):
        found = launch(bench, fault.kernel, fault.grid, fault.arguments("bad"))
        assert {finding.code for finding in found} == {fault.code}
        [finding] = [f for f in found if lines(f.access, fault.marks) and lines(f.previous, fault.other)]
        assert finding.source == finding.access[0]
        assert finding.source.file == planted_races.__file__
        assert finding.column >= 5
        assert (finding.kernel, finding.argument) == (fault.kernel.name, fault.argument)
        assert (finding.stream, finding.actor, finding.device) == ("target", "target", "host")
        assert finding.access[len(fault.marks)].function == "launch"
        own, other = fault.threads
        assert finding.thread == own
        assert f"{own}" in finding.message
        assert f"thread {other}" in finding.message
        assert fault.says in "\n".join([finding.message, *finding.notes])
        assert ("Other access at:" in render(finding)) == bool(fault.other)

    def test_its_twin_is_not(self, bench, fault):
        assert launch(bench, fault.kernel, fault.grid, fault.arguments("fixed")) == ()


def test_there_are_enough():
    assert len(FAULTS) >= 30
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


BLOCKS = 300


def of_blocks(bench, **more):
    arena = bench.arena()
    x = bench.put(arena, np.arange(64 * BLOCKS, dtype=np.float32), "x")
    return {"x": x, "y": bench.put(arena, np.zeros(64 * BLOCKS, np.float32), "y"), "repaired": 0} | more


class TestFindings:
    def test_a_pair_of_accesses_is_one_finding_over_all_launches(self, bench):
        arguments = of_blocks(bench)
        for _ in range(3):
            bench.stream.launch(in_each_block, BLOCKS, arguments)
        bench.stream.synchronize()
        found = sorted((f.source.line, f.previous[0].line, f.count) for f in bench.findings)
        reader = line_at("even and odd")
        assert found == [
            (reader, line_at("even"), 3 * 64 * BLOCKS),
            (reader, line_at("odd"), 3 * 64 * BLOCKS),
        ]

    def test_many_threads_of_the_host_find_what_one_finds(self):
        bench = Bench(Level.TRAP, threads=2)
        bench.stream.launch(in_each_block, BLOCKS, of_blocks(bench))
        bench.stream.synchronize()
        assert [finding.count for finding in bench.findings] == [64 * BLOCKS] * 2

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_block_knows_nothing_of_the_shared_arrays_of_others(self, threads):
        bench = Bench(Level.TRAP, threads=threads)
        for _ in range(2):
            bench.stream.launch(in_each_block, BLOCKS, of_blocks(bench, repaired=1))
        bench.stream.synchronize()
        assert bench.findings.list() == ()

    def test_graphs_are_looked_at_at_each_replay(self, bench):
        arguments = of_blocks(bench)
        bench.stream.synchronize()
        bench.stream.begin_capture()
        bench.stream.launch(in_each_block, BLOCKS, arguments)
        graph = bench.stream.end_capture("step")
        for _ in range(2):
            bench.stream.replay(graph)
        bench.stream.synchronize()
        assert [finding.count for finding in bench.findings] == [2 * 64 * BLOCKS] * 2
        graph.destroy()

    def test_launches_do_not_race_with_each_other(self, bench):
        arguments = of_blocks(bench, repaired=1)
        bench.stream.launch(in_each_block, BLOCKS, arguments)
        bench.stream.launch(in_each_block, BLOCKS, arguments | {"x": arguments["y"], "y": arguments["x"]})
        bench.stream.synchronize()
        assert bench.findings.list() == ()

    def test_the_other_block_is_named_where_blocks_are_many(self, bench):
        x = bench.put(bench.arena(), np.zeros(64, np.float32), "x")
        y = bench.put(bench.arena(), np.zeros(64, np.float32), "y")
        bench.stream.launch(neighbours, (3, 2, 2), {"x": x, "y": y, "step": 1, "repaired": 1, "by_warp": 0})
        bench.stream.synchronize()
        (finding,) = bench.findings
        assert (finding.kind, finding.block, finding.count) == ("two blocks race", (1, 0, 0), 64 * 11)
        assert "not ordered behind thread (0, 0, 0) of block (0, 0, 0)" in finding.message


def test_the_report_of_a_race(bench):
    x, y = (bench.put(bench.arena(), np.zeros(64, np.float32), name) for name in "xy")
    bench.stream.launch(neighbours, 1, {"x": x, "y": y, "step": 32, "repaired": 0, "by_warp": 1})
    bench.stream.synchronize()
    (finding,) = bench.findings
    written, read = line_at("neighbour is written"), line_at("neighbour is read")
    lines = render(finding).splitlines()
    assert lines[:6] == [
        f"RAC001 two threads of a block race: target, kernel neighbours (tests/support/planted_races.py:{read}:12)",
        (
            "  load of tile[(t + step) % 64] as tile[32] in shared memory: thread (0, 0, 0) is not ordered behind "
            "thread (32, 0, 0), which came first here with the store of tile[t]"
        ),
        (
            f"  argument tile, launch {finding.launch}, block (0, 0, 0), thread (0, 0, 0), stream target, device host, "
            "context target"
        ),
        f"  note: the store of tile[t] is at line {written}, column 5",
        "  note: the threads are of two warps: only cuda.syncthreads() between the two orders them",
        "  found 64 times",
    ]
    assert lines[7:9] == ["Seen at:", f"  tests/support/planted_races.py:{read} in neighbours"]
    other = lines.index("Other access at:")
    assert lines[other + 1] == f"  tests/support/planted_races.py:{written} in neighbours"


def test_the_report_of_a_promise(bench):
    given = {
        "x": np.zeros(64, np.float32), "n": np.arange(64, dtype=np.int32), "y": np.zeros(64, np.float32), "how": 1
    }  # fmt: skip
    (finding,) = launch(bench, promises, 1, given)
    line, barrier = line_at("branch"), line_at("under a branch")
    assert render(finding).splitlines()[:5] == [
        (
            "SYN001 barrier reached by part of a block: target, kernel promises "
            f"(tests/support/planted_races.py:{line}:12)"
        ),
        (
            "  limits[t] > 2 is promised to be one value for the block: thread (0, 0, 0) does not reach "
            f"cuda.syncthreads() at line {barrier}; 61 of 64 threads, from (3, 0, 0) to (63, 0, 0), do"
        ),
        f"  launch {finding.launch}, block (0, 0, 0), thread (3, 0, 0), stream target, device host, context target",
        (
            f"  note: cuda.syncthreads() at line {barrier} is reached by part of the block; the block went on as its "
            "first thread does"
        ),
        "",
    ]
