"""How a matrix lies in memory: the file's own bits, moved so that 32 neighbouring threads read neighbours.

Each matrix ``[n_out, n_in]`` of a GGUF file is repacked once, when it is loaded, into three arrays that all
formats share: ``codes`` (bytes), ``halves`` (scales: bits of float16, small integers) and ``words``.
Kernels take weights in blocks of 32 along ``n_in``: lane t of a warp owns weight t of a block, and byte t
of a group of 32 code bytes. So a warp's loads are contiguous, scales are the same for all its lanes, and
the host's compiler turns the lane loop into vector code. Weights are never expanded: the packed arrays hold
the bits of the file and no others.
"""

# No "from __future__ import annotations": the types of a device function's parameters are read at run time.
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES

from instrumentation.kernel import DeviceFunction, device_function
from instrumentation.kernel.types import i32, u8_2d, u16_2d, u32_2d
from refengine.errors import UnsupportedModelError

LANES = 32
#: shape of an array that a format does not use: kernels take all three whatever the format
UNUSED = (1, 1)
#: raw bytes repacked at a time: what is read, made and written stays in a core's own cache
_CHUNK_BYTES = 2**18

Blocks: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class PackedShapes:
    """C-order shapes of the arrays of a packed matrix: uint8 codes, uint16 halves, uint32 words."""

    codes: tuple[int, int]
    halves: tuple[int, int]
    words: tuple[int, int]

    def __post_init__(self) -> None:
        if min(*self.codes, *self.halves, *self.words) < 1:
            raise ValueError(f"every extent is at least 1, unused arrays are {list(UNUSED)}: {self}")

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays together, without padding between them."""
        return math.prod(self.codes) + 2 * math.prod(self.halves) + 4 * math.prod(self.words)


@dataclass(frozen=True)
class Packed:
    """Arrays of a packed matrix, or consecutive rows of them. Those that a format leaves are [1, 1]."""

    codes: npt.NDArray[np.uint8]
    halves: npt.NDArray[np.uint16]
    words: npt.NDArray[np.uint32]

    def __post_init__(self) -> None:
        for name, dtype in (("codes", np.uint8), ("halves", np.uint16), ("words", np.uint32)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 2 or not array.flags.c_contiguous:
                seen = f"{array.dtype} of shape {list(array.shape)}, strides {list(array.strides)}"
                raise ValueError(f"{name} is {seen}; want two dimensions of {np.dtype(dtype)}, C-contiguous")

    @property
    def shapes(self) -> PackedShapes:
        """Shapes of the three arrays."""
        codes, halves, words = self.codes.shape, self.halves.shape, self.words.shape
        return PackedShapes((codes[0], codes[1]), (halves[0], halves[1]), (words[0], words[1]))

    def rows(self, first: int, last: int) -> "Packed":
        """View of rows ``first`` to ``last`` (exclusive) of the arrays that have the matrix's rows."""
        n_out = max(self.codes.shape[0], self.halves.shape[0], self.words.shape[0])

        def cut(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return array[first:last] if array.shape[0] == n_out else array

        return Packed(cut(self.codes), cut(self.halves), cut(self.words))


@dataclass(frozen=True)
class Wide:
    """How a lane that owns four neighbouring columns reads a packed matrix: the same bytes as larger elements.

    ``weight(codes, halves, words, row, step, place, quad, i)`` is weight ``4 * quad + i`` of block ``8 * step + place``
    (place 0 to 7) of a row in float32, with the bits of ``QuantFormat.weight``. What it loads does not depend on i, so
    that a compiler loads it once for four; indices are linear in ``step``, so that it turns them into pointers.
    """

    weight: DeviceFunction
    #: annotations of the three arrays, of ``instrumentation.kernel.types``
    codes: Any = u8_2d
    halves: Any = u16_2d
    words: Any = u32_2d

    @property
    def arrays(self) -> dict[str, Any]:
        """Annotations of the three arrays by their names."""
        return {"codes": self.codes, "halves": self.halves, "words": self.words}

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Element types of the three arrays by their names."""
        return {name: np.dtype(str(kind.__metadata__[0].dtype)) for name, kind in self.arrays.items()}


def _by_column(weight: DeviceFunction) -> Wide:
    """For a format whose weights are read one by one."""

    @device_function
    def quad_weight(
        codes: u8_2d, halves: u16_2d, words: u32_2d, row: i32, step: i32, place: i32, quad: i32, i: i32
    ) -> Any:
        return weight(codes, halves, words, row, 8 * step + place, 4 * quad + i)

    return Wide(quad_weight)


@dataclass(frozen=True)
class QuantFormat:
    """How a format's blocks lie in a file and in memory, and the device function that reads one weight.

    ``weight(codes, halves, words, row, b, lane)`` is weight ``32 * b + lane`` of a row in float32, with
    the bits of ``gguf.quants.dequantize``. ``block`` is the layout of a block of ``GGML_QUANT_SIZES`` in the
    file. ``fill(blocks, out)`` packs ``blocks [n_rows, n_blocks]`` into the rows of ``out``.
    """

    type: Any  # GGMLQuantizationType: the gguf package has no types that mypy follows
    weight: DeviceFunction
    block: np.dtype[Any]
    fill: Callable[[Blocks, Packed], None]
    #: weights that share a run of ``group_bytes`` code bytes: the last group of a row may be partly empty
    group: int = LANES
    group_bytes: int = 0
    #: uint16 and uint32 elements for each block of the file
    block_halves: int = 0
    block_words: int = 0
    #: for lanes that own four columns; None: as ``weight``
    quads: Wide | None = None

    def __post_init__(self) -> None:
        if self.block.itemsize != self.block_bytes or self.group % LANES or self.group_bytes % LANES:
            raise ValueError(
                f"{self.name}: {self} is not {self.block_bytes} bytes a block, whole groups of {LANES}"
            )

    @cached_property
    def wide(self) -> Wide:
        """How a lane that owns four columns reads the format."""
        return self.quads if self.quads is not None else _by_column(self.weight)

    @property
    def name(self) -> str:
        """The format's name in GGUF, such as ``Q4_1``."""
        return str(self.type.name)

    @property
    def block_size(self) -> int:
        """Weights of a block in the file."""
        return int(GGML_QUANT_SIZES[self.type][0])

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the file."""
        return int(GGML_QUANT_SIZES[self.type][1])

    def packed_shapes(self, n_out: int, n_in: int) -> PackedShapes:
        """Shapes of a packed matrix ``[n_out, n_in]``. Raises UnsupportedModelError for other row lengths."""
        unit = math.lcm(LANES, self.block_size)
        if n_out < 1 or n_in < 1 or n_in % unit:
            raise UnsupportedModelError(
                f"a {self.name} matrix of {n_out} rows of {n_in} weights: kernels want at least one row, "
                f"of a multiple of {unit} weights; convert the model to another type"
            )
        blocks = n_in // self.block_size

        def shape(width: int) -> tuple[int, int]:
            return (n_out, width) if width else UNUSED

        return PackedShapes(
            codes=shape(-(-n_in // self.group) * self.group_bytes),
            halves=shape(blocks * self.block_halves),
            words=shape(blocks * self.block_words),
        )

    def repack(self, raw: npt.NDArray[np.uint8], n_out: int, n_in: int, out: Packed) -> None:
        """Pack a matrix ``[n_out, n_in]`` into ``out``; ``raw`` is its bytes in the file, uint8 ``[nbytes]``.

        Writes every byte of ``out``. Raises ValueError unless ``out`` has ``packed_shapes(n_out, n_in)``.
        """
        shapes = self.packed_shapes(n_out, n_in)
        nbytes = n_out * (n_in // self.block_size) * self.block_bytes
        if raw.dtype != np.uint8 or raw.shape != (nbytes,):
            raise ValueError(
                f"{self.name} [{n_out}, {n_in}] is uint8 [{nbytes}], not {raw.dtype} {list(raw.shape)}"
            )
        if out.shapes != shapes:
            raise ValueError(f"{self.name} [{n_out}, {n_in}] packs into {shapes}, not into {out.shapes}")
        for array in (out.codes, out.halves, out.words):
            if array.shape == UNUSED:
                array[...] = 0
        blocks = raw.view(self.block).reshape(n_out, -1)
        step = max(1, _CHUNK_BYTES // (nbytes // n_out))
        for first in range(0, n_out, step):
            last = min(first + step, n_out)
            self.fill(blocks[first:last], out.rows(first, last))


def pair_nibbles(blocks: Blocks, codes: npt.NDArray[np.uint8]) -> None:
    """Move the 4-bit codes of blocks of 32 weights to where the lanes want them.

    ``blocks``: ``[n_rows, n_blocks]`` of 16 bytes (``V16``), byte i of a block holding weights i (low nibble)
    and i + 16. ``codes``: ``[n_rows, 32 * ceil(n_blocks / 2)]``, byte t of group p to hold weight t of
    block 2p (low nibble) and of block 2p + 1; the high nibbles are zero where there is no such block.
    """
    n_rows, n_blocks = blocks.shape
    n_groups = -(-n_blocks // 2)
    low_nibbles = np.uint64(0x0F0F_0F0F_0F0F_0F0F)
    high_nibbles = ~low_nibbles
    second = np.zeros((n_rows, n_groups), "V16")
    second[:, : n_blocks // 2] = blocks[:, 1::2]
    even = np.ascontiguousarray(blocks[:, 0::2]).view(np.uint64)  # (n_rows, 2 * n_groups)
    odd = second.view(np.uint64)
    halves = codes.view("V16").reshape(n_rows, n_groups, 2)
    halves[:, :, 0] = ((even & low_nibbles) | ((odd & low_nibbles) << np.uint64(4))).view("V16")
    halves[:, :, 1] = (((even >> np.uint64(4)) & low_nibbles) | (odd & high_nibbles)).view("V16")
