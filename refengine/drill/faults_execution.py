"""Faults of captured graphs, library handles and the ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from instrumentation.levels import Level
from instrumentation.memory_watch import GRANULE, TOLERANCE, MemoryWatch
from refengine.drill.fault import Fault
from refengine.executor import MAX_EXECUTABLES

if TYPE_CHECKING:
    from refengine.drill.scene import Call, Scene
    from refengine.library_products import LibraryProducts

GEMM = {"gemm": "cublas"}
_NO_LIBRARY = {"host": "it has no cuBLAS"}
_NO_COUNTER = {"host": "it has no memory of its own that could be counted"}
#: bytes that are taken at a time, and how often
_TAKEN, _TIMES = GRANULE + TOLERANCE // 2, 6


# --- captured graphs


def _pinned(scene: Scene) -> None:
    def act(call: Call) -> None:
        scene.caused(f"free of hidden before {call.where()}", call)
        scene.hidden.buffer.free()

    scene.before("copy_in", "target", act)


def _planned_anew(scene: Scene) -> None:
    """Between the activation of a layout and its graph's replay, another one takes its memory."""
    executor = scene.target.executor

    def act(call: Call) -> None:
        other = next(each for each in executor.executables if not each.overlay.active)
        scene.target.stream.synchronize()
        scene.caused(call.where(), call)
        other.overlay.activate()

    scene.before("replay", "target", act)


def _captured_anew(scene: Scene) -> None:
    """The graph of a batch shape is lost, but not destroyed: the next step captures it again."""

    def known(call: Call) -> bool:
        return scene.executable(call.given[0]).captured is not None

    def act(call: Call) -> None:
        executable = scene.executable(call.given[0])
        lost, executable.captured = executable.captured, None
        assert lost is not None
        scene.undo.callback(lost.destroy)
        scene.before("end_capture", "target", lambda again: scene.caused(again.where(), again))

    scene.before("copy_in", "target", act, known)


def _unbounded(scene: Scene) -> None:
    executor = scene.target.executor
    executor.most = 1 << 30
    scene.before(
        "end_capture", "target", lambda call: scene.caused(call.where(), call),
        lambda _call: len(executor.executables) > MAX_EXECUTABLES,
    )  # fmt: skip


def _during_capture(scene: Scene, *, reserves: bool) -> None:
    def act(call: Call) -> None:
        if reserves:
            scene.caused(f"reservation before {call.where()}", call)
            scene.scratch("drill.scratch", 256, scene.target.owner)
        else:
            scene.caused(f"synchronize before {call.where()}", call)
            scene.target.stream.synchronize()

    scene.before("launch", "target", act, lambda call: call.captured)


# --- libraries


def _library(scene: Scene) -> LibraryProducts:
    library = scene.target.executor.operations.library
    assert library is not None, "options say that there is one"
    return library


def _other_stream(scene: Scene) -> None:
    """Somebody sets the handle to the draft's stream, past the library's own interface."""
    handle, streams = _library(scene).handle, (scene.target.stream, scene.draft.stream)
    other: Any = streams[1]

    def act(call: Call) -> None:
        scene.caused(call.where(), call)
        with handle.calling() as library:
            library.calls.set_stream(handle.value, other.handle)
        # What comes there must have run before its memory goes.
        other.mark_pending()

    scene.before("call", "target", act)
    scene.undo.callback(streams[1].synchronize)
    scene.undo.callback(lambda: handle.set_stream(streams[0]))


def _workspace_reset(scene: Scene) -> None:
    """The handle is given its stream once more, which takes the workspace away."""
    handle = _library(scene).handle
    stream: Any = scene.target.stream

    def act(call: Call) -> None:
        scene.caused(call.where("workspace"), call)
        with handle.calling() as library:
            library.set_stream(handle.value, stream.handle)

    scene.before("call", "target", act)
    scene.undo.callback(lambda: handle.set_stream(scene.target.stream))


# --- the ledger


def _behind_its_back(scene: Scene) -> None:
    """With each step somebody takes memory from the driver, past the allocator."""
    device: Any = scene.engine.device
    if device.memory_watch is not None:
        # A drill is over in less than the seconds that a step of the staircase takes.
        watch = MemoryWatch(
            scene.engine.allocator,
            every=0.0,
            spacing=0.0,
            every_waits=1,
            warm_waits=None,
            tolerance=TOLERANCE,
        )
        device.memory_watch = watch
        watch.begin()
    driver = device.context.driver
    taken: list[int] = []

    def act(call: Call) -> None:
        scene.caused(f"allocation before {call.where()}", call)
        device.context.enter(again=True)
        taken.append(driver.allocate(_TAKEN))
        if len(taken) < _TIMES:
            scene.before("copy_in", "target", act)

    def give_back() -> None:
        device.context.enter(again=True)
        for address in taken:
            driver.free(address)

    scene.before("copy_in", "target", act)
    scene.undo.callback(give_back)


EXECUTION = (
    Fault(
        name="pinned-buffer-freed", code="GRA001", level=Level.OFF,
        what="the hidden states are freed, which a captured graph of the draft reads",
        plant=_pinned,
    ),
    Fault(
        name="replay-of-another-plan", code="GRA001", level=Level.AUDIT,
        what="a graph of the target is replayed when another layout has its memory",
        plant=_planned_anew, otherwise=frozenset({"MEM004"}),
    ),
    Fault(
        name="graph-captured-anew", code="GRA002", level=Level.AUDIT,
        what="the target loses the graph of a batch shape, and captures it again",
        plant=_captured_anew,
    ),
    Fault(
        name="graphs-without-bound", code="GRA002", level=Level.AUDIT, incident="I1", workload="shapes",
        what="the target keeps the graph of every batch shape that it ever met",
        plant=_unbounded,
    ),
    Fault(
        name="reservation-in-a-capture", code="GRA003", level=Level.AUDIT,
        what="memory is reserved between two launches of the target that are being captured",
        plant=lambda scene: _during_capture(scene, reserves=True),
    ),
    Fault(
        name="synchronize-in-a-capture", code="GRA003", level=Level.AUDIT,
        what="the host waits for the target's stream between two launches that are being captured",
        plant=lambda scene: _during_capture(scene, reserves=False),
    ),
    Fault(
        name="library-on-the-other-stream", code="LIB001", level=Level.AUDIT, options=GEMM, not_on=_NO_LIBRARY,
        what="the target's cuBLAS handle works on the draft's stream",
        plant=_other_stream,
    ),
    Fault(
        name="workspace-reset", code="LIB002", level=Level.AUDIT, options=GEMM, not_on=_NO_LIBRARY, incident="I1",
        what="the target's cuBLAS handle is given its stream again, which takes its workspace away",
        plant=_workspace_reset,
    ),
    Fault(
        name="memory-beside-the-ledger", code="ACC001", level=Level.AUDIT, not_on=_NO_COUNTER, incident="I1",
        what="each step takes memory from the driver, past the allocator",
        plant=_behind_its_back,
    ),
)  # fmt: skip
