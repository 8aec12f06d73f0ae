"""One line of ``refengine doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: ``missing``: something optional is not there; ``failed``: the host device does not work
State: TypeAlias = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    group: str
    name: str
    state: State
    detail: str
    #: what to do, when something is not as it should be
    cure: str = ""

    def __post_init__(self) -> None:
        assert self.name, self
        assert self.state == "ok" or self.cure, self
