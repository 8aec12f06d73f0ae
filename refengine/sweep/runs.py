"""All runs of a sweep: which there are, over how many processes, and a file from which a sweep goes on."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import refengine
from instrumentation.errors import BadInputError
from refengine import logs
from refengine.sweep.judging import MODES, OUTCOMES, Mode, Reference, Run, SweepError, disturbed, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from instrumentation.faults import FaultKind
    from refengine.sweep.script import Workload

Key: TypeAlias = tuple[Mode, int]
#: runs that a process does before it reports them
MAX_CHUNK = 8


@dataclass(frozen=True)
class Sweep:
    """A workload and how it is disturbed. ``log`` is the verbosity and format of log lines; None: none at all."""

    workload: Workload
    kinds: tuple[FaultKind, ...]
    modes: tuple[Mode, ...] = MODES
    seed: int = 0
    random_runs: int = 20
    log: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        assert self.kinds, self
        assert self.seed >= 0, self
        assert self.random_runs >= 0, self

    def keys(self, wanted: Reference) -> list[Key]:
        """Mode and number of each run; numbers of ``nth`` and ``from`` are those of the sites."""
        sites = len(wanted.passed)
        counts = {"nth": sites, "from": sites, "random": self.random_runs if sites else 0}
        return [(mode, number) for mode in self.modes for number in range(1, counts[mode] + 1)]

    def reference(self) -> Reference:
        """The undisturbed run; see ``refengine.sweep.reference``. What the engine logs of it is as in ``run``."""
        with logs.lines(self.log):
            return reference(self.workload, self.kinds)

    def run(self, wanted: Reference, key: Key) -> Run:
        """One run. The engine logs each failure, which here are all on purpose: see ``log``."""
        with logs.lines(self.log):
            return disturbed(self.workload, wanted, *key, self.kinds, self.seed)

    def header(self, wanted: Reference) -> dict[str, Any]:
        """What a run depends on, for JSON: two sweeps with equal headers have equal runs."""
        workload = self.workload
        with workload.model.open("rb") as file:
            model = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "version": refengine.__version__,
            "model": model,
            **{f"option {name}": value for name, value in sorted(workload.options.items())},
            "prompts": [[list(prompt) for prompt in prompts] for prompts in workload.rounds],
            "n_predict": workload.n_predict,
            "kinds": list(self.kinds),
            "seed": self.seed,
            "sites": len(wanted.passed),
        }


# --- processes


def run_all(
    sweep: Sweep, wanted: Reference, keys: Sequence[Key], processes: int = 1
) -> Generator[Run, None, None]:
    """The runs of ``keys``; in their order with one process, otherwise as they end.

    Raises ``SweepError`` when a process dies, and names the runs that it may have died of.
    """
    if processes == 1:
        yield from (sweep.run(wanted, key) for key in keys)
        return
    size = max(1, min(MAX_CHUNK, len(keys) // (4 * processes)))
    chunks = [keys[start : start + size] for start in range(0, len(keys), size)]
    others = set(multiprocessing.active_children())
    # Not fork: Windows has none, and a fork of a process with threads inherits their locks.
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(sweep, wanted)
    )
    try:
        for runs in _as_they_end(pool, chunks, processes):
            yield from runs
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _as_they_end(
    pool: ProcessPoolExecutor, chunks: list[Sequence[Key]], processes: int
) -> Iterator[list[Run]]:
    # No more than there are processes: when one dies, what is under way is what it died of.
    going: dict[Future[list[Run]], Sequence[Key]] = {}
    waiting = iter(chunks)
    try:
        while True:
            while len(going) < processes and (chunk := next(waiting, None)) is not None:
                going[pool.submit(_run_chunk, chunk)] = chunk
            if not going:
                return
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                runs = future.result()
                del going[future]
                yield runs
    except BrokenProcessPool:
        suspects = ", ".join(f"{mode} {number}" for keys in going.values() for mode, number in keys)
        raise SweepError(
            f"a process of the sweep died in one of the runs {suspects}; sweep with one process to see in which"
        ) from None


_work: list[Callable[[Key], Run]] = []


def _begin(sweep: Sweep, wanted: Reference) -> None:
    # Ctrl-C goes to the whole group; the parent ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work[:] = [lambda key: sweep.run(wanted, key)]


def _run_chunk(keys: Sequence[Key]) -> list[Run]:
    return [_work[0](key) for key in keys]


# --- a file to go on from


class Journal:
    """JSON lines: what the runs depend on, then each finished run. A sweep that was interrupted goes on from it.

    Raises ``BadInputError``, and leaves the file alone, when it is of another sweep or is damaged.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[Key, Run] = {}
        text = path.read_bytes() if path.exists() else b""
        # A line that has no end was being written when the sweep was stopped.
        sound = text[: text.rfind(b"\n") + 1]
        if text:
            self._read(sound.splitlines(), dict(header))
        self._file = path.open("r+b" if text else "wb")
        self._file.truncate(len(sound))
        self._file.seek(len(sound))
        if not text:
            self._append({"sweep": dict(header)})

    def write(self, run: Run) -> None:
        """Add a run; it is in the file when this returns."""
        self._append(asdict(run))

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def _read(self, lines: list[bytes], header: dict[str, Any]) -> None:
        first = _parsed(lines[0]) if lines else None
        found = first.get("sweep") if isinstance(first, dict) else None
        if not isinstance(found, dict):
            raise BadInputError(
                f"{self.path} is no file of a sweep; give a new name, or a file that --resume wrote"
            )
        wanted = json.loads(json.dumps(header))
        for name in sorted({*found, *wanted}):
            there, here = found.get(name), wanted.get(name)
            if there != here:
                raise BadInputError(
                    f"{self.path} is of another sweep: {name} is {_short(there)} there and {_short(here)} here; "
                    "give a new name, or sweep as before"
                )
        for number, line in enumerate(lines[1:], 2):
            run = _run(_parsed(line))
            if run is None:
                raise BadInputError(
                    f"{self.path}:{number}: this line is no run; remove it, or give a new name"
                )
            self.done[run.mode, run.number] = run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _run(record: Any) -> Run | None:
    if not isinstance(record, dict) or set(record) != {field.name for field in fields(Run)}:
        return None
    wrong = record["wrong"]
    sound = (
        record["mode"] in MODES
        and record["outcome"] in OUTCOMES
        and all(type(record[name]) is int for name in ("number", "fired"))
        and all(isinstance(text, str) for text in (record["kind"], record["site"]))
        and isinstance(wrong, list)
        and all(isinstance(text, str) for text in wrong)
    )
    return Run(**{**record, "wrong": tuple(wrong)}) if sound else None


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
