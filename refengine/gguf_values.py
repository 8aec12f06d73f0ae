"""Metadata of a GGUF file: bounds-checked reading of keys and values.

Layout of a value: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length in the file is
checked against the bytes that are left before anything is read or allocated; all arithmetic is on Python
integers.
Strings stay packed as UTF-8 until someone asks for them: a list of two-letter strings takes six times its
size in the file, so a hostile file could otherwise multiply.
"""

from __future__ import annotations

import codecs
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf.constants import GGUFValueType

from refengine.errors import ModelFileError

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[str] | npt.NDArray[Any]

MAX_KEY_BYTES = 2**16 - 1  # the GGUF specification's own bound
MAX_KEYS = 2**16
MAX_STRING_BYTES = 2**30  # llama.cpp's, for strings and for arrays
MAX_ARRAY_ELEMENTS = 2**30
MAX_STRINGS = 2**24  # in all arrays of a file: each costs a loop step; vocabularies end near 2**18

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_FIELD_BYTES = 8 + 1 + 4 + 1  # key length, key, type, value
_UTF8_CHUNK = 2**16

_DTYPES: dict[Any, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_TYPE_NAMES: dict[Any, str] = {
    GGUFValueType.UINT8: "u8",
    GGUFValueType.INT8: "i8",
    GGUFValueType.UINT16: "u16",
    GGUFValueType.INT16: "i16",
    GGUFValueType.UINT32: "u32",
    GGUFValueType.INT32: "i32",
    GGUFValueType.FLOAT32: "f32",
    GGUFValueType.BOOL: "bool",
    GGUFValueType.STRING: "str",
    GGUFValueType.ARRAY: "arr",
    GGUFValueType.UINT64: "u64",
    GGUFValueType.INT64: "i64",
    GGUFValueType.FLOAT64: "f64",
}


def printable(text: str, limit: int = 200) -> str:
    """Text of a file or a path as part of a one-line message: escaped where a terminal would act on it."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return shown if shown.isprintable() else repr(shown)[1:-1]


def file_error(path: Path, field: str, problem: str) -> ModelFileError:
    """Build the one-line error of a field of a file: the value seen, the value wanted, what to do."""
    return ModelFileError(f"{printable(str(path), 4096)}: {field}: {problem}")


class Cursor:
    """Little-endian reads over the bytes of a file. Each one is checked against the bytes that are left."""

    __slots__ = ("data", "path", "pos", "size", "strings_left")

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.pos = 0
        self.strings_left = MAX_STRINGS

    def error(self, field: str, problem: str) -> ModelFileError:
        """Build the error of ``field``; the caller raises it."""
        return file_error(self.path, field, problem)

    def need(self, nbytes: int, field: str) -> int:
        """Step over ``nbytes`` bytes and return where they start."""
        start = self.pos
        if nbytes > self.size - start:
            raise self.error(
                field,
                f"{nbytes} bytes at offset {start} leave the file, which has {self.size - start} left; "
                "the file is truncated or damaged, fetch it again",
            )
        self.pos = start + nbytes
        return start

    def u32(self, field: str) -> int:
        """Read an unsigned 32-bit integer."""
        return int(_U32.unpack_from(self.data, self.need(4, field))[0])

    def u64(self, field: str) -> int:
        """Read an unsigned 64-bit integer."""
        return int(_U64.unpack_from(self.data, self.need(8, field))[0])

    def name(self, field: str, max_bytes: int) -> str:
        """Read a string of 1 to ``max_bytes`` bytes that names something."""
        nbytes = self.u64(f"{field} length")
        if not 1 <= nbytes <= max_bytes:
            raise self.error(field, f"length {nbytes}; want 1 to {max_bytes} bytes")
        start = self.need(nbytes, field)
        raw = self.data[start : self.pos]
        try:
            text = raw.decode()
        except UnicodeDecodeError as err:
            raise self.error(field, f"byte 0x{raw[err.start]:02x} at {err.start} is not UTF-8") from None
        if "\0" in text:  # C readers would see another, shorter name
            raise self.error(field, f"NUL byte in '{printable(text)}'; want text without it")
        return text

    def text(self, field: str) -> bytes:
        """Read a string value. Checked to be UTF-8, returned packed."""
        nbytes = self.u64(f"{field} length")
        if nbytes > MAX_STRING_BYTES:
            raise self.error(field, f"string length {nbytes}; want at most {MAX_STRING_BYTES} bytes")
        start = self.need(nbytes, field)
        self._check_utf8(start, nbytes, field)
        return self.data[start : self.pos]

    def texts(self, count: int, field: str) -> bytes:
        """Read an array of ``count`` strings. Checked to be UTF-8, returned packed, lengths included."""
        if count > self.strings_left:
            raise self.error(field, f"{count} strings; want at most {MAX_STRINGS} in a file")
        if 8 * count > self.size - self.pos:
            raise self.error(
                field, f"{count} strings cannot fit in {self.size - self.pos} bytes; is the file truncated?"
            )
        self.strings_left -= count
        start = pos = self.pos
        data, size, unpack = self.data, self.size, _U64.unpack_from
        for index in range(count):  # the one hot loop of opening a file: 100,000 steps are usual
            end = pos + 8
            if end <= size:
                (nbytes,) = unpack(data, pos)
                end += nbytes
            if end > size:
                self.pos = pos
                self.need(end - pos, f"{field} element {index}")
            if nbytes > _UTF8_CHUNK:
                self._check_utf8(pos + 8, nbytes, f"{field} element {index}")
            else:
                try:
                    data[pos + 8 : end].decode()
                except UnicodeDecodeError:
                    self._check_utf8(pos + 8, nbytes, f"{field} element {index}")
            pos = end
        self.pos = pos
        return data[start:pos]

    def _check_utf8(self, start: int, nbytes: int, field: str) -> None:
        # In chunks: one character outside the basic plane makes a decoded string four times as large.
        decoder = codecs.getincrementaldecoder("utf-8")()
        end = start + nbytes
        try:
            for pos in range(start, end, _UTF8_CHUNK):
                decoder.decode(self.data[pos : min(pos + _UTF8_CHUNK, end)])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as err:
            seen = f"0x{err.object[err.start]:02x}"
            raise self.error(field, f"byte {seen} makes the text invalid; want UTF-8") from None


@dataclass(slots=True)
class Field:
    """A metadata value, or the packed UTF-8 from which it is made when it is asked for."""

    type_name: str  # "u32", "str", "f32[32]"
    value: Value | None
    packed: bytes = b""
    length: int | None = None  # elements of an array; None for a scalar


class Metadata(Mapping[str, Value]):
    """Key -> value: Python scalars, NumPy arrays of numbers and booleans, ``list[str]``. Read-only."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Field]) -> None:
        self._fields = fields

    def __getitem__(self, key: str) -> Value:
        field = self._fields[key]
        if field.value is None:
            field.value = _unpack(field.packed, field.length)
            field.packed = b""
        return field.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def type_name(self, key: str) -> str:
        """GGUF type of a value: ``u32``, ``str``, ``f32[32]`` (an array of 32)."""
        return self._fields[key].type_name

    def array_length(self, key: str) -> int | None:
        """Elements of an array, without unpacking it; None for a scalar."""
        return self._fields[key].length


def _unpack(packed: bytes, length: int | None) -> str | list[str]:
    if length is None:
        return packed.decode()
    texts: list[str] = []
    pos = 0
    for _ in range(length):
        (nbytes,) = _U64.unpack_from(packed, pos)
        texts.append(packed[pos + 8 : pos + 8 + nbytes].decode())
        pos += 8 + nbytes
    return texts


def read_metadata(cursor: Cursor, n_kv: int) -> dict[str, Field]:
    """Read ``n_kv`` keys and values. Raises ModelFileError naming the key that is wrong."""
    fits = min(MAX_KEYS, (cursor.size - cursor.pos) // _MIN_FIELD_BYTES)
    if n_kv > fits:
        raise cursor.error("n_kv", f"is {n_kv}; want at most {fits}, more cannot fit; is the file truncated?")
    fields: dict[str, Field] = {}
    for index in range(n_kv):
        key = cursor.name(f"key {index}", MAX_KEY_BYTES)
        field = f"key '{printable(key)}'"
        if key in fields:
            raise cursor.error(field, "is there twice; want each key once")
        fields[key] = _read_field(cursor, field)
    return fields


def _read_type(cursor: Cursor, field: str) -> Any:
    number = cursor.u32(f"{field} type")
    if number not in _TYPE_NAMES:
        raise cursor.error(field, f"value type {number} is unknown; want 0 to {len(_TYPE_NAMES) - 1}")
    return GGUFValueType(number)


def _read_field(cursor: Cursor, field: str) -> Field:
    kind = _read_type(cursor, field)
    if kind == GGUFValueType.STRING:
        return Field("str", None, packed=cursor.text(field))
    if kind != GGUFValueType.ARRAY:
        return Field(_TYPE_NAMES[kind], _read_numbers(cursor, kind, 1, field)[0].item())
    element = _read_type(cursor, f"{field} element")
    count = cursor.u64(f"{field} array length")
    if element == GGUFValueType.ARRAY:
        raise cursor.error(field, "array of arrays; want an array of numbers, booleans or strings")
    if count > MAX_ARRAY_ELEMENTS:
        raise cursor.error(field, f"array of {count} elements; want at most {MAX_ARRAY_ELEMENTS}")
    type_name = f"{_TYPE_NAMES[element]}[{count}]"
    if element == GGUFValueType.STRING:
        return Field(type_name, None, packed=cursor.texts(count, field), length=count)
    return Field(type_name, _read_numbers(cursor, element, count, field), length=count)


def _read_numbers(cursor: Cursor, kind: Any, count: int, field: str) -> npt.NDArray[Any]:
    dtype = _DTYPES[kind]
    start = cursor.need(count * dtype.itemsize, field)
    numbers = np.frombuffer(cursor.data[start : cursor.pos], dtype)
    if kind == GGUFValueType.BOOL:
        if count and numbers.max() > 1:
            bad = int(np.argmax(numbers > 1))
            raise cursor.error(field, f"boolean byte {int(numbers[bad])} at element {bad}; want 0 or 1")
        return numbers.view(np.bool_)
    return numbers
