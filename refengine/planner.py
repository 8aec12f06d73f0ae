"""Place a graph's tensors in memory: lifetimes -> buffers, before anything runs.

A buffer is used again only by tensors of exactly its size, so that each tensor ends where its buffer ends and the
guard bytes behind it are the tensor's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.reservation import BufferRequest

if TYPE_CHECKING:
    from instrumentation.ownership import Owner
    from refengine.graph import Graph


@dataclass(frozen=True)
class Plan:
    """Buffers to reserve, and which of them each tensor lives in."""

    requests: tuple[BufferRequest, ...]
    place: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Payload bytes, without alignment and guard bytes."""
        return sum(request.nbytes for request in self.requests)


def plan(graph: Graph, owner: Owner) -> Plan:
    """Lifetimes of a graph's tensors -> a plan. Inputs and outputs live through the whole run."""
    last_use = {name: -1 for name in graph.tensors}
    for i, node in enumerate(graph.nodes):
        for name in (*node.tensors.values(), *([node.output] if node.output else [])):
            last_use[name] = i
    requests: list[BufferRequest] = []
    place: dict[str, int] = {}
    free: dict[int, list[int]] = {}

    def put(name: str) -> None:
        nbytes = graph.tensors[name].nbytes
        if graph.tensors[name].kind == "compute" and free.get(nbytes):
            place[name] = free[nbytes].pop()
            return
        place[name] = len(requests)
        requests.append(BufferRequest(nbytes=nbytes, owner=owner, name=f"compute.{name}"))

    for spec in graph.tensors.values():
        if spec.kind == "input":
            put(spec.name)
    for i, node in enumerate(graph.nodes):
        if node.output is not None:
            put(node.output)
        # An operation's output never shares a buffer with its inputs: they are freed after it.
        for name in {*node.tensors.values(), *([node.output] if node.output else [])}:
            spec = graph.tensors[name]
            if last_use[name] == i and spec.kind == "compute":
                free.setdefault(spec.nbytes, []).append(place[name])
    return Plan(tuple(requests), place)
