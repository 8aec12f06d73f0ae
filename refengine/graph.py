"""A model's computation for one batch shape: named operations between named tensors.

Architectures build graphs, the planner places their tensors in memory, the executor launches their nodes. Tensor
names are those of other GGUF engines (``attn_norm-0``, ``result_output``), so that dumps can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["input", "compute", "output"]
#: what the first axis of a tensor counts: rows computed, rows whose logits are wanted, or neither of them
Rows = Literal["tokens", "outputs", "fixed"]
Setting = int | float | str


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a graph's shapes depend on: rows computed, rows whose logits are wanted, spans of cached positions.

    And what is wanted of those rows.
    """

    n_tokens: int
    n_outputs: int
    #: spans of ``refengine.kernels.attention.SPAN`` positions that attention covers
    n_spans: int
    #: candidates of each wanted row, one of ``refengine.kernels.select.CANDIDATES``; 0: all its logits
    n_best: int = 0

    def __post_init__(self) -> None:
        assert min(self.n_tokens, self.n_spans) >= 1, self
        assert 0 <= self.n_outputs <= self.n_tokens, self
        assert self.n_best == 0 or (self.n_best > 0 and self.n_outputs), self

    def __str__(self) -> str:
        best = f" best {self.n_best}" if self.n_best else ""
        return f"{self.n_tokens}x{self.n_outputs}x{self.n_spans}{best}"


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What a graph's shapes depend on for the whole life of a context."""

    #: sequences that one batch can hold
    n_sequences: int
    #: pages of the KV cache that one sequence can hold
    n_pages: int
    #: rows of the persistent buffer ``hidden`` in which the context hands hidden states over; 0: it hands none over
    n_hidden: int = 0
    #: tokens whose recurrent states can be rolled back
    n_rs_seq: int = 0

    def __post_init__(self) -> None:
        assert min(self.n_sequences, self.n_pages) >= 1, self
        assert min(self.n_hidden, self.n_rs_seq) >= 0, self


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the graph: shape in C order, element type. Weights and caches are named, not specified."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    kind: Kind
    rows: Rows

    def __post_init__(self) -> None:
        assert self.shape, self
        assert all(n >= 1 for n in self.shape), self

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. ``tensors``: role in the operation -> tensor it reads; ``weights``: role -> weight.

    ``others``: role -> further results beside ``output``. ``layer``: whose KV cache or recurrent state it uses.
    ``buffers``: role -> persistent buffer of the context, which outlives the graph and is neither planned nor a weight.
    """

    op: str
    tensors: Mapping[str, str]
    output: str | None
    weights: Mapping[str, str]
    settings: Mapping[str, Setting]
    layer: int | None
    others: Mapping[str, str]
    buffers: Mapping[str, str]

    @property
    def results(self) -> tuple[str, ...]:
        """Tensors that it writes."""
        return (*([self.output] if self.output is not None else []), *self.others.values())


@dataclass
class Graph:
    """Nodes in execution order, with every tensor that they name."""

    shape: BatchShape
    #: what the first axis of results counts from here on
    rows: Rows = "tokens"
    #: what names of results begin with from here on
    prefix: str = ""
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, TensorSpec] = field(default_factory=dict)

    def input(self, name: str, shape: tuple[int, ...], rows: Rows, dtype: Any = np.int32) -> str:
        """A tensor that the host fills before each run."""
        return self._tensor(name, shape, dtype, "input", rows)

    def add(
        self,
        op: str,
        name: str,
        shape: tuple[int, ...] | None,
        tensors: Mapping[str, str],
        *,
        weights: Mapping[str, str] | None = None,
        others: Mapping[str, tuple[str, tuple[int, ...], Any]] | None = None,
        buffers: Mapping[str, str] | None = None,
        layer: int | None = None,
        kind: Kind = "compute",
        **settings: Setting,
    ) -> str:
        """Append an operation whose result is the float32 tensor ``name``; ``shape`` None: it has no result.

        ``others``: role -> name, shape and element type of each further result. Returns the result's whole name.
        """
        name = self.prefix + name
        for tensor in tensors.values():
            assert tensor in self.tensors, f"{op} {name}: {tensor} is not in the graph yet"
        if shape is not None:
            self._tensor(name, shape, np.float32, kind, self.rows)
        further = {
            role: (self.prefix + result, extents, dtype)
            for role, (result, extents, dtype) in (others or {}).items()
        }
        for result, extents, dtype in further.values():
            self._tensor(result, extents, dtype, kind, self.rows)
        self.nodes.append(
            Node(
                op,
                MappingProxyType(dict(tensors)),
                None if shape is None else name,
                MappingProxyType(dict(weights or {})),
                MappingProxyType(settings),
                layer,
                MappingProxyType({role: result for role, (result, _, _) in further.items()}),
                MappingProxyType(dict(buffers or {})),
            )
        )
        return name

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: Any, kind: Kind, rows: Rows) -> str:
        assert name not in self.tensors, f"tensor {name} is in the graph already"
        counted = {"tokens": self.shape.n_tokens, "outputs": self.shape.n_outputs, "fixed": shape[0]}
        assert shape[0] == counted[rows], f"tensor {name} of shape {shape} has not as many rows as {rows}"
        self.tensors[name] = TensorSpec(name, shape, np.dtype(dtype), kind, rows)
        return name
