"""Where log lines go when a command line runs the engine. Importing the library configures nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import structlog

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from structlog.typing import Processor

LogFormat: TypeAlias = Literal["auto", "console", "json"]
FORMATS: tuple[LogFormat, ...] = ("auto", "console", "json")


def level_of(verbosity: int) -> int:
    """Least level that is logged: errors at -1 and below, warnings at 0, info at 1, all at 2 and above."""
    if verbosity < 0:
        return logging.ERROR
    return (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbosity, 2)]


def configure(verbosity: int = 0, log_format: str = "auto") -> None:
    """Send log lines to stderr.

    ``auto`` writes keys and values for people on a terminal, otherwise one JSON object a line. Colours need a
    terminal, and an unset ``NO_COLOR`` (https://no-color.org). Raises ``BadInputError`` for another format.
    """
    if log_format not in FORMATS:
        raise BadInputError(f"log format {log_format!r} is unknown; use one of {', '.join(FORMATS)}")
    terminal = sys.stderr.isatty()
    plain = log_format == "console" or (log_format == "auto" and terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if plain:
        colours = terminal and not os.environ.get("NO_COLOR")
        shared.append(
            structlog.dev.ConsoleRenderer(
                colors=colours, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        )
    else:
        shared += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(level_of(verbosity)),
        logger_factory=_to_stderr,
        cache_logger_on_first_use=False,
    )


@contextlib.contextmanager
def lines(chosen: tuple[int, str] | None) -> Iterator[None]:
    """Log with a verbosity and in a format meanwhile; None: nothing at all."""
    configured, before = structlog.is_configured(), structlog.get_config()
    if chosen is None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    else:
        configure(*chosen)
    try:
        yield
    finally:
        if configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()


def _to_stderr(*_names: Any) -> structlog.PrintLogger:
    # Looked up at each line: whoever replaces sys.stderr later gets the lines too.
    return structlog.PrintLogger(sys.stderr)
