"""How a command ends when something goes wrong: one line on stderr, and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import click

from instrumentation.errors import Error, FindingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cli.report_file import ReportFile
    from refengine.engine import Engine

OK, FAILED, BAD_INPUT, OUT_OF_MEMORY, INTERRUPTED = 0, 1, 2, 3, 130
#: whoever read stdout went away: 128 + SIGPIPE, what a shell reports for other programs
BROKEN_PIPE = 141
_BREAK = "\n"
_NO_MEMORY = "this process cannot get more memory; ask for a smaller context or batch"


def report(error: BaseException, *, verbose: bool) -> int:
    """Print the one line that ``error`` deserves; returns the exit code."""
    match error:
        case BrokenPipeError():
            _forget_stdout()
            return BROKEN_PIPE
        case KeyboardInterrupt() | click.Abort():
            _print("interrupted")
            return INTERRUPTED
        case click.ClickException():
            _print(f"error: {_usage(error)}")
            return error.exit_code
        case Error():
            # The report of a finding has many lines, and the command prints it among its findings.
            text = str(error)
            _print(f"error: {text.partition(_BREAK)[0] if isinstance(error, FindingError) else text}")
            code: int = error.exit_code
        case MemoryError():
            _print(f"error: out of memory: {str(error) or _NO_MEMORY}")
            code = OUT_OF_MEMORY
        case OSError():
            where = f"{error.filename}: " if error.filename is not None else ""
            _print(f"error: {where}{error.strerror or error}")
            code = BAD_INPUT
        case _:
            hint = "" if verbose else " (-v shows where)"
            what = ": ".join(filter(None, (type(error).__name__, str(error))))
            _print(f"error: {what}; this is a bug{hint}")
            code = FAILED
            if verbose:
                traceback.print_exception(error)
    return code


def counts_findings(engine: Engine) -> bool:
    """Whether somebody asked for findings, and so is told that there are none."""
    return engine.options.check != "off" or engine.options.check_numerics


def end_engine(engine: Engine, kept: ReportFile | None = None) -> int:
    """Close, print what was found, and keep it where a file is given; returns the number of findings."""
    from instrumentation.reports.text import render  # noqa: PLC0415

    with contextlib.suppress(FindingError):  # leaks, which are among the findings
        engine.close()
    found = engine.findings
    if found or counts_findings(engine):
        for finding in found:
            click.echo(f"\n{render(finding)}\n", err=True)
        click.echo(f"{len(found)} finding{'s' * (len(found) != 1)}", err=True)
    if kept is not None:
        kept.add(found)
    return len(found)


def end_command(failed: Error | None, n_found: int, *, verbose: bool) -> None:
    """Exit as a command does that failed, or found something, or both: findings are 1 whatever came of them."""
    code = OK if failed is None else report(failed, verbose=verbose)
    if n_found or code:
        raise click.exceptions.Exit(FAILED if n_found else code)


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return error.format_message() + hint


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody is left to tell
        click.echo(f"refengine: {one_line(text)}", err=True)


def one_line(text: str) -> str:
    """Text of an error on one line, with what a terminal would act on escaped."""
    joined = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def _forget_stdout() -> None:
    """Let what is still buffered go nowhere, or the interpreter complains about the pipe when it ends."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), sys.stdout.fileno())


@contextlib.contextmanager
def one_interrupt() -> Iterator[None]:
    """Let a first Ctrl-C end the command in order, and a second one end the process at once."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return

    def first(_number: int, _frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
