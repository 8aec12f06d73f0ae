"""A finding as text in KASAN's order: headline, access, allocation, free, place, bytes around."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from instrumentation import catalogue
from instrumentation.findings import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from instrumentation.findings import BufferFacts, Finding, Frame, MemoryWindow, Stack

_ROW = 16
LineOf: TypeAlias = "Callable[[str, int], str]"


def render(finding: Finding, line_of: LineOf = linecache.getline) -> str:
    """Report of one finding, without a line break at its end. ``line_of``: gives the text of a source line."""
    sections = (
        _headline(finding),
        _stack("Seen at", finding.access, line_of),
        _stack("Other access at", finding.previous, line_of),
        _stack("Reserved at", finding.allocation, line_of),
        _stack("Freed at", finding.free, line_of),
        _place(finding),
        _bytes(finding.window),
        [f"Cure: {catalogue.entry(finding.code).cure}"],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def refused(finding: Finding) -> RefusedError:
    """Error to raise for a call that ``finding`` refuses."""
    return RefusedError(finding, render(finding))


def count_bytes(number: int) -> str:
    """``1 byte``, ``2 bytes``."""
    return f"{number} byte" if number == 1 else f"{number} bytes"


def describe_place(finding: Finding) -> str:
    """``4 bytes right of the 4096-byte buffer kv.k.0``, or nothing where no place is known."""
    buffer, offset = finding.buffer, finding.offset
    if buffer is None:
        return ""
    if offset is None:
        return f"the {buffer.nbytes}-byte buffer {buffer.name}"
    if offset < 0:
        distance, side = -offset, "left of"
    elif offset < buffer.nbytes:
        distance, side = offset, "inside"
    else:
        distance, side = offset - buffer.nbytes, "right of"
    return f"{count_bytes(distance)} {side} the {buffer.nbytes}-byte buffer {buffer.name}"


def _headline(finding: Finding) -> list[str]:
    parts = []
    if finding.size is not None:
        parts.append(count_bytes(finding.size))
    if finding.buffer is not None:
        parts.append(f"{finding.buffer.name} of {finding.buffer.owner}")
    elif finding.actor is not None:
        parts.append(finding.actor)
    if finding.kernel is not None:
        at = f" ({_source(finding.source, finding.column)})" if finding.source else ""
        parts.append(f"kernel {finding.kernel}{at}")
    lines = [f"{finding.code} {finding.kind}" + (": " + ", ".join(parts) if parts else "")]
    lines.append(f"  {finding.message}")
    facts = {
        "argument": finding.argument,
        "launch": finding.launch,
        "block": finding.block,
        "thread": finding.thread,
        "stream": finding.stream,
        "device": finding.device,
        "context": finding.actor,
    }
    known = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if known:
        lines.append("  " + ", ".join(known))
    lines += [f"  note: {note}" for note in finding.notes]
    if finding.count > 1:
        lines.append(f"  found {finding.count} times")
    return lines


def _source(frame: Frame, column: int | None) -> str:
    place = f"{_path(frame.file)}:{frame.line}"
    return place if column is None else f"{place}:{column}"


def _path(file: str) -> str:
    path = Path(file)
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else file


def _stack(title: str, stack: Stack, line_of: LineOf) -> list[str]:
    return [f"{title}:", *(line for frame in stack for line in _frame(frame, line_of))] if stack else []


def _frame(frame: Frame, line_of: LineOf) -> Iterator[str]:
    yield f"  {_path(frame.file)}:{frame.line} in {frame.function}"
    source = line_of(frame.file, frame.line).strip()
    if source:
        yield f"      {source}"


def _extent(buffer: BufferFacts) -> str:
    return f"[{buffer.address:#x}, {buffer.address + buffer.nbytes:#x}) of {buffer.owner}"


def _place(finding: Finding) -> list[str]:
    if finding.buffer is None:
        return []
    place = describe_place(finding)
    lines = [f"{place[0].upper()}{place[1:]} {_extent(finding.buffer)}"]
    if finding.neighbour is not None and finding.source is not None:
        assert finding.offset is not None, finding
        inside = finding.buffer.address + finding.offset - finding.neighbour.address
        other = finding.neighbour
        lines.append(
            f"That is {count_bytes(inside)} inside the {other.nbytes}-byte buffer {other.name} {_extent(other)}"
        )
    elif finding.neighbour is not None:
        reach = "reached" if finding.reached_neighbour else "did not reach"
        lines.append(
            f"The damage {reach} the redzone of the neighbour {finding.neighbour.name} "
            f"{_extent(finding.neighbour)}"
        )
    return lines


def _bytes(window: MemoryWindow | None) -> list[str]:
    if window is None:
        return []
    lines = [f"Memory around {window.first:#x}:"]
    stop = window.address + len(window.data)
    for row in range(window.address - window.address % _ROW, stop, _ROW):
        cells = []
        marks = []
        for address in range(row, row + _ROW):
            seen = window.address <= address < stop
            cells.append(f"{window.data[address - window.address]:02x}" if seen else "  ")
            marks.append("^^" if seen and window.first <= address < window.stop else "  ")
        hit = any(mark.strip() for mark in marks)
        label = f"{'>' if hit else ' '} {row:#x}: "
        lines.append(f"{label}{' '.join(cells)}".rstrip())
        if hit:
            lines.append(f"{' ' * len(label)}{' '.join(marks)}".rstrip())
    hidden = window.stop - stop
    if hidden > 0:
        lines.append(f"  and {count_bytes(hidden)} more")
    return lines
