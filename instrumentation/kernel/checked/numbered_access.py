"""How the checked form of a kernel for a GPU names its accesses: by their numbers in the kernel's access table."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from instrumentation.kernel.checked.access import MAX_CALLS, AccessTable, CallSite, Site
from instrumentation.kernel.host_emit import HostAccess, Place
from instrumentation.kernel.origin import origin_of

if TYPE_CHECKING:
    from instrumentation.kernel.parse import ParsedFunction


#: alias classes beside those of the host: an own element that is known to be there, written before or not
WRITTEN, INSIDE = "written", "inside"
#: an element of a parameter that is known to be there, and written; what stands before the class of one that is there
KNOWN, SURE = "known", "sure "


def _kind(place: Place) -> tuple[str, str]:
    """How an element is accessed, and its alias class."""
    if place.kind in (WRITTEN, INSIDE):
        return "try", "lane"
    return ("sure", place.kind.removeprefix(SURE)) if place.kind.startswith(SURE) else ("try", place.kind)


class NumberedAccess(HostAccess):
    """Text of checked accesses by the numbers of a table."""

    def __init__(self, table: AccessTable) -> None:
        self._sites = {site: number for number, site in enumerate(table.sites)}
        self._calls = {call: number + 1 for number, call in enumerate(table.calls)}

    def load(self, place: Place) -> str:
        """Expression that reads an element, 0 where there is none."""
        if place.kind == WRITTEN:
            return f"load_own({place.pointer}, {place.element})"
        if place.kind == KNOWN:
            return f"load_known({place.pointer}, {place.element})"
        how, kind = _kind(place)
        return f"{how}_load_{kind}({self._terms(place, 'load')})"

    def store(self, place: Place, value: str) -> str:
        """Statement that writes an element, where there is one."""
        assert place.kind != "ro", f"store to {place.name}, which the access sets call read-only"
        if place.kind in (WRITTEN, INSIDE):
            shadow = place.shadow if place.kind == INSIDE else "0"
            return f"store_own({place.pointer}, {place.element}, {shadow}, {value})"
        how, kind = _kind(place)
        return f"{how}_store_{kind}({self._terms(place, 'store')}, {value})"

    def atomic(self, operation: str, place: Place, operands: str) -> str:
        """Expression that changes an element and gives what was there before; 0 where there is none."""
        return f"try_atomic_{operation}({self._terms(place, f'atomic {operation}')}, {operands})"

    def call(self, parsed: ParsedFunction, node: ast.Call, where: str) -> str:
        """The caller's own chain of calls with this one behind it."""
        origin = origin_of(node)
        assert origin is not None, ast.dump(node)
        pairs = zip(parsed.parameters, node.args, strict=True)
        arrays = tuple((name, each.id) for name, each in pairs if isinstance(each, ast.Name))
        number = self._calls[CallSite(origin, arrays)]
        return f"called({_said(where, origin)}, {number if number <= MAX_CALLS else 0})"

    def _terms(self, place: Place, how: str) -> str:
        assert place.origin is not None, place
        number = self._sites[Site(place.origin, place.name, place.space, how)]
        indices, extents = (f"({', '.join(texts)},)" for texts in (place.indices, place.extents))
        return ", ".join(
            (place.pointer, indices, extents, place.shadow, str(number), _said(place.where, place.origin))
        )


def _said(where: str, origin: Any) -> str:
    return f"unwritten_allowed({where})" if origin.may_be_unwritten else where
