"""Tables on stdout, row by row: Markdown, CSV, or one JSON list."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType


class Column(NamedTuple):
    """A column of the Markdown form: its header, its least width, and whether it is a number."""

    name: str
    width: int
    right: bool = False


class Table:
    """Rows on stdout as they come, those before a failure included. A context manager."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = columns
        self.started = False

    def __enter__(self) -> Self:
        return self

    def add(
        self, cells: Sequence[str], row: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """One more row: ``cells`` for people, ``row`` for programs, with ``more`` where a value may be a list."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class _Markdown(Table):
    def add(
        self, cells: Sequence[str], row: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """A row; widths are fixed, so that it need not wait for others."""
        del row, more
        if not self.started:
            self.started = True
            self._line([column.name for column in self.columns])
            rules = ("-" * (column.width - column.right) + ":" * column.right for column in self.columns)
            click.echo(f"| {' | '.join(rules)} |")
        self._line(cells)

    def _line(self, cells: Sequence[str]) -> None:
        padded = (
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, self.columns, strict=True)
        )
        click.echo(f"| {' | '.join(padded)} |")


class _Csv(Table):
    def add(
        self, cells: Sequence[str], row: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """A row, behind a header."""
        del cells, more
        if not self.started:
            self.started = True
            click.echo(_csv_line(row.keys()))
        click.echo(_csv_line(row.values()))


class _Json(Table):
    def __init__(self, columns: Sequence[Column]) -> None:
        super().__init__(columns)
        self.rows: list[Mapping[str, Any]] = []

    def add(
        self, cells: Sequence[str], row: Mapping[str, Any], more: Mapping[str, Any] | None = None
    ) -> None:
        """Keep it: a list is written whole."""
        del cells
        self.rows.append({**row, **(more or {})})

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.rows:
            click.echo(json.dumps(self.rows, indent=2, allow_nan=False))


FORMATS: dict[str, Callable[[Sequence[Column]], Table]] = {"md": _Markdown, "csv": _Csv, "json": _Json}
format_option = click.option(
    "-o",
    "--output",
    type=click.Choice(list(FORMATS)),
    default="md",
    metavar="FORMAT",
    help="md, csv or json (md).",
)


def _csv_line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(values)
    return line.getvalue()
