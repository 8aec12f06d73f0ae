"""Slots of a scheduler, what one adds to a step, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from refengine.batch import Batch
from refengine.generation import DraftStatistics

if TYPE_CHECKING:
    from refengine.request import Request


@dataclass
class Slot:
    """A sequence of the context, with the request that runs in it."""

    number: int
    request: Request | None = None
    #: tokens that the sequence holds; those of the last request stay for one that begins with them
    held: list[int] = field(default_factory=list)
    #: step in which it was last decoded
    used: int = 0

    @property
    def pending(self) -> list[int]:
        """Tokens of its request that are not decoded yet: at least one."""
        assert self.request is not None, self
        return self.request.history[len(self.held) :]


@dataclass
class Block:
    """What a slot adds in a step: the next ``n_known`` tokens of its request, and drafts behind the last one."""

    slot: Slot
    n_known: int
    #: most drafts; only behind a request's last token
    n_draft: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def request(self) -> Request:
        """Request of the slot."""
        assert self.slot.request is not None, self
        return self.slot.request

    @property
    def reaches_end(self) -> bool:
        """Whether its rows give a new token."""
        return len(self.slot.held) + self.n_known == len(self.request.history)

    @property
    def tokens(self) -> list[int]:
        """Known tokens, then drafts."""
        return self.slot.pending[: self.n_known] + self.drafts

    def batch(self) -> Batch:
        """Rows to decode; what its request wants of them from the last known token on."""
        ids = np.array(self.tokens, np.int32)
        outputs = np.zeros(len(ids), np.bool_)
        if self.reaches_end:
            outputs[self.n_known - 1 :] = True
        start = len(self.slot.held)
        position = np.arange(start, start + len(ids), dtype=np.int32)
        return Batch(
            ids, position, np.full(len(ids), self.slot.number, np.int32), outputs, n_best=self.request.n_best
        )


@dataclass
class Statistics:
    """Counts since the scheduler was made."""

    steps: int = 0
    #: slots that ran a request, summed over the steps
    busy_slots: int = 0
    #: times that a batch found no room in the KV cache
    retries: int = 0
    preemptions: int = 0
    #: tokens that preempted requests had decoded
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    #: prompt tokens that a slot held already
    reused_tokens: int = 0
    #: decodes that failed, and were tried again for each request alone when there were several
    failed_decodes: int = 0
    draft: DraftStatistics = field(default_factory=DraftStatistics)

    @property
    def mean_busy_slots(self) -> float:
        """Slots that run a request, on average over the steps."""
        return self.busy_slots / self.steps if self.steps else 0.0
