"""Hold Ctrl-C back while books are being changed.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread. In the middle of a change to the
ledger, or between taking a lock and entering its block, that would leave half a change or a lock that nobody opens.
Inside ``deferred()`` the signal is only noted; it is acted on when the outermost block is left.
"""

from __future__ import annotations

import importlib
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType, TracebackType

# Only the main thread receives signals, and only it touches these.
_depth = 0
_noted = False
_usual: Any = None
# What ``signal`` wraps: turning numbers into enums and back takes longer than all the rest of it.
_raw: Any = importlib.import_module("_signal")


def _note(_number: int, _frame: FrameType | None) -> None:
    global _noted  # noqa: PLW0603
    _noted = True


def enter() -> None:
    """Begin to hold interrupts back; ``leave`` must follow. Does nothing outside the main thread."""
    global _depth, _usual  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        return
    if _depth == 0:
        handler = _raw.getsignal(signal.SIGINT)
        if callable(handler):
            _usual = handler
            _raw.signal(signal.SIGINT, _note)
    _depth += 1


def leave() -> None:
    """End it; at the outermost level, act on an interrupt that came."""
    global _depth, _noted, _usual  # noqa: PLW0603
    if threading.current_thread() is not threading.main_thread():
        return
    _depth -= 1
    if _depth == 0 and _usual is not None:
        handler, _usual = _usual, None
        came, _noted = _noted, False
        _raw.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, None)


def pending() -> bool:
    """Whether an interrupt waits: long work asks now and then, and stops where its books are whole."""
    return _noted


class deferred:  # noqa: N801 - reads as a word: with deferred():
    """Context manager: interrupts wait until the block is left."""

    def __enter__(self) -> None:
        enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave()
