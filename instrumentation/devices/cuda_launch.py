"""Launches as the driver takes them: a packed block of parameters with the table of their addresses.

Numba's CUDA target flattens an array into separate parameters of 8 bytes: meminfo, parent (both null for memory that
Numba does not manage), number of elements, bytes of an element, address, extents, strides in bytes. A number has the
bytes of its type.
"""

from __future__ import annotations

from array import array
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from instrumentation.devices.launch import number_bits
from instrumentation.shadow import WRITTEN
from instrumentation.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from instrumentation.devices.cuda_driver import Driver
    from instrumentation.devices.cuda_trap import CudaTrap
    from instrumentation.devices.launch import Launch
    from instrumentation.devices.numerics import NumericChecks
    from instrumentation.handles import LibraryCall


class DeviceArray(NamedTuple):
    """An array argument of a kernel that checks memory: an address that no buffer stands for."""

    address: int
    shape: tuple[int, ...]
    itemsize: int


class Parameters:
    """Parameter values in slots of 8 bytes, and behind them the address of each slot."""

    __slots__ = ("_block", "address", "count")

    def __init__(self, slots: list[int]) -> None:
        self.count = len(slots)
        self._block = array("q", slots)
        self._block.extend(slots)
        start = self._block.buffer_info()[0]
        for i in range(self.count):
            self._block[self.count + i] = start + 8 * i
        #: of the table of addresses, which is what ``cuLaunchKernel`` takes
        self.address = start + 8 * self.count

    def __setitem__(self, index: int, value: int) -> None:
        """Change a value: the driver copies them at each launch."""
        self._block[range(self.count)[index]] = value


def pack(signature: dict[str, Any], values: Iterable[View | DeviceArray | float]) -> Parameters:
    """Parameters of a kernel, from a value for each of its signature's, in order."""
    slots: list[int] = []
    for kind, value in zip(signature.values(), values, strict=True):
        if isinstance(value, View | DeviceArray):
            slots += array_slots(value)
        else:
            slots.append(number_bits(kind, value))
    return Parameters(slots)


def pack_checked(launch: Launch, slots: list[int]) -> Parameters:
    """Parameters of a kernel's checked form: see ``checked_signature``."""
    given: list[int] = []
    for kind, value in zip(launch.kernel.signature.values(), launch.arguments.values(), strict=True):
        if isinstance(value, View):
            given += [value.address, *value.shape]
        else:
            given.append(number_bits(kind, value))
    return Parameters([*given, *slots])


def array_slots(value: View | DeviceArray) -> list[int]:
    """The eight-byte parameters of a C-contiguous array."""
    shape, itemsize = value.shape, value.itemsize
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return [0, 0, prod(shape), itemsize, value.address, *shape, *reversed(strides)]


def region_rows(regions: Sequence[tuple[int, int, int]]) -> tuple[DeviceArray, npt.NDArray[np.int64]]:
    """What ``check_regions`` takes for regions of (address, nbytes, byte): the memory around them, and rows [n, 3]."""
    rows = np.array(regions, np.int64)
    base = int(rows[:, 0].min())
    stop = int((rows[:, 0] + rows[:, 1]).max())
    rows[:, 0] -= base
    return DeviceArray(base, (stop - base,), 1), rows


class PreparedLaunch:
    """A checked launch with its parameters and loaded function: queued as often as wanted, at the cost of one call."""

    __slots__ = ("block", "function", "grid", "launch", "marks", "numerics", "parameters", "trap")

    def __init__(
        self,
        launch: Launch,
        function: Any,
        trap: CudaTrap | None = None,
        numerics: NumericChecks | None = None,
        marks: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.launch = launch
        #: what looks at its numbers
        self.numerics = numerics
        self.function = function
        self.grid = launch.grid
        self.block = block_of(launch.kernel.block)
        #: address and bytes of states to say "written" of behind it
        self.marks = marks
        #: report and shadows, where the function is the kernel's checked form
        self.trap = trap
        if trap is None:
            self.parameters = pack(launch.kernel.signature, launch.arguments.values())
        else:
            self.parameters = pack_checked(launch, trap.slots)

    def queue(self, driver: Driver, stream: Any, *, early: bool = False) -> None:
        """Queue it on a driver's stream; ``early``: as ``Driver.launch`` has it."""
        if self.trap is not None:
            # Since it was prepared, memory may have been written, or freed.
            slots = self.trap.slots
            for i, slot in enumerate(slots, -len(slots)):
                self.parameters[i] = slot
        driver.launch(self.function, self.grid, self.block, stream, self.parameters.address, early=early)
        for address, nbytes in self.marks:
            driver.fill(address, WRITTEN, nbytes, stream)

    def __str__(self) -> str:
        return f"{self.launch.kernel.name} (launch {self.launch.number})"


class PreparedCall:
    """A checked call of a library, as part of a captured graph."""

    __slots__ = ("launch", "marks")
    #: the library's kernels are not ours to check
    trap = None
    numerics = None

    def __init__(self, call: LibraryCall, marks: Sequence[tuple[int, int]] = ()) -> None:
        self.launch = call
        #: as those of ``PreparedLaunch``
        self.marks = marks

    def queue(self, driver: Driver, stream: Any, *, early: bool = False) -> None:
        """Make the call: the library queues on the stream that is being captured, which its handle has."""
        assert not early, "a library's kernels wait for nobody"
        self.launch.queue(captured=True)
        for address, nbytes in self.marks:
            driver.fill(address, WRITTEN, nbytes, stream)

    def __str__(self) -> str:
        return str(self.launch)


#: what a stream queues, and captures
Prepared: TypeAlias = PreparedLaunch | PreparedCall


def block_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Threads of a block along x, y, z."""
    x, y, z = (*shape, 1, 1)[:3]
    return x, y, z
