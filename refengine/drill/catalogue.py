"""Every fault of the drill, in the order of the catalogue of findings."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from instrumentation.catalogue import CATALOGUE
from instrumentation.errors import BadInputError
from refengine.drill.faults_execution import EXECUTION
from refengine.drill.faults_kernels import KERNELS
from refengine.drill.faults_memory import MEMORY
from refengine.drill.faults_order import ORDER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from refengine.drill.fault import Fault

_ORDER = {code: i for i, code in enumerate(CATALOGUE)}
FAULTS: tuple[Fault, ...] = tuple(
    sorted((*MEMORY, *ORDER, *EXECUTION, *KERNELS), key=lambda fault: _ORDER[fault.code])
)
_BY_NAME = {fault.name: fault for fault in FAULTS}
assert len(_BY_NAME) == len(FAULTS), "two faults share a name"


def fault_of(name: str) -> Fault:
    """Fault of a name. Raises ``BadInputError`` naming near ones."""
    found = _BY_NAME.get(name)
    if found is None:
        alike = difflib.get_close_matches(name, _BY_NAME, n=4, cutoff=0.8)
        near = dict.fromkeys([*alike, *(each for each in _BY_NAME if name and name in each)])
        which = f"near ones are {', '.join(near)}" if near else f"known are {', '.join(_BY_NAME)}"
        raise BadInputError(f"fault {name!r} is unknown; {which}")
    return found


def faults_of(names: Iterable[str]) -> tuple[Fault, ...]:
    """Faults of some names, each once, in the order of the catalogue; all of them without a name."""
    chosen = {fault_of(name).name for name in names}
    return tuple(fault for fault in FAULTS if not chosen or fault.name in chosen)
