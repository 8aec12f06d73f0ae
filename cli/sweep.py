"""``refengine sweep``: fail every device call of a workload, one run for each, and see that nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import completion
from cli import model_options as options
from cli.command import EngineCommand, Settings
from cli.failures import FAILED, one_line
from cli.help import RareOption
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from refengine.sweep import Key, Reference, Run, Sweep

#: a log line for each tenth of the runs where nothing can be drawn
_STEPS = 10


@click.command(cls=EngineCommand, short_help="Fail each reservation of a workload, one run each.")
@options.model_option
@click.option(
    "--sites",
    type=completion.Offered("reserve", "copy", "launch", "event", "graph", "all", several=True),
    default="reserve",
    metavar="KINDS",
    help="reserve, copy, launch, event, graph: some with commas between, or all (reserve).",
)
@click.option(
    "--modes",
    type=completion.Offered("nth", "from", "random", several=True),
    default="nth,from,random",
    metavar="MODES",
    help="Fail the nth call, all from the nth on, calls at random (all three).",
)
@click.option(
    "-s", "--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of the random runs (0)."
)
@click.option(
    "--runs-random",
    type=click.IntRange(0, 1_000_000),
    default=20,
    metavar="N",
    help="How many random runs (20).",
)
@click.option("-j", "--jobs", type=click.IntRange(1, 256), default=1, metavar="N", help="Processes (1).")
@click.option(
    "--resume",
    type=completion.FILE,
    metavar="FILE",
    help="Keep finished runs here, and go on from what is there.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option(
    "-n",
    "--predict",
    "n_predict",
    type=click.IntRange(2, 1024),
    metavar="N",
    help="Tokens of each answer (3; with drafts 5).",
)
@click.option("-c", "--ctx-size", "n_ctx", type=int, default=128, metavar="N", help="Context length (128).")
@click.option(
    "-b",
    "--batch-size",
    "n_batch",
    cls=RareOption,
    type=int,
    default=32,
    metavar="N",
    help="Most tokens of a decode (32).",
)
@click.option(
    "-ub",
    "--ubatch-size",
    "n_ubatch",
    cls=RareOption,
    type=int,
    default=16,
    metavar="N",
    help="Most tokens of a pass (16).",
)
@options.slot_options
@options.speculative_options
@click.option("-t", "--threads", type=int, default=1, metavar="N", help="Threads of each process (1).")
@click.option(
    "--check",
    type=completion.LEVEL,
    default="guard",
    metavar="LEVEL",
    help="off, guard, audit or trap (guard).",
)
@options.trap_options
@options.numerics_option
@click.option(
    "--no-cuda-graphs",
    "cuda_graphs",
    cls=RareOption,
    flag_value=False,
    default=True,
    help="Launch kernels one by one.",
)
@click.option(
    "--no-worst-case-reserve",
    "worst_case_reserve",
    cls=RareOption,
    flag_value=False,
    default=True,
    help="Let compute memory grow.",
)
@click.pass_obj
def sweep(
    settings: Settings,
    /,
    model: str | None,
    sites: str,
    modes: str,
    seed: int,
    runs_random: int,
    jobs: int,
    resume: str | None,
    as_json: bool,
    n_predict: int | None,
    **given: Any,
) -> None:
    """Fail every reservation, or other device call, of a workload: one run each.

    A run loads MODEL, answers two rounds of requests and unloads. Each request
    must end in an error that names a call that failed, or with the usual tokens;
    each failure must be counted; nothing may be left; and it must answer as usual
    afterwards. Exits with 1 when a run did not, or when a call has no fault site.

    \b
    Example:
      refengine sweep --sites reserve
    """  # noqa: D301 - click's mark for lines that stay as they are
    from cli.display import display  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.sweep import MODES, SWEPT_KINDS, Sweep, Workload  # noqa: PLC0415

    kinds = SWEPT_KINDS if sites.strip() == "all" else _chosen("--sites", sites, SWEPT_KINDS)
    log = (settings.verbosity, settings.log_format) if settings.verbosity > 0 else None
    planned = Sweep(
        Workload.of(resolve_model(model), n_predict=n_predict, device="host", **given),
        kinds, _chosen("--modes", modes, MODES), seed, runs_random, log,
    )  # fmt: skip
    quiet = settings.verbosity < 0
    with display(quiet=quiet):
        wanted = planned.reference()
    if not wanted.passed and not wanted.uncounted():
        raise BadInputError(f"--sites {sites}: the workload makes no such calls; give others, or all")
    runs = _finish(planned, wanted, jobs, Path(resume) if resume is not None else None, quiet=quiet)
    rows, wrong = _rows(planned, wanted, runs), [run for run in runs if run.wrong]
    if as_json:
        click.echo(json.dumps(_as_json(planned, wanted, rows, runs), indent=2))
    else:
        click.echo("\n".join(_lines(wanted, rows, runs)))
    if wrong or wanted.uncounted():
        raise click.exceptions.Exit(FAILED)


def _chosen(flag: str, text: str, known: tuple[Any, ...]) -> tuple[Any, ...]:
    """Words of a list with commas, in the order of ``known``."""
    given = [word.strip() for word in text.split(",")]
    unknown = [word for word in given if word not in known]
    if unknown:
        raise BadInputError(f"{flag} {text!r}: {unknown[0]!r} is unknown; give some of {', '.join(known)}")
    return tuple(word for word in known if word in given)


def _finish(planned: Sweep, wanted: Reference, jobs: int, file: Path | None, *, quiet: bool) -> list[Run]:
    """Do every run that is not in the file; all runs in the order of their keys."""
    from refengine.sweep import Journal, run_all  # noqa: PLC0415

    keys = planned.keys(wanted)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(file, planned.header(wanted))) if file is not None else None
        done: dict[Key, Run] = dict(journal.done) if journal is not None else {}
        todo = [key for key in keys if key not in done]
        going = stack.enter_context(contextlib.closing(run_all(planned, wanted, todo, jobs)))
        try:
            for run in _shown(going, len(todo), quiet=quiet):
                done[run.mode, run.number] = run
                if journal is not None:
                    journal.write(run)
        except KeyboardInterrupt:
            if file is not None:
                finished = sum(key in done for key in keys)
                click.echo(
                    f"{finished} of {len(keys)} runs are in {file}; the same command goes on", err=True
                )
            raise
    return [done[key] for key in keys]


def _shown(runs: Iterable[Run], total: int, *, quiet: bool) -> Iterator[Run]:
    """Show on stderr how far the runs are: live on a terminal, a few log lines elsewhere."""
    if quiet or not sys.stderr.isatty():
        import structlog  # noqa: PLC0415

        log, step = structlog.get_logger("cli"), 0
        for count, run in enumerate(runs, 1):
            yield run
            if count * _STEPS // total > step:
                step = count * _STEPS // total
                log.info("sweeping", runs=count, of=total)
        return
    from rich.console import Console  # noqa: PLC0415 - a fifth of the start-up time
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, wrong = bar.add_task("sweeping", total=total), 0
        for run in runs:
            yield run
            wrong += bool(run.wrong)
            bar.update(task, advance=1, description=f"sweeping, {wrong} misbehaved")


def _rows(planned: Sweep, wanted: Reference, runs: list[Run]) -> list[dict[str, Any]]:
    """Counts of each kind of site, then of all. A run counts for the kind of the first call that it failed."""
    from refengine.sweep import OUTCOMES  # noqa: PLC0415

    rows = []
    counts: list[tuple[str, int, int]] = [
        (kind, wanted.sites[kind], wanted.calls[kind]) for kind in planned.kinds
    ]
    for kind, sites, calls in [*counts, ("all", len(wanted.passed), wanted.calls.total())]:
        own = [run for run in runs if kind in (run.kind, "all")]
        by_mode, by_outcome = Counter(run.mode for run in own), Counter(run.outcome for run in own)
        rows.append(
            {"kind": kind, "sites": sites, "calls": calls}
            | {mode: by_mode[mode] for mode in planned.modes}
            | {outcome: by_outcome[outcome] for outcome in OUTCOMES}
            | {"misbehaved": sum(bool(run.wrong) for run in own)}
        )
    return rows


def _lines(wanted: Reference, rows: list[dict[str, Any]], runs: list[Run]) -> Iterator[str]:
    table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for first, *numbers in table:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])
    yield ""
    wrong = [run for run in runs if run.wrong]
    for run in wrong:
        yield one_line(f"{run.mode} {run.number}, {run.site}: {'; '.join(run.wrong)}")
    yield from wanted.uncounted()
    if wanted.preemptions or wanted.verifications:
        yield (
            f"undisturbed, requests were preempted {wanted.preemptions} times and drafts verified "
            f"{wanted.verifications} times"
        )
    yield f"{len(wanted.passed)} sites, {len(runs)} runs, {len(wrong)} misbehaved"


def _as_json(
    planned: Sweep, wanted: Reference, rows: list[dict[str, Any]], runs: list[Run]
) -> dict[str, Any]:
    wrong = [dataclasses.asdict(run) for run in runs if run.wrong]
    workload = planned.workload
    return {
        "ok": not wrong and not wanted.uncounted(),
        "model": str(workload.model),
        "options": dict(workload.options),
        "prompts": workload.rounds,
        "n_predict": workload.n_predict,
        "seed": planned.seed,
        "preemptions": wanted.preemptions,
        "verifications": wanted.verifications,
        "reused": wanted.reused,
        "sites": len(wanted.passed),
        "calls": wanted.calls.total(),
        "runs": len(runs),
        "kinds": rows,
        "uncounted": wanted.uncounted(),
        "misbehaved": wrong,
    }
