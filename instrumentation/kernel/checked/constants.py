"""Which states of what a kernel only reads a loop need not look up: those that were all looked at before it.

Nothing writes such an element while the kernel runs, nor its state. So where a loop reads many of them, their states
are looked at in a loop of their own first, which does nothing else: no registers are kept for what a report would say,
and the loop itself is that of the plain kernel. Where one of them is not written, the loop runs in its checked form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instrumentation.kernel.checked.sums import Capped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instrumentation.kernel.checked.bounds import Root
    from instrumentation.kernel.checked.sums import Sum

#: loads of a turn for whose sake states are looked at first: with fewer, the wait for them costs more than the tests
LEAST_LOOKED = 8


@dataclass
class ConstantReads:
    """What each turn of one loop reads of arrays that the kernel only reads."""

    #: whether their states are looked at before the loop
    looked: bool = False
    #: numbers of the elements, as text that is valid in each turn, by the array's name
    numbers: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, root: Root, indices: Sequence[Sum | Capped]) -> bool:
        """A load of each turn: whether its state was looked at before the loop."""
        texts = [
            f"min({each.value.text()}, {each.cap.text()})" if isinstance(each, Capped) else each.text()
            for each in indices
        ]
        number = texts[0]
        for text, extent in zip(texts[1:], root.extents[1:], strict=True):
            number = f"({number} * {extent} + {text})"
        self.numbers.setdefault(root.name, {})[number] = None
        return self.looked

    @property
    def worth(self) -> bool:
        """Whether their states are to be looked at first."""
        return sum(len(numbers) for numbers in self.numbers.values()) >= LEAST_LOOKED

    def lines(self, sure: str, turns: str) -> list[str]:
        """Statements after which the name ``sure`` holds only if all states are those of what is written.

        ``turns``: the loop's own first line, ``for k in ...:``; there is a turn where ``sure`` holds.
        """
        variable = turns.split()[1]
        lines: list[str] = []
        for name, numbers in self.numbers.items():
            looks = {
                number: f"_states = common_states(_states, v_{name}, {number}, s_{name})"
                for number in numbers
            }
            once = [look for number, look in looks.items() if variable not in number]
            each = [f"    {look}" for number, look in looks.items() if variable in number]
            loop = [turns, *each] if each else []
            body = ["_states = int32(-1)", *once, *loop, f"{sure} = are_written(_states, v_{name})"]
            lines += [f"if {sure} and s_{name} != 0:", *(f"    {line}" for line in body)]
        return lines
