"""Faults of reservations and memory: what is dropped, refused, overrun, freed too early, twice, or never."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from instrumentation.faults import FaultPlan
from instrumentation.levels import Level
from refengine.context_plan import ContextPlan, ContextSettings
from refengine.drill.fault import Fault
from refengine.drill.kernels import stray
from refengine.graph import BatchShape

if TYPE_CHECKING:
    from instrumentation.view import View
    from refengine.drill.scene import Call, Scene
    from refengine.planner import Plan

#: compute memory grows with the prompt, as in incident I2
GROWING = {"worst_case_reserve": False}
#: launches are made one by one in every step
PLAIN = {"cuda_graphs": False}
_SCRATCH_NBYTES = 1024


# --- reservations


def _unchecked(scene: Scene, *, fails: bool) -> None:
    """The compute arena is to grow for a longer prompt; nobody asks whether it did."""
    executor = scene.target.executor

    def make_room(layout: Plan, _name: str) -> None:
        needed = executor.allocator.arena_size(layout.requests)
        if needed > executor.arena.nbytes:
            scene.caused("reservation of compute of target")
            if fails:
                scene.injector.plan = FaultPlan.nth(scene.injector.sites + 1, "reserve")
                scene.injector.enabled = True
            reserve = executor.allocator.reserve_arena
            reserve(
                needed, owner=executor.owner, name="compute"
            )  # lint: reserve-ok that it is dropped is planted
            scene.injector.enabled = False

    setattr(executor, "_make_room", make_room)  # noqa: B010 - a type checker refuses to assign a method


def _refused(scene: Scene) -> None:
    scene.caused("reservation of compute of target")
    scene.injector.plan = FaultPlan.nth(1, "reserve")
    scene.injector.enabled = True


class _ShortSighted(ContextSettings):
    """Sizes that take one token at a time for the worst that can come."""

    @property
    def reserved_shapes(self) -> list[BatchShape]:
        """See ``ContextSettings``."""
        return [BatchShape(1, 1, 1)]


def _too_small_a_worst_case(plans: list[ContextPlan]) -> list[ContextPlan]:
    target = plans[0]
    given = {each.name: getattr(target.settings, each.name) for each in fields(ContextSettings)}
    return [replace(target, settings=_ShortSighted(**given)), *plans[1:]]


# --- redzones


def _stray(scene: Scene, at: int, view: View) -> None:
    """A launch more in the step: it writes one element of ``view``, counted from the first."""

    def act(call: Call) -> None:
        scene.before("launch", "target", lambda made: scene.caused(made.where("y"), made), _is_stray)
        scene.target.stream.launch(stray, 1, {"y": view, "at": at})
        del call

    scene.before("launch", "target", act)


def _is_stray(call: Call) -> bool:
    return call.given[0] is stray


def _flat(view: View) -> View:
    return view.buffer.view(np.float32, view.buffer.nbytes // 4)


def _past_the_redzone(scene: Scene) -> None:
    """From keys into the middle of the values behind them in the same arena: no guard byte lies there."""
    keys, values = scene.target.cache.layers[0]
    inside = values.address + values.nbytes // 2 - keys.address
    _stray(scene, inside // 4, _flat(keys))


# --- freed memory


def _poked(scene: Scene) -> None:
    """A buffer is freed; something kept its address."""
    buffer = scene.scratch("drill.scratch", _SCRATCH_NBYTES, scene.target.owner)

    def act(call: Call) -> None:
        buffer.free()
        scene.caused(f"write to drill.scratch before {call.where()}")
        scene.engine.device.fill_bytes(buffer.address + 64, 4, 0x41)

    scene.before("copy_in", "target", act)


def _given_up(scene: Scene) -> None:
    """A launch is given a view of a layout that was evicted."""
    executor = scene.target.executor
    kept = executor.evict(next(iter(executor.shapes))).views

    def stale(call: Call) -> dict[str, View]:
        alike = {}
        for name, view in call.views.items():
            other = kept.get(view.name)
            if name not in call.writes and other is not None and other.ndim == view.ndim:
                alike[name] = other
        return alike

    def act(call: Call) -> None:
        name, view = next(iter(stale(call).items()))
        scene.caused(call.where(name), call)
        call.exchange(name, view)

    scene.before("launch", "target", act, lambda call: bool(stale(call)))


def _freed_twice(scene: Scene) -> None:
    buffer = scene.scratch("drill.scratch", _SCRATCH_NBYTES, scene.target.owner)

    def act(call: Call) -> None:
        buffer.free()
        scene.caused(f"free of drill.scratch before {call.where()}")
        buffer.free()

    scene.before("copy_in", "target", act)


def _view_freed(scene: Scene) -> None:
    def act(call: Call) -> None:
        scene.caused(f"free of hidden before {call.where()}")
        foreign: object = scene.hidden
        scene.engine.allocator.free(foreign)  # type: ignore[arg-type]

    scene.before("copy_in", "target", act)


def _forgotten(scene: Scene) -> None:
    """A layout leaves the books of the executor, and nobody gives it up."""
    executor = scene.target.executor
    shape = next(iter(executor.shapes))
    scene.caused(f"eviction of compute {shape} of target")
    executor._executables.pop(shape)  # noqa: SLF001 - what an engine with this bug would do


MEMORY = (
    Fault(
        name="failed-reservation-dropped", code="RES001", level=Level.OFF, incident="I2",
        what="the compute arena cannot grow for a longer prompt, and nobody looks whether it did",
        plant=lambda scene: _unchecked(scene, fails=True), options=GROWING, consequences=frozenset({"RES002"}),
    ),
    Fault(
        name="reservation-dropped", code="RES001", level=Level.OFF,
        what="the compute arena grows for a longer prompt, and the result is dropped unseen",
        plant=lambda scene: _unchecked(scene, fails=False), options=GROWING, consequences=frozenset({"RES002"}),
    ),
    Fault(
        name="reservation-refused", code="RES002", level=Level.OFF, incident="I2",
        what="there is no memory for the compute arena of a longer prompt",
        plant=_refused, options=GROWING,
    ),
    Fault(
        name="plan-beyond-the-worst-case", code="RES003", level=Level.OFF, incident="I2",
        what="compute memory of the target is reserved for one token, as the largest batch that can come",
        plans=_too_small_a_worst_case, planned="plan of compute of target",
    ),
    Fault(
        name="write-left", code="MEM001", level=Level.GUARD, safe_from=Level.GUARD,
        what="a kernel of the target's step writes the element before the first of the hidden states",
        plant=lambda scene: _stray(scene, -1, _flat(scene.hidden)), otherwise=frozenset({"MEM011"}),
    ),
    Fault(
        name="write-right", code="MEM002", level=Level.GUARD, safe_from=Level.GUARD,
        what="a kernel of the target's step writes the element behind the last of the hidden states",
        plant=lambda scene: _stray(scene, scene.hidden.size, _flat(scene.hidden)), otherwise=frozenset({"MEM011"}),
    ),
    Fault(
        name="write-after-free", code="MEM003", level=Level.GUARD,
        what="memory of the target is written by its address after it was freed",
        plant=_poked,
    ),
    Fault(
        name="view-of-an-evicted-layout", code="MEM004", level=Level.GUARD, options=PLAIN,
        what="a launch of the target reads a tensor of a batch shape that was given up",
        plant=_given_up,
    ),
    Fault(
        name="freed-twice", code="MEM005", level=Level.OFF,
        what="a buffer of the target is freed a second time in the middle of a step",
        plant=_freed_twice,
    ),
    Fault(
        name="view-freed", code="MEM005", level=Level.OFF,
        what="the view of the hidden states is freed, and not their buffer",
        plant=_view_freed,
    ),
    Fault(
        name="layout-forgotten", code="MEM006", level=Level.OFF, options=PLAIN,
        what="the layout of a batch shape of the target is dropped from the books, and never given up",
        plant=_forgotten,
    ),
    Fault(
        name="write-past-the-redzone", code="MEM011", level=Level.TRAP,
        what="a kernel of the target's step writes from the keys into the middle of the values behind them",
        plant=_past_the_redzone,
    ),
)  # fmt: skip
