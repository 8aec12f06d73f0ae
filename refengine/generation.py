"""What a generation returns, and how its text and timings come together."""

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
