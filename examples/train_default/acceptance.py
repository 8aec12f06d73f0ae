"""Speculative decoding simulated in PyTorch: how many drafts of the MTP block an engine would accept.

With greedy sampling the text does not depend on drafts, so it is made first; then every draft that an engine would make
along it is a row of one teacher-forced pass, because a draft behind a wrong one is never accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from model import Qwen35
    from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """Drafts made and accepted, counted as an engine prints them."""

    generated: int
    accepted: int
    #: rounds of drafting: decodes of the target
    rounds: int

    @property
    def rate(self) -> float:
        """Accepted of generated."""
        return self.accepted / max(1, self.generated)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a decode of the target gives, its own one included."""
        return 1 + self.accepted / max(1, self.rounds)


@torch.no_grad()
def continue_greedily(model: Qwen35, prompts: Tensor, n_predict: int) -> Tensor:
    """Prompts (B, P) -> (B, P + n_predict), everything computed anew for each token."""
    tokens = prompts
    for _ in range(n_predict):
        best = model.logits(model.hidden(tokens)[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, best], dim=1)
    return tokens


@torch.no_grad()
def accepted_drafts(model: Qwen35, tokens: Tensor, n_prompt: int, n_max: int = 3) -> Acceptance:
    """Count along tokens (B, N) that a model said behind ``n_prompt`` of them."""
    rows = model.drafted(tokens, model.hidden(tokens), n_max)
    following = tokens[:, 1:]
    # right[s][p]: the draft of step s at row p is token p + 1
    right = torch.stack([model.logits(row).argmax(-1)[:, :-1] == following for row in rows]).cpu()
    generated = accepted = rounds = 0
    for sequence in range(tokens.shape[0]):
        p = n_prompt  # the first token that the target said
        while p + n_max < tokens.shape[1]:
            n = 0
            while n < n_max and right[n, sequence, p + n]:
                n += 1
            generated, accepted, rounds = generated + n_max, accepted + n, rounds + 1
            p += n + 1
    return Acceptance(generated, accepted, rounds)
