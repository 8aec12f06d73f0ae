"""What all commands share: logging options, types of values, flags that are refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cli.help import RareOption, ScreenCommand, help_all
from cli.settings_file import say_source, use_environment, use_file
from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    from refengine.inspection import DriverMemory

F = TypeVar("F", bound=Callable[..., Any])

# No K, M or G: for some people those are powers of ten.
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?) *([A-Za-z]*)")


@dataclass
class Settings:
    """What a command line says about itself. ``verbosity``: -1 quiet, 0 usual, 1 and 2 for ``-v`` and ``-vv``."""

    verbosity: int = 0
    log_format: str = "auto"


def _settings(ctx: click.Context) -> Settings:
    return ctx.ensure_object(Settings)


def _set_verbosity(ctx: click.Context, _param: click.Parameter, value: int) -> None:
    if value:
        _settings(ctx).verbosity = value


def _set_quiet(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        _settings(ctx).verbosity = -1


def _set_format(ctx: click.Context, _param: click.Parameter, value: str) -> None:
    _settings(ctx).log_format = value


def _common() -> list[click.Option]:
    return [
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=_set_quiet,
            help="No summary, only errors.",
        ),
        click.Option(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=_set_verbosity,
            help="More log; -vv for all.",
        ),
        RareOption(
            ["--log-format"],
            type=click.Choice(["auto", "console", "json"]),
            default="auto",
            expose_value=False,
            callback=_set_format,
            metavar="FORMAT",
            help="Log as console, json or auto (default).",
        ),
        RareOption(
            ["--config"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=use_file,
            metavar="FILE",
            help="Options from this TOML file.",
        ),
    ]


class EngineCommand(ScreenCommand):
    """A command with the options that all commands have; logging is configured before it runs.

    ``refused``: flags of other engines that end the command by name, each group with its reason.
    """

    def __init__(self, *args: Any, refused: Sequence[Refused] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _common()
        self.params.append(help_all(sum(isinstance(param, RareOption) for param in self.params)))
        self.params += [RefusedFlag(each) for each in refused]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; a wrong value that comes from elsewhere than the command line says where from."""
        use_environment(ctx)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            raise say_source(error, ctx) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # the line says whose help to read
            if isinstance(error, click.NoSuchOption):
                hidden = {
                    flag for param in self.params if getattr(param, "hidden", False) for flag in param.opts
                }
                near = [flag for flag in error.possibilities or () if flag not in hidden]
                raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from None
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Configure logging, then run."""
        from refengine import logs  # noqa: PLC0415 - --help does without

        settings = _settings(ctx)
        logs.configure(settings.verbosity, settings.log_format)
        return super().invoke(ctx)


@dataclass(frozen=True)
class Refused:
    """Flags of another engine that mean nothing here, and what to do instead."""

    names: tuple[str, ...]
    reason: str

    def __post_init__(self) -> None:
        assert all(name.startswith("-") for name in self.names), self


class RefusedFlag(click.Option):
    """A flag that is refused where the parser meets it, whether or not a value follows."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(list(refused.names), hidden=True, expose_value=False, is_flag=False, flag_value="")
        self.refused = refused

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser end at this flag: what stands behind it may be no option of ours."""
        super().add_to_parser(parser, ctx)

        def refuse(_value: Any, _state: Any) -> None:
            raise BadInputError(f"{'/'.join(self.refused.names)}: {self.refused.reason}")

        for known in (parser._long_opt, parser._short_opt):  # noqa: SLF001
            for name in self.refused.names:
                if name in known:
                    known[name].process = refuse


class FiniteRange(click.FloatRange):
    """A number between two that is one: every comparison with NaN fails, so that a limit of NaN is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.FloatRange``."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite", param, ctx)
        return number


def parse_size(text: str, flag: str) -> int:
    """Number of bytes of ``64MiB``, ``1.5 GiB`` or ``4096``. Raises ``BadInputError`` naming the flag."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = 0
    if match is not None and unit is not None:
        nbytes = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if nbytes < 1:
        raise BadInputError(
            f"{flag} {text!r}: want bytes, or a number with KiB, MiB or GiB, for example 64MiB"
        )
    return nbytes


def count_bytes(nbytes: int) -> str:
    """``134.5 MiB``."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def beside_arenas(memory: DriverMemory) -> str:
    """``beside arenas: 2 captured graphs 4.0 MiB, loaded kernels 2.0 MiB, page-locked 1.3 MiB of the host``."""
    graphs = f"{memory.graphs} captured graph{'s' * (memory.graphs != 1)} {count_bytes(memory.graph_nbytes)}"
    kernels = f"loaded kernels {count_bytes(memory.kernel_nbytes)}"
    if memory.handle_nbytes:
        kernels += f", library handles {count_bytes(memory.handle_nbytes)}"
    return f"beside arenas: {graphs}, {kernels}, page-locked {count_bytes(memory.host_nbytes)} of the host"


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Decorators as one, in the order in which their options are to be listed."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
