"""Bounded reading of files that anybody may have made: JSON without surprises, arrays without pickles."""

from __future__ import annotations

import json
import math
import re
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from instrumentation.errors import BadInputError
from refengine.gguf_values import printable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_JSON_BYTES = 64 << 20
MAX_ARRAYS = 1 << 16
MAX_DIMS = 8
#: element types that arrays of a recording have
DTYPES = {"<f4": np.dtype(np.float32), "<i4": np.dtype(np.int32)}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}")
_MAX_HEADER_BYTES = 4096


class GoldenFileError(BadInputError):
    """A recording is damaged, newer than this version, or does not fit. Names the file and what is wrong."""


def read_bytes(path: Path, limit: int) -> bytes:
    """Whole content of a file of at most ``limit`` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise GoldenFileError(f"{path}: cannot be read: {reason}") from None
    if len(data) > limit:
        raise GoldenFileError(f"{path}: has more than {limit} bytes; want at most as many")
    return data


class Fields:
    """A JSON object whose values are taken by name and type."""

    def __init__(self, path: Path, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise GoldenFileError(
                f"{path}: {where or 'the content'} is {shown(value)}; want an object in braces"
            )
        self.path = path
        self.where = where
        self.values: Mapping[str, Any] = value

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Of a file. Raises ``GoldenFileError``."""
        data = read_bytes(path, MAX_JSON_BYTES)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise GoldenFileError(f"{path}: is no JSON: {str(error) or 'nested too deeply'}") from None
        return cls(path, "", value)

    def fail(self, key: str, want: str) -> GoldenFileError:
        """What is raised for a value that is not as wanted."""
        name = f"{self.where}.{key}" if self.where else key
        seen = shown(self.values[key]) if key in self.values else "missing"
        return GoldenFileError(f"{self.path}: {name} is {seen}; want {want}")

    def integer(self, key: str, low: int = 0, high: int = 2**31 - 1) -> int:
        """A whole number from ``low`` to ``high``."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"a whole number from {low} to {high}")
        return value

    def number(self, key: str) -> float:
        """A finite number that is not negative."""
        value = self.values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise self.fail(key, "a number that is not negative")
        return float(value)

    def text(self, key: str, limit: int = 1 << 24) -> str:
        """Text of at most ``limit`` characters."""
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > limit:
            raise self.fail(key, f"text of at most {limit} characters")
        return value

    def name(self, key: str) -> str:
        """Text that ``NAME`` describes."""
        value = self.text(key)
        if not NAME.fullmatch(value):
            raise self.fail(key, "letters, digits, and '_', '.', '-' between them")
        return value

    def optional(self, key: str) -> bool:
        """Whether there is a value, and it is not null."""
        return self.values.get(key) is not None

    def inner(self, key: str) -> Fields:
        """An object inside."""
        name = f"{self.where}.{key}" if self.where else key
        return Fields(self.path, name, self.values.get(key))

    def items(self, key: str, limit: int) -> list[Any]:
        """A list of at most ``limit`` values."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) > limit:
            raise self.fail(key, f"a list of at most {limit} values")
        return value

    def objects(self, key: str, limit: int) -> list[Fields]:
        """A list of objects."""
        name = f"{self.where}.{key}" if self.where else key
        return [Fields(self.path, f"{name}[{i}]", value) for i, value in enumerate(self.items(key, limit))]

    def integers(self, key: str, limit: int, low: int = 0, high: int = 2**31 - 1) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self.items(key, limit)
        if any(not isinstance(v, int) or isinstance(v, bool) or not low <= v <= high for v in values):
            raise self.fail(key, f"whole numbers from {low} to {high}")
        return tuple(values)


def shown(value: object) -> str:
    """A value on one line, shortened."""
    text = value if isinstance(value, str) else json.dumps(value)[:80]
    text = printable(text[:60]) + ("..." if len(text) > 60 else "")
    return f"'{text}'" if isinstance(value, str) else text


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write an uncompressed .npz, the same bytes for the same arrays."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")  # whose time is 1980, always
            with archive.open(entry, "w", force_zip64=True) as file:
                npy.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an .npz that is not compressed: so what is read takes no more memory than the file has bytes.

    Raises ``GoldenFileError``.
    """
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            return _arrays_of(path, archive, size)
    except GoldenFileError:
        raise
    except OSError as error:
        raise GoldenFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - zipfile raises whatever its parts do
        reason = printable(str(error)) or type(error).__name__
        raise GoldenFileError(f"{path}: is damaged: {reason}; record the case again") from None


def _arrays_of(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, npt.NDArray[Any]]:
    entries = archive.infolist()
    if len(entries) > MAX_ARRAYS:
        raise GoldenFileError(f"{path}: has {len(entries)} arrays; want at most {MAX_ARRAYS}")
    if sum(entry.file_size for entry in entries) > size:
        raise GoldenFileError(f"{path}: its arrays are larger than the file; want none that overlap")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for entry in entries:
        name = entry.filename.removesuffix(".npy")
        if not NAME.fullmatch(name) or name == entry.filename or name in arrays:
            raise GoldenFileError(f"{path}: entry {shown(entry.filename)}; want names of tensors, each once")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise GoldenFileError(f"{path}: array {name} is compressed; write it with np.savez")
        arrays[name] = _array_of(path, archive, entry, name)
    return arrays


def _array_of(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> npt.NDArray[Any]:
    with archive.open(entry) as file:
        if npy.read_magic(file) != (1, 0):
            raise GoldenFileError(f"{path}: array {name} is of another version of the format; want 1.0")
        shape, fortran, dtype = npy.read_array_header_1_0(file, max_header_size=_MAX_HEADER_BYTES)
        data = file.read()
    if dtype.str not in DTYPES:
        raise GoldenFileError(
            f"{path}: array {name} has elements of {dtype.str}; want one of {', '.join(DTYPES)}"
        )
    if fortran or not 1 <= len(shape) <= MAX_DIMS or any(n < 0 for n in shape):
        raise GoldenFileError(f"{path}: array {name} has shape {shape}; want 1 to {MAX_DIMS} axes in C order")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(data):
        raise GoldenFileError(
            f"{path}: array {name} has {len(data)} bytes; want {wanted} for its shape {shape}"
        )
    return np.frombuffer(data, DTYPES[dtype.str]).reshape(shape)
