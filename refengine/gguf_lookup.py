"""Typed look-up in a GGUF file's metadata, and the overrides that ``--override-kv`` puts over it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from instrumentation.errors import BadInputError
from refengine.errors import UnsupportedModelError
from refengine.gguf_values import Field, Metadata, Scalar, file_error, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from refengine.errors import ModelFileError

MAX_OVERRIDE_BYTES = 127  # llama.cpp's bound, for the key and for a string value

_T = TypeVar("_T")


class TypedMetadata:
    """Typed look-up. Every getter raises ModelFileError naming the key, what was seen and what was wanted.

    A key that is absent gives ``default``, unchecked; without a default it is required.
    """

    path: Path
    metadata: Metadata

    def error(self, field: str, problem: str) -> ModelFileError:
        """Build an error of this file; the caller raises it."""
        return file_error(self.path, field, problem)

    def unsupported(self, field: str, problem: str) -> UnsupportedModelError:
        """Build the error of a sound file that this engine does not run; the caller raises it."""
        return UnsupportedModelError(f"{printable(str(self.path), 4096)}: {field}: not supported; {problem}")

    def _default(self, key: str, default: _T | None, wanted: str) -> _T:
        if default is None:
            raise self.error(f"key '{printable(key)}'", f"is missing; want {wanted}")
        return default

    def _wrong_type(self, key: str, wanted: str) -> ModelFileError:
        return self.error(
            f"key '{printable(key)}'", f"has type {self.metadata.type_name(key)}; want {wanted}"
        )

    def _check_range(self, key: str, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            raise self.error(f"key '{printable(key)}'", f"is {value}; want at least {minimum}")
        if maximum is not None and value > maximum:
            raise self.error(f"key '{printable(key)}'", f"is {value}; want at most {maximum}")

    def get_int(
        self, key: str, default: int | None = None, *, minimum: int | None = None, maximum: int | None = None
    ) -> int:
        """Return an integer of any width, within [minimum, maximum]."""
        if key not in self.metadata:
            return self._default(key, default, "an integer")
        value = self.metadata[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(key, "an integer")
        self._check_range(key, value, minimum, maximum)
        return value

    def get_float(
        self,
        key: str,
        default: float | None = None,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
    ) -> float:
        """Return a finite float, within [minimum, maximum]."""
        if key not in self.metadata:
            return self._default(key, default, "f32 or f64")
        value = self.metadata[key]
        if not isinstance(value, float):
            raise self._wrong_type(key, "f32 or f64")
        if not math.isfinite(value):
            raise self.error(f"key '{printable(key)}'", f"is {value}; want a finite number")
        self._check_range(key, value, minimum, maximum)
        return value

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        if key not in self.metadata:
            return self._default(key, default, "bool")
        value = self.metadata[key]
        if not isinstance(value, bool):
            raise self._wrong_type(key, "bool")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        if key not in self.metadata:
            return self._default(key, default, "str")
        value = self.metadata[key]
        if not isinstance(value, str):
            raise self._wrong_type(key, "str")
        return value

    def get_strings(self, key: str, default: Sequence[str] | None = None) -> list[str]:
        """Return an array of strings."""
        if key not in self.metadata:
            return list(self._default(key, default, "an array of strings"))
        value = self.metadata[key]
        if not isinstance(value, list):
            raise self._wrong_type(key, "an array of strings")
        return value

    def get_ints(
        self,
        key: str,
        default: Sequence[int] | None = None,
        *,
        length: int | None = None,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> list[int]:
        """Return an array of integers of any width, each within [minimum, maximum].

        ``length``: the number of elements that it must have.
        """
        if key not in self.metadata:
            return list(self._default(key, default, "an array of integers"))
        value = self.metadata[key]
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self._wrong_type(key, "an array of integers")
        if length is not None and len(value) != length:
            raise self.error(f"key '{printable(key)}'", f"has {len(value)} elements; want {length}")
        if len(value):
            self._check_range(key, int(value.min()), minimum, maximum)
            self._check_range(key, int(value.max()), minimum, maximum)
        return [int(element) for element in value]

    def get_bools(self, key: str, *, length: int) -> list[bool]:
        """Return an array of ``length`` booleans; the key is required."""
        value = (
            self.metadata[key] if key in self.metadata else self._default(key, None, "an array of booleans")
        )
        if not isinstance(value, np.ndarray) or value.dtype != np.bool_:
            raise self._wrong_type(key, "an array of booleans")
        if len(value) != length:
            raise self.error(f"key '{printable(key)}'", f"has {len(value)} elements; want {length}")
        return [bool(element) for element in value]

    def get_layer_ints(
        self,
        key: str,
        n_layer: int,
        default: int | None = None,
        *,
        minimum: int | None = None,
        maximum: int | None = None,
    ) -> list[int]:
        """Return one integer per layer: an array of ``n_layer`` as it is, a scalar for all layers."""
        if isinstance(self.metadata.get(key), np.ndarray):
            return self.get_ints(key, length=n_layer, minimum=minimum, maximum=maximum)
        return [self.get_int(key, default, minimum=minimum, maximum=maximum)] * n_layer


def override_fields(overrides: Mapping[str, Scalar]) -> dict[str, Field]:
    """Metadata fields that replace or join those of a file, of the types that ``--override-kv`` knows."""
    fields = {}
    for key, value in overrides.items():
        type_name = {bool: "bool", int: "i64", float: "f64", str: "str"}.get(type(value))
        if type_name is None:
            seen = type(value).__name__
            raise BadInputError(f"override of '{printable(key)}': type {seen}; want int, float, bool or str")
        fields[key] = Field(type_name, value)
    return fields


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        raise ValueError
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or "_" in text:
        raise ValueError
    return value


def _parse_bool(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _parse_str(text: str) -> str:
    if len(text.encode()) > MAX_OVERRIDE_BYTES:
        raise ValueError
    return text


_OVERRIDE_TYPES: dict[str, tuple[Callable[[str], Scalar], str]] = {
    "int": (_parse_int, "a decimal integer of 64 bits"),
    "float": (_parse_float, "a finite number"),
    "bool": (_parse_bool, "true or false"),
    "str": (_parse_str, f"text of at most {MAX_OVERRIDE_BYTES} bytes of UTF-8"),
}


def parse_override_kv(arguments: Sequence[str]) -> dict[str, Scalar]:
    """Parse ``--override-kv`` arguments, each ``KEY=TYPE:VALUE`` with TYPE int, float, bool or str.

    The last one of a key wins. Raises BadInputError naming the argument.
    """
    overrides: dict[str, Scalar] = {}
    for argument in arguments:
        shown = f"--override-kv '{printable(argument)}'"
        key, equals, typed = argument.partition("=")
        type_name, colon, text = typed.partition(":")
        if not key or not equals or not colon:
            raise BadInputError(f"{shown}: want KEY=TYPE:VALUE, for example llama.context_length=int:4096")
        if len(key.encode(errors="replace")) > MAX_OVERRIDE_BYTES:
            raise BadInputError(
                f"{shown}: key of {len(key)} characters; want at most {MAX_OVERRIDE_BYTES} bytes"
            )
        if type_name not in _OVERRIDE_TYPES:
            known = ", ".join(_OVERRIDE_TYPES)
            raise BadInputError(f"{shown}: type '{printable(type_name)}' is unknown; want one of {known}")
        parse, wanted = _OVERRIDE_TYPES[type_name]
        try:
            overrides[key] = parse(text)
        except (ValueError, KeyError):
            raise BadInputError(f"{shown}: value '{printable(text)}'; want {wanted}") from None
    return overrides
