"""The model's weights on a device: read from the file, repacked once, shared read-only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

from instrumentation.reservation import BufferRequest
from refengine.config import loaded_tensors
from refengine.errors import UnsupportedModelError
from refengine.kernels.quants import format_of
from refengine.kernels.quants.layout import LANES, Packed, PackedShapes

if TYPE_CHECKING:
    from instrumentation.allocator import Allocator
    from instrumentation.arena import Arena
    from instrumentation.buffer import Buffer
    from instrumentation.devices.base import Stream
    from instrumentation.devices.launch import Argument
    from instrumentation.ownership import Owner
    from instrumentation.view import View
    from refengine.config import ModelConfig, Shape
    from refengine.gguf_file import GGUFFile, TensorInfo

#: called with (bytes done, bytes in all) while weights are loaded
Progress = Callable[[int, int], None]
#: parts of a packed matrix start at multiples of this many bytes
PART_ALIGNMENT = 256
#: matrices that are no products' and are read as they are
PLAIN = ("ssm_conv1d.weight",)
#: arrays of packed matrices that hold nothing but the bits of numbers, for who looks for NaN: type, field -> format
BITS: dict[tuple[Any, str], str] = {
    (GGMLQuantizationType.F32, "words"): "f32",
    (GGMLQuantizationType.BF16, "halves"): "bf16",
    **{
        (GGMLQuantizationType[name], "halves"): "f16"
        for name in ("F16", "IQ4_NL", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    },
}


@dataclass(frozen=True)
class Matrix:
    """A packed weight matrix [n_out, n_in] on the device; those of several experts lie one under the other."""

    type: Any
    n_out: int
    n_in: int
    codes: View
    halves: View
    words: View

    @property
    def arguments(self) -> dict[str, Argument]:
        """The three array arguments of every kernel that reads weights."""
        return {"codes": self.codes, "halves": self.halves, "words": self.words}

    @cached_property
    def wide_arguments(self) -> dict[str, Argument]:
        """The same for kernels whose lanes own four columns: the same bytes in larger elements."""
        dtypes = format_of(self.type).wide.dtypes
        return {
            name: _in_elements(view, dtypes[name])
            for name, view in (("codes", self.codes), ("halves", self.halves), ("words", self.words))
        }


def _in_elements(view: View, dtype: np.dtype[Any]) -> View:
    """The bytes of a view [rows, columns] as elements of another size."""
    if view.dtype == dtype:
        return view
    rows, columns = view.shape
    shape = (rows, columns * view.itemsize // dtype.itemsize)
    return view.buffer.view(dtype, shape, offset=view.offset, name=view.name, bits=view.bits)


def _parts(shapes: PackedShapes) -> list[tuple[str, np.dtype[Any], tuple[int, int], int]]:
    """(field, element type, shape, byte offset) of the three arrays in one buffer."""
    parts, offset = [], 0
    for field, dtype in (("codes", np.uint8), ("halves", np.uint16), ("words", np.uint32)):
        shape: tuple[int, int] = getattr(shapes, field)
        parts.append((field, np.dtype(dtype), shape, offset))
        nbytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
        offset += -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT
    return parts


def _packed_nbytes(shapes: PackedShapes) -> int:
    _, dtype, shape, offset = _parts(shapes)[-1]
    return offset + shape[0] * shape[1] * dtype.itemsize


def _filled_up(raw: npt.NDArray[np.uint8], n_rows: int, row_nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of rows, each with zero bytes behind it up to ``row_nbytes``."""
    if raw.size == n_rows * row_nbytes:
        return raw
    wide = np.zeros((n_rows, row_nbytes), np.uint8)
    wide[:, : raw.size // n_rows] = raw.reshape(n_rows, -1)
    return wide.reshape(-1)


class WeightPlan:
    """Which buffers a file's weights need, known before any of them is read; ``draft``: with the MTP block's."""

    def __init__(self, gguf: GGUFFile, config: ModelConfig, owner: Owner, *, draft: bool = False) -> None:
        self.gguf = gguf
        #: shapes in which the engine takes the tensors; files may have dimensions of 1 more or less
        self.shapes: dict[str, Shape] = loaded_tensors(config, draft=draft)
        self.requests = [
            BufferRequest(nbytes=self._nbytes(gguf.tensor(name)), owner=owner, name=f"weight.{name}")
            for name in self.shapes
        ]

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is an array of float32 as it is, and not a packed matrix."""
        return len(self.shapes[name]) == 1 or name.endswith(PLAIN)

    def matrix_shape(self, info: TensorInfo) -> tuple[int, int]:
        """Rows and row length of a packed matrix; rows of experts' floats are filled up with zeros to whole blocks."""
        *rows, n_in = self.shapes[info.name]
        if len(rows) == 2 and format_of(info.type).block_size == 1:
            n_in = -(-n_in // LANES) * LANES
        return prod(rows), n_in

    def _nbytes(self, info: TensorInfo) -> int:
        if self.is_plain(info.name):
            if info.type != GGMLQuantizationType.F32:
                raise UnsupportedModelError(
                    f"tensor {info.name} is {info.type.name}; vectors are read as F32 only: convert the model again"
                )
            return info.n_elements * 4
        return _packed_nbytes(format_of(info.type).packed_shapes(*self.matrix_shape(info)))

    @property
    def nbytes(self) -> int:
        """Payload bytes of all weights."""
        return sum(request.nbytes for request in self.requests)


class Weights:
    """All weights of a model in one arena."""

    def __init__(self, allocator: Allocator, weight_plan: WeightPlan, owner: Owner) -> None:
        self.plan = weight_plan
        self.owner = owner
        self.vectors: dict[str, View] = {}
        self.matrices: dict[str, Matrix] = {}
        self.buffers: tuple[Buffer, ...] = ()
        size = allocator.arena_size(weight_plan.requests)
        self.arena: Arena = allocator.reserve_arena(size, owner=owner, name="weights").unwrap()
        try:
            self.buffers = self.arena.reserve_all(weight_plan.requests).unwrap()
        except BaseException:
            self.arena.release()
            raise

    def load(self, stream: Stream, progress: Progress | None = None) -> None:
        """Read, repack and copy every tensor; file pages go back to the system one tensor at a time."""
        gguf = self.plan.gguf
        total = sum(gguf.tensor(name).nbytes for name in self.plan.shapes)
        done = 0
        for name, buffer in zip(self.plan.shapes, self.buffers, strict=True):
            info = gguf.tensor(name)
            if self.plan.is_plain(name):
                view = buffer.view(np.float32, self.plan.shapes[name], name=name)
                stream.copy_in(view, np.ascontiguousarray(gguf.raw(name)))
                stream.synchronize()
                self.vectors[name] = view
            else:
                self.matrices[name] = self._load_matrix(stream, buffer, info)
            buffer.share_read_only()
            gguf.release_pages(name)
            done += info.nbytes
            if progress is not None:
                progress(done, total)

    def _load_matrix(self, stream: Stream, buffer: Buffer, info: TensorInfo) -> Matrix:
        n_out, n_in = self.plan.matrix_shape(info)
        form = format_of(info.type)
        raw = _filled_up(self.plan.gguf.raw(info.name), n_out, n_in // form.block_size * form.block_bytes)
        parts = _parts(form.packed_shapes(n_out, n_in))
        host = {field: np.empty(shape, dtype) for field, dtype, shape, _ in parts}
        form.repack(raw, n_out, n_in, Packed(**host))
        views = {}
        for field, dtype, shape, offset in parts:
            bits = BITS.get((info.type, field), "")
            views[field] = buffer.view(dtype, shape, offset=offset, name=f"{info.name}.{field}", bits=bits)
            stream.copy_in(views[field], host[field])
        stream.synchronize()
        return Matrix(info.type, n_out, n_in, **views)

    def release(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            buffer.free()
        self.buffers = ()
        self.arena.release()
