"""``refengine inspect``: what is in a model file, and what memory it will take."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import click

from cli import model_options as options
from cli.command import EngineCommand, count_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from refengine.inspection import FileSummary, MemoryPlan


@click.command(cls=EngineCommand, short_help="Show what is in a model file, and its memory plan.")
@options.model_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@options.context_options
@options.gemm_option
@options.speculative_options
@options.override_option
@options.check_tensors_option
def inspect(
    model: str | None, as_json: bool, override_kv: tuple[str, ...], check_tensors: bool, **given: Any
) -> None:
    """Show metadata, tensors and the memory plan of a model file. Reads no weights.

    The plan is what loading reserves with the same options, at check levels off and guard.

    \b
    Example:
      refengine inspect -c 2048
    """  # noqa: D301 - click's mark for lines that stay as they are
    from refengine import inspection  # noqa: PLC0415 - --help does without what it takes to run
    from refengine.gguf_file import GGUFFile  # noqa: PLC0415
    from refengine.gguf_lookup import parse_override_kv  # noqa: PLC0415
    from refengine.models import resolve_model  # noqa: PLC0415
    from refengine.options import EngineOptions  # noqa: PLC0415

    engine_options = EngineOptions(**given)
    overrides = parse_override_kv(override_kv)
    with GGUFFile.open(resolve_model(model), override_kv=overrides) as gguf:
        summary = inspection.summarise(gguf)
        if not as_json:
            click.echo("\n\n".join(_file_tables(summary)))
        memory = None
        try:
            memory = inspection.memory_plan(gguf, engine_options)
            if check_tensors:
                inspection.check_tensor_data(gguf)
        finally:
            # A file that cannot be run is shown as far as it goes, and refused after that.
            if as_json:
                click.echo(json.dumps(_as_json(summary, memory), indent=2, allow_nan=False))
            elif memory is not None:
                click.echo("\n" + _plan_table(memory))


def _file_tables(summary: FileSummary) -> list[str]:
    from refengine.gguf_values import printable  # noqa: PLC0415

    facts = f"{printable(summary.path, 4096)}: GGUF version {summary.version}, alignment {summary.alignment}"
    metadata = [(printable(row.key), row.type, row.text) for row in summary.metadata]
    tensors = [
        (printable(row.name), row.type, "x".join(map(str, row.shape)), f"{row.nbytes:,}")
        for row in summary.tensors
    ]
    types = [
        (row.type, str(row.tensors), f"{row.elements:,}", f"{row.nbytes:,}", f"{row.bits_per_weight:.2f}")
        for row in summary.types
    ]
    elements, nbytes = sum(row.elements for row in summary.types), sum(row.nbytes for row in summary.types)
    if types:
        each = f"{nbytes * 8 / elements:.2f}"
        types.append(("all", str(len(tensors)), f"{elements:,}", f"{nbytes:,}", each))
    return [
        facts,
        _table(("key", "type", "value"), metadata),
        _table(("tensor", "type", "shape", "bytes"), tensors, right={3}),
        _table(("type", "tensors", "elements", "bytes", "bits a weight"), types, right={1, 2, 3, 4}),
    ]


def _plan_table(memory: MemoryPlan) -> str:
    from instrumentation.levels import Level  # noqa: PLC0415

    used = memory.settings
    facts = (
        f"memory plan: n_ctx {used.n_ctx}, n_batch {used.n_batch}, n_ubatch {used.n_ubatch}, "
        f"cache {used.cache_type_k}/{used.cache_type_v}, sequences {used.n_sequences}"
    )
    rows: list[tuple[str, ...]] = [
        (str(a.owner), a.name, str(a.buffers), f"{a.payload:,}", f"{a.off:,}", f"{a.guard:,}")
        for a in memory.arenas
    ]
    totals = [memory.payload, memory.total(Level.OFF), memory.total(Level.GUARD)]
    rows.append(("total", "", str(sum(a.buffers for a in memory.arenas)), *(f"{n:,}" for n in totals)))
    rows.append(("", "", "", *(count_bytes(n) for n in totals)))
    header = ("owner", "arena", "buffers", "bytes used", "reserved, off", "reserved, guard")
    table = f"{facts}\n{_table(header, rows, right={2, 3, 4, 5})}"
    if memory.not_loaded:
        table += f"\nnot loaded: {len(memory.not_loaded)} tensors of the MTP block; --spec-type draft-mtp loads them"
    return table


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] | set[int] = frozenset()
) -> str:
    """Columns with two spaces between them. No borders and no wrapping: this is for grep too."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in right else text.ljust(widths[i])

    return "\n".join("  ".join(cell(i, text) for i, text in enumerate(line)).rstrip() for line in lines)


def _as_json(summary: FileSummary, memory: MemoryPlan | None) -> dict[str, Any]:
    return {
        "path": summary.path,
        "version": summary.version,
        "alignment": summary.alignment,
        "metadata": {
            row.key: {"type": row.type, "value": _finite(row.value)}
            | ({"length": row.length} if row.length is not None else {})
            for row in summary.metadata
        },
        "tensors": [dataclasses.asdict(row) for row in summary.tensors],
        "types": [
            dataclasses.asdict(row) | {"bits_per_weight": row.bits_per_weight} for row in summary.types
        ],
        "plan": _plan_as_json(memory) if memory is not None else None,
    }


def _plan_as_json(memory: MemoryPlan) -> dict[str, Any]:
    from instrumentation.levels import Level  # noqa: PLC0415

    return {
        "settings": dataclasses.asdict(memory.settings),
        "arenas": [dataclasses.asdict(arena) | {"owner": str(arena.owner)} for arena in memory.arenas],
        "not_loaded": list(memory.not_loaded),
        "payload": memory.payload,
        "off": memory.total(Level.OFF),
        "guard": memory.total(Level.GUARD),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: those become text."""
    if isinstance(value, list):
        return [_finite(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
