"""Command line: ``python -m instrumentation.lint PATH...``."""

from __future__ import annotations

import sys

import click

from instrumentation.lint import lint_paths, render_json, render_text


@click.command()
@click.argument("paths", nargs=-1, required=True)
@click.option(
    "--format", "style", type=click.Choice(["text", "json"]), default="text", help="Form of the reports."
)
@click.option(
    "--reserving", multiple=True, metavar="NAME", help="One more function that returns a reservation."
)
def main(paths: tuple[str, ...], style: str, reserving: tuple[str, ...]) -> None:
    """Report each reservation whose result is discarded, or used without a check.

    Ends with 0 when there is none, 1 when there is, 2 when a path cannot be read or parsed.
    """
    result = lint_paths(paths, reserving=reserving)
    try:
        click.echo((render_json if style == "json" else render_text)(result.reports), nl=False)
    except OSError as error:
        click.echo(f"the reports cannot be written: {error.strerror}", err=True)
        sys.exit(2)
    if style == "text":
        click.echo(f"{result.n_files} files read, {len(result.reports)} reports", err=True)
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main(prog_name="python -m instrumentation.lint")
