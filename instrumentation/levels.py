"""How much is checked. A level never changes a result, only what is noticed."""

from __future__ import annotations

import enum

from instrumentation.errors import BadInputError


class Level(enum.IntEnum):
    """Each level does all that the one below it does."""

    #: reservations checked, bad arguments refused
    OFF = 0
    #: redzones, poison, quarantine; owner and liveness at each launch
    GUARD = 1
    #: leases, order over streams, captured graphs, library handles, device memory against the ledger
    AUDIT = 2
    #: checked kernels: every load and store
    TRAP = 3

    @classmethod
    def parse(cls, text: str) -> Level:
        """Level of a name such as ``"guard"``; case does not matter. Raises ``BadInputError``."""
        level = cls.__members__.get(text.upper()) if isinstance(text, str) else None
        if level is None:
            names = ", ".join(member.name.lower() for member in cls)
            raise BadInputError(f"check level {text!r} is unknown; use one of {names}")
        return level

    def __str__(self) -> str:
        return self.name.lower()
