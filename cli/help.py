"""Help that fits a screen: what few people need is listed by ``--help-all``."""

from __future__ import annotations

import click

_ALL = "cli.help.all"


class RareOption(click.Option):
    """An option like any other, which ``--help`` leaves to ``--help-all``."""


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def help_all(n_rare: int) -> click.Option:
    """The flag that lists all options, of which ``--help`` leaves out ``n_rare``."""
    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_show_all,
        help=f"The same with {n_rare} more options.",
    )


class ScreenCommand(click.Command):
    """A command whose help lists its ``RareOption`` apart, and only when all are asked for."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Usual options, then the rare ones."""
        usual: list[tuple[str, str]] = []
        rare: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                (rare if isinstance(param, RareOption) else usual).append(record)
        with formatter.section("Options"):
            formatter.write_dl(usual)
        if rare and ctx.meta.get(_ALL):
            with formatter.section("More options"):
                formatter.write_dl(rare)
