"""Run a graph: place it by its plan, capture its launches once per batch shape, replay them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from instrumentation import interrupts
from refengine.errors import AbortedError
from refengine.library_products import GEMM
from refengine.operands import Operands, Step
from refengine.ops import OPS
from refengine.planner import Plan, plan

if TYPE_CHECKING:
    from instrumentation.allocator import Allocator
    from instrumentation.devices.base import Graph as CapturedGraph
    from instrumentation.devices.base import Stream
    from instrumentation.overlay import Overlay
    from instrumentation.ownership import Owner
    from instrumentation.reservation import ReservationError
    from instrumentation.view import View
    from refengine.graph import BatchShape, Graph, Node
    from refengine.kernels.kv_types import CacheType
    from refengine.library_products import LibraryProducts
    from refengine.weights import Weights

#: batch shapes whose captured launches are kept
MAX_EXECUTABLES = 16
Arrays = Mapping[str, npt.NDArray[Any]]
#: called with a graph, a node of it that was just queued, and where the graph's tensors are
Tap: TypeAlias = "Callable[[Graph, Node, Mapping[str, View]], None]"


@dataclass(frozen=True)
class Operations:
    """What nodes name besides the graph's own tensors."""

    weights: Weights
    #: keys and values by layer
    caches: Mapping[int, tuple[View, View]]
    #: convolution history and matrices by layer
    recurrent: Mapping[int, tuple[View, View]]
    #: element types of keys and of values
    cache_types: tuple[CacheType, CacheType]
    rotary: tuple[View, View]
    #: persistent buffers by the name that nodes have for them, such as ``hidden`` [n_hidden, n_embd]
    buffers: Mapping[str, View] = field(default_factory=dict)
    #: as ``Device.wide_loads``
    wide: bool = False
    #: the library that products of many rows are given to; None without one
    library: LibraryProducts | None = None

    def call(self, node: Node, views: Mapping[str, View]) -> Step:
        """What a node stands for on a stream: a launch, or a call of a library."""
        matrices = self.weights.matrices
        vectors = self.weights.vectors
        named = {**node.tensors, **node.others}
        layer = -1 if node.layer is None else node.layer
        operands = Operands(
            tensors={role: views[name] for role, name in named.items()},
            output=views[node.output] if node.output is not None else None,
            vectors={role: vectors[name] for role, name in node.weights.items() if name in vectors},
            matrices={role: matrices[name] for role, name in node.weights.items() if name in matrices},
            settings=node.settings,
            cache=self.caches.get(layer),
            recurrent=self.recurrent.get(layer),
            cache_types=self.cache_types,
            rotary=self.rotary,
            buffers={role: self.buffers[name] for role, name in node.buffers.items()},
            wide=self.wide,
            library=self.library,
        )
        return OPS[node.op](operands)


class Executable:
    """A graph in memory: a layout of the compute arena, views of its tensors, and its captured launches.

    Inputs are one buffer of the layout, and ``host_inputs`` is what is copied there: one array with a part for each.
    """

    def __init__(self, graph: Graph, overlay: Overlay, layout: Plan, handed: str | None = None) -> None:
        self.graph = graph
        mine = [node.output is not None or handed not in node.buffers.values() for node in graph.nodes]
        count = mine.index(False) if False in mine else len(mine)
        assert not any(mine[count:]), f"nodes behind the hand-over of {handed}: {graph.nodes[count:]}"
        #: what outputs come from, and behind it what only writes to the buffer that is handed over
        self.nodes, self.handing_over = graph.nodes[:count], graph.nodes[count:]
        self.overlay = overlay
        self.views: dict[str, View] = {
            spec.name: overlay.buffers[layout.place[spec.name]].view(
                spec.dtype, spec.shape, offset=layout.inputs.get(spec.name, 0), name=spec.name
            )
            for spec in graph.tensors.values()
        }
        #: whether the library has loaded what it needs for this shape, which a capture would not let it do
        self.may_capture = all(node.op != GEMM for node in graph.nodes)
        #: the launches of the first
        self.captured: CapturedGraph | None = None
        buffer = overlay.buffers[layout.place[next(iter(layout.inputs))]]
        self.inputs: View = buffer.view(np.uint8, buffer.nbytes)
        self.host_inputs: npt.NDArray[np.uint8] = np.zeros(buffer.nbytes, np.uint8)
        #: the part of each input
        self.parts: dict[str, npt.NDArray[Any]] = {}
        for name, offset in layout.inputs.items():
            spec = graph.tensors[name]
            part = self.host_inputs[offset : offset + spec.nbytes]
            self.parts[name] = part.view(spec.dtype).reshape(spec.shape)

    def fill(self, inputs: Arrays) -> None:
        """Put every input of the graph, in its shape, into ``host_inputs``, of which no copy may be under way."""
        assert inputs.keys() == self.parts.keys(), (list(inputs), list(self.parts))
        for name, part in self.parts.items():
            array = inputs[name]
            assert array.shape == part.shape, (name, array.shape, part.shape)
            part[...] = array

    def release(self) -> None:
        """Give up the captured launches, then the layout."""
        if self.captured is not None:
            self.captured.destroy()
        self.overlay.release()


class Executor:
    """Executes the graphs of one context on its stream, in its compute arena.

    ``handed``: a persistent buffer that another context reads behind an event. Nobody waits here for what writes to it.
    """

    def __init__(
        self,
        allocator: Allocator,
        stream: Stream,
        owner: Owner,
        build: Callable[[BatchShape], Graph],
        operations: Operations,
        *,
        capture: bool,
        handed: str | None = None,
    ) -> None:
        self.allocator = allocator
        self.stream = stream
        self.owner = owner
        self.build = build
        self.operations = operations
        self.capture = capture
        self.handed = handed
        #: batch shapes that are kept
        self.most = MAX_EXECUTABLES
        #: whether the arena was reserved for the largest plan, which no other may exceed
        self.worst_case = False
        self._tap: Tap | None = None
        self._executables: OrderedDict[BatchShape, Executable] = OrderedDict()

    def nbytes(self, shapes: list[BatchShape]) -> int:
        """Bytes of a compute arena in which each of these shapes, and each smaller one, fits."""
        return max(self.allocator.arena_size(plan(self.build(s), self.owner).requests) for s in shapes)

    @property
    def executables(self) -> tuple[Executable, ...]:
        """Those that are kept, the one that was used last at the end."""
        return tuple(self._executables.values())

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Batch shapes of ``executables``."""
        return tuple(self._executables)

    def reserve(self, nbytes: int, *, worst_case: bool = False) -> None:
        """Reserve the compute arena; raises ``OutOfMemoryError``.

        ``worst_case``: no plan will need more, and one that does is reported (RES003).
        """
        self.worst_case = worst_case
        self.arena = self.allocator.reserve_arena(nbytes, owner=self.owner, name="compute").unwrap()

    def prepare(self, shape: BatchShape) -> Executable | ReservationError:
        """The executable of a shape; the failure when its layout could not be reserved."""
        # What a hand-over, or an interrupted run, left in the queue must not run when another layout is active.
        self.stream.synchronize()
        known = self._executables.get(shape)
        if known is not None:
            self._executables.move_to_end(shape)
            return known
        while len(self._executables) >= self.most:
            self.evict(next(iter(self._executables)))
        graph = self.build(shape)
        layout = plan(graph, self.owner)
        name = f"compute {shape}"
        failure = self._make_room(layout, name)
        if failure is not None:
            return failure
        reservation = self.arena.reserve_overlay(layout.requests, owner=self.owner, name=name)
        if reservation.error is not None:
            return reservation.error
        executable = Executable(graph, reservation.value, layout, self.handed)
        self._executables[shape] = executable
        return executable

    def evict(self, shape: BatchShape) -> Executable:
        """Give up what is kept for a shape; nothing that is queued may need it."""
        executable = self._executables[shape]
        executable.release()
        del self._executables[shape]
        return executable

    def _make_room(self, layout: Plan, name: str) -> ReservationError | None:
        """Replace the arena by a larger one when a layout needs it, which a worst-case reservation rules out.

        The failure when there is no memory for it; then nothing has changed.
        """
        needed = self.allocator.arena_size(layout.requests)
        if needed <= self.arena.nbytes:
            return None
        # A tap has all tensors in memory, for which nothing was reserved.
        if self.worst_case and self._tap is None:
            self.arena.check_plan(layout.requests, name=name)
        larger = self.allocator.reserve_arena(needed, owner=self.owner, name="compute")
        if larger.error is not None:
            return larger.error
        self.release()
        self.arena = larger.value
        return None

    def run(self, executable: Executable, inputs: Arrays, outputs: Arrays) -> None:
        """Copy ``inputs`` in, run the graph, copy ``outputs`` out; returns when they are there.

        What the graph hands over is on its way then, behind everything else on the stream.

        ``inputs``: an array of its shape for each input of the graph. ``outputs``: C-contiguous, for those wanted.
        """
        executable.overlay.activate()
        try:
            executable.fill(inputs)
            self.stream.copy_in(executable.inputs, executable.host_inputs)
            self._queue_launches(executable)
            for name, array in outputs.items():
                self.stream.copy_out(array, executable.views[name])
            if executable.handing_over:
                self.stream.synchronize()
                # Not captured: graphs of many shapes hand the same rows over, and would be one graph many times.
                self._launch(executable, executable.handing_over)
                return
        except Exception:
            # What is queued already writes to cells that the caller gives up now.
            self.stream.synchronize()
            raise
        self.stream.synchronize()

    def _queue_launches(self, executable: Executable) -> None:
        if executable.captured is None and self.capture and executable.may_capture:
            executable.captured = self._captured(executable)
        if executable.captured is not None:
            self.stream.replay(executable.captured)
        else:
            self._launch(executable, executable.nodes)
            executable.may_capture = True

    def _captured(self, executable: Executable) -> CapturedGraph:
        self.stream.begin_capture()
        try:
            self._launch(executable, executable.nodes)
            return self.stream.end_capture(f"{self.owner} {executable.graph.shape}")
        finally:
            self.stream.abandon_capture()

    def _launch(self, executable: Executable, nodes: list[Node]) -> None:
        for node in nodes:
            if interrupts.pending():  # a first launch compiles its kernel, which takes a while
                raise AbortedError("interrupted")
            self.operations.call(node, executable.views).queue(self.stream)
            if self._tap is not None:
                self._tap(executable.graph, node, executable.views)

    @contextmanager
    def tapped(self, build: Callable[[BatchShape], Graph], tap: Tap) -> Iterator[None]:
        """Run graphs of ``build`` launch by launch, and call ``tap`` behind each launch.

        What the tap queues on the stream finds the node's results: memory that others take later still holds them.
        The compute arena grows where these graphs need more.
        """
        usual = self.build, self.capture
        self._forget()
        self.build, self.capture, self._tap = build, False, tap
        try:
            yield
        finally:
            self.build, self.capture = usual
            self._tap = None
            self._forget()

    def _forget(self) -> None:
        """Give up all executables, also when the stream can no longer be waited for."""
        try:
            self.stream.synchronize()
        finally:
            for executable in self._executables.values():
                executable.release()
            self._executables.clear()

    def check_integrity(self) -> None:
        """The compute arena has the layouts of the executables and no others. Raises AssertionError: a bug here."""
        used = {executable.overlay.serial for executable in self._executables.values()}
        assert self.arena.overlays.keys() == used, f"layouts {set(self.arena.overlays)}, in use {used}"

    def release(self) -> None:
        """Give everything back, also when the stream can no longer be waited for."""
        try:
            self._forget()
        finally:
            self.arena.release()
