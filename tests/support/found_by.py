"""The table of the README: planted faults and what finds them, measured.

usage: python tests/support/found_by.py

Every fault and its repaired twin runs on the host device at each level. What may store anywhere, below level trap, does
so in a process of its own. What NVIDIA's compute-sanitizer said of the faults of kernels is in a file that
tests/gpu/sanitizer_matrix.py writes, on a GPU. The column of PyTorch's CUDA stream sanitizer is there where PyTorch is
installed.
"""

# ruff: noqa: T201 - a script

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import structlog
from planted_faults import PLANTED
from planted_order import FAULTS
from race_scenarios import SCENARIOS
from racing import Player, parse
from trap_world import World

from instrumentation import catalogue_source
from instrumentation.errors import Error
from instrumentation.findings import RefusedError
from instrumentation.levels import Level

Kind = Literal["bad", "fixed"]
#: runs a fault, or its twin, at a level: whether anything was reported
Runs = Callable[[Kind, Level], bool]
LEVELS = (Level.OFF, Level.GUARD, Level.AUDIT, Level.TRAP)
TORCH = "PyTorch's stream sanitizer"
NVIDIA = "compute-sanitizer"
#: what that said, and what makes the file
ANSWERS = Path(__file__).resolve().parent.parent / "data" / "compute_sanitizer.json"
ASK_AGAIN = "run tests/gpu/sanitizer_matrix.py --twins -o tests/data/compute_sanitizer.json on a GPU"
#: stores where a value says that it loads from beside its block's memory: what level trap alone is sure to see
BY_CHANCE = frozenset({"a very large unsigned index"})


@dataclass(frozen=True)
class Fault:
    """One planted fault. ``programs``: bad and fixed, for who is told of streams. ``wild``: it may store anywhere."""

    name: str
    runs: Runs
    programs: tuple[str, str] | None = None
    wild: bool = False

    def __post_init__(self) -> None:
        assert self.wild or self.name not in BY_CHANCE, self.name

    def found(self, kind: Kind, level: Level) -> bool:
        """Whether anything was reported; not by a program that died, nor where that is chance."""
        if self.name in BY_CHANCE and level < Level.TRAP:
            return False
        run = partial(self.runs, kind, level)
        return apart(run) if self.wild else run()


def _launch(fault: Any, kind: Kind, level: Level) -> bool:
    grid = fault.grid_of(kind) if hasattr(fault, "grid_of") else fault.grid
    return bool(World(level=level).launch(fault.kernel, grid, fault.arguments(kind)))


def _play(programs: tuple[str, str], kind: Kind, level: Level) -> bool:
    player = Player(level=level)
    for step in parse(programs[kind == "fixed"]):
        try:
            player.do(step)
        except RefusedError:
            return True
    player.bench.device.synchronize()
    # Some of these programs read what nothing wrote, which level trap says too.
    return any(finding.code.startswith("STR") for finding in player.findings)


def _example(code: str, kind: Kind, level: Level) -> bool:
    text = catalogue_source.source(code, kind)
    for each in LEVELS:
        text = text.replace(f"level=Level.{each.name}", f"level=Level.{level.name}")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(catalogue_source.path(code, kind))}
    try:
        exec(compile(text, names["__file__"], "exec"), names)  # noqa: S102 - a file of the package
    except Error as error:
        return bool(names["findings"].list()) or hasattr(error, "code")
    return bool(names["findings"].list())


def _planted(*codes: str) -> list[Fault]:
    return [Fault(each.name, partial(_launch, each), wild=True) for each in PLANTED if each.codes[0] in codes]


def _order(code: str) -> list[Fault]:
    return [Fault(each.name, partial(_launch, each)) for each in FAULTS if each.code == code]


def _streams(*codes: str) -> list[Fault]:
    return [
        Fault(name, partial(_play, (bad, fixed)), (bad, fixed))
        for name, (code, bad, fixed) in SCENARIOS.items()
        if code in codes
    ]


def _examples(*codes: str) -> list[Fault]:
    return [Fault(code, partial(_example, code), wild=True) for code in codes]


ROWS: dict[str, list[Fault]] = {
    "reservation failed or never looked at; leak; double free": _examples(
        "RES001", "RES002", "MEM005", "MEM006"
    ),
    "store out of bounds": _planted("MEM011"),
    "load out of bounds": _planted("MEM010"),
    "load of what nothing wrote": _planted("MEM012"),
    "use after free, by host, launch or kernel": _examples("MEM003", "MEM004", "MEM013"),
    "threads of a block race": _order("RAC001"),
    "part of a block at a barrier": _order("SYN001"),
    "streams write, or read and write, in no order": _streams("STR010", "STR011"),
    "memory given up under queued work": _streams("STR012"),
    "host array used under a copy": _streams("STR013"),
    "buffer, stream or event of another owner; destroyed stream": _examples("OWN001", "OWN002", "STR001"),
    "lease: mode, end, event, hand-over": _examples("OWN010", "OWN011", "OWN012"),
    "captured graph: freed buffer, cache without bound, call in a capture": _examples(
        "GRA001", "GRA002", "GRA003"
    ),
    "library handle: stream, workspace": _examples("LIB001", "LIB002"),
}


def apart(run: Callable[[], bool]) -> bool:
    """What ``run`` gives in a process of its own; false if that dies."""
    process = os.fork()
    if process == 0:
        code = 1
        signal.alarm(60)  # what it wrote over may be what it waits for
        try:
            with Path(os.devnull).open("w") as nothing:
                os.dup2(nothing.fileno(), 2)
            code = 7 if run() else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7


def found_by_torch(faults: list[Fault], kind: Kind) -> int | None:
    """Faults that PyTorch's sanitizer finds; None where it is not asked."""
    programs = [fault.programs for fault in faults if fault.programs is not None]
    if not programs:
        return None
    import torch_streams  # noqa: PLC0415 - where PyTorch is

    return sum(torch_streams.finds(each[kind == "fixed"]) for each in programs)


def answers(path: Path, kind: Kind) -> dict[str, dict[str, str]]:
    """What each tool of compute-sanitizer that was asked said of each fault of a kernel, or of its twin.

    Fails where a fault of a kernel was not asked, or another one was.
    """
    said: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))[kind]
    names = {fault.name for fault in (*PLANTED, *FAULTS)}
    missing, unknown = sorted(names - said.keys()), sorted(said.keys() - names)
    assert not missing, f"{path.name} has no answer on {kind} of {missing}; {ASK_AGAIN}"
    assert not unknown, f"{path.name} has answers on {kind} of {unknown}, which are no faults; {ASK_AGAIN}"
    return said


def found_by_nvidia(faults: list[Fault], kind: Kind) -> int | None:
    """Faults that some tool of compute-sanitizer reported; None where none was asked."""
    said = answers(ANSWERS, kind)
    asked = [said[fault.name].values() for fault in faults if fault.name in said]
    assert len(asked) in (0, len(faults)), "kernels are asked, streams are not: which of these are which?"
    if not asked:
        return None
    return sum(any(each != "-" and not each.startswith("failed") for each in those) for those in asked)


def _cell(count: int | None) -> str:
    return "" if count is None else str(count or "-")


def row(name: str, *, torch: bool) -> tuple[list[str], int]:
    """Cells: name, number of faults, how many each level finds and how many the others do; and false reports.

    A false report is one of ours on a repaired twin.
    """
    faults = ROWS[name]
    # Twins run here: their kernels are compiled when the faults run in processes that are forked.
    false = sum(fault.runs("fixed", level) for fault in faults for level in LEVELS)
    counts: list[int | None] = [sum(fault.found("bad", level) for fault in faults) for level in LEVELS]
    counts.append(found_by_nvidia(faults, "bad"))
    if torch:
        counts.append(found_by_torch(faults, "bad"))
    return [name, str(len(faults)), *map(_cell, counts)], false


def main() -> int:
    """Print the table, and what was reported of the repaired twins."""
    warnings.simplefilter("ignore")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    torch = importlib.util.find_spec("torch") is not None
    heads = ["planted fault", "of", *(f"`{level}`" for level in LEVELS), NVIDIA, *([TORCH] if torch else [])]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    n_false = 0
    for name in ROWS:
        cells, false = row(name, torch=torch)
        n_false += false
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nreports on the {sum(map(len, ROWS.values()))} repaired twins: {n_false}", end="")
    theirs = sum(found_by_nvidia(faults, "fixed") or 0 for faults in ROWS.values())
    print(f"; {NVIDIA}: {theirs} on the {len(answers(ANSWERS, 'fixed'))} of kernels", end="")
    if torch:
        theirs = sum(found_by_torch(faults, "fixed") or 0 for faults in ROWS.values())
        print(
            f"; {TORCH}: {theirs} on the {sum(bool(f.programs) for each in ROWS.values() for f in each)} of streams"
        )
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
