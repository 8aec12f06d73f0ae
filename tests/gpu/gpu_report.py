"""What the checks of a GPU run say, and how many of them missed."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Report:
    """Counts checks and prints one line for each that is not part of a table."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def missed(self, name: str, why: str = "") -> None:
        """A check that does not hold; at most 500 characters of why."""
        self.failed.append(name)
        print(f"MISSED {name}: {' | '.join(why.strip().splitlines())[-500:]}", flush=True)

    def check(self, name: str, holds: object, detail: object = "") -> bool:
        """Count a check and print it."""
        if holds:
            self.passed += 1
            print(f"ok {name} {str(detail)[:200]}".rstrip(), flush=True)
        else:
            self.missed(name, str(detail))
        return bool(holds)

    def count(self, name: str, holds: object) -> None:
        """Count a check that a row of a table shows."""
        if holds:
            self.passed += 1
        else:
            self.failed.append(name)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What raises inside is a check that missed, and the next one goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - reported
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
            self.missed(name, f"{at}: {type(error).__name__}: {error}")
