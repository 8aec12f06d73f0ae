"""``refengine explain``: what a finding code means, a program that causes it, and the cure."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from cli.command import EngineCommand
from cli.completion import CODE
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from instrumentation.catalogue_entry import Entry

#: lines of text are no longer than this on a wide terminal, either
_WIDTH = 100


@click.command(cls=EngineCommand, short_help="Show what a finding code means, and the repair.")
@click.argument("codes", nargs=-1, type=CODE, metavar="[CODE]...")
@click.option("--run", "run_programs", is_flag=True, help="Run the programs too, and print what is reported.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array of objects instead of text.")
def explain(codes: tuple[str, ...], run_programs: bool, as_json: bool) -> None:
    """Show what finding codes mean, programs that cause them, and how to repair those.

    Without a CODE, list all codes.

    \b
    Example:
      refengine explain MEM002
    """  # noqa: D301 - click's mark for lines that stay as they are
    from instrumentation.catalogue import CATALOGUE, NOT_REPORTED, entry  # noqa: PLC0415 - --help does without

    entries = [entry(code) for code in codes]
    if run_programs:
        if not entries:
            raise BadInputError("--run: name the codes whose programs shall run")
        silent = [each.code for each in entries if each.code in NOT_REPORTED]
        if silent:
            raise BadInputError(
                f"--run: this version does not report {', '.join(silent)} yet; name codes that it reports"
            )
    reports = {each.code: _report(each) for each in entries} if run_programs else {}
    if as_json:
        chosen = entries or list(CATALOGUE.values())
        click.echo(json.dumps([_as_json(each, reports.get(each.code)) for each in chosen], indent=2))
    elif not entries:
        click.echo("\n".join(_table(list(CATALOGUE.values()))))
    elif sys.stdout.isatty():
        _draw(entries, reports)
    else:
        click.echo("\n\n\n".join(_plain(each, reports.get(each.code)) for each in entries))


def _report(entry: Entry) -> str:
    """What this version reports of an entry's program."""
    from instrumentation import catalogue_source  # noqa: PLC0415 - as above
    from instrumentation.reports.text import render  # noqa: PLC0415

    outcome = catalogue_source.run(entry.code, "bad")
    if not outcome.findings:
        return str(outcome.error or "nothing")
    return "\n\n".join(render(finding) for finding in outcome.findings)


def _sections(entry: Entry, report: str | None) -> Iterator[tuple[str, str, str]]:
    """Heading, text and language, which is empty for prose, of each part of an explanation."""
    from instrumentation import catalogue, catalogue_source  # noqa: PLC0415 - as above

    yield "", entry.meaning, ""
    note = catalogue.status(entry.code)
    if note:
        yield "", note, ""
    yield "Cure", entry.cure, ""
    module = f"instrumentation.catalogue_programs.{catalogue_source.path(entry.code, 'bad').stem}"
    source = catalogue_source.source(entry.code, "bad").strip()
    yield f"A program that causes it (python -m {module})", source, "python"
    yield "Repaired", catalogue_source.repair(entry.code), "diff"
    if report is not None:
        yield "What this version reports", report, "text"


def _heading(entry: Entry) -> str:
    return f"{entry.code} {entry.title}: found at {entry.found_by}"


def _plain(entry: Entry, report: str | None) -> str:
    parts = [_heading(entry)]
    for heading, text, language in _sections(entry, report):
        body = textwrap.indent(text, "    ") if language else "\n".join(textwrap.wrap(text, _WIDTH))
        parts.append(f"{heading}:\n{body}" if heading else body)
    return "\n\n".join(parts)


def _draw(entries: Sequence[Entry], reports: dict[str, str]) -> None:
    """As ``_plain``, in colours and as wide as the terminal."""
    from rich.console import Console  # noqa: PLC0415 - a fifth of the start-up time
    from rich.padding import Padding  # noqa: PLC0415
    from rich.syntax import Syntax  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, width=min(_WIDTH, shutil.get_terminal_size().columns))
    for number, entry in enumerate(entries):
        console.print(Text("\n\n" * bool(number)) + Text(_heading(entry), "bold"))
        for heading, text, language in _sections(entry, reports.get(entry.code)):
            console.print()
            if heading:
                console.print(Text(f"{heading}:", "bold"))
            if language:
                code = Syntax(text, language, theme="ansi_dark", background_color="default", word_wrap=True)
                console.print(Padding(code, (0, 0, 0, 4)))
            else:
                console.print(Text(text))


def _table(entries: Sequence[Entry]) -> list[str]:
    """One line for each code: no borders, for grep too."""
    from instrumentation.catalogue import NOT_REPORTED  # noqa: PLC0415 - as above

    width = max(len(entry.title) for entry in entries)
    found = max(len(entry.found_by) for entry in entries)
    return [
        f"{entry.code}  {entry.title.ljust(width)}  "
        f"{entry.found_by.ljust(found)}  {'not reported yet' if entry.code in NOT_REPORTED else ''}".rstrip()
        for entry in entries
    ]


def _as_json(entry: Entry, report: str | None) -> dict[str, Any]:
    from instrumentation import catalogue, catalogue_source  # noqa: PLC0415 - as above

    return {
        "code": entry.code,
        "title": entry.title,
        "level": str(entry.level) if entry.level is not None else None,
        "found_by": entry.found_by,
        "meaning": entry.meaning,
        "cure": entry.cure,
        "reported": entry.code not in catalogue.NOT_REPORTED,
        "note": catalogue.status(entry.code),
        "program": {kind: catalogue_source.source(entry.code, kind) for kind in ("bad", "fixed")},
    } | ({"report": report} if report is not None else {})
