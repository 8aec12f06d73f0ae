"""Memory of a GPU: one driver allocation for each arena, and the synchronous calls of ``DeviceMemory``.

Fills are queued on a stream of their own, and whatever follows waits for all of them at once: an overlay that becomes
active writes a hundred canaries.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from instrumentation.account import Account
from instrumentation.devices.base import MemoryInfo
from instrumentation.devices.cuda_driver import DriverCallError
from instrumentation.devices.cuda_kernels import FIND_BLOCKS, check_regions, find_mismatch
from instrumentation.devices.cuda_launch import DeviceArray, block_of, pack, region_rows
from instrumentation.devices.host_memory import bytes_at
from instrumentation.errors import DeviceError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instrumentation.devices.cuda_context import CudaContext

Flags = npt.NDArray[np.int32]
#: ranges up to this size are compared on the host
_COPIED = 64 * 1024
#: so many regions are copied and compared one by one; more go to a kernel
_FEW_REGIONS = 2


class CudaMemory:
    """``DeviceMemory`` of one context. On a lost device fills and comparisons do nothing: no byte is there."""

    name: str
    alignment = 256

    def __init__(self, context: CudaContext) -> None:
        self.context = context
        self.name = context.name
        self.account = Account(context.account)
        self._memory_calls = context.calls("memory")
        #: bytes by address
        self._blocks: dict[int, int] = {}
        self._scratch = context.scratch()

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes of the GPU, whoever holds the rest."""
        with self._memory_calls:
            self.context.enter(again=True)
            free, total = self.context.driver.memory_info()
        return MemoryInfo(free=min(free, total), total=total)

    def allocate(self, nbytes: int) -> int:
        """Address of ``nbytes`` fresh bytes; raises ``OutOfMemoryError``."""
        with self._memory_calls:
            self.context.enter(again=True)
            try:
                address = self.context.driver.allocate(nbytes)
            except DriverCallError as error:
                if not error.out_of_memory:
                    raise
                free, total = self.context.driver.memory_info()
                raise OutOfMemoryError(
                    f"{self.name} memory: {nbytes:,} bytes were refused by the driver; {free:,} of {total:,} are free"
                ) from None
        self._blocks[address] = nbytes
        return address

    def release(self, address: int) -> None:
        """Give back what ``allocate`` returned; work that is queued and may name it runs before."""
        if self._blocks.pop(address, None) is None:
            raise DeviceError(f"{self.name} memory: release of {address:#x}, which was not allocated here")
        if self.context.lost is None:
            self._before_release()
            with self._memory_calls:
                self.context.enter(again=True)
                self.context.driver.free(address)

    def _before_release(self) -> None:
        """Make sure that no queued work names memory that is given back."""
        self.settle()

    def fill_bytes(self, address: int, nbytes: int, value: int) -> None:
        """Set ``nbytes`` bytes to ``value``."""
        if nbytes and self.context.lost is None:
            with self._memory_calls:
                self.context.driver.fill(address, value, nbytes, self._scratch.stream)
                self._scratch.unsettled = True

    def settle(self) -> None:
        """Wait for fills: called before anything else can see the memory."""
        if self._scratch.unsettled:
            self._scratch.unsettled = False
            with self._memory_calls:
                self.context.driver.synchronize_stream(self._scratch.stream)

    def read_bytes(self, address: int, nbytes: int) -> bytes:
        """Copy of ``nbytes`` bytes."""
        parts = []
        with self._scratch.lock, self._memory_calls:
            for start in range(0, nbytes, self._scratch.NBYTES):
                count = min(self._scratch.NBYTES, nbytes - start)
                self._fetch(address + start, count)
                parts.append(ctypes.string_at(self._scratch.host, count))
        return b"".join(parts)

    def write_bytes(self, address: int, data: bytes) -> None:
        """Put ``data`` at an address."""
        scratch = self._scratch
        with scratch.lock, self._memory_calls:
            for start in range(0, len(data), scratch.NBYTES):
                part = data[start : start + scratch.NBYTES]
                ctypes.memmove(scratch.host, part, len(part))
                self.context.driver.copy_in(address + start, scratch.host, len(part), scratch.stream)
                self.context.driver.synchronize_stream(scratch.stream)

    def first_mismatch(self, address: int, nbytes: int, value: int) -> int:
        """Offset of the first byte that is not ``value``; -1 when all are."""
        if not nbytes or self.context.lost is not None:
            return -1
        if nbytes > _COPIED:
            return self._find(address, nbytes, value)
        with self._scratch.lock, self._memory_calls:
            self._fetch(address, nbytes)
            wrong = np.flatnonzero(bytes_at(self._scratch.host, nbytes) != value)
        return int(wrong[0]) if wrong.size else -1

    def mismatches(self, regions: Sequence[tuple[int, int, int]]) -> list[int]:
        """Indices of those of ``regions`` (address, nbytes, value) that hold another byte somewhere."""
        if self.context.lost is not None:
            return []
        if len(regions) <= _FEW_REGIONS:
            return [i for i, region in enumerate(regions) if self.first_mismatch(*region) >= 0]
        found: list[int] = []
        most = self._scratch.MAX_REGIONS
        for start in range(0, len(regions), most):
            flags = self._check(regions[start : start + most])
            found += (start + np.flatnonzero(flags)).tolist()
        return found

    def _check(self, regions: Sequence[tuple[int, int, int]]) -> Flags:
        """Flags of regions, at most ``Scratch.MAX_REGIONS`` of them, by one launch."""
        context, scratch = self.context, self._scratch
        function = context.function(check_regions)
        memory, rows = region_rows(regions)
        table = DeviceArray(scratch.table, rows.shape, 8)
        flags = DeviceArray(scratch.flags, (len(rows),), 4)
        parameters = pack(check_regions.signature, (memory, table, flags, 0, 1))
        with scratch.lock, self._memory_calls:
            bytes_at(scratch.host, rows.nbytes)[:] = rows.reshape(-1).view(np.uint8)
            context.driver.copy_in(scratch.table, scratch.host, rows.nbytes, scratch.stream)
            context.driver.fill(scratch.flags, 0, 4 * len(rows), scratch.stream)
            grid, block = (len(rows), 1, 1), block_of(check_regions.block)
            context.driver.launch(function, grid, block, scratch.stream, parameters.address)
            self._fetch(scratch.flags, 4 * len(rows))
            return bytes_at(scratch.host, 4 * len(rows)).view(np.int32).copy()

    def _find(self, address: int, nbytes: int, value: int) -> int:
        context, scratch = self.context, self._scratch
        function = context.function(find_mismatch)
        data, found = DeviceArray(address, (nbytes,), 1), DeviceArray(scratch.word, (1,), 8)
        parameters = pack(find_mismatch.signature, (data, found, value))
        grid = (min(FIND_BLOCKS, -(-nbytes // find_mismatch.block[0])), 1, 1)
        with scratch.lock, self._memory_calls:
            # All bits of a word set: as an unsigned number the largest there is.
            context.driver.fill(scratch.word, 0xFF, 8, scratch.stream)
            block = block_of(find_mismatch.block)
            context.driver.launch(function, grid, block, scratch.stream, parameters.address)
            self._fetch(scratch.word, 8)
            return ctypes.c_int64.from_address(scratch.host).value

    def _fetch(self, address: int, nbytes: int) -> None:
        """Copy to the scratch memory and wait, which settles fills too."""
        scratch = self._scratch
        self.context.driver.copy_out(scratch.host, address, nbytes, scratch.stream)
        self.context.driver.synchronize_stream(scratch.stream)
        scratch.unsettled = False
