"""Faults of ownership and order: what belongs to the other context, and what nobody waits for."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from instrumentation.levels import Level
from refengine.drill.fault import Fault
from refengine.drill.faults_memory import PLAIN
from refengine.kernels.kv_types import PAGE

if TYPE_CHECKING:
    from refengine.context_plan import ContextPlan
    from refengine.drill.scene import Call, Scene

#: what a stream's handle held in incident I1: the address of something on the heap of the host
_HEAP = ctypes.create_string_buffer(64)


# --- ownership


def _other_cache(scene: Scene) -> None:
    """The target's step stores its keys in the draft's cache."""
    mine, other = scene.target.cache, scene.draft.cache

    def stores(call: Call) -> list[str]:
        return [
            name for name, view in call.views.items() if name in call.writes and view.buffer in mine.buffers
        ]

    def act(call: Call) -> None:
        name = stores(call)[0]
        scene.caused(call.where(name), call)
        call.exchange(name, other.layers[0][mine.buffers.index(call.views[name].buffer) % 2])

    scene.before("launch", "target", act, lambda call: bool(stores(call)))


def _other_stream(scene: Scene) -> None:
    """The first launch of the target's step goes to the draft's stream."""

    def act(call: Call) -> None:
        call.left_out = True
        scene.before("launch", "draft", lambda made: scene.caused(made.where(), made))
        kernel, grid, arguments = call.given
        scene.draft.stream.launch(kernel, grid, arguments)

    scene.before("launch", "target", act)


def _other_event(scene: Scene) -> None:
    event = scene.engine.device.create_event(owner=scene.draft.owner, name="event of the draft")
    scene.undo.callback(event.destroy)

    def act(call: Call) -> None:
        scene.caused(call.where(), call)
        call.given[0] = event

    scene.before("record", "target", act)


def _smaller_draft(plans: list[ContextPlan]) -> list[ContextPlan]:
    target, draft = plans
    return [target, replace(draft, settings=replace(draft.settings, n_cells=PAGE))]


def _lease_over(scene: Scene) -> None:
    def act(call: Call) -> None:
        scene.planted = f"end of the lease of hidden at {call.where()}"
        scene.caused_by_first("draft", scene.hidden.buffer)
        for lease in scene.hidden.buffer.leases:
            lease.end()

    scene.before("wait", "draft", act)


def _left_out(scene: Scene, kind: str, role: str) -> None:
    """One half of the hand-over is left out: the record on the target's stream, or the wait on the draft's."""

    def act(call: Call) -> None:
        scene.planted = f"{call.where()} left out"
        call.left_out = True
        scene.caused_by_first("draft", scene.hidden.buffer)

    scene.before(kind, role, act)


# --- streams


def _overwritten(scene: Scene, *, saturated: bool) -> None:
    """The target's stream is replaced by an address of the heap."""
    stream: Any = scene.target.stream

    def full(_call: Call) -> bool:
        return not saturated or scene.engine.scheduler.statistics.retries > 0

    def act(call: Call) -> None:
        scene.caused(f"handle of stream target before {call.where()}", call)
        stream.handle = ctypes.addressof(_HEAP)

    scene.before("copy_in", "target", act, full)


def _destroyed_event(scene: Scene) -> None:
    def act(call: Call) -> None:
        scene.caused(call.where(), call)
        call.given[0].destroy()

    scene.before("record", "target", act)


def _second_stream(scene: Scene, *, writes: bool) -> None:
    """The hidden states are on their way, and a second stream of the target touches them: nothing orders the two."""
    stream = scene.stream(scene.target.owner, "second")
    fetched = np.zeros(scene.hidden.shape, np.float32)

    def act(_call: Call) -> None:
        for kind in ("fill", "copy_out"):
            scene.before(kind, "second", lambda made: scene.caused(made.where(), made))
        if writes:
            stream.fill(scene.hidden, 0)
        else:
            stream.copy_out(fetched, scene.hidden)

    scene.before("record", "target", act)


def _evicted_in_use(scene: Scene) -> None:
    """The layout that the hand-over still reads is given up without waiting for it."""
    executor = scene.target.executor

    def act(call: Call) -> None:
        scene.caused(f"eviction of compute {executor.shapes[-1]} of target before {call.where()}")
        executor.evict(executor.shapes[-1])

    scene.before("record", "target", act)


def _read_early(scene: Scene) -> None:
    """The host looks at logits before it has waited for the copy that brings them."""

    def act(call: Call) -> None:
        scene.caused(f"host read behind {call.where()}", call)
        scene.engine.device.host_access(call.given[0], "read", owner=scene.target.owner)

    scene.behind("copy_out", "target", act)


ORDER = (
    Fault(
        name="cache-of-the-other", code="OWN001", level=Level.GUARD, options=PLAIN,
        what="the target's step stores its keys in the cache of the draft",
        plant=_other_cache,
    ),
    Fault(
        name="stream-of-the-other", code="OWN001", level=Level.GUARD, options=PLAIN,
        what="a launch of the target's step is queued on the stream of the draft",
        plant=_other_stream,
    ),
    Fault(
        name="event-of-the-other", code="OWN002", level=Level.GUARD,
        what="the target records an event of the draft behind its hidden states",
        plant=_other_event, consequences=frozenset({"OWN011", "OWN012"}),
    ),
    Fault(
        name="draft-too-small", code="OWN003", level=Level.OFF,
        what="the draft is loaded with fewer cells than its target",
        plans=_smaller_draft, planned="plan of kv of draft",
    ),
    Fault(
        name="lease-over", code="OWN010", level=Level.AUDIT,
        what="the hidden states are taken back before the draft reads them",
        plant=_lease_over, otherwise=frozenset({"OWN001"}),
    ),
    Fault(
        name="record-left-out", code="OWN011", level=Level.AUDIT,
        what="the target lends its hidden states behind an event that it did not record anew",
        plant=lambda scene: _left_out(scene, "record", "target"),
    ),
    Fault(
        name="wait-left-out", code="OWN012", level=Level.AUDIT,
        what="the draft's stream does not wait for the event behind the hidden states",
        plant=lambda scene: _left_out(scene, "wait", "draft"),
    ),
    Fault(
        name="stream-overwritten", code="STR001", level=Level.GUARD, safe_from=Level.GUARD,
        what="the handle of the target's stream holds an address of the host's heap",
        plant=lambda scene: _overwritten(scene, saturated=False),
    ),
    Fault(
        name="stream-overwritten-under-saturation", code="STR001", level=Level.GUARD, safe_from=Level.GUARD,
        incident="I1", workload="saturated",
        what="the same with four requests that fill the KV cache, after batches were tried again",
        plant=lambda scene: _overwritten(scene, saturated=True),
    ),
    Fault(
        name="event-destroyed", code="STR001", level=Level.OFF,
        what="the event of the hand-over is destroyed, and recorded",
        plant=_destroyed_event,
    ),
    Fault(
        name="second-writer", code="STR010", level=Level.AUDIT,
        what="a second stream of the target clears the hidden states while a launch still writes them",
        plant=lambda scene: _second_stream(scene, writes=True),
    ),
    Fault(
        name="second-reader", code="STR011", level=Level.AUDIT,
        what="a second stream of the target copies the hidden states out while a launch still writes them",
        plant=lambda scene: _second_stream(scene, writes=False),
    ),
    Fault(
        name="evicted-in-use", code="STR012", level=Level.AUDIT, options=PLAIN,
        what="a layout of the target is given up while a launch that reads it waits to run",
        plant=_evicted_in_use,
    ),
    Fault(
        name="logits-read-early", code="STR013", level=Level.AUDIT,
        what="the host reads the target's logits before it has waited for their copy",
        plant=_read_early,
    ),
)  # fmt: skip
