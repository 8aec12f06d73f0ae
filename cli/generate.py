"""``refengine generate``: a prompt in, text out."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from cli import completion
from cli import model_options as options
from cli.command import EngineCommand, Settings, beside_arenas, count_bytes
from cli.failures import counts_findings, end_command, end_engine
from cli.refused import REFUSED
from cli.report_file import ReportFile, report_option
from instrumentation.errors import BadInputError, Error

MAX_PROMPT_BYTES = 64 << 20

if TYPE_CHECKING:
    from cli.display import Display
    from refengine.engine import Engine
    from refengine.generation import Generation
    from refengine.gguf_values import Scalar


def _check_predict(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    if value < 1 and value != -1:
        raise BadInputError(f"-n/--predict is {value}; give a positive number, or -1 for until the end")
    return value


def _check_parallel(_ctx: click.Context, _param: click.Parameter, value: int) -> None:
    if value != 1:
        raise BadInputError(f"-np/--parallel is {value}: one prompt is one sequence; leave it out")


@click.command(cls=EngineCommand, refused=REFUSED)
@options.model_option
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt, as it is; - reads stdin.")
@click.option(
    "-f", "--file", type=completion.FILE, metavar="FILE", help="A file with the prompt; - reads stdin."
)
@click.option(
    "-n", "--predict", "--n-predict", "n_predict", type=int, default=-1, metavar="N",
    callback=_check_predict, help="Most tokens to generate; -1: to the end.",
)  # fmt: skip
@click.option("--ignore-eos", is_flag=True, help="Go on where the model would end.")
@click.option("-st", "--single-turn", is_flag=True, help="Ask it with the model's chat template.")
@click.option("-sys", "--system-prompt", metavar="TEXT", help="System message; implies -st.")
@options.sampling_options
@options.context_options
@options.device_options
@options.schedule_option
@options.override_option
@options.check_tensors_option
@report_option
@options.speculative_options
@click.option(
    "-np", "--parallel", type=int, default=1, hidden=True, expose_value=False, callback=_check_parallel
)
@click.option("--fast", is_flag=True, hidden=True)
# What is so anyway.
@click.option("--jinja", is_flag=True, hidden=True, expose_value=False)
@click.option("-no-cnv", "--no-conversation", is_flag=True, hidden=True, expose_value=False)
@click.option("--no-context-shift", is_flag=True, hidden=True, expose_value=False)
@click.option("--no-display-prompt", is_flag=True, hidden=True, expose_value=False)
@click.option("--no-escape", is_flag=True, hidden=True, expose_value=False)
@click.pass_obj
def generate(
    settings: Settings,
    /,
    model: str | None,
    prompt: str | None,
    file: str | None,
    override_kv: tuple[str, ...],
    check_tensors: bool,
    report_file: str | None,
    single_turn: bool,
    system_prompt: str | None,
    **given: Any,
) -> None:
    """Continue a prompt. Stdout gets the generated text and nothing else.

    \b
    Example:
      refengine generate -p "def fib(n):" -n 64 --spec-type draft-mtp
      refengine generate -m smollm2 -st -p "What is a page fault?" --temp 0
    """  # noqa: D301 - click's mark for lines that stay as they are
    text = _read_prompt(prompt, file)
    from cli.display import display  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.gguf_lookup import parse_override_kv  # noqa: PLC0415
    from refengine.inspection import DriverMemory  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415
    from refengine.sampling import SamplingParams  # noqa: PLC0415

    overrides = parse_override_kv(override_kv)
    path = resolve_model(model)
    engine_options = options.split(given, set(EngineOptions.__dataclass_fields__))
    # Whatever can be refused is refused before weights are loaded.
    EngineOptions(**engine_options)
    SamplingParams(**options.split(dict(given), set(SamplingParams.__dataclass_fields__)))
    kept = ReportFile.of(report_file, path)
    with display(quiet=settings.verbosity < 0) as shown:
        engine = _load(path, overrides, engine_options, shown, check_tensors=check_tensors)
        written = _Text(shown)
        failed: Error | None = None
        try:
            chat = single_turn or system_prompt is not None
            result = _write(engine, _chat(engine, text, system_prompt) if chat else text, written, given)
            peak = engine.allocator.snapshot()
            beside = DriverMemory.of(engine)
        except Error as error:
            failed = error
        finally:
            shown.clear()
            written.end_line(more=failed is not None or settings.verbosity >= 0 or counts_findings(engine))
            found = end_engine(engine, kept)
    if failed is None and settings.verbosity >= 0:
        _summarise(engine, result, peak.reserved_peak, peak.used.peak)
        if beside:
            click.echo(beside_arenas(beside), err=True)
    end_command(failed, found, verbose=settings.verbosity > 0)


def _bounded(source: BinaryIO, name: str) -> bytes:
    """All bytes of a source that ends; no context holds more than this."""
    text = source.read(MAX_PROMPT_BYTES + 1)
    if len(text) > MAX_PROMPT_BYTES:
        raise BadInputError(f"{name}: more than {MAX_PROMPT_BYTES} bytes; give a shorter prompt")
    return text


def _read_prompt(prompt: str | None, file: str | None) -> bytes:
    if (prompt is None) == (file is None):
        seen = "no prompt" if prompt is None else "two prompts"
        raise BadInputError(f"{seen}; give one of -p/--prompt and -f/--file")
    if "-" in (prompt, file):
        return _bounded(sys.stdin.buffer, "stdin")
    if prompt is not None:
        return os.fsencode(prompt)
    assert file is not None
    try:
        with Path(file).open("rb") as source:
            return _bounded(source, f"-f/--file {file}")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInputError(f"-f/--file {file}: cannot be read: {reason}") from None


def _load(
    path: Path,
    overrides: dict[str, Scalar],
    engine_options: dict[str, Any],
    shown: Display,
    *,
    check_tensors: bool,
) -> Engine:
    import refengine  # noqa: PLC0415

    if check_tensors:
        from refengine.gguf_file import GGUFFile  # noqa: PLC0415
        from refengine.inspection import check_tensor_data  # noqa: PLC0415

        with GGUFFile.open(path) as gguf:
            check_tensor_data(gguf)
    return refengine.load(path, override_kv=overrides, progress=shown.weights, **engine_options)


def _chat(engine: Engine, prompt: bytes, system: str | None) -> list[int]:
    """Tokens of one turn of the user, as the model's template writes it."""
    from refengine.chat_template import render_chat  # noqa: PLC0415

    if engine.chat_template is None:
        raise BadInputError("the model has no chat template; leave out --single-turn and --system-prompt")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt.decode("utf-8", "surrogateescape")})
    tokenizer = engine.tokenizer

    def name(token: int | None) -> str:
        return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")

    text = render_chat(
        engine.chat_template, messages, bos_token=name(tokenizer.bos_id), eos_token=name(tokenizer.eos_id)
    )
    return tokenizer.encode(text, parse_special=True, add_special=False)


class _Text:
    """Stdout as UTF-8, whatever the terminal's own encoding is: golden texts are compared by bytes."""

    def __init__(self, shown: Display) -> None:
        self._shown = shown
        self._inside_a_line = False

    def write(self, piece: str) -> None:
        """A piece, at once."""
        self._shown.text_follows()
        sys.stdout.buffer.write(piece.encode())
        sys.stdout.buffer.flush()
        self._inside_a_line = not piece.endswith("\n") if piece else self._inside_a_line

    def end_line(self, *, more: bool) -> None:
        """Let what follows (``more``: on stderr) begin on a line of its own, where somebody reads both together.

        Text in a file or pipe of its own stays as it is.
        """
        if not self._inside_a_line:
            return
        with contextlib.suppress(OSError, ValueError):  # a reader that went away; streams without a file
            if sys.stdout.isatty():
                sys.stdout.buffer.write(b"\n")
                sys.stdout.buffer.flush()
            elif more and os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
                click.echo("", err=True)


def _write(engine: Engine, prompt: bytes | list[int], written: _Text, given: dict[str, Any]) -> Generation:
    ends: list[Generation] = []
    pieces = engine.stream(prompt, on_end=ends.append, **given)
    with contextlib.closing(pieces):
        for piece in pieces:
            written.write(piece)
    return ends[0]


def _summarise(engine: Engine, result: Generation, reserved: int, used: int) -> None:
    times = result.timings
    lines = [f"seed: {result.seed}"]
    for name, unit, count, seconds, rate in (
        ("prompt eval time", "tokens", times.prompt_tokens, times.prompt_seconds, times.prompt_per_second),
        ("eval time", "runs  ", times.predicted_tokens, times.predicted_seconds, times.predicted_per_second),
    ):
        each = seconds * 1e3 / count if count else 0.0
        lines.append(
            f"{name:>16} = {seconds * 1e3:10.2f} ms / {count:5d} {unit} "
            f"({each:8.2f} ms per token, {rate:8.2f} tokens per second)"
        )
    if engine.draft is not None:
        lines.append(str(result.draft))
    lines.append(
        f"memory peak: {count_bytes(reserved)} reserved ({reserved} bytes), {count_bytes(used)} used ({used} bytes), "
        f"device {engine.device.name}"
    )
    click.echo("\n".join(lines), err=True)
