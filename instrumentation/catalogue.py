"""Every finding code: what it means, a program that causes it, and the cure. A contract: codes never change.

The programs assume an ``allocator``, an ``arena`` reserved from it, a ``device`` and its ``memory``, the
streams ``stream`` and ``other``, and the owners ``target`` and ``draft``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from instrumentation.catalogue_execution import EXECUTION
from instrumentation.catalogue_memory import MEMORY
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instrumentation.catalogue_entry import Entry

CATALOGUE: Mapping[str, Entry] = MappingProxyType({entry.code: entry for entry in (*MEMORY, *EXECUTION)})
assert len(CATALOGUE) == len(MEMORY) + len(EXECUTION), "two entries share a code"


def entry(code: str) -> Entry:
    """Entry of ``code``, such as ``"MEM002"``; case does not matter. Raises ``BadInputError``."""
    found = CATALOGUE.get(code) or CATALOGUE.get(code.upper())
    if found is None:
        raise BadInputError(f"finding code {code!r} is unknown; known are {', '.join(CATALOGUE)}")
    return found
