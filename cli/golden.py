"""``refengine golden``: record what a model computes, compare it later, elsewhere, or with another engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import completion
from cli import model_options as options
from cli.command import EngineCommand, FiniteRange, Settings, together
from cli.failures import BAD_INPUT, FAILED
from cli.golden_output import showing
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.engine import Engine
    from refengine.golden.kld import Summary
    from refengine.golden.prompts import Prompt

option = click.option
_path = click.Path(path_type=Path)
_MAX_TEXT_BYTES = 64 << 20

_device_options = together(
    options.placement_options,
    option(
        "--check", type=completion.LEVEL, default="off", metavar="LEVEL", help="off, guard, audit or trap."
    ),
)
_tolerance_option = option(
    "--tolerance", type=FiniteRange(0), metavar="NMSE", help="Compare by this NMSE, never by bits."
)
_json_option = option("--json", "as_json", is_flag=True, help="One JSON object.")
_chunks_option = option(
    "--chunks", type=click.IntRange(min=1), metavar="N", help="Only the first N chunks; all."
)


class _Group(click.Group):
    """A group whose help ends with its options, as that of a command does."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Commands first."""
        self.format_commands(ctx, formatter)
        click.Command.format_options(self, ctx, formatter)


@click.group(cls=_Group, invoke_without_command=True)
@click.pass_context
def golden(ctx: click.Context) -> None:
    """Record tensors of a model, and find the first one that differs.

    \b
    Example:
      refengine golden record --prompts prompts.txt -o golden
      refengine golden check golden
    """  # noqa: D301 - click's mark for lines that stay as they are
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(BAD_INPUT)


@golden.command(cls=EngineCommand, short_help="Write a directory for each prompt.")
@options.model_option
@option(
    "--prompts", required=True, type=_path, metavar="FILE", help="A prompt a line; .jsonl: an object a line."
)
@option("-o", "--output", required=True, type=_path, metavar="DIR", help="Gets a directory for each prompt.")
@option(
    "-n",
    "--predict",
    "n_predict",
    type=click.IntRange(0, 1 << 20),
    default=8,
    metavar="N",
    help="Greedy tokens to record behind each prompt (8).",
)
@option("--tensors", multiple=True, metavar="GLOB", help="Tensors to record, for example '*-3'; repeatable.")
@option("--all", "all_tensors", is_flag=True, help="Record every tensor of the graph.")
@option(
    "--rows", "n_rows", type=click.IntRange(min=1), metavar="N", help="Only the last N rows of each; all."
)
@option("--no-drafts", is_flag=True, help="Leave the MTP block out, if there is one.")
@option("--overwrite", is_flag=True, help="Replace cases that are there.")
@options.context_options
@_device_options
@click.pass_obj
def record(
    settings: Settings,
    /,
    model: str | None,
    prompts: Path,
    output: Path,
    n_predict: int,
    tensors: tuple[str, ...],
    all_tensors: bool,
    n_rows: int | None,
    no_drafts: bool,
    overwrite: bool,
    **given: Any,
) -> None:
    """Write a directory for each prompt: case.json and tensors.npz.

    Tensors have the names that other engines have for them, in execution order.
    The usual ones are inputs and results of each layer's halves, of the MTP
    block and of the model, and recurrent states.

    \b
    Example:
      refengine golden record --prompts prompts.txt -o golden
    """  # noqa: D301
    from refengine.golden import case, tap  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.golden.prompts import read_prompts  # noqa: PLC0415
    from refengine.golden.record import Request, drafts_if_it_can, require_consistent  # noqa: PLC0415
    from refengine.golden.record import record as compute  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415

    EngineOptions(**given)
    asked = read_prompts(prompts)
    case.require_room([output / prompt.name for prompt in asked], overwrite=overwrite)
    path = resolve_model(model)
    patterns = tap.ALL if all_tensors else tensors or tap.DEFAULT
    spec_type = "none" if no_drafts else drafts_if_it_can(path)
    with showing(settings) as shown:
        session = shown.session(**given)
        found = session.model_id(path)
        for prompt in asked:
            engine = session.engine(path, spec_type=spec_type)
            n = n_predict if prompt.n_predict is None else prompt.n_predict
            request = Request(prompt.name, _tokens(engine, prompt), prompt.text, n, n_rows or 0, patterns)
            made = compute(engine, request, found)
            require_consistent(made)
            case.write(made, output / prompt.name, overwrite=overwrite)
            shown.line(f"{prompt.name}: {len(made.tokens)} tokens, {len(made.tensors)} tensors")


def _tokens(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    if prompt.tokens is not None:
        return prompt.tokens
    return tuple(engine.tokenizer.encode(prompt.text or "", parse_special=True))


@golden.command(cls=EngineCommand, short_help="Compute again; name the first tensor that differs.")
@click.argument("recordings", nargs=-1, required=True, type=_path, metavar="DIR...")
@option(
    "-m",
    "--model",
    type=completion.MODEL,
    metavar="MODEL",
    help="The model; by its recorded name here or beside DIR.",
)
@_tolerance_option
@option("--any-model", is_flag=True, help="Compare with a model of another SHA-256, too.")
@_json_option
@_device_options
@click.pass_obj
def check(
    settings: Settings,
    /,
    recordings: tuple[Path, ...],
    model: str | None,
    tolerance: float | None,
    any_model: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Compute recordings again, and name the first tensor that differs.

    On the kind of device that recorded them every bit must be the same, elsewhere
    the NMSE of each tensor within the recorded tolerance. DIR is a case or holds
    cases; a logits file of llama-debug or llama-results does, too.
    Exits with 1 when something differs.

    \b
    Example:
      refengine golden check golden --check audit
    """  # noqa: D301
    from refengine.golden.session import model_of, read_any  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415

    EngineOptions(**given)
    path = resolve_model(model) if model is not None else None
    wanted = [(each, where) for where in recordings for each in read_any(where)]
    chosen = [(each, path or model_of(each, where)) for each, where in wanted]
    with showing(settings) as shown:
        session = shown.session(**given)
        results = (session.check(each, at, tolerance=tolerance, any_model=any_model) for each, at in chosen)
        same = shown.comparisons(results, as_json=as_json)
    if not same:
        raise click.exceptions.Exit(FAILED)


@golden.command(cls=EngineCommand, short_help="Compare two recordings without a model.")
@click.argument("wanted", type=_path)
@click.argument("found", type=_path)
@_tolerance_option
@option("--exact", is_flag=True, help="Compare bits, whatever the devices.")
@_json_option
@click.pass_obj
def diff(
    settings: Settings, /, wanted: Path, found: Path, tolerance: float | None, exact: bool, as_json: bool
) -> None:
    """Compare two recordings, or directories of them, without a model.

    Either can be a logits file of llama-debug or llama-results. Bits when both
    are of one kind of device, or else NMSE. Exits with 1 when something differs.

    \b
    Example:
      refengine golden diff golden/case-001 other/case-001
    """  # noqa: D301
    from refengine.golden.session import diff as compared  # noqa: PLC0415
    from refengine.golden.session import read_any  # noqa: PLC0415

    if exact and tolerance is not None:
        raise click.UsageError("--exact and --tolerance exclude each other; give one of them")
    results = compared(read_any(wanted), read_any(found), exact=exact or None, tolerance=tolerance)
    with showing(settings) as shown:
        same = shown.comparisons(results, as_json=as_json)
    if not same:
        raise click.exceptions.Exit(FAILED)


@golden.command(cls=EngineCommand)
@click.argument("recording", type=_path, metavar="DIR")
@option(
    "--tensors", multiple=True, metavar="GLOB", help="Tensors to print, for example 'l_out-*'; repeatable."
)
def dump(recording: Path, tensors: tuple[str, ...]) -> None:
    """Print recorded tensors as llama-eval-callback does.

    Two such logs can be compared with diff(1). DIR is a case or holds cases.

    \b
    Example:
      refengine golden dump golden/case-001 --tensors 'l_out-*'
    """  # noqa: D301
    from refengine.golden.dump import dump as lines  # noqa: PLC0415
    from refengine.golden.session import read_any  # noqa: PLC0415
    from refengine.golden.tap import matches  # noqa: PLC0415

    read = list(read_any(recording))
    names = list(dict.fromkeys(name for each in read for name in each.tensors))
    # Two logs of nothing would be the same.
    if tensors and not any(matches(name, tensors) for name in names):
        raise BadInputError(
            f"{recording}: no tensor has a name like {', '.join(tensors)}; there are {', '.join(names[:8])} and others"
        )
    for each in read:
        for line in lines(each, tensors or ("*",)):
            click.echo(line)


@golden.command("kld-base", cls=EngineCommand)
@options.model_option
@option("-f", "--file", "text", required=True, type=_path, metavar="FILE", help="Text, UTF-8.")
@option("-o", "--output", required=True, type=_path, metavar="FILE", help="The base file.")
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=3),
    default=512,
    metavar="N",
    help="Tokens of a chunk (512).",
)
@_chunks_option
@options.batch_options
@_device_options
@click.pass_obj
def kld_base(
    settings: Settings,
    /,
    model: str | None,
    text: Path,
    output: Path,
    n_ctx: int,
    chunks: int | None,
    **given: Any,
) -> None:
    """Write llama.cpp's base file for KL divergence.

    The second half of each chunk of the text is predicted; llama-perplexity
    --kl-divergence reads it, and so does golden kld.

    \b
    Example:
      refengine golden kld-base -f text.txt -o base.kld -c 256
    """  # noqa: D301
    from refengine.golden.files import read_bytes  # noqa: PLC0415
    from refengine.golden.kld import write_base  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415

    EngineOptions(n_ctx=n_ctx, **given)
    data, path = read_bytes(text, _MAX_TEXT_BYTES), resolve_model(model)
    with showing(settings) as shown:
        engine = shown.session(**given).engine(path, n_ctx=n_ctx)
        tokens = engine.tokenizer.encode(data, parse_special=False)
        layout = write_base(engine, output, tokens, n_ctx, chunks or 0, shown.progress)
        shown.line(f"{output}: {layout.n_chunk} chunks of {n_ctx} tokens, {layout.nbytes} bytes")


@golden.command(cls=EngineCommand, short_help="KL divergence and perplexity against a base.")
@options.model_option
@option(
    "--base", required=True, type=_path, metavar="FILE", help="Base file, of llama-perplexity or kld-base."
)
@_chunks_option
@option("--max-kld", type=FiniteRange(0), metavar="X", help="Exit with 1 above this mean KLD.")
@option("--min-same-top", type=FiniteRange(0, 1), metavar="P", help="Exit with 1 below this same-top rate.")
@_json_option
@options.batch_options
@_device_options
@click.pass_obj
def kld(
    settings: Settings,
    /,
    model: str | None,
    base: Path,
    chunks: int | None,
    max_kld: float | None,
    min_same_top: float | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Mean KL divergence, same-top rate and perplexity against a base file.

    \b
    Example:
      refengine golden kld --base base.kld --max-kld 0.001
    """  # noqa: D301
    from refengine.golden.kld import measure  # noqa: PLC0415
    from refengine.golden.kld_base import KldBase  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415

    EngineOptions(**given)
    opened, path = KldBase.open(base), resolve_model(model)
    with showing(settings) as shown:
        engine = shown.session(**given).engine(path, n_ctx=opened.layout.n_ctx)
        summary = measure(engine, opened, chunks or 0, shown.progress)
        shown.result(json.dumps(summary.as_json(), indent=2) if as_json else "\n".join(summary.lines()))
        missed = list(_missed(summary, max_kld, min_same_top))
        for line in missed:
            click.echo(line, err=True)
    if missed:
        raise click.exceptions.Exit(FAILED)


def _missed(summary: Summary, max_kld: float | None, min_same_top: float | None) -> Iterator[str]:
    """Limits that were not kept."""
    if max_kld is not None and not summary.kld.value <= max_kld:
        yield f"mean KLD is {summary.kld.value:.6f}; want at most {max_kld}"
    if min_same_top is not None and not summary.same_top.value >= min_same_top:
        yield f"same top is {summary.same_top.value:.4f}; want at least {min_same_top}"
