"""States of a thread's own arrays in a checked kernel for a GPU: where all places are constants, bits of a number."""

from __future__ import annotations

import ast
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from instrumentation.kernel.checked.numbered_access import INSIDE, WRITTEN
from instrumentation.kernel.host_emit import FunctionEmitter, Place
from instrumentation.kernel.written_out import Known

if TYPE_CHECKING:
    from instrumentation.kernel.checked.bounds import View
    from instrumentation.kernel.checked.lower_cuda import CudaModule
    from instrumentation.kernel.parse import ParsedFunction

#: elements of an own array whose states are bits of one number
MOST_BITS = 64


class OwnArrays(FunctionEmitter):
    """One thread's statements, of which those that follow in any case know what those before them wrote."""

    module: CudaModule

    def __init__(
        self, module: CudaModule, parsed: ParsedFunction, ranks: dict[str, int], moving: frozenset[str]
    ) -> None:
        super().__init__(module, parsed, ranks)
        self.known = Known()
        #: own arrays whose states are bits of one number, as they are accessed at constant places alone
        self.bits = frozenset(
            name
            for name, array in parsed.arrays.items()
            if array.space == "local" and prod(array.shape) <= MOST_BITS and name not in moving
        )
        #: those that are not, as it turned out
        self.moving: set[str] = set()
        #: of each, elements that statements before this one wrote on every way, and the number does not say yet
        self._new: dict[str, int] = {}
        #: inside of a loop whose indices are looked at before it
        self.view: View | None = None

    def place(self, name: str, index: ast.expr, node: ast.AST) -> Place:
        """Where an index into an array points, and what is known of that if it is an own one."""
        place = super().place(name, index, node)
        array = self.parsed.arrays.get(name)
        if array is None or array.space != "local":
            return place
        number = self.known.element(array, index)
        if number is None or not isinstance(node, ast.Subscript):
            self._moves(name)
            return replace(place, shadow="0") if self.known.whole(name, array) else place
        is_load = isinstance(node.ctx, ast.Load)
        written = number in self.known.written.get(name, ())
        if is_load and not written and name in self.bits and self.view is not None:
            written = self.view.reads_own(name, number)
        shadow = place.shadow
        if name in self.bits:
            shadow = f"own_state({place.shadow}, {number})" if is_load else "0"
        return replace(place, kind=WRITTEN if written else INSIDE, element=str(number), shadow=shadow)

    def _moves(self, name: str) -> None:
        """An own array is accessed at a place that is not known here."""
        if name in self.bits:
            self.moving.add(name)

    def is_own(self, name: str) -> bool:
        """Whether a name is an array of one thread, or may be."""
        return name in self.parsed.arrays and self.parsed.arrays[name].space == "local"

    def note(self, node: ast.stmt) -> None:
        """Say in a number's bits that an own element is written."""
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        name = (
            target.value.id
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
            else ""
        )
        if name not in self.bits or name in self.moving:
            return
        assert isinstance(target, ast.Subscript)
        number = self.known.element(self.parsed.arrays[name], target.slice)
        if number is not None and number not in self.known.written.get(name, ()):
            self._new[name] = self._new.get(name, 0) | 1 << number

    def say_new(self) -> None:
        """Say what is written, where ways part or meet: the compiler takes long for names that are assigned often."""
        for name, bits in self._new.items():
            self.emit(f"s_{name} = s_{name} | uint64({bits})")
        self._new = {}
