"""A sweep one of whose runs kills its process. Here, where a process of its own can import it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refengine.sweep import Key, Sweep

if TYPE_CHECKING:
    from refengine.sweep import Reference, Run


@dataclass(frozen=True)
class DyingSweep(Sweep):
    def run(self, wanted: Reference, key: Key) -> Run:
        if key == ("nth", 3):
            os._exit(9)
        return super().run(wanted, key)
