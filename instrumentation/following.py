"""A context that follows another one, as a draft follows its target, has room for all that one can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, capture_stack
from instrumentation.reports.text import refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from instrumentation.findings import FindingLog
    from instrumentation.ownership import Owner


@dataclass(frozen=True, slots=True)
class Extents:
    """How large a context of ``owner`` is: ``sizes`` are counts by name, such as ``{"positions": 1024}``."""

    owner: Owner
    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        assert self.sizes, self
        assert min(self.sizes.values()) >= 0, self


def require_room(follower: Extents, followed: Extents, findings: FindingLog) -> None:
    """Raise ``FindingError`` (OWN003) when ``follower`` has less of anything than ``followed``.

    Call it before memory is reserved for the follower. Sizes that only the follower has are its own business; one that
    it lacks is a ``BadInputError``.
    """
    missing = sorted(set(followed.sizes) - set(follower.sizes))
    if missing:
        raise BadInputError(
            f"{follower.owner} does not say how many {', '.join(missing)} it has; give what {followed.owner} gives"
        )
    short = [name for name, size in followed.sizes.items() if follower.sizes[name] < size]
    if not short:
        return
    sizes = ", ".join(f"{name} {follower.sizes[name]} of {followed.sizes[name]}" for name in short)
    finding = Finding(
        code="OWN003",
        message=f"{follower.owner} follows {followed.owner} and is smaller: {sizes}",
        actor=follower.owner.name,
        access=capture_stack(),
    )
    findings.append(finding)
    raise refused(finding)
