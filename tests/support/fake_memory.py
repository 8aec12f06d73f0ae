"""A device's memory made of NumPy arrays at made-up addresses; what is not mapped cannot be touched."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from instrumentation.account import Account
from instrumentation.devices.base import MemoryInfo
from instrumentation.errors import DeviceError, OutOfMemoryError

_FIRST = 0x7F00_0000_0000
_GAP = 1 << 20  # unmapped bytes between allocations


class FakeMemory:
    """``DeviceMemory`` with ``total`` bytes. Addresses depend on nothing but the order of calls."""

    def __init__(self, total: int = 1 << 24, *, name: str = "fake", alignment: int = 256) -> None:
        self.name = name
        self.alignment = alignment
        self.total = total
        self.calls = 0
        self.account = Account()
        self._next = _FIRST + (alignment if alignment < 256 else 0)
        self._mapped: dict[int, np.ndarray] = {}
        #: raise ``DeviceError`` at fills from now on
        self.broken = False

    @property
    def used(self) -> int:
        return sum(len(data) for data in self._mapped.values())

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=self.total - self.used, total=self.total)

    def allocate(self, nbytes: int) -> int:
        assert nbytes >= 1
        self.calls += 1
        if nbytes > self.total - self.used:
            raise OutOfMemoryError(f"{self.name}: {nbytes} bytes asked, {self.total - self.used} free")
        address = self._next
        # What a driver returns is not zero: 0xA5 shows whoever relies on that.
        self._mapped[address] = np.full(nbytes, 0xA5, np.uint8)
        self._next += -(-nbytes // self.alignment) * self.alignment + _GAP
        return address

    def release(self, address: int) -> None:
        if address not in self._mapped:
            raise DeviceError(f"{self.name}: release of {address:#x}, which is not allocated")
        del self._mapped[address]

    def fill_bytes(self, address: int, nbytes: int, value: int) -> None:
        if self.broken:
            raise DeviceError(f"{self.name}: fill failed")
        self._bytes(address, nbytes)[:] = value

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        return self._bytes(address, nbytes).tobytes()

    def first_mismatch(self, address: int, nbytes: int, value: int) -> int:
        wrong = self._bytes(address, nbytes) != value
        return int(wrong.argmax()) if wrong.any() else -1

    def mismatches(self, regions) -> list[int]:
        return [i for i, region in enumerate(regions) if self.first_mismatch(*region) >= 0]

    def write(self, address: int, data: bytes) -> None:
        """What a faulty kernel does: bytes anywhere in mapped memory."""
        self._bytes(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def _bytes(self, address: int, nbytes: int) -> np.ndarray:
        bases = sorted(self._mapped)
        at = bisect_right(bases, address) - 1
        base = bases[at] if at >= 0 else 0
        data = self._mapped.get(base)
        if nbytes < 1 or data is None or address + nbytes > base + len(data):
            raise DeviceError(f"{self.name}: [{address:#x}, {address + nbytes:#x}) is not mapped")
        return data[address - base : address - base + nbytes]
