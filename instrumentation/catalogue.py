"""Every finding code: what it means, a program that causes it, and the cure. A contract: codes never change.

``python -m instrumentation.catalogue`` prints the page docs/findings.md; ``catalogue_source`` has the programs.
"""

from __future__ import annotations

import difflib
import sys
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

#: codes that nothing in this version constructs; a test holds this to the source
NOT_REPORTED: frozenset[str] = frozenset()
#: codes that this version reports in some of the cases that their meaning covers
PARTLY_REPORTED: Mapping[str, str] = MappingProxyType({})
assert CATALOGUE.keys() >= NOT_REPORTED
assert CATALOGUE.keys() - NOT_REPORTED >= PARTLY_REPORTED.keys()


def entry(code: str) -> Entry:
    """Entry of ``code``, such as ``"MEM002"``; case does not matter. Raises ``BadInputError`` naming near ones."""
    found = CATALOGUE.get(code) or CATALOGUE.get(code.upper())
    if found is None:
        near = _near(code.upper())
        which = f"near ones are {', '.join(near)}" if near else f"known are {', '.join(CATALOGUE)}"
        raise BadInputError(f"finding code {code!r} is unknown; {which}")
    return found


def _near(text: str) -> list[str]:
    """Codes that someone who wrote ``text`` may have meant: ``MEM1``, ``OWN``, ``MEN002``."""
    letters, digits = text[:3], text[3:]
    meant = f"{letters}{digits.lstrip('0').rjust(3, '0')}"
    if digits.isascii() and digits.isdigit() and meant in CATALOGUE:
        return [meant]
    alike = difflib.get_close_matches(text, CATALOGUE, n=6, cutoff=0.6)
    return [code for code in CATALOGUE if (text and code.startswith(text)) or code in alike]


def status(code: str) -> str:
    """What this version does not report of a code, as sentences; empty when it reports all."""
    if code in NOT_REPORTED:
        return "This version does not report it yet."
    return PARTLY_REPORTED.get(code, "")


def main() -> None:
    """Print the page of all codes."""
    from instrumentation.catalogue_page import page  # noqa: PLC0415 - it reads this module

    sys.stdout.write(page())


if __name__ == "__main__":
    main()
