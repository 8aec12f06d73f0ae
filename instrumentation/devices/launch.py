"""What is checked of a launch before it runs, the same on every device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numba.core import types as nb

from instrumentation.errors import BadInputError
from instrumentation.findings import Finding, RefusedError, capture_stack
from instrumentation.reports.text import render
from instrumentation.view import View

if TYPE_CHECKING:
    from instrumentation.findings import FindingLog
    from instrumentation.kernel import Kernel
    from instrumentation.ownership import Owner

Argument = View | int | float
MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 65535
_launch_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its grid and arguments, checked: types, ranks and overlap."""

    kernel: Kernel
    #: blocks along x, y, z
    grid: tuple[int, int, int]
    arguments: dict[str, Argument]
    #: number of this launch since the process started
    number: int

    @property
    def blocks(self) -> int:
        """Number of blocks of the grid."""
        return prod(self.grid)

    @property
    def views(self) -> dict[str, View]:
        """Array arguments by parameter."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, View)}


def bind(kernel: Kernel, grid: int | tuple[int, ...], arguments: Mapping[str, Argument]) -> Launch:
    """Check a launch's grid and arguments. Raises ``BadInputError`` naming the kernel and the argument."""
    shape = (grid,) if isinstance(grid, int) else tuple(grid)
    shape = (*shape, *(1,) * (3 - len(shape)))
    if len(shape) != 3 or any(n < 1 for n in shape) or shape[0] > MAX_GRID_X or max(shape[1:]) > MAX_GRID_YZ:
        raise BadInputError(f"{kernel.name}: grid {grid}; give 1 to 3 positive extents within the device's limits")
    if set(arguments) != set(kernel.signature):
        missing = sorted(set(kernel.signature) - set(arguments))
        unknown = sorted(set(arguments) - set(kernel.signature))
        raise BadInputError(f"{kernel.name}: missing arguments {missing}, unknown arguments {unknown}")
    for name, kind in kernel.signature.items():
        _check_type(kernel, name, kind, arguments[name])
    launch = Launch(kernel, shape, {n: arguments[n] for n in kernel.signature}, next(_launch_numbers))
    _refuse_overlap(launch)
    return launch


def _check_type(kernel: Kernel, name: str, kind: Any, value: Argument) -> None:
    if isinstance(kind, nb.Array):
        wanted = f"a view of {kind.dtype} with {kind.ndim} axes"
        if not isinstance(value, View):
            raise BadInputError(f"{kernel.name}: argument {name} is {type(value).__name__}; give {wanted}")
        if str(value.dtype) != str(kind.dtype) or value.ndim != kind.ndim:
            raise BadInputError(
                f"{kernel.name}: argument {name} is view {value.name} of {value.dtype} {value.shape}; give {wanted}"
            )
    elif isinstance(value, View) or not isinstance(value, int | float | np.integer | np.floating):
        raise BadInputError(f"{kernel.name}: argument {name} is {type(value).__name__}; give a number for {kind}")
    elif isinstance(kind, nb.Integer):
        low, high = kind.minval, kind.maxval
        if int(value) != value or not low <= value <= high:
            raise BadInputError(f"{kernel.name}: argument {name} is {value}; give a whole number that fits {kind}")


def _refuse_overlap(launch: Launch) -> None:
    """A written argument overlaps no other: both the lowering and the hardware may reorder the accesses."""
    kernel = launch.kernel
    spans = [(v.address, v.address + v.nbytes, name) for name, v in launch.views.items() if v.nbytes]
    spans.sort()
    reach: tuple[int, str] = (0, "")
    for start, stop, name in spans:
        if start < reach[0] and (name in kernel.writes or reach[1] in kernel.writes):
            first, second = launch.views[reach[1]], launch.views[name]
            raise BadInputError(
                f"{kernel.name}: arguments {reach[1]} ({first.name}) and {name} ({second.name}) overlap and one is "
                "written; give disjoint views"
            )
        reach = max(reach, (stop, name))


class LaunchMonitor:
    """Level ``guard``: every buffer that a launch names is live and its owner's to use, on a stream of its own."""

    def __init__(self, findings: FindingLog, device: str) -> None:
        self.findings = findings
        self.device = device

    def check(self, launch: Launch, owner: Owner, stream: str) -> None:
        """Raise ``FindingError`` (MEM004, OWN001) before the launch runs."""
        for name, view in launch.views.items():
            buffer = view.buffer
            if view.generation != buffer.generation or not buffer.live:
                view.check_live(
                    kernel=launch.kernel.name, argument=name, launch=launch.number, stream=stream, actor=owner.name
                )
            if owner == buffer.owner and not buffer.read_only:
                continue
            mode = "write" if name in launch.kernel.writes else "read"
            if not buffer.permits(owner, mode):  # type: ignore[arg-type]
                self._refuse_owner(launch, name, view, owner, stream, mode)

    def _refuse_owner(
        self, launch: Launch, name: str, view: View, owner: Owner, stream: str, mode: str
    ) -> None:
        buffer = view.buffer
        state = "shared read-only" if buffer.read_only else f"owned by {buffer.owner} and not lent to {owner}"
        finding = Finding(
            code="OWN001",
            message=f"{launch.kernel.name} of {owner} would {mode} {view.name} through {name}, which is {state}",
            buffer=buffer.facts(),
            kernel=launch.kernel.name,
            argument=name,
            launch=launch.number,
            stream=stream,
            actor=owner.name,
            device=self.device,
            access=capture_stack(),
            allocation=buffer.allocation,
        )
        self.findings.append(finding)
        raise RefusedError(finding, render(finding))
