"""``refengine soak``: clients that keep all slots busy, and proof that every answer is the one given alone."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cli import completion
from cli import model_options as options
from cli.command import EngineCommand, Settings, count_bytes
from cli.failures import FAILED, one_line
from cli.refused import REFUSED
from cli.report_file import ReportFile, report_option, writable
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from refengine.soak import End, Soak, Summary
    from refengine.soak.memory import MemoryPoint
    from refengine.soak.plan import Unit

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) *(s|m|h)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_DEFAULT_DURATION = "60s"
#: seconds between two drawings, and between two log lines where nothing can be drawn
_DRAW, _LOG = 0.25, 5.0
#: problems that are printed whole; the JSON has all of them
_SHOWN_PROBLEMS = 20

# Several slots share one cache here, so that flag has a meaning.
_REFUSED = tuple(refused for refused in REFUSED if "--kv-unified" not in refused.names)


@click.command(
    cls=EngineCommand, short_help="Keep every slot busy, and compare each answer.", refused=_REFUSED
)
@options.model_option
@click.option("--clients", type=int, default=10, metavar="N", help="Requests that are wanted at a time (10).")
@click.option("-np", "--parallel", "n_slots", type=int, default=4, metavar="N", help="Slots (4).")
@click.option(
    "-kvu/-no-kvu",
    "--kv-unified/--no-kv-unified",
    "kv_unified",
    default=True,
    help="One cache for all slots (default), or parts.",
)
@click.option("--duration", metavar="TIME", help="How long to ask: 60s (default), 5m, 1h.")
@click.option("--retries", type=int, metavar="N", help="Ask until N batches found no room.")
@click.option("--requests", type=int, metavar="N", help="Ask N times.")
@click.option("-s", "--seed", type=int, default=0, metavar="N", help="Of requests and failures (0).")
@click.option("--pool", type=int, default=200, metavar="N", help="Different requests to choose from (200).")
@click.option(
    "--fail-rate", type=float, default=0.0, metavar="P", help="Fail device calls with this probability."
)
@click.option(
    "--fail-kinds",
    type=completion.Offered("reserve", "copy", "launch", "event", "graph", "library", several=True),
    default="reserve",
    metavar="KINDS",
    help="reserve (default), copy, launch, event, graph, library.",
)
@click.option(
    "-o",
    "--json",
    "json_file",
    type=completion.FILE,
    metavar="FILE",
    help="Summary as JSON; - for stdout, no table.",
)
@report_option
@options.context_options
@options.device_options
@options.schedule_option
@options.override_option
@options.speculative_options
@click.pass_obj
def soak(
    settings: Settings,
    /,
    model: str | None,
    duration: str | None,
    retries: int | None,
    requests: int | None,
    override_kv: tuple[str, ...],
    fail_kinds: str,
    json_file: str | None,
    report_file: str | None,
    **given: Any,
) -> None:
    """Keep every slot busy, and compare each answer with the one given alone.

    Exits with 1 when one differs, a request that fits did not complete, something
    was found, or memory grew.

    \b
    Example:
      refengine soak -c 1024 -np 4 --duration 60s --check guard
    """  # noqa: D301 - click's mark for lines that stay as they are
    from cli.display import display  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.gguf_lookup import parse_override_kv  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415
    from refengine.soak import Soak, SoakPlan  # noqa: PLC0415

    kinds: Any = tuple(word.strip() for word in fail_kinds.split(","))
    end = _end(duration, retries, requests)
    plan = SoakPlan(
        end=end, fail_kinds=kinds, **options.split(given, {"clients", "seed", "pool", "fail_rate"})
    )
    checked = EngineOptions(**given)
    if end.unit == "retries" and (checked.n_slots == 1 or not checked.kv_unified):
        seen = "-np 1" if checked.n_slots == 1 else "--no-kv-unified"
        raise BadInputError(
            f"--retries with {seen}: nobody takes another's room, so no batch is ever tried again and the soak would "
            "not end; give --duration or --requests"
        )
    overrides = parse_override_kv(override_kv)
    path = resolve_model(model)
    file = None if json_file in (None, "-") else writable(str(json_file), "-o/--json", path)
    kept = ReportFile.of(report_file, path)
    _hush(settings)
    with display(quiet=settings.verbosity < 0) as shown:
        running = Soak(path, checked, plan, override_kv=overrides, progress=shown.weights)
        shown.text_follows()
        try:
            with running, _watching(running, quiet=settings.verbosity < 0) as watch:
                running.run(watch)
                running.verify(watch)
        finally:
            # Whatever ended it, what is known by now is worth having.
            if kept is not None:
                kept.add(running.found)
            _print(running.summary(), json_file, file)
    if not running.summary().ok:
        raise click.exceptions.Exit(FAILED)


def _end(duration: str | None, retries: int | None, requests: int | None) -> End:
    from refengine.soak import End  # noqa: PLC0415

    counted: list[tuple[str, Unit, int | None]] = [
        ("--retries", "retries", retries),
        ("--requests", "requests", requests),
    ]
    ends = [(flag, unit, amount) for flag, unit, amount in counted if amount is not None]
    if len(ends) + (duration is not None) > 1:
        flags = ["--duration"] * (duration is not None) + [flag for flag, _, _ in ends]
        raise BadInputError(f"{' and '.join(flags)}: a soak has one end; give one of them")
    for flag, unit, amount in ends:
        if amount < 1:
            raise BadInputError(f"{flag} is {amount}; give a positive number")
        return End(amount, unit)
    text = _DEFAULT_DURATION if duration is None else duration
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds > 0:
        raise BadInputError(f"--duration {text!r}: want a positive number with s, m or h, for example 60s")
    return End(seconds, "seconds")


def _hush(settings: Settings) -> None:
    """Count retries and failures instead of logging each: there are thousands on purpose. ``-v`` logs them."""
    import structlog  # noqa: PLC0415

    if settings.verbosity < 1:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


# --- while it runs


@contextlib.contextmanager
def _watching(running: Soak, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show on stderr how it goes: live on a terminal, a log line now and then elsewhere. Gives what to call often."""
    if quiet:
        yield lambda: None
        return
    if sys.stderr.isatty():
        from rich.console import Console  # noqa: PLC0415 - a fifth of the start-up time
        from rich.live import Live  # noqa: PLC0415

        with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
            yield _every(_DRAW, lambda: live.update(_live_table(_state(running)), refresh=True))
        return
    import structlog  # noqa: PLC0415

    log = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr), wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )
    yield _every(_LOG, lambda: log.info("soaking", **_state(running)))


def _every(seconds: float, action: Callable[[], None]) -> Callable[[], None]:
    """``action``, at most once in so many seconds, however often it is called."""
    due = time.monotonic() + seconds

    def call() -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + seconds
            action()

    return call


def _state(running: Soak) -> dict[str, str]:
    from refengine.soak.memory import resident  # noqa: PLC0415

    engine, statistics, counts = running.engine, running.statistics, running.counts
    slots = engine.scheduler.slots
    done = running.seconds
    rate = statistics.generated_tokens / done if done else 0.0
    drafts = statistics.draft
    return {
        "elapsed": f"{done:.0f} s, {running.part:.0%} of {running.plan.end}",
        "requests": f"{counts.asked} asked, {counts.completed} completed, {counts.refused} refused, "
        f"{counts.failed} failed",
        "busy_slots": f"{sum(slot.request is not None for slot in slots)} of {len(slots)}",
        "cells_free": str(engine.context.cache.free_positions),
        "retries": str(statistics.retries),
        "preemptions": str(statistics.preemptions),
        "tokens_per_second": f"{rate:.1f}",
        "acceptance": f"{drafts.acceptance:.3f}" if drafts.generated else "-",
        "problems": f"{len(engine.findings)} findings, {len(running.problems)} others",
        "ledger": count_bytes(engine.allocator.snapshot().reserved),
        "process": _bytes(resident()),
        "verified": f"{running.verified} of {len(running.outputs)}",
    }


def _live_table(state: dict[str, str]) -> Any:
    from rich.table import Table  # noqa: PLC0415

    table = Table.grid(padding=(0, 2))
    for name, value in state.items():
        table.add_row(name.replace("_", " "), value)
    return table


# --- what came of it


def _print(summary: Summary, json_name: str | None, file: Path | None) -> None:
    text = json.dumps(summary.as_dict(), indent=2, allow_nan=False)
    try:
        if file is not None:
            file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"-o/--json {json_name}: cannot be written: {error.strerror}") from None
    finally:
        # A disk that is full by now must not cost the table, too.
        click.echo(text if json_name == "-" else "\n".join(_lines(summary)))


def _lines(summary: Summary) -> Iterator[str]:
    requests = summary.requests
    part = requests.completed_part
    rows = [
        ("asked", f"{requests.asked}"),
        ("completed", f"{requests.completed}"),
        ("refused, cannot fit", f"{requests.refused}"),
        ("cancelled", f"{requests.cancelled}"),
        ("failed", f"{requests.failed}, {requests.hit} of them by injected failures"),
        ("unfinished", f"{requests.asked - requests.ended}"),
        ("completed of those that fit", "-" if part is None else f"{100 * part:.2f} %"),
        ("retries", f"{summary.retries}"),
        ("preemptions", f"{summary.preemptions}"),
        ("tokens generated", f"{summary.generated_tokens}"),
        ("tokens recomputed", f"{summary.recomputed_tokens} ({summary.recomputed_part:.3f} of generated)"),
        ("tokens reused", f"{summary.reused_tokens}"),
        ("steps", f"{summary.steps}"),
        ("mean busy slots", f"{summary.mean_busy_slots:.2f}"),
        ("seconds", f"{summary.seconds:.1f}"),
        ("tokens per second", f"{summary.tokens_per_second:.1f}"),
        ("injected failures", f"{summary.injected_failures}"),
        ("compared with alone", f"{summary.verified} of {summary.distinct} different requests"),
        ("differences", f"{summary.count('difference')}"),
        ("findings", f"{summary.count('finding')}"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        yield f"{name.ljust(width)}  {value}"
    if summary.draft.generated:
        yield str(summary.draft)
    yield ""
    yield from _memory_lines(summary)
    yield ""
    for problem in summary.problems[:_SHOWN_PROBLEMS]:
        # A finding's report has its own lines.
        yield str(problem) if problem.kind == "finding" else one_line(str(problem))
    if len(summary.problems) > _SHOWN_PROBLEMS:
        yield f"and {len(summary.problems) - _SHOWN_PROBLEMS} more"
    ended = "" if summary.finished else ", not finished"
    yield f"{len(summary.problems)} problem{'s' * (len(summary.problems) != 1)}{ended}"


def _memory_lines(summary: Summary) -> Iterator[str]:
    columns: list[tuple[str, Callable[[MemoryPoint], int | None]]] = [
        ("reserved", lambda point: point.reserved),
        ("used", lambda point: point.used),
        ("explained", lambda point: point.explained),
        ("device", lambda point: point.device),
        ("process", lambda point: point.resident),
    ]
    yield "bytes    " + "".join(name.rjust(16) for name, _ in columns)
    for name, point in summary.memory.items():
        cells = (_plain(None if point is None else column(point)).rjust(16) for _, column in columns)
        yield name.ljust(9) + "".join(cells)
    yield f"warm-up: {summary.warm_up}"


def _plain(nbytes: int | None) -> str:
    return "-" if nbytes is None else str(nbytes)


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else count_bytes(nbytes)
