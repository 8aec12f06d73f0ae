"""The drill over the fake CUDA driver: the same faults through the CUDA device's code, and those of it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from engines import DATA
from fake_cublas import blas_device

from instrumentation.levels import Level
from refengine.drill import FAULTS, Drill, Fault
from refengine.drill.kernels import stray

if TYPE_CHECKING:
    from refengine.drill.scene import Call, Scene

MODEL = DATA / "qwen35.gguf"
#: checked kernels take long to compile, and tests/gpu runs all of them
CHOSEN = [fault for fault in FAULTS if fault.level < Level.TRAP and fault.workload == "text"]
NOT_ON_CUDA = [fault for fault in FAULTS if "cuda" in fault.not_on]


def run(*faults: Fault) -> dict:
    return {row.fault: row for row in Drill(MODEL, faults, device=blas_device).run()}


@pytest.fixture(scope="module")
def rows() -> dict:
    return run(*CHOSEN)


@pytest.mark.parametrize("fault", CHOSEN, ids=lambda fault: fault.name)
def test_a_fault_is_found_at_the_level_of_the_host(rows: dict, fault: Fault):
    row = rows[fault.name]
    assert (row.status, row.level, row.false_reports) == ("found", fault.found_at, ()), row.why
    late = {"write-after-free", "layout-forgotten", "memory-beside-the-ledger"}
    assert (row.distance > 0) == (fault.name in late)


def test_order_inside_a_block_is_nothing_that_it_looks_at():
    rows = run(*NOT_ON_CUDA)
    assert {row.code for row in rows.values()} == {"RAC001", "SYN001"}
    for fault in NOT_ON_CUDA:
        row = rows[fault.name]
        assert (row.status, row.why, row.ok) == ("not on this device", fault.not_on["cuda"], True)


def test_a_graph_is_checked_as_one_launch():
    """Where several launches of a graph write a buffer none is blamed: the distance goes to the graph's end."""
    written: list[object] = []
    counts = {"before": 0, "launches": 0}

    def plant(scene: Scene) -> None:
        def again(call: Call) -> bool:
            """A captured launch whose result lies where another one's did."""
            counts["before"] += call.captured
            if not call.captured or "y" not in call.writes:
                return False
            written.append(call.views["y"].buffer)
            return written.count(written[-1]) > 1

        def act(call: Call) -> None:
            view = call.views["y"]
            flat = view.buffer.view(np.float32, view.buffer.nbytes // 4)
            scene.before("launch", "target", lambda made: scene.caused("stray", made))
            scene.target.stream.launch(stray, 1, {"y": flat, "at": flat.size})

        def replayed(call: Call) -> None:
            counts["launches"] = call.given[0].launches

        scene.before("launch", "target", act, again)
        scene.before("replay", "target", replayed)

    fault = Fault(
        name="stray-in-a-graph",
        code="MEM002",
        level=Level.GUARD,
        safe_from=Level.GUARD,
        what="planted",
        plant=plant,
    )
    [row] = run(fault).values()
    assert row.status == "found"
    assert row.found.startswith("graph target ")
    # The launch in front of which it stands was counted, and stands behind it.
    assert row.distance == counts["launches"] - counts["before"] > 10
