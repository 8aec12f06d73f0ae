"""A scheduler that several threads may use: one lock, one step at a time, and a thread for what nobody waits for."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from instrumentation import interrupts
from refengine.errors import RequestError
from refengine.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from refengine.request import Ask
    from refengine.scheduler import Scheduler
    from refengine.tokenizer import Tokenizer

#: seconds after which who waits for another thread's work looks again
_POLL = 0.05
_CLOSED = "the engine is closed; load the model again"


class Service:
    """Makes requests of a scheduler progress; the ``Driver`` of each of them."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.closed = False
        # Held for one step.
        self.lock = threading.RLock()
        #: the thread that works while nobody waits; None when nothing is to be done
        self.pump: threading.Thread | None = None
        self._numbers = itertools.count(1)
        self._changing = False
        #: a computation beside the requests has the context
        self._lent_out = False
        #: requests that were cancelled in the middle of a change
        self._given_up: list[Request] = []

    def queue(self, ask: Ask) -> Request:
        """Queue a request; raises ``RequestError`` when closed."""
        with self.lock, self._change():
            self._require_open()
            request = Request(next(self._numbers), ask, self.tokenizer, self)
            self.scheduler.submit(request)
        return request

    def start_pump(self) -> None:
        """Let a thread work until nothing is queued."""
        with self.lock:
            if self.pump is None:
                self.pump = threading.Thread(target=self._run_pump, name="refengine", daemon=True)
                self.pump.start()

    def drive(self, timeout: float | None = None) -> None:
        """Do one step of the work that is queued, or wait while another thread does, up to ``timeout`` seconds."""
        # Deferred: an interrupt between the lock and the block that opens it would leave it locked for good.
        with interrupts.deferred():
            if not self.lock.acquire(timeout=_POLL if timeout is None else min(max(timeout, 0.0), _POLL)):
                return
            try:
                self._require_open()
                self.require_settled()
                self._step()
            finally:
                self.lock.release()

    def cancel(self, request: Request) -> None:
        """End a request and give its memory back; does nothing when it has ended."""
        with self.lock, interrupts.deferred():
            if self._changing:
                # A stream that nobody holds any more is closed by the garbage collector, at any time.
                self._given_up.append(request)
            else:
                self.scheduler.cancel(request)

    def drop_prefixes(self) -> None:
        """Forget the tokens that slots keep of ended requests."""
        with self.lock:
            self.require_settled()
            with self._change():
                self.scheduler.drop_prefixes()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """No step while the block runs, and every sequence empty; requests that ran are computed again later."""
        with self.lock:
            self._require_open()
            self.require_settled()
            with self._change():
                self.scheduler.clear()
            try:
                self._lent_out = True
                yield
            finally:
                self._lent_out = False

    def close(self, release: Callable[[], None]) -> bool:
        """Fail what has not ended, call ``release``, wait for the thread; False when closed before."""
        with self.lock:
            if self.closed:
                return False
            self.require_settled()
            self.closed = True
            with self._change():
                self.scheduler.fail_all(RequestError(_CLOSED))
                release()
            pump = self.pump
        if pump is not None and pump is not threading.current_thread():
            pump.join()
        return True

    def _step(self) -> None:
        with self._change():
            self.scheduler.step()

    def _run_pump(self) -> None:
        while True:
            with self.lock:
                if self.closed or self.scheduler.is_idle:
                    self.pump = None
                    return
                try:
                    self._step()
                except Exception as error:  # noqa: BLE001 - whoever waits for a request is told
                    self.scheduler.fail_all(error)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the scheduler's books; the lock is held. Interrupts, and what is cancelled meanwhile, wait."""
        with interrupts.deferred():
            outer, self._changing = self._changing, True
            try:
                yield
            finally:
                self._changing = outer
                while self._given_up and not outer:
                    self.scheduler.cancel(self._given_up.pop())

    def _require_open(self) -> None:
        if self.closed:
            raise RequestError(_CLOSED)

    def require_settled(self) -> None:
        """Raises ``RequestError`` for what ``on_finding`` asks for: it is called in the middle of a step.

        So is what who has the context for itself asks of the engine: it would run in the sequences that are in use.
        """
        if self._changing or self._lent_out:
            raise RequestError("the engine is in the middle of a step; ask again when it is done")
