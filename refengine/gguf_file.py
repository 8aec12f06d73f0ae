"""A validated view of a GGUF file: nothing comes out of it that was not checked against the file's own bytes.

The ``gguf`` package gives the format's constants. Its reader trusts lengths and offsets, and builds several
arrays for each string, so this module parses for itself. Opening a file takes about as much memory as its
metadata has bytes, plus a few hundred bytes for each key and tensor, whose numbers are bounded; tensor data
stays in the mapping until it is read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from refengine.gguf_lookup import TypedMetadata, override_fields
from refengine.gguf_values import Cursor, Metadata, Scalar, file_error, printable, read_metadata

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from refengine.gguf_values import Field

MAX_TENSORS = 2**16
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME less its NUL
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 2**20

_MAGIC = b"GGUF"
_HEADER_BYTES = 4 + 4 + 8 + 8
_VERSIONS = (2, 3)
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, n_dims, one dimension, type, offset
_INT64_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file, and as what.

    ``shape`` is in C order (the last dimension is contiguous), ``offset`` counts bytes from the file's start.
    """

    name: str
    type: Any  # GGMLQuantizationType: the gguf package has no types that mypy follows
    shape: tuple[int, ...]
    n_elements: int
    nbytes: int
    offset: int

    def __post_init__(self) -> None:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        if self.n_elements != math.prod(self.shape) or self.nbytes * block != self.n_elements * block_bytes:
            raise ValueError(f"tensor '{self.name}': {self.nbytes} bytes are not {self.shape} of {self.type}")


class GGUFFile(TypedMetadata):
    """An open GGUF file of version 2 or 3, little-endian. Use it as a context manager.

    The file must not be shortened while it is open: that is a bus error in every program that maps files.
    Metadata stays readable after ``close()``; arrays from ``raw()`` keep their part of the mapping alive.
    """

    def __init__(
        self,
        path: Path,
        mapping: mmap.mmap,
        *,
        version: int,
        alignment: int,
        metadata: Metadata,
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.version = version
        self.alignment = alignment
        self.metadata = metadata
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, override_kv: Mapping[str, Scalar] | None = None
    ) -> GGUFFile:
        """Map a file and check all of it but the values of its weights.

        ``override_kv`` replaces or adds metadata after the checks; it does not change how the file is read.
        Raises ModelFileError, in one line, for whatever is wrong with the file.
        """
        path = Path(path)
        overrides = override_fields(override_kv or {})
        mapping = _map(path)
        try:
            return cls._parse(path, mapping, overrides)
        except BaseException:
            _unmap(mapping)
            raise

    @classmethod
    def _parse(cls, path: Path, mapping: mmap.mmap, overrides: dict[str, Field]) -> GGUFFile:
        cursor = Cursor(mapping, path)
        version = _read_version(cursor)
        n_tensors = cursor.u64("n_tensors")
        n_kv = cursor.u64("n_kv")
        fits = min(MAX_TENSORS, (cursor.size - cursor.pos) // _MIN_TENSOR_BYTES)
        if n_tensors > fits:
            wanted = f"want at most {fits}, more cannot fit; is the file truncated?"
            raise cursor.error("n_tensors", f"is {n_tensors}; {wanted}")
        fields = read_metadata(cursor, n_kv)
        alignment = _alignment(cursor, fields)
        tensors = _read_tensors(cursor, n_tensors, alignment)
        return cls(
            path,
            mapping,
            version=version,
            alignment=alignment,
            metadata=Metadata(fields | overrides),
            tensors=tensors,
        )

    @property
    def architecture(self) -> str:
        """``general.architecture``. Raises ModelFileError if the file has none."""
        return self.get_str("general.architecture")

    def tensor(self, name: str) -> TensorInfo:
        """Look up a tensor. Raises ModelFileError if the file does not have it."""
        info = self.tensors.get(name)
        if info is None:
            raise self.error(f"tensor '{printable(name)}'", f"is not one of the {len(self.tensors)} there")
        return info

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Bytes of a tensor: read-only uint8 [nbytes], a view of the mapping."""
        info = self.tensor(name)
        if self._mapping is None:
            raise self.error(f"tensor '{name}'", "was asked for after close(); read it before")
        return np.frombuffer(self._mapping, np.uint8, info.nbytes, info.offset)

    def release_pages(self, name: str) -> None:
        """Give the memory of a tensor back to the system: the next read fetches it from the file again.

        Pages that it shares with its neighbours stay. Does nothing where the system has no such call.
        """
        info = self.tensor(name)
        start, nbytes = inner_pages(info.offset, info.nbytes, mmap.PAGESIZE)
        if self._mapping is None or not nbytes or not hasattr(mmap, "MADV_DONTNEED"):
            return
        with contextlib.suppress(OSError):  # advice: a system that does not take it loses nothing
            self._mapping.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def close(self) -> None:
        """Close the file, once or more often. The mapping goes with the last array that ``raw()`` gave."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            _unmap(mapping)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def inner_pages(offset: int, nbytes: int, page: int) -> tuple[int, int]:
    """Start and length of the whole pages inside [offset, offset + nbytes)."""
    start = -(-offset // page) * page
    end = (offset + nbytes) // page * page
    return start, max(0, end - start)


def _map(path: Path) -> mmap.mmap:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise file_error(path, "model", "is a directory; want a GGUF file")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise file_error(path, "model", "is not a regular file; want a GGUF file")
        if status.st_size < _HEADER_BYTES:
            raise file_error(path, "header", _short_header(path, status.st_size))
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as err:
        raise file_error(path, "model", f"cannot be read: {err.strerror or err}") from None
    except (
        ValueError,
        OverflowError,
    ) as err:  # a NUL in the path; emptied since stat; beyond the address space
        raise file_error(path, "model", f"cannot be mapped: {err}") from None


def _short_header(path: Path, nbytes: int) -> str:
    if nbytes == 0:
        return "the file is empty; want a GGUF file"
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != _MAGIC[: len(magic)]:
        return f"starts with {magic!r}; want {_MAGIC!r}, is this a GGUF file?"
    return f"the file has {nbytes} bytes; want at least {_HEADER_BYTES}, it is truncated, fetch it again"


def _unmap(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # arrays still look at it; the last one takes it with it
        mapping.close()


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.data[:4])
    cursor.need(4, "magic")
    if magic != _MAGIC:
        raise cursor.error("magic", f"starts with {magic!r}; want {_MAGIC!r}, is this a GGUF file?")
    version = cursor.u32("version")
    if version in _VERSIONS:
        return version
    if version and version % 2**16 == 0:
        raise cursor.error("version", f"is 0x{version:08x}: a big-endian file; convert it to little-endian")
    if version == 1:
        raise cursor.error("version", "is 1, which is no longer read; want 2 or 3, convert the model again")
    raise cursor.error("version", f"is {version}; want 2 or 3")


def _alignment(cursor: Cursor, fields: dict[str, Field]) -> int:
    field = fields.get("general.alignment")
    if field is None:
        return DEFAULT_ALIGNMENT
    where = "key 'general.alignment'"
    if field.type_name != "u32" or not isinstance(field.value, int):
        raise cursor.error(where, f"has type {field.type_name}; want u32")
    value = field.value
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(where, f"is {value}; want a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}")
    return value


def _read_tensors(cursor: Cursor, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(n_tensors):
        info = _read_tensor(cursor, index, alignment)
        if info.name in tensors:
            raise cursor.error(f"tensor '{printable(info.name)}'", "is there twice; want each name once")
        tensors[info.name] = info
    # Offsets in the file count from the end of the header, which is known only now.
    data_start = -(-cursor.pos // alignment) * alignment
    before: TensorInfo | None = None
    for relative in sorted(tensors.values(), key=lambda info: info.offset):
        info = replace(relative, offset=data_start + relative.offset)
        tensors[info.name] = info
        where = f"tensor '{printable(info.name)}'"
        end = info.offset + info.nbytes
        if end > cursor.size:
            raise cursor.error(
                where,
                f"bytes {info.offset} to {end} leave the file of {cursor.size} bytes; "
                "the file is truncated or damaged, fetch it again",
            )
        if before is not None and info.offset < before.offset + before.nbytes:
            raise cursor.error(
                where,
                f"starts at byte {info.offset} and overlaps '{printable(before.name)}', "
                f"which ends at {before.offset + before.nbytes}",
            )
        before = info
    return tensors


def _read_tensor(cursor: Cursor, index: int, alignment: int) -> TensorInfo:
    """Read one tensor's entry; its offset still counts from the start of the data."""
    name = cursor.name(f"tensor {index} name", MAX_TENSOR_NAME_BYTES)
    where = f"tensor '{printable(name)}'"
    n_dims = cursor.u32(f"{where} n_dims")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(where, f"has {n_dims} dimensions; want 1 to {MAX_DIMS}")
    ne = [cursor.u64(f"{where} dimension {axis}") for axis in range(n_dims)]
    for axis, extent in enumerate(ne):
        if not 1 <= extent < _INT64_LIMIT:
            signed = extent - 2**64 if extent >= _INT64_LIMIT else extent
            raise cursor.error(where, f"dimension {axis} is {signed}; want 1 to 2^63 - 1")
    number = cursor.u32(f"{where} type")
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise cursor.error(where, f"has type {number}, which is unknown; want a type of ggml") from None
    if ne[0] % block:
        raise cursor.error(where, f"has rows of {ne[0]} elements; want a multiple of {block} for {kind.name}")
    n_elements = math.prod(ne)
    if n_elements >= _INT64_LIMIT:
        raise cursor.error(where, f"has {n_elements} elements; want fewer than 2^63")
    nbytes = n_elements // block * block_bytes
    # Readers that pad sizes in 64 bits wrap here and then see a small tensor.
    if nbytes + alignment > _INT64_LIMIT:
        raise cursor.error(where, f"has {nbytes} bytes; want fewer than 2^63 with padding")
    offset = cursor.u64(f"{where} offset")
    if offset % alignment:
        raise cursor.error(where, f"has offset {offset}; want a multiple of the alignment {alignment}")
    return TensorInfo(name, kind, tuple(reversed(ne)), n_elements, nbytes, offset)
