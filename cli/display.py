"""Progress on stderr: live on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = structlog.get_logger("cli")
#: a log line for each tenth of the weights
_STEPS = 10


class Display:
    """What is going on. Nothing is drawn once text was written: it would stand in the same line."""

    def __init__(self, *, live: bool) -> None:
        self.live = live
        self.compiled = 0
        self._step = -1
        self._console: Any = None
        self._status: Any = None
        self._bar: Any = None
        self._line = False
        if live:
            from rich.console import Console  # noqa: PLC0415 - a fifth of the start-up time

            self._console = Console(stderr=True)

    def weights(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of weights are loaded."""
        if not self.live:
            step = done * _STEPS // total
            if step > self._step:
                self._step = step
                _log.info("loading weights", done=done, total=total)
            return
        if self._bar is None:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn  # noqa: PLC0415

            self._bar = Progress(
                TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True),
                console=self._console, transient=True,
            )  # fmt: skip
            self._bar.add_task("weights", total=total)
            self._bar.start()
        self._bar.update(self._bar.tasks[0].id, completed=done)
        if done >= total:
            self.clear()

    def compiling(self, kernel: str) -> None:
        """A kernel is about to be compiled, which is done once for a machine."""
        self.compiled += 1
        _log.info("compiling kernel", kernel=kernel)
        if not self.live or self._bar is not None:
            return
        text = f"compiling kernels, once for this machine: {self.compiled}, {kernel}"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)

    def measuring(self, text: str, event: str = "measuring") -> None:
        """Say what is done from here on. Nothing moves meanwhile: that would take a part of its time."""
        self.clear()
        _log.info(event, step=text)
        if self.live:
            self._console.print(text, end="", markup=False, highlight=False)
            self._line = True

    @property
    def drawing(self) -> bool:
        """Whether something is drawn now."""
        return self._bar is not None or self._status is not None or self._line

    def clear(self) -> None:
        """Take down what is drawn."""
        for drawn in (self._bar, self._status):
            if drawn is not None:
                drawn.stop()
        self._bar = self._status = None
        if self._line:
            from rich.control import Control  # noqa: PLC0415
            from rich.segment import ControlType  # noqa: PLC0415

            self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._line = False

    def text_follows(self) -> None:
        """Draw nothing from here on."""
        self.clear()
        self.live = False


@contextlib.contextmanager
def display(*, quiet: bool) -> Iterator[Display]:
    """A display that hears of weights by ``progress=display.weights``, and of every kernel that is compiled."""
    from instrumentation.kernel import compile_listeners  # noqa: PLC0415 - imports Numba

    shown = Display(live=sys.stderr.isatty() and not quiet)
    compile_listeners.append(shown.compiling)
    try:
        yield shown
    finally:
        compile_listeners.remove(shown.compiling)
        shown.clear()
