"""A drafter that knows what the target will say: it forces how much of each draft is accepted, and checks its food."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from engines import same_bits
from slots import alone, hidden_of

from refengine.speculative import START

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from slots import Wish

    import refengine
    from refengine.speculative import Feed


class ScriptedDrafter:
    """Takes the place of an engine's drafter, whose rollback planes it needs: load with ``spec_type="draft-mtp"``.

    ``accept(position, n)``: how many of ``n`` drafts for ``position`` on shall be right; the one behind them is wrong.
    ``check_hidden``: compare every hidden row that is handed over with that of the text computed alone.
    """

    def __init__(
        self,
        engine: refengine.Engine,
        name: str,
        wishes: Sequence[Wish],
        accept: Callable[[int, int], int],
        *,
        eos: int | None = None,
        check_hidden: bool = True,
    ) -> None:
        self.engine, self.name, self.accept, self.check_hidden = engine, name, accept, check_hidden
        #: whole true texts
        self.texts = [(*wish.prompt, *alone(name, wish, eos).tokens) for wish in wishes]
        #: what each sequence was fed, by sequence
        self.fed: dict[int, list[int]] = {}
        #: sequences whose last token the target has yet to decode
        self.follows: dict[int, bool] = {}
        #: (position of the first draft, drafts, right ones) of each draft that was made
        self.made: list[tuple[int, int, int]] = []
        self.hidden_rows = 0
        engine.scheduler.drafter = self

    def feed(self, feeds: Sequence[Feed]) -> None:
        assert len({feed.sequence for feed in feeds}) == len(feeds), "a sequence twice"
        rows = self._rows()
        for feed in feeds:
            fed = self.fed.setdefault(feed.sequence, [])
            assert feed.start == len(fed), f"fed from {feed.start} where {len(fed)} is next"
            fed += feed.tokens
            texts = [text for text in self.texts if list(text[: len(fed)]) == fed]
            assert texts, f"sequence {feed.sequence} was fed what nobody says"
            self.follows[feed.sequence] = feed.drafts_follow
            # Of two texts with this beginning the hidden rows are the same.
            for position, row in enumerate(feed.hidden_rows, feed.start):
                assert (row == START) == (position == 0)
                if position and self.check_hidden:
                    assert same_bits(rows[row], hidden_of(self.name, texts[0])[position - 1]), position
                    self.hidden_rows += 1

    def _rows(self) -> np.ndarray:
        """Hidden rows of the target's last batch."""
        context = self.engine.context
        kept = context.kept["hidden"]
        rows = np.empty(kept.shape, np.float32)
        if self.check_hidden:
            context.stream.copy_out(rows, kept)
            context.stream.synchronize()
        return rows

    def draft(
        self, wanted: Mapping[int, int], histories: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        made = {}
        for sequence, n in wanted.items():
            history = list(histories[sequence])
            assert n >= 1
            assert self.follows.get(sequence), f"sequence {sequence} cannot draft"
            assert self.fed[sequence] == history, f"sequence {sequence} was fed other tokens"
            text = next((t for t in self.texts if list(t[: len(history)]) == history), None)
            assert text is not None, "the target says what it does not say alone"
            rest = list(text[len(history) : len(history) + n])
            right = min(self.accept(len(history), n), len(rest))
            drafts = rest[:right]
            if right < n:
                # The wrong one, and more behind it that are never reached.
                truth = rest[right] if right < len(rest) else 0
                drafts += [(truth + 1) % 290] * (n - right)
            made[sequence] = drafts
            self.made.append((len(history), n, right))
        return made

    def remove(self, sequence: int) -> None:
        self.fed.pop(sequence, None)
        self.follows.pop(sequence, None)

    def truncate(self, sequence: int, length: int) -> bool:
        fed = self.fed.get(sequence, [])
        if len(fed) < length:
            return False
        del fed[length:]
        self.follows.pop(sequence, None)
        return True
