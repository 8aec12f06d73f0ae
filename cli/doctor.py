"""``refengine doctor``: whether everything is here that the engine needs."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from cli.command import EngineCommand
from cli.failures import FAILED

if TYPE_CHECKING:
    from cli.health_check import Check


@click.command(cls=EngineCommand, short_help="Show versions, devices and what is missing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def doctor(as_json: bool) -> None:
    """Show versions, devices and what is missing, and run a kernel on the host device.

    Exits with 0 when the host device works, otherwise with 1. No GPU is needed.

    \b
    Example:
      refengine doctor
    """  # noqa: D301 - click's mark for lines that stay as they are
    from cli import health  # noqa: PLC0415 - --help does without what it takes to run

    checks = health.examine()
    works = all(check.state != "failed" for check in checks)
    if as_json:
        click.echo(
            json.dumps({"ok": works, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2)
        )
    else:
        click.echo("\n".join(_lines(checks)))
    if not works:
        raise click.exceptions.Exit(FAILED)


def _lines(checks: list[Check]) -> list[str]:
    lines: list[str] = []
    width = max(len(check.name) for check in checks)
    group = ""
    for check in checks:
        if check.group != group:
            group = check.group
            lines += [""] * bool(lines) + [group]
        mark = {"ok": "  ", "missing": "- ", "failed": "! "}[check.state]
        lines.append(f"{mark}{check.name.ljust(width)}  {check.detail}")
        if check.cure:
            lines.append(f"  {' ' * width}  -> {check.cure}")
    return lines
