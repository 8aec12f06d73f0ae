"""``refengine``: the command group. Commands are imported when they are asked for."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from cli.command import Settings
from cli.failures import BAD_INPUT, OK, one_interrupt, report
from instrumentation.errors import BadInputError
from refengine import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

#: command -> module and name
COMMANDS = {
    "generate": ("cli.generate", "generate"),
    "inspect": ("cli.inspect", "inspect"),
    "bench": ("cli.bench", "bench"),
    "doctor": ("cli.doctor", "doctor"),
    "sweep": ("cli.sweep", "sweep"),
    "soak": ("cli.soak", "soak"),
    "drill": ("cli.drill", "drill"),
    "golden": ("cli.golden", "golden"),
    "explain": ("cli.explain", "explain"),
    "report": ("cli.report", "report"),
}
#: commands to come
NOT_BUILT = ("serve",)


class Commands(click.Group):
    """A group that imports a command when it is named, and ends every failure in one place."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which people need them."""
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name in NOT_BUILT:
            raise BadInputError(f"command {cmd_name} is not built yet; there are {', '.join(COMMANDS)}")
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. What it raises ends here, before click makes something else of it."""
        settings = ctx.obj = Settings()
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A vocabulary has characters that an old code page lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException):
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit of a library included
            raise click.exceptions.Exit(report(error, verbose=settings.verbosity > 0)) from None

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run from a command line, and exit; ``standalone_mode=False`` returns the exit code instead."""
        del prog_name  # one name, however it was started
        _open_standard_streams()
        # A prompt with a star in it is not a pattern for file names.
        extra["windows_expand_args"] = False
        with one_interrupt():
            try:
                code = super().main(args, "refengine", complete_var, standalone_mode=False, **extra)
            except (click.ClickException, click.Abort) as error:
                code = report(error, verbose=False)
        code = code if isinstance(code, int) else OK
        if standalone_mode:
            sys.exit(code)
        return code


def _open_standard_streams() -> None:
    """A stream that the caller closed is None; what is written to it goes nowhere, and it holds no input."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="COMMAND --help has the usual options, COMMAND --help-all every one. Any option may also come from the "
    "environment (REFENGINE_CTX_SIZE for --ctx-size) or from a TOML file (COMMAND --config FILE). Exit codes: 0 ok, "
    "1 findings or a failed check, 2 bad usage or input, 3 out of memory or context, 130 interrupted, 141 nobody "
    "reads the output.",
)
@click.version_option(__version__, prog_name="refengine", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run GGUF language models in memory that you can trust.

    \b
    Example:
      refengine generate -p "def fib(n):" -n 64
    """  # noqa: D301 - click's mark for lines that stay as they are
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(BAD_INPUT)
