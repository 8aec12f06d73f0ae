"""``refengine bench``: tokens per second of a model, in the form of ``llama-bench``."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import click

from cli import completion
from cli import model_options as options
from cli.command import EngineCommand, Refused, Settings, beside_arenas, count_bytes
from cli.failures import FAILED, end_engine
from cli.refused import REFUSED
from cli.report_file import ReportFile, report_option
from cli.tables import FORMATS, Column, format_option
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from cli.display import Display
    from refengine.bench import BenchPlan, Result
    from refengine.engine import Engine

_PLAIN = "plain decoding is measured, without drafts; leave it out"
_TESTS = "not built yet; give prompts with -p and generations with -n"
_OTHERS = ("-ngl", "-sm", "-mg", "-ts", "-ot", "-ncmoe", "-nkvo", "--rpc", "-fa", "--numa", "-C", "--prio")
_REFUSED = (
    *(refused for refused in REFUSED if refused.names[0] in _OTHERS),
    Refused(("--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"), _PLAIN),
    Refused(("-pg",), _TESTS),
    Refused(("-d", "--n-depth"), _TESTS),
)
_NUMBERS = re.compile(r" *-?[0-9]{1,9} *(, *-?[0-9]{1,9} *)*")


def _numbers(_ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[int, ...]:
    text = ",".join(value)
    if not _NUMBERS.fullmatch(text):
        raise BadInputError(
            f"{'/'.join(param.opts)} {text!r}: want numbers of tokens with commas between, for example 128,512"
        )
    return tuple(int(number) for number in text.split(","))


@click.command(cls=EngineCommand, short_help="Measure tokens per second at check levels.", refused=_REFUSED)
@options.model_option
@click.option(
    "-p", "--n-prompt", multiple=True, default=("512",), callback=_numbers, metavar="N,...",
    help="Tokens of each prompt test (512); 0: none.",
)  # fmt: skip
@click.option(
    "-n", "--n-gen", multiple=True, default=("128",), callback=_numbers, metavar="N,...",
    help="Tokens of each generation test (128); 0: none.",
)  # fmt: skip
@click.option("-r", "--repetitions", type=int, default=5, metavar="N", help="Timed runs of each test (5).")
@format_option
@click.option(
    "--check",
    type=completion.LEVELS,
    default="off",
    metavar="LEVELS",
    help="off, guard, audit, trap: some with commas between (off).",
)
@click.option(
    "-c", "--ctx-size", "n_ctx", type=int, default=0, metavar="N", help="Context length; 0: what the tests need."
)  # fmt: skip
@options.batch_options
@options.placement_options
@options.numerics_option
@options.memory_options
@options.override_option
@report_option
@click.pass_obj
def bench(
    settings: Settings,
    /,
    model: str | None,
    output: str,
    check: str,
    override_kv: tuple[str, ...],
    report_file: str | None,
    **given: Any,
) -> None:
    """Measure tokens per second, at each of some check levels.

    Test ppN decodes a prompt of N random tokens in batches, tgN decodes N tokens
    one by one; each from an empty cache, after a run that warms up. Generation
    also shows the bytes that a token moves, and what part that is of the
    bandwidth of a copy in the same memory. Sampling and speculative decoding
    (--spec-type draft-mtp) are not part of it.

    \b
    Example:
      refengine bench -p 512 -n 128 --check off,guard
    """  # noqa: D301 - click's mark for lines that stay as they are
    from cli.display import display  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.bench import BenchPlan, run  # noqa: PLC0415
    from refengine.gguf_lookup import parse_override_kv  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415

    overrides = parse_override_kv(override_kv)
    levels = tuple(dict.fromkeys(level.strip() for level in check.split(",")))
    path = resolve_model(model)
    plan = BenchPlan.of(path, levels=levels, override_kv=overrides, **given)
    kept = ReportFile.of(report_file, path)
    quiet = settings.verbosity < 0
    with display(quiet=quiet) as shown, FORMATS[output](COLUMNS) as table:
        ending = _Ending(shown, kept, quiet=quiet)
        results = run(plan, progress=shown.weights, step=shown.measuring, close=ending)
        copies: dict[str, Result] = {}
        with contextlib.closing(results):
            for result in results:
                shown.clear()
                table.add(_cells(plan, result), _numbers_of(plan, result), {"samples_ts": result.samples})
                if not quiet and result.token_bytes is not None and result.check not in copies:
                    copies[result.check] = result
    for result in copies.values():
        click.echo(_copy_line(result), err=True)
    if ending.found:
        raise click.exceptions.Exit(FAILED)


class _Ending:
    """Closes engines, and counts what they found."""

    def __init__(self, shown: Display, kept: ReportFile | None, *, quiet: bool) -> None:
        self.shown = shown
        self.kept = kept
        self.quiet = quiet
        self.found = 0

    def __call__(self, engine: Engine) -> None:
        from refengine.inspection import DriverMemory  # noqa: PLC0415 - as above

        self.shown.clear()
        beside = DriverMemory.of(engine)
        if beside and not self.quiet:
            click.echo(f"check {engine.level}: {beside_arenas(beside)}", err=True)
        self.found += end_engine(engine, self.kept)


def _copy_line(result: Result) -> str:
    if result.copy is None:
        return f"check {result.check}: copy bandwidth not measured, too little memory is free"
    return (
        f"check {result.check}: copy bandwidth {result.copy.per_second / 1e9:.2f} GB/s, read and written, "
        f"of {count_bytes(result.copy.nbytes)}"
    )


# --- formats


def _numbers_of(plan: BenchPlan, result: Result) -> dict[str, Any]:
    """Everything about a result but its samples; names are llama-bench's where it has one."""
    test, moved, copy = result.test, result.token_bytes, result.copy
    return {
        "model_filename": str(plan.model.path),
        "model_type": plan.model.type,
        "model_size": plan.model.nbytes,
        "model_n_params": plan.model.n_params,
        "device": result.device,
        "check": result.check,
        "test": test.name,
        "n_prompt": test.n if test.kind == "pp" else 0,
        "n_gen": test.n if test.kind == "tg" else 0,
        "avg_ts": result.mean,
        "stddev_ts": result.stdev,
        "bytes_per_token": moved.total if moved is not None else None,
        "copy_bytes_per_second": copy.per_second if moved is not None and copy is not None else None,
        "percent_of_copy": result.percent_of_copy,
    }


COLUMNS = (
    Column("model", 20), Column("size", 10, True), Column("params", 10, True), Column("device", 7),
    Column("check", 5), Column("test", 8, True), Column("t/s", 20, True), Column("bytes/token", 11, True),
    Column("% of copy", 9, True),
)  # fmt: skip


def _cells(plan: BenchPlan, result: Result) -> list[str]:
    model, percent, moved = plan.model, result.percent_of_copy, result.token_bytes
    return [
        model.type, count_bytes(model.nbytes), _count_params(model.n_params), result.device, result.check,
        result.test.name, f"{result.mean:.2f} ± {result.stdev:.2f}",
        "" if moved is None else count_bytes(round(moved.total)),
        "" if percent is None else f"{percent:.2f}",
    ]  # fmt: skip


def _count_params(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1_000_000_000 else f"{n / 1e6:.2f} M"
