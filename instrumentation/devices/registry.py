"""Handles of streams and events as the driver gave them, apart from the objects that carry them.

A handle that changed behind us is what incident I1 came down to: the stream of a library call was a host heap address.
"""

from __future__ import annotations

from typing import Any


class HandleRegistry:
    """What was made here and not destroyed yet, each with its handle."""

    def __init__(self) -> None:
        self._given: dict[object, tuple[int, Any]] = {}

    def add(self, thing: object, handle: Any) -> None:
        """A stream or event was made."""
        self._given[thing] = (handle_value(handle), handle)

    def given(self, thing: object) -> Any:
        """The handle that was given for it; None when it is not known."""
        return self._given.get(thing, (0, None))[1]

    def find(self, value: int) -> Any:
        """What has this handle now; None when nothing has."""
        return next((thing for thing, (known, _) in self._given.items() if known == value), None)

    def remove(self, thing: object) -> None:
        """It was destroyed."""
        self._given.pop(thing, None)

    def problem(self, thing: object, handle: Any) -> str | None:
        """What is wrong with a handle that is about to be used; None when it is the one that was given."""
        known = self._given.get(thing)
        if known is None:
            return "is not one that this device has created"
        value = handle_value(handle)
        if value != known[0]:
            return f"has the handle {value:#x}, and {known[0]:#x} was given for it: something overwrote it"
        return None


def handle_value(handle: Any) -> int:
    """A handle as a number: the driver's pointer."""
    return int(handle) if hasattr(handle, "__int__") else id(handle)
