"""Checked accesses: the text of each, and what its number in a report stands for.

Every load, store and atomic of a kernel's normal form is a *site*; every call of a device function that stays one is a
*call*. A report names both by number, so the compiled code holds no text and no line: ``access_table`` gives them
from the source as it is parsed now, the same for every lowering of one normal form.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.kernel.checked.report import CALL_BITS, CHAIN_BITS, SITE_BITS
from instrumentation.kernel.host_emit import HostAccess, Place
from instrumentation.kernel.origin import Origin, origin_of

if TYPE_CHECKING:
    from instrumentation.findings import Frame
    from instrumentation.kernel.parse import ParsedFunction

#: calls beyond these have number 0: their caller is not known
MAX_CALLS = (1 << CALL_BITS) - 1


@dataclass(frozen=True, slots=True)
class Site:
    """One access: where it stands, of which array, and how: ``load``, ``store``, ``atomic add``. Or one promise."""

    origin: Origin
    array: str
    #: ``shared`` or ``local`` for an array that the function declares, empty for a parameter
    space: str
    how: str
    #: of a promise, what not every thread reaches where it is not kept
    barrier: Origin | None = None
    #: and for which value a thread reaches it, where it is true or false
    wanted: bool | None = None


@dataclass(frozen=True, slots=True)
class CallSite:
    """One call of a device function: where it stands, and which array stands for each parameter."""

    origin: Origin
    arrays: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A site with its calls. ``array`` is the kernel's name for it; None when it has none, or that is not known."""

    site: Site
    array: str | None
    frames: tuple[Frame, ...]


class CheckedAccess(HostAccess):
    """Text of checked accesses; numbers sites and calls as they come."""

    def __init__(self) -> None:
        self._sites: dict[Site, int] = {}
        self._calls: dict[CallSite, int] = {}

    def load(self, place: Place) -> str:
        """Expression that reads an element, 0 where there is none."""
        return f"try_load_{place.kind}({self._terms(place, 'load')})"

    def store(self, place: Place, value: str) -> str:
        """Statement that writes an element, where there is one."""
        assert place.kind != "ro", f"store to {place.name}, which the access sets call read-only"
        return f"try_store_{place.kind}({self._terms(place, 'store')}, {value})"

    def atomic(self, operation: str, place: Place, operands: str) -> str:
        """Expression that changes an element and gives what was there before; 0 where there is none."""
        return f"try_atomic_{operation}({self._terms(place, f'atomic {operation}')}, {operands})"

    def agreement(self, value: Origin, barrier: Origin | None, wanted: bool | None) -> int:
        """Number of a place where a value is promised to be that of all threads."""
        return self._number(Site(value, "", "", "promise", barrier, wanted))

    def call(self, parsed: ParsedFunction, node: ast.Call, where: str) -> str:
        """The caller's own chain of calls with this one behind it."""
        origin = origin_of(node)
        assert origin is not None, ast.dump(node)
        pairs = zip(parsed.parameters, node.args, strict=True)
        arrays = tuple((name, each.id) for name, each in pairs if isinstance(each, ast.Name))
        number = self._calls.setdefault(CallSite(origin, arrays), len(self._calls) + 1)
        return f"called({_said(where, origin)}, {number if number <= MAX_CALLS else 0})"

    def _terms(self, place: Place, how: str) -> str:
        assert place.origin is not None, place
        number = self._number(Site(place.origin, place.name, place.space, how))
        scale, shift = place.spread or ("1", "0")
        indices, extents = (f"({', '.join(texts)},)" for texts in (place.indices, place.extents))
        where = _said(place.where, place.origin)
        return ", ".join((place.pointer, indices, extents, scale, shift, place.shadow, str(number), where))

    def _number(self, site: Site) -> int:
        number = self._sites.setdefault(site, len(self._sites))
        # Statements of a kernel are bounded, and so are its sites.
        assert number < 1 << SITE_BITS, number
        return number

    def table(self, kernel: str) -> AccessTable:
        """What the numbers stand for in the code of a kernel."""
        return AccessTable(kernel, tuple(self._sites), tuple(self._calls))


def _said(where: str, origin: Origin) -> str:
    return f"unwritten_allowed({where})" if origin.may_be_unwritten else where


@dataclass(frozen=True, slots=True)
class AccessTable:
    """Sites by number, and calls by number less one."""

    kernel: str
    sites: tuple[Site, ...]
    calls: tuple[CallSite, ...]

    def resolve(self, site: int, chain: int) -> Resolved:
        """Follow an access's array through the calls around it, out to the kernel."""
        found = self.sites[site]
        array: str | None = found.array
        frames = list(found.origin.frames)
        for depth in range(CHAIN_BITS // CALL_BITS):
            number = chain >> (depth * CALL_BITS) & MAX_CALLS
            if not chain >> (depth * CALL_BITS):
                break
            if number == 0:
                break
            call = self.calls[number - 1]
            frames += call.origin.frames
            # An array that the function declares itself has no name outside.
            array = None if found.space else dict(call.arrays).get(array or "")
        # Of a chain that did not fit, the calls next to the kernel are missing.
        known = frames[-1].function == self.kernel
        return Resolved(found, array if known else None, tuple(frames))
