"""Memory of the host device: the process's own, handed out through ``DeviceMemory``."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.account import Account
from instrumentation.devices.base import MemoryInfo
from instrumentation.errors import DeviceError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

Bytes = npt.NDArray[np.uint8]


class HostMemory:
    """``DeviceMemory`` over NumPy allocations."""

    name = "host"
    alignment = 4096

    def __init__(self) -> None:
        self._blocks: dict[int, Bytes] = {}
        self.account = Account()

    def memory_info(self) -> MemoryInfo:
        """Memory of the machine: what the system says is available, of what there is."""
        return _memory_info()

    def allocate(self, nbytes: int) -> int:
        """Address of ``nbytes`` fresh bytes; raises ``OutOfMemoryError``."""
        info = self.memory_info()
        if nbytes > info.free:
            # Linux grants more than it has and kills the process later; that is no place to learn of it.
            raise OutOfMemoryError(
                f"host memory: {nbytes:,} bytes were asked for and {info.free:,} of {info.total:,} are available"
            )
        try:
            block = np.empty(nbytes + self.alignment, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"host memory: {nbytes:,} bytes were refused by the system") from error
        address = -(-block.ctypes.data // self.alignment) * self.alignment
        self._blocks[address] = block
        return address

    def release(self, address: int) -> None:
        """Give back what ``allocate`` returned."""
        self.take(address)

    def take(self, address: int) -> Bytes:
        """Forget what ``allocate`` returned; it stays mapped for as long as the caller keeps the result."""
        block = self._blocks.pop(address, None)
        if block is None:
            raise DeviceError(f"host memory: release of {address:#x}, which was not allocated here")
        return block

    def fill_bytes(self, address: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes to ``value``."""
        ctypes.memset(address, value, nbytes)

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Copy of ``nbytes`` bytes."""
        return ctypes.string_at(address, nbytes)

    def first_mismatch(self, address: int, nbytes: int, value: int) -> int:
        """Offset of the first byte that is not ``value``; -1 when all are."""
        chunk = 1 << 20
        for start in range(0, nbytes, chunk):
            part = bytes_at(address + start, min(chunk, nbytes - start))
            wrong = np.flatnonzero(part != value)
            if wrong.size:
                return start + int(wrong[0])
        return -1

    def mismatches(self, regions: Sequence[tuple[int, int, int]]) -> list[int]:
        """Indices of those of ``regions`` (address, nbytes, value) that hold another byte somewhere."""
        return [i for i, region in enumerate(regions) if self.first_mismatch(*region) >= 0]


def bytes_at(address: int, nbytes: int) -> Bytes:
    """NumPy array over ``nbytes`` bytes of this process at ``address``; keeps nothing alive."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _memory_info() -> MemoryInfo:
    if sys.platform == "win32":
        return _windows_memory()
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        total = int(rows["MemTotal"].split()[0]) * 1024
        return MemoryInfo(free=min(int(rows["MemAvailable"].split()[0]) * 1024, total), total=total)
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    return MemoryInfo(free=total, total=total)


def _windows_memory() -> MemoryInfo:
    class Status(ctypes.Structure):
        _fields_ = [
            ("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong),
            ("available", ctypes.c_ulonglong), ("page_total", ctypes.c_ulonglong),
            ("page_available", ctypes.c_ulonglong), ("virtual_total", ctypes.c_ulonglong),
            ("virtual_available", ctypes.c_ulonglong), ("extended", ctypes.c_ulonglong),
        ]  # fmt: skip

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return MemoryInfo(free=int(status.available), total=int(status.total))
