"""What is known about each reservation and each name at one point of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.lint.annotations import Kind

# A reservation's condition is a set of these, one for each kind of path that leads here.
ABSENT = 1  #: not made on this path
UNCHECKED = 2  #: nobody looked, and the duty to look is here
SEEN = 4  #: looked at or handed over, outcome not known here
GOOD = 8  #: known to have succeeded
FAILED = 16  #: known to have failed


@dataclass(frozen=True, slots=True)
class Res:
    """A reservation."""

    token: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A value whose truth tells how reservations went: ``r.ok`` (positive), ``r.error`` (negative).

    ``exact`` when the other truth value says that the (only) reservation went the other way.
    """

    tokens: frozenset[int]
    positive: bool
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Bag:
    """A container of reservations; the condition of ``token`` is that of each element."""

    token: int


@dataclass(frozen=True, slots=True)
class Maker:
    """A callable that reserves: ``arena.reserve`` without a call."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Plain:
    """None, or anything that is of no interest."""

    name: str


NONE = Plain("None")
OTHER = Plain("other")

Value = Res | Verdict | Bag | Maker | Plain
Values = frozenset[Value]
OTHERS: Values = frozenset({OTHER})


def tokens_of(values: Iterable[Value]) -> list[int]:
    """Tokens of the reservations among ``values``, in a fixed order."""
    return sorted(value.token for value in values if isinstance(value, Res))


class State:
    """Values of names (``r``, ``self.r``, ``rs[0]``) and conditions of reservations.

    ``dead`` when no path leads here; a dead state counts for nothing in ``join``.
    """

    __slots__ = ("conditions", "dead", "names")

    def __init__(self) -> None:
        self.names: dict[str, Values] = {}
        self.conditions: dict[int, int] = {}
        self.dead = False

    def copy(self) -> State:
        """Make an independent copy."""
        other = State()
        other.become(self)
        return other

    def become(self, other: State) -> None:
        """Take over what ``other`` knows."""
        self.names, self.conditions, self.dead = dict(other.names), dict(other.conditions), other.dead

    def condition(self, token: int) -> int:
        """Condition of a reservation."""
        return self.conditions.get(token, ABSENT)

    def see(self, token: int, *, sure: bool = True) -> None:
        """Take the duty to look from this scope; perhaps, unless that is ``sure``."""
        condition = self.condition(token)
        if condition & UNCHECKED:
            self.conditions[token] = (condition & ~UNCHECKED if sure else condition) | SEEN

    def decide(self, token: int, *, good: bool, sure: bool = True) -> bool:
        """Learn how a reservation went; False when it is known to have gone the other way."""
        condition = self.condition(token)
        outcome = GOOD if good else FAILED
        possible = bool(condition & (UNCHECKED | SEEN | outcome))
        if not sure:
            self.conditions[token] = condition | (outcome if possible else 0)
            return True
        self.conditions[token] = (condition & ABSENT) | (outcome if possible else 0) or ABSENT
        return possible or bool(condition & ABSENT)

    def is_meant(self, token: int, values: Values) -> bool:
        """Whether what is learned about ``values`` is learned about the reservation, where there is one.

        Not when the value may be something else while another name has the reservation.
        """
        return len(values) == 1 or sum(Res(token) in held for held in self.names.values()) <= 1

    def renew(self, token: int) -> None:
        """Forget what was said about an earlier reservation of the same place."""
        for name, values in self.names.items():
            if any(isinstance(value, Verdict) and token in value.tokens for value in values):
                self.names[name] = OTHERS

    def held_elsewhere(self, token: int, key: str) -> bool:
        """Whether a name other than ``key`` has the reservation."""
        return any(Res(token) in values for name, values in self.names.items() if name != key)

    def unchecked(self) -> list[int]:
        """Tokens whose reservation nobody may have looked at."""
        return [token for token, condition in self.conditions.items() if condition & UNCHECKED]

    def key(self) -> tuple[object, ...]:
        """Hashable form."""
        return (frozenset(self.names.items()), frozenset(self.conditions.items()), self.dead)


def join(*states: State | None) -> State | None:
    """What is known when one of several paths led here; None when none does."""
    alive = [state for state in states if state is not None and not state.dead]
    if not alive:
        return None
    result = alive[0].copy()
    for state in alive[1:]:
        for name in result.names.keys() | state.names.keys():
            nothing: Values = frozenset()
            result.names[name] = result.names.get(name, nothing) | state.names.get(name, nothing)
        for token in result.conditions.keys() | state.conditions.keys():
            result.conditions[token] = result.condition(token) | state.condition(token)
    return result


def merged(*states: State | None) -> State:
    """As ``join``, with a dead state for no path."""
    state = join(*states)
    if state is None:
        state = State()
        state.dead = True
    return state
