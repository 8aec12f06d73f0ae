"""``refengine drill``: plant every fault of the catalogue in a run, and show who finds it."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import click

from cli import model_options as options
from cli.command import EngineCommand, Settings
from cli.failures import FAILED, one_line
from cli.tables import FORMATS, Column, format_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instrumentation.levels import Level
    from refengine.drill import Fault, Row

_COLUMNS = (
    Column("fault", 40), Column("code", 6), Column("planted at", 60), Column("found at", 48), Column("check", 48),
    Column("level", 5), Column("distance", 8, True), Column("false", 5, True),
)  # fmt: skip
_LISTED = (
    Column("fault", 37),
    Column("code", 6),
    Column("level", 21),
    Column("incident", 8),
    Column("what", 40),
)


@click.command(cls=EngineCommand)
@options.model_option
@click.option("--fault", "names", multiple=True, metavar="NAME", help="Plant this one; repeatable (all).")
@click.option("--level", metavar="LEVEL", help="Run at this level alone: off, guard, audit or trap.")
@click.option("--list", "listed", is_flag=True, help="Say what faults there are, and plant none.")
@format_option
@click.option("-dev", "--device", default="auto", metavar="NAME", help="auto, host, cuda or cuda:N.")
@click.option("-t", "--threads", type=int, metavar="N", help="Threads of the host device; all cores.")
@click.pass_obj
def drill(
    settings: Settings,
    /,
    model: str | None,
    names: tuple[str, ...],
    level: str | None,
    listed: bool,
    output: str,
    device: str,
    threads: int | None,
) -> None:
    """Plant faults in runs of target and draft, and see which check finds them.

    Each one runs in an engine of its own, at one check level after the other until
    it is found. Distance counts launches, replays and copies between the fault and
    its report; false counts reports that it does not explain, and those of the same
    runs without it. Exits with 1 when one is missed, or there is a false report.

    \b
    Example:
      refengine drill --device host
    """  # noqa: D301 - click's mark for lines that stay as they are
    from cli.display import display  # noqa: PLC0415 - --help does without what it takes to run
    from instrumentation.levels import Level  # noqa: PLC0415
    from refengine.drill import Drill, faults_of  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415

    only = None if level is None else Level.parse(level)
    faults = faults_of(names)
    if listed:
        _list(faults, output)
        return
    planned = Drill(resolve_model(model), faults, device=device, threads=threads, only=only)
    quiet = settings.verbosity < 0
    rows = []
    with display(quiet=quiet) as shown, FORMATS[output](_COLUMNS) as table:

        def starting(fault: Fault, at: Level) -> None:
            shown.measuring(f"{fault.name} at {at}", "drilling")

        with contextlib.closing(planned.run(starting)) as found:
            for row in found:
                shown.clear()
                values = row.as_dict()
                lists = {name: value for name, value in values.items() if isinstance(value, list)}
                table.add(row.cells, values | {name: "; ".join(each) for name, each in lists.items()}, lists)
                rows.append(row)
    for row in rows:
        for text in (*row.false_reports, *((row.why,) if row.status == "missed" else ())):
            click.echo(one_line(f"{row.fault}: {text}"), err=True)
    if not quiet:
        click.echo(_summary(rows), err=True)
    if not all(row.ok for row in rows):
        raise click.exceptions.Exit(FAILED)


def _list(faults: Sequence[Fault], output: str) -> None:
    with FORMATS[output](_LISTED) as table:
        for fault in faults:
            row = {
                "fault": fault.name,
                "code": fault.code,
                "level": fault.found_at,
                "incident": fault.incident or None,
                "what": fault.what,
                "not_on": "; ".join(f"{kind}: {why}" for kind, why in fault.not_on.items()) or None,
            }
            table.add([fault.name, fault.code, fault.found_at, fault.incident, fault.what], row)


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.status for row in rows)
    false = sum(len(row.false_reports) for row in rows)
    faults = f"{len(rows)} fault{'s' * (len(rows) != 1)}"
    return f"{faults}: {', '.join(f'{n} {status}' for status, n in counts.items())}; {false} false reports"
