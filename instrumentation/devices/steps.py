"""Small launches of this package's own around those of the user, on the same stream and in the same graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from instrumentation.devices.cuda_launch import DeviceArray

if TYPE_CHECKING:
    from instrumentation.kernel import Kernel

__all__ = ["DeviceArray", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A launch of a kernel that takes raw addresses, with a value for each of its parameters."""

    kernel: Kernel
    grid: tuple[int, int, int]
    values: tuple[DeviceArray | int, ...]

    @property
    def host_slots(self) -> list[int]:
        """Argument block of the host: grid, then address and extents, or bits."""
        slots = list(self.grid)
        for value in self.values:
            slots += [value.address, *value.shape] if isinstance(value, DeviceArray) else [value]
        return slots
