"""What a request gives: text, tokens, why it ended, how long it took, how its drafts fared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: why a generation ended: end-of-generation token, n_predict reached, context full, or cancelled
FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(frozen=True)
class Timings:
    """Seconds and counts, in the groups that other engines print."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Decoded tokens a second; the first token comes from the prompt's own decode and is not counted."""
        return self.predicted_tokens / self.predicted_seconds if self.predicted_seconds > 0 else 0.0


@dataclass(frozen=True)
class DraftStatistics:
    """How many tokens were drafted, and how many of them the target would have chosen too."""

    #: decodes that verified at least one draft
    blocks: int = 0
    generated: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.accepted <= self.generated, self
        assert 0 <= self.blocks <= self.generated, self

    def __add__(self, other: DraftStatistics) -> DraftStatistics:
        return DraftStatistics(
            self.blocks + other.blocks, self.generated + other.generated, self.accepted + other.accepted
        )

    @property
    def acceptance(self) -> float:
        """Accepted of the generated, 0 to 1."""
        return self.accepted / self.generated if self.generated else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens that a verification gives: the accepted ones and the one chosen behind them."""
        return 1.0 + self.accepted / self.blocks if self.blocks else 0.0

    def __str__(self) -> str:
        return (
            f"draft acceptance = {self.acceptance:0.5f} ({self.accepted:5d} accepted / {self.generated:5d} generated), "
            f"mean len = {self.mean_length:5.2f}"
        )


@dataclass(frozen=True)
class Generation:
    """A finished generation."""

    text: str
    #: generated token ids, an end-of-generation token included
    tokens: list[int]
    prompt_tokens: list[int]
    finish_reason: FinishReason
    #: seed that reproduces the run
    seed: int
    timings: Timings
    #: float32 [len(tokens), n_vocab]: the logits that each generated token was chosen from, when asked for
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    draft: DraftStatistics = DraftStatistics()
    #: how often other requests needed its memory, and it was computed again
    preemptions: int = 0
