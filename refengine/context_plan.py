"""What a context reserves, known before anything is: sizes, shapes and buffers of one role, target or draft."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from instrumentation.following import Extents
from instrumentation.ownership import Owner
from instrumentation.reservation import BufferRequest
from refengine.architectures import BUILDERS, DRAFT_BUILDERS
from refengine.batch import MicroBatchLimits
from refengine.fusion import fused
from refengine.graph import BatchShape, ContextShape
from refengine.kernels.attention import SPAN
from refengine.kernels.kv_types import PAGE
from refengine.kernels.select import CANDIDATES
from refengine.library_products import ARENA, by_library, requests
from refengine.memory.kv_cache import CacheShape
from refengine.memory.recurrent_state import RecurrentShape
from refengine.planner import plan

if TYPE_CHECKING:
    from refengine.config import ModelConfig
    from refengine.graph import Graph
    from refengine.kernels.kv_types import CacheType

Role = Literal["target", "draft"]
#: rows of logits that one micro-batch can give: a vocabulary of 250,000 makes each a megabyte
MAX_OUTPUTS = 32
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class ContextSettings:
    """Sizes of a context; see ``refengine.load`` for what they mean."""

    #: positions that a sequence can have
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_sequences: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    capture: bool
    #: positions of all sequences together; ``n_ctx`` unless given
    n_cells: int = 0
    #: tokens that a recurrent state can be rolled back
    n_rs_seq: int = 0
    #: whether the hidden states of all rows are kept for a draft context
    hands_over: bool = False
    #: reserve compute memory for the largest batch at load; otherwise it grows with what is computed
    worst_case_reserve: bool = True
    #: join operations into larger kernels, which changes no bit of what is computed; without, each tensor is there
    fuse: bool = True
    #: join them also where that takes more arithmetic or longer to compile, which pays on a GPU
    fewest_launches: bool = False
    #: find the candidates that a batch asks for on the device; without, it is given all logits
    chooses: bool = False
    #: give products of many rows to the device's library
    library: bool = False

    def __post_init__(self) -> None:
        assert min(self.n_ctx, self.n_batch, self.n_ubatch, self.n_sequences) >= 1, self
        assert min(self.n_rs_seq, self.n_cells) >= 0, self

    @property
    def n_pages(self) -> int:
        """Pages of the KV cache."""
        return -(-(self.n_cells or self.n_ctx) // PAGE)

    @property
    def n_hidden(self) -> int:
        """Rows of hidden states that are kept for a draft context: as many as a batch can have."""
        return min(self.n_batch, self.n_pages * PAGE) if self.hands_over else 0

    @cached_property
    def limits(self) -> MicroBatchLimits:
        """What one pass takes."""
        keep_tail = min(self.n_rs_seq + 1, self.n_ubatch, MAX_OUTPUTS)
        return MicroBatchLimits(self.n_ubatch, MAX_OUTPUTS, keep_tail)

    @property
    def worst_shapes(self) -> list[BatchShape]:
        """Batch shapes that need the most memory.

        A plan grows with each extent of its shape, so there is one for each thing that can be wanted of its rows.
        """
        n_tokens = min(self.n_ubatch, self.n_batch, self.n_pages * PAGE, self.n_ctx * self.n_sequences)
        n_outputs, n_spans = min(n_tokens, MAX_OUTPUTS), self.n_spans(self.n_ctx)
        wanted = (0, *CANDIDATES) if self.chooses else (0,)
        return [BatchShape(n_tokens, n_outputs, n_spans, n_best) for n_best in wanted]

    @property
    def reserved_shapes(self) -> list[BatchShape]:
        """Batch shapes whose compute memory is reserved at load."""
        return self.worst_shapes if self.worst_case_reserve else [BatchShape(1, 1, 1)]

    def n_spans(self, n_positions: int) -> int:
        """Spans that a graph covers for rows that see up to ``n_positions``: a power of two, or all that there are.

        Few different shapes, so that captured launches are used again, and never twice the work.
        """
        most = -(-self.n_ctx // SPAN)
        wanted = -(-n_positions // SPAN)
        return min(1 << (wanted - 1).bit_length(), most)


@dataclass(frozen=True)
class ContextPlan:
    """A model in a context of one role."""

    config: ModelConfig
    settings: ContextSettings
    role: Role = "target"

    @cached_property
    def owner(self) -> Owner:
        """Who the context's memory and stream belong to."""
        return Owner(self.role)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a KV cache: the trunk's, or the MTP block's."""
        return self.config.attention_layers if self.role == "target" else (self.config.n_layer,)

    @property
    def cache(self) -> CacheShape:
        """KV cache."""
        config, settings = self.config, self.settings
        return CacheShape(
            n_layer=len(self.attention_layers),
            n_head_kv=config.n_head_kv,
            head_dim=config.head_dim,
            n_ctx=settings.n_pages * PAGE,
            n_sequences=settings.n_sequences,
            type_k=settings.cache_type_k,
            type_v=settings.cache_type_v,
        )

    @property
    def recurrent(self) -> RecurrentShape | None:
        """Recurrent state; None without recurrent layers."""
        hybrid = self.config.hybrid
        if hybrid is None or self.role == "draft":
            return None
        return RecurrentShape(
            layers=self.config.recurrent_layers,
            n_head=hybrid.n_value_head,
            state_size=hybrid.state_size,
            n_channels=hybrid.n_channels,
            n_taps=hybrid.n_taps,
            n_sequences=self.settings.n_sequences,
            n_rs_seq=self.settings.n_rs_seq,
        )

    @property
    def rotary(self) -> list[BufferRequest]:
        """Cosine and sine tables: float32 [n_ctx, n_rot / 2] each."""
        nbytes = self.settings.n_ctx * (self.config.n_rot // 2) * _FLOAT_BYTES
        return [
            BufferRequest(nbytes=nbytes, owner=self.owner, name=f"rotary.{part}")
            for part in ("cosine", "sine")
        ]

    @property
    def extents(self) -> Extents:
        """Sizes that a context which follows this one must have, too."""
        row_nbytes = (self.config.n_rot // 2) * _FLOAT_BYTES
        return Extents(
            self.owner,
            {
                "positions": self.settings.n_ctx,
                "cells": self.settings.n_pages * PAGE,
                "sequences": self.settings.n_sequences,
                "rows of a batch": self.settings.n_batch,
                "rows of the rotary tables": min(table.nbytes for table in self.rotary) // row_nbytes,
            },
        )

    @property
    def kept_rows(self) -> tuple[str, int] | None:
        """Name and rows of the buffer of hidden states that outlives a graph: float32 [rows, n_embd].

        ``hidden``: those of a target's last batch, for its draft context; ``chain``: a draft's own of each sequence.
        """
        if self.role == "draft":
            return "chain", self.settings.n_sequences
        return ("hidden", self.settings.n_hidden) if self.settings.n_hidden else None

    @property
    def kept(self) -> list[BufferRequest]:
        """The buffer of ``kept_rows``."""
        if self.kept_rows is None:
            return []
        name, rows = self.kept_rows
        nbytes = rows * self.config.n_embd * _FLOAT_BYTES
        return [BufferRequest(nbytes=nbytes, owner=self.owner, name=name)]

    def graph(self, shape: BatchShape) -> Graph:
        """The graph that is run for one batch shape."""
        graph = self.model_graph(shape)
        if self.settings.library:
            graph = by_library(graph)
        if not self.settings.fuse:
            return graph
        return fused(graph, fewest=self.settings.fewest_launches)

    def model_graph(self, shape: BatchShape) -> Graph:
        """The model's graph for one batch shape, in elementary operations."""
        settings = self.settings
        context = ContextShape(settings.n_sequences, settings.n_pages, settings.n_hidden, settings.n_rs_seq)
        build = BUILDERS if self.role == "target" else DRAFT_BUILDERS
        return build[self.config.architecture](self.config, context, shape)

    @cached_property
    def library(self) -> list[BufferRequest]:
        """What a library works in: workspace, and a matrix as float32. Nothing when no batch has rows enough."""
        if not self.settings.library:
            return []
        return requests((self.graph(shape) for shape in self.settings.worst_shapes), self.owner)

    def arenas(self) -> list[tuple[str, list[list[BufferRequest]]]]:
        """Name and layouts, of which one is in use at a time, of each arena that a context reserves."""
        compute = [
            list(plan(self.graph(shape), self.owner).requests) for shape in self.settings.reserved_shapes
        ]
        recurrent = self.recurrent
        arenas = [
            ("kv", [self.cache.requests(self.owner)]),
            ("recurrent", [recurrent.requests(self.owner)] if recurrent is not None else []),
            ("rotary", [self.rotary]),
            ("kept", [self.kept] if self.kept else []),
            (ARENA, [self.library] if self.library else []),
            ("compute", compute),
        ]
        return [(name, layouts) for name, layouts in arenas if layouts]
