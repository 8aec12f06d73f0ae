"""The one exception tree of the project, each class with the exit code that a command line ends with.

A message names the thing, the value seen, the value wanted, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class Error(Exception):
    """Root of every error that this project raises on purpose."""

    exit_code: ClassVar[int] = 1


class BadInputError(Error):
    """What the caller gave cannot be used: a file, an argument, a request."""

    exit_code: ClassVar[int] = 2


class KernelDialectError(BadInputError):
    """A kernel's source lies outside the dialect. The message starts with ``file:line``."""


class DeviceError(Error):
    """A device refused or failed a call. The message names the call and its owner."""


class OutOfMemoryError(Error):
    """Memory that was asked for is not there. Names the size, the owner and what holds the memory now."""

    exit_code: ClassVar[int] = 3


class FindingError(Error):
    """A finding that cannot be survived, or findings left at close. The message is the text report."""
