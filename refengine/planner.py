"""Place a graph's tensors in memory: lifetimes -> buffers, before anything runs.

A buffer is used again only by tensors of exactly its size, so that each tensor ends where its buffer ends and the
guard bytes behind it are the tensor's own. Tensors that count different rows never share one, although their sizes
may be equal by chance: so what is shared does not depend on the batch shape, and a plan grows with each extent of it.

Inputs lie one behind the other in a buffer of their own, ``compute.inputs``, so that one copy fills them all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.reservation import BufferRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from instrumentation.ownership import Owner
    from refengine.graph import Graph, Node, Rows, TensorSpec


#: inputs start at multiples of this many bytes of their buffer
INPUT_ALIGNMENT = 64


@dataclass(frozen=True)
class Plan:
    """Buffers to reserve, and which of them each tensor lives in."""

    requests: tuple[BufferRequest, ...]
    place: Mapping[str, int]
    #: first byte of each input in the buffer of all inputs, which holds nothing else; other tensors have their buffer
    #: to themselves while they live
    inputs: Mapping[str, int]

    def __post_init__(self) -> None:
        assert len({self.place[name] for name in self.inputs}) <= 1, self
        assert all(offset % INPUT_ALIGNMENT == 0 for offset in self.inputs.values()), self

    @property
    def nbytes(self) -> int:
        """Payload bytes, without alignment and guard bytes."""
        return sum(request.nbytes for request in self.requests)


def plan(graph: Graph, owner: Owner) -> Plan:
    """Lifetimes of a graph's tensors -> a plan. Inputs and outputs live through the whole run."""
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in _named_by(node)}
    requests: list[BufferRequest] = []
    place: dict[str, int] = {}
    free: defaultdict[tuple[Rows, int], list[int]] = defaultdict(list)

    def put(spec: TensorSpec) -> None:
        reusable = free[spec.rows, spec.nbytes] if spec.kind == "compute" else []
        if reusable:
            place[spec.name] = reusable.pop()
        else:
            place[spec.name] = len(requests)
            requests.append(BufferRequest(nbytes=spec.nbytes, owner=owner, name=f"compute.{spec.name}"))

    inputs = [spec for spec in graph.tensors.values() if spec.kind == "input"]
    offsets, nbytes = _packed(inputs)
    if inputs:
        place.update(dict.fromkeys(offsets, len(requests)))
        requests.append(BufferRequest(nbytes=nbytes, owner=owner, name="compute.inputs"))
    for i, node in enumerate(graph.nodes):
        for name in node.results:
            put(graph.tensors[name])
        # An operation's output never shares a buffer with its inputs: they are freed after it.
        for name in _named_by(node):
            spec = graph.tensors[name]
            if last_use[name] == i and spec.kind == "compute":
                free[spec.rows, spec.nbytes].append(place[name])
    return Plan(tuple(requests), place, offsets)


def _packed(inputs: Iterable[TensorSpec]) -> tuple[dict[str, int], int]:
    """Offset of each input, and the bytes of all: the last one ends where the buffer ends."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in inputs:
        offsets[spec.name] = -(-end // INPUT_ALIGNMENT) * INPUT_ALIGNMENT
        end = offsets[spec.name] + spec.nbytes
    return offsets, end


def _named_by(node: Node) -> dict[str, None]:
    """Tensors of a node, each once, in an order that does not change from process to process."""
    return dict.fromkeys((*node.tensors.values(), *node.results))
