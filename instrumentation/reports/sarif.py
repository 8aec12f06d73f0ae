"""Findings as one SARIF 2.1.0 file, which code hosts and editors show at the lines that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from instrumentation import catalogue

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.findings import Finding, Frame

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(findings: Iterable[Finding]) -> dict[str, Any]:
    """The whole file as an object: one run, with a rule for each code that was found."""
    found = list(findings)
    codes = sorted({finding.code for finding in found})
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "refengine", "rules": [_rule(code) for code in codes]}},
                "results": [_result(finding, codes.index(finding.code)) for finding in found],
            }
        ],
    }


def _rule(code: str) -> dict[str, Any]:
    entry = catalogue.entry(code)
    return {
        "id": code,
        "shortDescription": {"text": entry.title},
        "fullDescription": {"text": entry.meaning},
        "help": {"text": entry.cure},
    }


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    frames = [*([finding.source] if finding.source else []), *finding.access, *finding.allocation]
    related = {"previous": finding.previous, "allocation": finding.allocation, "free": finding.free}
    places = [_location(stack[0], None, name) for name, stack in related.items() if stack]
    message = f"{finding.kind}: {finding.message}"
    column = finding.column if finding.source else None
    owner = finding.buffer.owner if finding.buffer else finding.actor
    known = {
        "owner": owner,
        "buffer": finding.buffer.name if finding.buffer else None,
        "kernel": finding.kernel,
        "launch": finding.launch,
        "stream": finding.stream,
        "device": finding.device,
    }
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": "error",
        "message": {"text": " ".join([message, *(f"({note})" for note in finding.notes)])},
        "locations": [_location(frames[0], column)] if frames else [],
        "occurrenceCount": finding.count,
        "properties": {name: value for name, value in known.items() if value is not None},
    }
    return result | ({"relatedLocations": places} if places else {})


def _location(frame: Frame, column: int | None, message: str = "") -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(frame.file)}}
    if frame.line >= 1:
        place["region"] = {"startLine": frame.line} | ({"startColumn": column} if column else {})
    return {"physicalLocation": place} | ({"message": {"text": message}} if message else {})


def _uri(file: str) -> str:
    """Relative to the working folder where it lies below, for a code host to find it."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        return quote(path.relative_to(Path.cwd()).as_posix(), errors="replace")
    # What stands for no file, such as <string>, is quoted as it is.
    text = path.as_posix()
    absolute = f"/{text}" if path.drive else text
    return (
        f"file://{quote(absolute, errors='replace')}" if path.is_absolute() else quote(text, errors="replace")
    )
