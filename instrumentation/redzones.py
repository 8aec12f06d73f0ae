"""Guard bytes: where they lie around a payload, what they hold, and how damage to them is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from instrumentation.errors import BadInputError
from instrumentation.findings import MemoryWindow

if TYPE_CHECKING:
    from instrumentation.devices.base import DeviceMemory

#: every payload starts at a multiple of this many bytes
ALIGNMENT = 256

LEFT_CANARY = 0xFA
RIGHT_CANARY = 0xFB
FRESH = 0xCD
FREED = 0xDD

_CONTEXT = 32
_MAX_WINDOW = 7 * 16
_MAX_SCAN = 64 * 1024


def align_up(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Region(NamedTuple):
    """``nbytes`` bytes from ``address`` on that should all hold ``byte``."""

    address: int
    nbytes: int
    byte: int

    @property
    def stop(self) -> int:
        """Address behind the last byte."""
        return self.address + self.nbytes


class Block(NamedTuple):
    """What a payload takes of its arena, redzones and padding included; counted from the arena's start."""

    offset: int
    nbytes: int
    payload: int
    payload_nbytes: int

    @property
    def stop(self) -> int:
        """Offset behind the block."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class Redzones:
    """Geometry of blocks. ``width`` 0: no redzones, only alignment."""

    width: int

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or not 0 <= self.width <= 1 << 20:
            raise BadInputError(f"redzone is {self.width!r} bytes; use a whole number from 0 to {1 << 20}")

    @property
    def left_width(self) -> int:
        """Bytes left of a payload: the payload behind them stays aligned."""
        return align_up(self.width)

    def block_nbytes(self, nbytes: int) -> int:
        """Bytes that a payload of ``nbytes`` takes of its arena."""
        return self.left_width + align_up(nbytes + self.width)

    def block(self, offset: int, nbytes: int) -> Block:
        """Block at ``offset`` of an arena."""
        return Block(offset, self.block_nbytes(nbytes), offset + self.left_width, nbytes)

    def left(self, base: int, block: Block) -> Region:
        """Canary left of the payload, in an arena at address ``base``."""
        return Region(base + block.offset, block.payload - block.offset, LEFT_CANARY)

    def right(self, base: int, block: Block) -> Region:
        """Canary right of the payload: starts at the byte behind it and takes the padding too."""
        end = block.payload + block.payload_nbytes
        return Region(base + end, block.stop - end, RIGHT_CANARY)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a region that do not hold what they should: all damage lies in ``[first, stop)``."""

    region: Region
    first: int
    stop: int
    seen: bytes
    #: the scan ended before the region did, and more damage may follow
    cut: bool

    def __post_init__(self) -> None:
        assert self.region.address <= self.first < self.stop <= self.region.stop, self

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last damaged one."""
        return self.stop - self.first

    def describe(self) -> str:
        """``2 bytes from 0x... on hold 41 42, not fb``."""
        shown = self.seen[:8].hex(" ") + (" ..." if len(self.seen) > 8 else "")
        count = "1 byte" if self.nbytes == 1 else f"{self.nbytes} bytes"
        verb = "holds" if self.nbytes == 1 else "hold"
        at = f"at {self.first:#x}" if self.nbytes == 1 else f"from {self.first:#x} on"
        at_least = "at least " if self.cut else ""
        return f"{at_least}{count} {at} {verb} {shown}, not {self.region.byte:02x}"


def find_damage(memory: DeviceMemory, region: Region) -> Damage | None:
    """Damage in ``region``, or None. Reads at most 64 KiB from the first damaged byte on."""
    if not region.nbytes:
        return None
    at = memory.first_mismatch(region.address, region.nbytes, region.byte)
    if at < 0:
        return None
    count = min(region.nbytes - at, _MAX_SCAN)
    data = memory.read_bytes(region.address + at, count)
    kept = data.rstrip(bytes([region.byte]))
    first = region.address + at
    # A byte restored between the two reads leaves nothing to strip to; the first one was seen damaged.
    seen = kept or data[:1]
    return Damage(region, first, first + len(seen), seen, cut=count < region.nbytes - at)


def access_window(memory: DeviceMemory, address: int, nbytes: int, low: int, high: int) -> MemoryWindow:
    """Bytes around an access of ``nbytes`` bytes, within the mapped addresses ``[low, high)``."""
    start = max(low, (address - _CONTEXT) // 16 * 16)
    stop = min(high, -(-(address + nbytes + _CONTEXT) // 16) * 16)
    return MemoryWindow(start, memory.read_bytes(start, stop - start), address, address + nbytes)


def window(memory: DeviceMemory, damage: Damage, low: int, high: int) -> MemoryWindow:
    """Bytes around ``damage``, within the mapped addresses ``[low, high)``."""
    start = max(low, (damage.first - _CONTEXT) // 16 * 16)
    stop = min(high, -(-(damage.stop + _CONTEXT) // 16) * 16, start + _MAX_WINDOW)
    return MemoryWindow(start, memory.read_bytes(start, stop - start), damage.first, damage.stop)
