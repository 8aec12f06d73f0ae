"""Faults inside kernels: indices, memory that nobody wrote, memory that is gone, order of threads, numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.allocator import Allocator
from instrumentation.levels import Level
from instrumentation.reservation import BufferRequest
from refengine.drill.fault import Fault
from refengine.drill.kernels import linger
from refengine.drill.variants import n_barriers, with_half_a_barrier, without_barrier
from refengine.kernels.kv_types import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from instrumentation.devices.launch import Argument
    from instrumentation.kernel import Kernel
    from refengine.drill.scene import Call, Scene

#: of the attention kernels, behind what each thread puts where the others read it
_BARRIER = 1
_PLAIN_THREADS = {"cuda": "checked kernels on CUDA look at no order of threads"}
#: additions that a launch waits behind: on a GPU some milliseconds each million
_ROUNDS = {"cuda": 4_000_000}
_LINGERING = 5
_SCRATCH_NBYTES = 1024


def _input(scene: Scene, name: str, value: Callable[[Scene], int]) -> None:
    """One number of what the target's step is given is out of range."""

    def act(call: Call) -> None:
        executable = scene.executable(call.given[0])
        scene.planted = f"{name}[0] of {call.where()}"
        executable.parts[name][0] = value(scene)
        # The bad thing is the access, and so the launch that makes it.
        view = executable.views[name]
        scene.before(
            "launch", "target", lambda made: scene.caused("", made), lambda made: view in made.views.values()
        )

    scene.before("copy_in", "target", act)


def _left_out(scene: Scene) -> None:
    """The first launch of a batch shape's first run is left out: nothing ever wrote what it would have."""

    def act(call: Call) -> None:
        scene.caused(f"{call.where()} left out", call)
        call.left_out = True

    scene.before("launch", "target", act)


def _freed_under_way(scene: Scene) -> None:
    """A launch reads a buffer that is freed while it waits to run, of an allocator that nobody watches."""
    device: Any = scene.engine.device
    owner, stream = scene.target.owner, scene.target.stream
    level = scene.engine.level
    allocator = Allocator(device, level=level, findings=scene.engine.allocator.findings)
    allocator.keep_shadows(level >= Level.TRAP)
    scene.undo.callback(allocator.close)
    arena = allocator.reserve_arena(1 << 16, owner=owner, name="unwatched").unwrap()
    scene.undo.callback(arena.release)
    requests = [BufferRequest(_SCRATCH_NBYTES, owner, f"unwatched.{name}") for name in ("x", "y")]
    x, y = (buffer.view(np.float32, _SCRATCH_NBYTES // 4) for buffer in arena.reserve_all(requests).unwrap())
    scene.undo.callback(y.buffer.free)
    long: dict[str, Argument] = {
        "x": y.slice(1, y.size),
        "y": y.slice(0, 1),
        "rounds": _ROUNDS.get(device.kind.lower(), 1),
    }

    def act(_call: Call) -> None:
        for view in (x, y):
            stream.fill(view, 0)
        stream.synchronize()
        for _ in range(_LINGERING):
            stream.launch(linger, 1, long)
        scene.before("launch", "target", lambda made: scene.caused(made.where("x"), made))
        stream.launch(linger, 1, {"x": x, "y": y, "rounds": 1})
        x.buffer.free()

    scene.before("copy_in", "target", act)


def _changed(scene: Scene, change: Callable[[Kernel], Kernel]) -> None:
    """A kernel of the step runs with another text."""

    def ordered(call: Call) -> bool:
        kernel: Kernel = call.given[0]
        return kernel.name.startswith("attention") and n_barriers(kernel) > _BARRIER

    def act(call: Call) -> None:
        scene.caused(call.where(), call)
        call.given[0] = change(call.given[0])

    scene.before("launch", "target", act, ordered)


def _nan(scene: Scene) -> None:
    """A weight of the target's first norm becomes NaN in memory."""
    weights = scene.engine.weights.vectors
    view = weights[next(name for name in weights if "attn_norm" in name)]
    scene.planted = f"element 1 of {view.name}"
    scene.caused_by_first("target", view.buffer)
    scene.engine.device.fill_bytes(view.address + 4, 4, 0xFF)


KERNELS = (
    Fault(
        name="token-out-of-range", code="MEM010", level=Level.TRAP, safe_from=Level.TRAP,
        what="the token id of a row is one more than the vocabulary has, behind the check of the batch",
        plant=lambda scene: _input(scene, "tokens", lambda scene: scene.engine.config.n_vocab),
    ),
    Fault(
        name="cell-out-of-range", code="MEM011", level=Level.TRAP, safe_from=Level.TRAP,
        what="the cell of a row is the first one behind the KV cache",
        plant=lambda scene: _input(scene, "cell", lambda scene: scene.target.settings.n_pages * PAGE),
        consequences=frozenset({"MEM012"}),
    ),
    Fault(
        name="launch-left-out", code="MEM012", level=Level.TRAP,
        what="the launch that looks embeddings up is missing in the first run of a batch shape",
        plant=_left_out,
    ),
    Fault(
        name="freed-under-a-launch", code="MEM013", level=Level.TRAP,
        what="memory of an allocator that nobody watches is freed while a launch of the target that reads it waits",
        plant=_freed_under_way,
    ),
    Fault(
        name="barrier-left-out", code="RAC001", level=Level.TRAP, not_on=_PLAIN_THREADS,
        what="the target's attention kernel runs without one of its barriers",
        plant=lambda scene: _changed(scene, lambda kernel: without_barrier(kernel, _BARRIER)),
    ),
    Fault(
        name="barrier-for-half-a-block", code="SYN001", level=Level.OFF,
        what="a barrier of the target's attention kernel stands under a condition of the thread",
        plant=lambda scene: _changed(scene, lambda kernel: with_half_a_barrier(kernel, _BARRIER, promised=False)),
    ),
    Fault(
        name="promise-not-kept", code="SYN001", level=Level.TRAP, not_on=_PLAIN_THREADS,
        what="the same, and the source promises that the condition is that of all threads",
        plant=lambda scene: _changed(scene, lambda kernel: with_half_a_barrier(kernel, _BARRIER, promised=True)),
        consequences=frozenset({"RAC001"}),
    ),
    Fault(
        name="weight-not-a-number", code="NUM001", level=Level.OFF, options={"check_numerics": True},
        what="one element of the target's first norm becomes NaN in memory",
        plant=_nan,
    ),
)  # fmt: skip
