"""Several requests in one context: each step is one decode for all that can go on.

A request has a slot, whose sequence holds the tokens decoded for it. In each step a slot adds what it has not decoded
yet: a part of its prompt, or its last token with drafts behind it. Logits of the last token, and of drafts,
give new tokens; what the target would not have said is cut off again.

When the cells do not suffice, in this order: idle slots lose their prefixes, drafts are left out and parts of prompts
become smaller, the youngest request is preempted. It keeps its tokens and is computed again later, which gives the
same bits. The oldest running request is never preempted, and each step decodes at least one more token of it: so a
request that fits alone ends after no more steps than it has tokens, counted from when it is the oldest, and no
younger one is admitted before an older one.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import structlog

from instrumentation.errors import Error
from refengine.batch import Batch
from refengine.context import DecodeStatus
from refengine.errors import ContextSizeError
from refengine.generation import DraftStatistics
from refengine.kernels.kv_types import PAGE
from refengine.slots import Block, Slot, Statistics
from refengine.speculative import START, Feed

if TYPE_CHECKING:
    from refengine.context import Context
    from refengine.outputs import Rows
    from refengine.request import Request
    from refengine.speculative import Drafter

log = structlog.get_logger()
#: a request is admitted beside others when this part of all pages stays free for those to grow into
_SPARE = 8


class Scheduler:
    """Requests in slots of a target context, with drafts of ``drafter`` if there is one.

    Not safe for several threads at once: the engine holds a lock.
    """

    def __init__(self, context: Context, drafter: Drafter | None = None, n_draft: int = 0) -> None:
        self.context = context
        self.drafter = drafter
        #: most drafts behind a token
        self.n_draft = n_draft if drafter is not None else 0
        self.slots = [Slot(number) for number in range(context.settings.n_sequences)]
        #: waiting requests, oldest first
        self.queue: list[Request] = []
        self.statistics = Statistics()

    # --- requests

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.queue and not any(slot.request for slot in self.slots)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        bisect.insort(self.queue, request, key=lambda waiting: waiting.number)

    def cancel(self, request: Request) -> None:
        """End a request, and release what its slot holds; does nothing when it has ended."""
        if request.ended:
            return
        request.give_up()
        if request in self.queue:
            self.queue.remove(request)
        for slot in self.slots:
            if slot.request is request:
                self._empty(slot)

    def fail_all(self, error: Exception) -> None:
        """End everything with an error."""
        for request in self.queue:
            request.fail(error)
        self.queue.clear()
        for slot in self._running():
            self._fail(slot, error)

    def clear(self) -> None:
        """Preempt every request and drop every prefix: the whole context is free."""
        for slot in reversed(self._running()):
            self._preempt(slot)
        while self._drop_prefix():
            pass

    def drop_prefixes(self) -> None:
        """Forget what idle slots hold."""
        while self._drop_prefix():
            pass

    def step(self) -> bool:
        """One decode for all that can go on; False when there is nothing to do."""
        self._admit()
        blocks = self._fitting(self._wanted())
        if not blocks:
            return False
        self.statistics.steps += 1
        self.statistics.busy_slots += len(self._running())
        self._draft(blocks)
        try:
            self._decode(blocks)
        finally:
            # Nothing is under way between steps.
            self.context.settle()
        return True

    def _running(self) -> list[Slot]:
        """Slots with a request, oldest first."""
        busy = [(slot.request.number, slot) for slot in self.slots if slot.request is not None]
        return [slot for _, slot in sorted(busy, key=lambda pair: pair[0])]

    # --- admission

    def _admit(self) -> None:
        while self.queue:
            free = [slot for slot in self.slots if slot.request is None]
            if not free:
                return
            request = self.queue[0]
            # The one that holds most of it; of equals the one that was used least lately.
            slot = max(free, key=lambda s: (self._reusable(s, request), not s.held, -s.used))
            if len(free) < len(self.slots) and not self._has_room(slot, request):
                return
            del self.queue[0]
            self._start(slot, request)

    def _reusable(self, slot: Slot, request: Request) -> int:
        """Tokens of a request that a slot need not decode again.

        With a drafter the last common token is decoded again, for its hidden state.
        """
        common = 0
        limit = min(len(slot.held), len(request.history) - 1)
        while common < limit and slot.held[common] == request.history[common]:
            common += 1
        return max(0, common - 1) if self.drafter is not None else common

    def _has_room(self, slot: Slot, request: Request) -> bool:
        """Whether a request can be admitted beside those that run without starving them at once."""
        cache = self.context.cache
        idle = [s for s in self.slots if s.request is None and s is not slot]
        available = cache.free_pages + sum(cache.n_pages(s.number) for s in (*idle, slot))
        for other in self._running():
            assert other.request is not None
            available -= _pages(len(other.request.history) + 1) - cache.n_pages(other.number)
        return _pages(len(request.history) + 1) <= available - cache.shape.n_pages // _SPARE

    def _start(self, slot: Slot, request: Request) -> None:
        keep = self._reusable(slot, request)
        if not self._cut_back(slot, keep):
            keep = 0
            self._forget(slot)
        if self.drafter is not None and keep:
            assert keep + 1 <= len(request.history)
        del slot.held[keep:]
        slot.request = request
        self.statistics.reused_tokens += keep
        request.begin(keep)

    def _cut_back(self, slot: Slot, length: int) -> bool:
        """Let an idle slot hold its first ``length`` tokens alone; False when it cannot."""
        if self.drafter is not None and not (length and self.drafter.truncate(slot.number, length + 1)):
            return False
        return length == len(slot.held) or self.context.truncate(slot.number, length)

    # --- what a step decodes

    def _wanted(self) -> list[Block]:
        """Blocks of a step, oldest request first, ``n_batch`` tokens at most.

        First an equal share for each, of which a request that generates takes one token; then what is left, by age,
        for drafts and for the rest of prompts. When not all get something, the oldest does, then who waited longest.
        """
        running = self._running()
        budget = n_batch = self.context.settings.n_batch
        blocks = []
        for slot in sorted(running, key=lambda s: (s is not running[0], s.used)):
            # A tail that is larger than a share is taken whole, if only by who waited longest: it would wait for good.
            share = min(budget, max(1, n_batch // len(running)))
            n = self._whole(slot, share) or self._whole(slot, budget)
            if n:
                blocks.append(Block(slot, n))
                budget -= n
        blocks.sort(key=lambda block: block.request.number)
        for block in blocks:
            n = max(block.n_known, self._whole(block.slot, block.n_known + budget))
            budget -= n - block.n_known
            block.n_known = n
            block.n_draft = min(budget, self._most_drafts(block))
            budget -= block.n_draft
        return blocks

    def _whole(self, slot: Slot, n: int) -> int:
        """The next ``n`` tokens, or fewer so that what is left behind is no part of a tail that stays together."""
        pending = len(slot.pending)
        return pending if n >= pending else max(0, min(n, pending - self.context.settings.limits.keep_tail))

    def _most_drafts(self, block: Block) -> int:
        """Drafts that could still be used: behind a token that was generated, within what is asked and the context."""
        request = block.request
        generated = len(request.history) - len(request.ask.prompt)
        if not generated or block.n_known != 1 or not block.reaches_end:
            return 0
        left = self.n_draft
        if request.ask.n_predict != -1:
            left = min(left, request.ask.n_predict - generated - 1)
        return max(0, min(left, request.ask.n_ctx - len(request.history)))

    def _fitting(self, blocks: list[Block]) -> list[Block]:
        """Make blocks fit the free cells, or room for them."""
        while blocks:
            needed = {b.slot.number: b.n_known + b.n_draft for b in blocks}
            if self.context.cache.fits(needed):
                return blocks
            if self._drop_prefix():
                continue
            self.statistics.retries += 1
            log.warning(
                "failed to find free space in the KV cache, retrying with smaller batch size",
                n_tokens=sum(needed.values()),
                free=self.context.cache.free_positions,
            )
            if self._make_smaller(blocks):
                continue
            youngest = self._running()[-1]
            if len(self._running()) == 1:
                self._fail(youngest, ContextSizeError("Context size has been exceeded."))
            else:
                self._preempt(youngest)
            blocks = [b for b in blocks if b.slot is not youngest]
        return blocks

    def _make_smaller(self, blocks: list[Block]) -> bool:
        """Leave drafts out; when there are none, halve the parts of prompts. False when nothing can be smaller."""
        drafting = [b for b in blocks if b.n_draft]
        for block in drafting:
            block.n_draft = 0
        if drafting:
            return True
        changed = False
        for block in blocks:
            n = self._whole(block.slot, block.n_known // 2)
            changed |= 0 < n < block.n_known
            block.n_known = n or block.n_known
        return changed

    def _preempt(self, slot: Slot) -> None:
        request = slot.request
        assert request is not None, slot
        log.info("preempted", request=request.number, tokens=len(slot.held))
        self.statistics.preemptions += 1
        self.statistics.recomputed_tokens += len(slot.held)
        self._empty(slot)
        request.wait()
        self.submit(request)

    def _drop_prefix(self) -> bool:
        """Forget what the longest unused idle slot holds; False when none holds anything."""
        idle = [slot for slot in self.slots if slot.request is None and slot.held]
        if idle:
            self._forget(min(idle, key=lambda slot: slot.used))
        return bool(idle)

    # --- decoding

    def _draft(self, blocks: list[Block]) -> None:
        wanted = {b.slot.number: b.n_draft for b in blocks if b.n_draft}
        if self.drafter is None or not wanted:
            return
        made = self.drafter.draft(wanted, {b.slot.number: b.request.history for b in blocks})
        for block in blocks:
            block.drafts = made.get(block.slot.number, [])
            assert len(block.drafts) <= block.n_draft, block

    def _decode(self, blocks: list[Block]) -> None:
        """Decode blocks together; after a failure each alone, so that it ends only the requests that it hits."""
        try:
            status = self.context.decode(Batch.joined([block.batch() for block in blocks]))
            if status not in (DecodeStatus.OK, DecodeStatus.ABORTED):
                self.context.require(status)
        except Error as error:
            self.statistics.failed_decodes += 1
            if len(blocks) == 1:
                self._fail(blocks[0].slot, error)
                return
            log.warning("a decode failed, trying each request alone", requests=len(blocks), error=str(error))
            for block in blocks:
                self._decode([block])
            return
        if status == DecodeStatus.OK:
            self._settle(blocks, self.context.rows)

    def _settle(self, blocks: list[Block], rows: Rows) -> None:
        """Choose tokens from a batch's output rows, cut off what was not said, feed the drafter."""
        feeds = []
        row = output = 0
        for block in blocks:
            slot, before = block.slot, len(block.slot.held)
            tokens = block.tokens
            n_outputs = 1 + len(block.drafts) if block.reaches_end else 0
            slot.used = self.statistics.steps
            slot.held += tokens
            try:
                n_kept = self._choose(block, rows[output : output + n_outputs])
            except Error as error:
                self._fail(slot, error)
            else:
                feeds += self._finish(slot, block.request, before, row, n_kept)
            row += len(tokens)
            output += n_outputs
        if self.drafter is not None and feeds:
            self.drafter.feed(feeds)

    def _choose(self, block: Block, rows: Rows) -> int:
        """Take tokens while drafts are what the target says; returns how many rows of the block stay."""
        request, drafts = block.request, block.drafts
        before = request.draft
        accepted = 0
        for i, row in enumerate(rows):
            if drafts:
                # Counted before the token that may end the request: who waits in another thread sees the end at once.
                request.draft = before + DraftStatistics(1, len(drafts), accepted)
            token = request.take(row)
            self.statistics.generated_tokens += 1
            if request.ended or i == len(drafts) or token != drafts[i]:
                break
            accepted += 1
        if drafts:
            self.statistics.draft += DraftStatistics(1, len(drafts), accepted)
        return block.n_known + accepted

    def _finish(self, slot: Slot, request: Request, before: int, row: int, n_kept: int) -> list[Feed]:
        """Cut a slot back to the rows that stay, and say what its drafter is to learn of them."""
        if request.ended:
            slot.request = None
        keep = before + n_kept
        if keep < len(slot.held):
            if not self.context.truncate(slot.number, keep):
                # A state that cannot go back exactly is computed again, if anybody needs it.
                log.info("rollback refused", request=request.number, tokens=keep)
                self.statistics.recomputed_tokens += 0 if request.ended else keep
                self._forget(slot)
                return []
            del slot.held[keep:]
        if request.error is not None:
            self._forget(slot)
            return []
        if self.drafter is None:
            return []
        # Row i of the batch gives the drafter's row of the next position; behind an ended request only what is held.
        stop = min(len(slot.held) + (not request.ended), len(request.history), request.ask.n_ctx)
        tokens = request.history[before + 1 : stop]
        rows = list(range(row, row + len(tokens)))
        start = before + 1
        if before == 0:
            tokens, rows, start = [request.history[0], *tokens], [START, *rows], 0
        follows = not request.ended and stop == len(request.history)
        return [Feed(slot.number, tokens, start, rows, follows)] if tokens else []

    # --- ends

    def _fail(self, slot: Slot, error: Exception) -> None:
        request = slot.request
        assert request is not None, slot
        request.fail(error)
        self._empty(slot)

    def _empty(self, slot: Slot) -> None:
        slot.request = None
        self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        slot.held.clear()
        self.context.remove(slot.number)
        if self.drafter is not None:
            self.drafter.remove(slot.number)

    def check_integrity(self) -> None:
        """Slots and queue agree with each other and with the context. Raises AssertionError: a bug here."""
        numbers = [request.number for request in self.queue]
        assert numbers == sorted(numbers), "queue out of order"
        running = [slot.request for slot in self.slots if slot.request is not None]
        assert len({id(r) for r in (*running, *self.queue)}) == len(running) + len(self.queue), (
            "a request twice"
        )
        for slot in self.slots:
            assert self.context.length(slot.number) == len(slot.held), (
                f"slot {slot.number}: {len(slot.held)} held"
            )
            if slot.request is not None:
                assert slot.held == slot.request.history[: len(slot.held)], (
                    f"slot {slot.number} holds others' tokens"
                )
                assert slot.pending, f"slot {slot.number} has nothing to decode"
        assert all(r.status == "running" for r in running), "a running request that is not"


def _pages(n_positions: int) -> int:
    return -(-n_positions // PAGE)
