"""Findings as JSON lines: one object a line, exact both ways. docs/reports.md has the fields.

A file may come from another machine, or from somebody who means no good: what is wrong with a line is one error that
says which, and nothing in a line names a file that is opened.
"""

from __future__ import annotations

import json
import linecache
import re
from dataclasses import dataclass, field, fields
from typing import IO, TYPE_CHECKING, Any, NoReturn

from instrumentation.catalogue import CATALOGUE
from instrumentation.errors import BadInputError
from instrumentation.findings import BufferFacts, Finding, Frame, MemoryWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

#: what each line says of itself; another number is another meaning of some field
SCHEMA = "refengine.finding/1"
#: bytes of the longest line, and lines of the longest file, that are read
MAX_LINE_NBYTES, MAX_LINES = 1 << 20, 1 << 20
#: whole numbers that a field may hold: addresses are unsigned, offsets have a sign
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_HEX = re.compile(r"(?:[0-9a-f]{2})*")
_STACKS = ("access", "previous", "allocation", "free")
_BUFFERS = ("buffer", "neighbour")
_POSITIONS = ("block", "thread")
_NUMBERS = ("size", "offset", "launch", "column")
_TEXTS = ("actor", "device", "kernel", "argument", "stream")
_ALWAYS = ("code", "kind", "message")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A finding with the source lines that its frames name, as they were when it was made."""

    finding: Finding
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def line_of(self, file: str, line: int) -> str:
        """Text of a source line; empty where it was not known."""
        return self.lines.get((file, line), "")


# --- writing


def dump(finding: Finding, line_of: Callable[[str, int], str] = linecache.getline) -> str:
    """A finding as one line, without a line break at its end. Fields that do not apply are left out."""
    return json.dumps(as_dict(finding, line_of), allow_nan=False)


def as_dict(finding: Finding, line_of: Callable[[str, int], str] = linecache.getline) -> dict[str, Any]:
    """The object of a finding's line."""

    def frame(each: Frame) -> dict[str, Any]:
        text = line_of(each.file, each.line).strip()
        return each._asdict() | ({"source": text} if text else {})

    made: dict[str, Any] = {"schema": SCHEMA}
    for each in fields(finding):
        value = getattr(finding, each.name)
        if value is None or value == () or (each.name == "reached_neighbour" and not value):
            continue
        if each.name in _STACKS:
            value = [frame(one) for one in value]
        elif each.name == "source":
            value = frame(value)
        elif each.name in _BUFFERS:
            value = {one.name: getattr(value, one.name) for one in fields(value)}
        elif each.name == "window":
            value = {
                "address": value.address, "data": value.data.hex(), "first": value.first, "stop": value.stop,
            }  # fmt: skip
        elif isinstance(value, tuple):
            value = list(value)
        made[each.name] = value
    return made


def write(findings: Iterable[Finding], file: IO[str]) -> None:
    """Write a line for each finding."""
    for finding in findings:
        file.write(dump(finding) + "\n")


# --- reading


def read(file: IO[bytes], name: str) -> Iterator[Recorded]:
    """Findings of a file, line by line; empty lines are passed over. Raises ``BadInputError`` naming the line."""
    for number in range(1, MAX_LINES + 1):
        line = file.readline(MAX_LINE_NBYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_NBYTES:
            raise BadInputError(
                f"{name}, line {number}: more than {MAX_LINE_NBYTES} bytes; no finding has them"
            )
        if line.strip():
            yield load(line, f"{name}, line {number}")
    if file.read(1):
        raise BadInputError(f"{name}: more than {MAX_LINES} lines; split it")


def load(line: bytes | str, where: str = "finding") -> Recorded:
    """The finding of a line. Raises ``BadInputError``, which begins with ``where``."""
    try:
        value = json.loads(line, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadInputError(f"{where}: nested too deeply; want one object of a finding") from None
    except ValueError as error:  # of text that is not UTF-8, too
        raise BadInputError(f"{where}: no JSON: {_short(str(error))}") from None
    return _Reader(where).recorded(value)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a field stands there twice")
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _short(value: object, most: int = 60) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


class _Reader:
    """Values of one line, each of the kind that its field has."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: dict[tuple[str, int], str] = {}

    def refuse(self, field_name: str, value: object, wanted: str) -> NoReturn:
        seen = _short(repr(value) if isinstance(value, str) else value)
        raise BadInputError(f"{self.where}: {field_name} is {seen}; want {wanted}")

    def recorded(self, value: Any) -> Recorded:
        if not isinstance(value, dict):
            self.refuse("the line", value, "one object")
        if value.get("schema") != SCHEMA:
            self.refuse("schema", value.get("schema"), f"{SCHEMA!r}, which this version writes and reads")
        given = {name: each for name, each in value.items() if name != "schema"}
        self.only(given, tuple(each.name for each in fields(Finding)), "the line")
        for name in _ALWAYS:
            self.text(name, given.get(name), least=1)
        if given["code"] not in CATALOGUE:
            self.refuse("code", given["code"], "a code that refengine explain knows")
        if given.get("reached_neighbour") is True and "neighbour" not in given:
            self.refuse("reached_neighbour", True, "no such field without a neighbour")
        finding = Finding(**{name: self.field(name, each) for name, each in given.items()})
        if finding.neighbour is not None and finding.source is not None and finding.offset is None:
            self.refuse("offset", None, "a whole number, since there are a neighbour and a source")
        return Recorded(finding, self.lines)

    def field(self, name: str, value: Any) -> Any:
        if name in _ALWAYS or name in _TEXTS:
            return self.text(name, value)
        if name in _STACKS:
            return tuple(self.frame(name, each) for each in self.items(name, value))
        if name in _BUFFERS:
            return self.buffer(name, value)
        if name in _POSITIONS:
            return self.position(name, value)
        if name in _NUMBERS:
            return self.number(name, value, _LEAST if name == "offset" else 0)
        if name == "count":
            return self.number(name, value, 1)
        if name == "source":
            return self.frame(name, value)
        if name == "window":
            return self.window(value)
        if name == "notes":
            return tuple(self.text(name, each) for each in self.items(name, value))
        assert name == "reached_neighbour", name
        if not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return value

    def text(self, name: str, value: Any, least: int = 0) -> str:
        if not isinstance(value, str) or len(value) < least:
            self.refuse(name, value, "text" if not least else "text that is not empty")
        return value

    def number(self, name: str, value: Any, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            self.refuse(name, value, f"a whole number from {least} to {_MOST}")
        return value

    def items(self, name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            self.refuse(name, value, "a list")
        return value

    def only(self, value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(where, value, f"an object of {', '.join(names)}")
        unknown = next((name for name in value if name not in names), None)
        if unknown is not None:
            self.refuse(f"a field of {where}", unknown, f"one of {', '.join(names)}")
        return value

    def frame(self, name: str, value: Any) -> Frame:
        given = self.only(value, (*Frame._fields, "source"), name)
        file, function = (self.text(f"{name}.{part}", given.get(part)) for part in ("file", "function"))
        made = Frame(file, self.number(f"{name}.line", given.get("line"), 0), function)
        if "source" in given:
            self.lines[made.file, made.line] = self.text(f"{name}.source", given["source"])
        return made

    def buffer(self, name: str, value: Any) -> BufferFacts:
        given = self.only(value, tuple(each.name for each in fields(BufferFacts)), name)
        return BufferFacts(
            self.text(f"{name}.name", given.get("name")),
            self.text(f"{name}.owner", given.get("owner")),
            self.number(f"{name}.address", given.get("address"), 0),
            self.number(f"{name}.nbytes", given.get("nbytes"), 1),
        )

    def position(self, name: str, value: Any) -> tuple[int, int, int]:
        given = [self.number(name, each, 0) for each in self.items(name, value)]
        if len(given) != 3:
            self.refuse(name, value, "three whole numbers: x, y, z")
        return given[0], given[1], given[2]

    def window(self, value: Any) -> MemoryWindow:
        given = self.only(value, tuple(each.name for each in fields(MemoryWindow)), "window")
        address, first, stop = (
            self.number(f"window.{part}", given.get(part), 0) for part in ("address", "first", "stop")
        )
        data = self.text("window.data", given.get("data"), least=2)
        if not _HEX.fullmatch(data):
            self.refuse("window.data", data, "pairs of hexadecimal digits")
        if not (address <= first < stop and first < address + len(data) // 2):
            self.refuse("window.first", first, "an address inside the window, and stop behind it")
        return MemoryWindow(address, bytes.fromhex(data), first, stop)
