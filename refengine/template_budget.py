"""What a chat template may cost: a budget of steps and characters, and a limit of processor time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

from refengine.errors import RequestError

STEP: Final = 16
"""Units that a call or a turn of a loop costs beside what it makes; a character costs one."""

_BASE_UNITS: Final = 1 << 22
# Templates copy a message a few times over (strip, split, +); none comes near this often.
_UNITS_PER_INPUT_CHAR: Final = 64
_CPU_SECONDS: Final = 10.0
_MAX_INPUT_CHARS: Final = 1 << 26
_MAX_INPUT_PARTS: Final = 1 << 21

T = TypeVar("T")


class BudgetError(Exception):
    """The template costs more than any template for such messages should."""


@dataclass
class _Budget:
    units: int
    limit: int
    deadline: float


_current: ContextVar[_Budget | None] = ContextVar("template_budget", default=None)


@contextlib.contextmanager
def spending(input_units: int) -> Iterator[None]:
    """Open a budget for a template whose variables measure ``input_units``."""
    limit = _BASE_UNITS + _UNITS_PER_INPUT_CHAR * input_units
    # Processor time of this thread, so that a busy machine does not change the answer.
    token = _current.set(_Budget(limit, limit, time.thread_time() + _CPU_SECONDS))
    try:
        yield
    finally:
        _current.reset(token)


def charge(units: int) -> None:
    """Pay ``units`` from the open budget; raise ``BudgetError`` if they are not there."""
    budget = _current.get()
    if budget is None:
        raise BudgetError("nothing may run outside a rendering")
    budget.units -= units
    if budget.units < 0:
        raise BudgetError(f"it takes more than {budget.limit} steps and characters")
    if time.thread_time() > budget.deadline:
        raise BudgetError(f"it takes more than {_CPU_SECONDS:.0f} seconds")


def charge_value(value: T) -> T:
    """Pay for a value that was made, and return it.

    A container pays for all that can be reached from it, counted each time it is reached: lists that share
    their parts are small in memory and of any size when printed or compared.
    """
    budget = _current.get()
    if budget is None:
        raise BudgetError("nothing may run outside a rendering")
    if isinstance(value, str):
        charge(len(value))
    elif isinstance(value, (list, tuple, Mapping)):
        count, chars = _extent(value, budget.limit, budget.limit)
        if count > budget.limit or chars > budget.limit:
            raise BudgetError(f"a value of more than {budget.limit} parts and characters")
        charge(count)
    return value


def measure(variables: Mapping[str, object]) -> int:
    """Return the size of what a template is given, in characters and parts."""
    count, chars = _extent(variables, _MAX_INPUT_PARTS, _MAX_INPUT_CHARS)
    if count > _MAX_INPUT_PARTS or chars > _MAX_INPUT_CHARS:
        raise RequestError(
            f"the messages are too large; wanted at most {_MAX_INPUT_CHARS} characters "
            f"in {_MAX_INPUT_PARTS} parts"
        )
    return count + chars


def _extent(value: object, max_count: int, max_chars: int) -> tuple[int, int]:
    """Return the number of parts and of characters in ``value``; stop counting beyond either maximum."""
    count = chars = 0
    stack = [value]
    while stack and count <= max_count and chars <= max_chars:
        item = stack.pop()
        count += 1
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item
    return count, chars
