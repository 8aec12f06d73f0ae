"""What a decode gives of a row whose logits are wanted: all of them, or the likeliest tokens with theirs.

A model of 250,000 tokens makes a megabyte of logits for each row; who takes the likeliest token needs eight bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from refengine.errors import ComputeError
from refengine.kernels.select import CANDIDATES

if TYPE_CHECKING:
    from collections.abc import Collection


class Candidates(NamedTuple):
    """The likeliest tokens of a row, the highest logit first, of equal ones the lowest id. Both arrays [n].

    They are all that the row has when ``n`` is less than what was asked for.
    """

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    #: logits of the row, and how many of them are NaN or infinite; NaN is not among the candidates
    n_vocab: int
    n_bad: int

    def require_finite(self, position: int | None) -> None:
        """Raise ``ComputeError`` if a logit of the row is NaN or infinite."""
        if self.n_bad:
            at = "" if position is None else f" at position {position}"
            raise ComputeError(
                f"{self.n_bad} of {self.n_vocab} logits{at} are not finite; find the first bad tensor with "
                "--check-numerics"
            )

    def with_logit(self, tokens: Collection[int], logit: np.float32) -> Candidates:
        """As if these tokens had this logit: the likeliest, as many fewer than before as there are tokens."""
        if self.n_bad:
            return self  # for the sampler to refuse
        whole = len(self.ids) == self.n_vocab
        n = len(self.ids) - (0 if whole else len(tokens))
        if not whole and self.logits[-1] > logit:
            # They go below everything that is here.
            kept = [i for i, token in enumerate(self.ids.tolist()) if token not in tokens][:n]
            return Candidates(self.ids[kept], self.logits[kept], self.n_vocab, self.n_bad)
        others = ~np.isin(self.ids, list(tokens))
        ids = np.concatenate([self.ids[others], np.array(sorted(tokens), np.int32)])
        logits = np.concatenate([self.logits[others], np.full(len(tokens), logit, np.float32)])
        order = np.lexsort((ids, -logits))[:n]
        return Candidates(ids[order], logits[order], self.n_vocab, self.n_bad)


#: logits of one row, float32 [n_vocab], or its candidates; and of several
Row: TypeAlias = "npt.NDArray[np.float32] | Candidates"
Rows: TypeAlias = "npt.NDArray[np.float32] | list[Candidates]"


def at_least(n: int) -> int:
    """How many candidates to ask for who needs ``n``; 0, which is whole rows, when no kernel finds as many."""
    assert n >= 1, n
    return next((k for k in CANDIDATES if k >= n), 0)


def candidates_of(best: npt.NDArray[np.int32], n_vocab: int) -> list[Candidates]:
    """Candidates of rows as ``refengine.kernels.select.best_of_rows`` packs them: [n_rows, 2 * k + 1]."""
    k = best.shape[1] // 2
    logits = best.view(np.float32)
    found = []
    for row, (last, n_bad) in enumerate(zip(best[:, k - 1].tolist(), best[:, 2 * k].tolist(), strict=True)):
        n = k if last >= 0 else int(np.count_nonzero(best[row, :k] >= 0))
        found.append(Candidates(best[row, :n], logits[row, k : k + n], n_vocab, n_bad))
    return found
