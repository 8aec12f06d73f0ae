"""``--check-numerics``: the first NaN or infinity that a launch makes (NUM001), the same on every device.

What a launch made is what is not finite behind it and was finite before it, in the arrays that it writes: so memory
that it leaves alone, whatever it holds, is never taken for its work. Each launch has small kernels around it, in
captured graphs as well; they keep the first launch that made any, its first element, and how many elements that it may
have read were not finite at that time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from instrumentation.devices.numerics_kernels import (
    BLOCK,
    ELEMENT_BITS,
    FIRST,
    FIRST_NAN,
    LATER,
    LATER_LAUNCHES,
    MADE,
    MARKS,
    MAX_OPERANDS,
    NOWHERE,
    OPERANDS,
    SEALED,
    STATE_WORDS,
    count_made,
    count_marked,
    count_operand,
    mark,
    seal,
)
from instrumentation.devices.steps import DeviceArray, Step
from instrumentation.findings import CallSite, Finding
from instrumentation.kernel.stores import stores_to
from instrumentation.numbers import Format, format_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from instrumentation.devices.launch import Launch
    from instrumentation.findings import FindingLog
    from instrumentation.ownership import Owner
    from instrumentation.view import View

State: TypeAlias = npt.NDArray[np.int64]
#: every kernel that a step launches, for a device that must load them before a capture
KERNELS = (mark, count_made, count_operand, count_marked, seal)
#: a name that ends with the number of a layer: ``l_out-3``, ``kv.k.3``
_LAYER = re.compile(r"[^-.].*[-.](\d{1,6})")


def fresh_state() -> State:
    """State of a stream or graph behind which nothing was found."""
    state = np.zeros(STATE_WORDS, np.int64)
    state[[FIRST, FIRST_NAN, *range(OPERANDS + 1, STATE_WORDS, 2)]] = NOWHERE
    return state


@dataclass(frozen=True, slots=True)
class Numbers:
    """An array argument of a launch that holds numbers."""

    argument: str
    #: place of the argument among those of the kernel
    position: int
    view: View
    format: Format

    @property
    def count(self) -> int:
        """Its numbers."""
        return self.view.nbytes // self.format.nbytes

    @property
    def marks(self) -> int:
        """Words of a mark for each."""
        return -(-self.count // MARKS)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks that look at all of them."""
        return (-(-self.marks // BLOCK), 1, 1)

    @property
    def memory(self) -> DeviceArray:
        """The same memory as two-byte words."""
        return DeviceArray(self.view.address, (self.count * self.format.words,), 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents that go with its name."""
        named = self.view.named or self.view.shape
        if prod(named) == self.count:
            return named
        rows = named[0] if named and self.count % max(named[0], 1) == 0 else 1
        return (rows, self.count // max(rows, 1))

    def place(self, element: int) -> str:
        """``row 2, column 17``; ``element [0, 3, 5, 1]`` of what has more than two axes."""
        shape = self.shape
        indices = [int(i) for i in np.unravel_index(element, shape)]
        if len(shape) == 1:
            return f"element {indices[0]}"
        if len(shape) == 2:
            return f"row {indices[0]}, column {indices[1]}"
        return f"element [{', '.join(map(str, indices))}], row {indices[0]}"


class NumericChecks:
    """What runs around one launch, for as often as it runs."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.called_at = CallSite()
        kernel = launch.kernel
        numbers = [
            Numbers(name, position, view, form)
            for position, (name, view) in enumerate(launch.views.items())
            if view.nbytes and (form := format_of(view)) is not None
        ]
        self.written = [each for each in numbers if each.argument in kernel.writes]
        self.read = [each for each in numbers if each.argument in kernel.reads][:MAX_OPERANDS]

    @property
    def n_marks(self) -> int:
        """Words of 32 bits that it wants between its steps."""
        return sum(each.marks for each in self.written)

    def steps(self, marks: DeviceArray, state: int) -> tuple[list[Step], list[Step]]:
        """Steps in front of the launch and behind it. ``state``: address of a state; none: nothing to look at."""
        if not self.written:
            return [], []
        before, behind = [], []
        memory = DeviceArray(state, (STATE_WORDS,), 8)
        first_mark: dict[str, int] = {}
        at = 0
        for each in self.written:
            form = each.format
            first_mark[each.argument] = at
            meant = stores_to(self.launch.kernel, each.argument).infinite
            seen = (each.memory, form.words, form.exponent, form.fraction, int(meant), marks, at)
            before.append(Step(mark, each.grid, seen))
            behind.append(Step(count_made, each.grid, (*seen, each.position, memory)))
            at += each.marks
        for i, each in enumerate(self.read):
            slot = OPERANDS + 2 * i
            form = each.format
            if each.argument in first_mark:
                held: tuple[DeviceArray | int, ...] = (
                    marks, first_mark[each.argument], each.marks, slot, memory,
                )  # fmt: skip
                behind.append(Step(count_marked, each.grid, held))
            else:
                held = (each.memory, form.words, form.exponent, slot, memory)
                behind.append(Step(count_operand, each.grid, held))
        behind.append(Step(seal, (1, 1, 1), (memory, self.launch.number)))
        return before, behind


class NumericsWatch:
    """Reports the first launch of a device that makes a number which is not finite; later ones are consequences."""

    def __init__(self, findings: FindingLog, device: str) -> None:
        self.findings = findings
        self.device = device
        self.found = False

    def report(self, state: State, checks: Sequence[NumericChecks], stream: str, owner: Owner) -> None:
        """Report what a state has, of launches among ``checks``, unless something was reported before."""
        number = int(state[SEALED])
        if not number or self.found:
            return
        self.found = True
        each = next(each for each in checks if each.launch.number == number)
        self.findings.append(_finding(state, each, stream, owner, self.device))


def _finding(state: State, checks: NumericChecks, stream: str, owner: Owner, device: str) -> Finding:
    first = int(state[FIRST])
    position, element = first >> ELEMENT_BITS, first & ((1 << ELEMENT_BITS) - 1)
    made = next(each for each in checks.written if each.position == position)
    what = "NaN" if state[FIRST_NAN] == first else "infinite"
    view, kernel = made.view, checks.launch.kernel
    layer = _LAYER.fullmatch(view.name)
    where = f"{view.name}, {made.place(element)}" + (f", layer {layer[1]}" if layer else "")
    number = int(state[MADE])
    count = f"{number} elements that it wrote are" if number > 1 else "1 element that it wrote is"
    stores = stores_to(kernel, made.argument)
    return Finding(
        code="NUM001",
        kind=f"first {'NaN' if what == 'NaN' else 'infinity'}",
        message=f"{where} is {what}: kernel {kernel.name} is the first that made any; {count} not finite",
        size=made.format.nbytes,
        buffer=view.buffer.facts(),
        offset=view.offset + element * made.format.nbytes,
        access=checks.called_at.stack,
        allocation=view.buffer.allocation,
        kernel=kernel.name,
        launch=checks.launch.number,
        source=stores.frames[0] if stores.frames else None,
        argument=made.argument,
        stream=stream,
        actor=owner.name,
        device=device,
        notes=tuple(_notes(state, checks, stores.lines)),
    )


def _notes(state: State, checks: NumericChecks, lines: Sequence[str]) -> Iterator[str]:
    if len(lines) > 1:
        yield f"one of the stores at {', '.join(lines)}"
    held = [
        f"{each.view.name} ({each.argument}) held {number}, the first at {each.place(first)}"
        for each, number, first in _operands(state, checks)
        if number
    ]
    if held:
        yield f"the kernel may have passed it on: {'; '.join(held)}"
    else:
        yield "all numbers that the kernel reads are finite: it made this one itself"
    later, launches = int(state[LATER]), int(state[LATER_LAUNCHES])
    if launches:
        runs = f"{launches} launch{'es' * (launches != 1)}"
        yield f"behind it, {runs} made {later} more up to the next time that the host waited"


def _operands(state: State, checks: NumericChecks) -> Iterator[tuple[Numbers, int, int]]:
    for i, each in enumerate(checks.read):
        slot = OPERANDS + 2 * i
        yield each, int(state[slot]), int(state[slot + 1])
