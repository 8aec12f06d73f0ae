"""``refengine report``: findings that another command kept, as text, JSON lines or SARIF."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli import completion
from cli.command import EngineCommand
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from instrumentation.reports.jsonlines import Recorded


@click.command(cls=EngineCommand, short_help="Print findings that a command kept.")
@click.argument("file", type=completion.FILE, metavar="FILE")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "sarif"]), default="text", metavar="FORMAT",
    help="text (default), json (lines) or sarif.",
)  # fmt: skip
@click.option(
    "--code",
    "codes",
    type=completion.CODE,
    multiple=True,
    metavar="CODE",
    help="Only findings of this code; repeatable.",
)
def report(file: str, form: str, codes: tuple[str, ...]) -> None:
    """Print findings that a command kept with --report; FILE - is stdin.

    Source lines are shown as they were when the finding was made: nothing but
    FILE is read.

    \b
    Example:
      refengine report findings.jsonl --code MEM011
    """  # noqa: D301 - click's mark for lines that stay as they are
    from instrumentation import catalogue  # noqa: PLC0415 - --help does without

    wanted = {catalogue.entry(code).code for code in codes}
    with _opened(file) as source:
        found = [each for each in _read(source, file) if not wanted or each.finding.code in wanted]
    for line in _FORMATS[form](found):
        click.echo(line)


def _opened(file: str) -> nullcontext[BinaryIO] | BinaryIO:
    if file == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return Path(file).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(f"{file}: cannot be read: {reason}") from None


def _read(source: BinaryIO, file: str) -> Iterator[Recorded]:
    from instrumentation.reports.jsonlines import read  # noqa: PLC0415 - as above

    return read(source, "stdin" if file == "-" else file)


def _text(found: list[Recorded]) -> Iterator[str]:
    from instrumentation.reports.text import render  # noqa: PLC0415 - as above

    for each in found:
        yield _printable(render(each.finding, each.line_of)) + "\n"
    yield f"{len(found)} finding{'s' * (len(found) != 1)}"


def _json(found: list[Recorded]) -> Iterator[str]:
    from instrumentation.reports.jsonlines import dump  # noqa: PLC0415 - as above

    return (dump(each.finding, each.line_of) for each in found)


def _sarif(found: list[Recorded]) -> Iterator[str]:
    from instrumentation.reports.sarif import sarif  # noqa: PLC0415 - as above

    yield json.dumps(sarif(each.finding for each in found), indent=2)


_FORMATS = {"text": _text, "json": _json, "sarif": _sarif}


def _printable(text: str) -> str:
    """Text with what a terminal would act on escaped: the file may be anybody's."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
