"""A recording: what one engine computed of one prompt, and the directory that holds it.

``case.json`` says what was computed, by what, from what; ``tensors.npz`` has the arrays by the names that other engines
have for them. Tensors stand in execution order. Rows of an array are the last rows of the prompt: all, or fewer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from instrumentation.errors import BadInputError
from refengine import __version__
from refengine.golden.files import (
    MAX_ARRAYS,
    MAX_DIMS,
    NAME,
    Fields,
    GoldenFileError,
    read_arrays,
    shown,
    write_arrays,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SCHEMA = 1
CASE, ARRAYS = "case.json", "tensors.npz"
MAX_TOKENS = 1 << 24
#: NMSE up to which a tensor of another device agrees, unless the recording says otherwise
TOLERANCE = 1e-6
ENGINE = f"refengine {__version__}"
#: settings of the engine that a recording has, which a check uses again
SETTINGS = ("n_ctx", "n_batch", "n_ubatch", "cache_type_k", "cache_type_v", "spec_type", "draft_n_max")
_MAX_SOURCES = 256
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LAYER = re.compile(r"-(\d{1,4})$")
Array = npt.NDArray[Any]


def layer_of(tensor: str) -> int | None:
    """Number of the layer that a tensor's name ends with."""
    match = _LAYER.search(tensor)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class DeviceId:
    """Two devices of one kind and architecture compute the same bits."""

    #: host or cuda
    kind: str
    #: such as x86_64 or sm_90
    arch: str

    def __str__(self) -> str:
        return f"{self.kind} {self.arch}"


@dataclass(frozen=True)
class ModelId:
    """Which model file."""

    name: str
    sha256: str

    def __post_init__(self) -> None:
        assert _SHA256.fullmatch(self.sha256), self


@dataclass(frozen=True)
class Step:
    """A tensor of the engine's graph, and the operation that makes it, whether or not the tensor was recorded."""

    name: str
    op: str
    #: C order
    shape: tuple[int, ...]
    #: name and shape of what it is made of, weights first
    sources: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Recording:
    """What an engine computed of one prompt. ``tensors``: float32 or int32, in execution order."""

    name: str
    #: engine and version, or the kind of file it was read from
    engine: str
    tensors: Mapping[str, Array]
    #: NMSE of each tensor up to which another device agrees
    tolerance: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    device: DeviceId | None = None
    model: ModelId | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] = ()
    settings: Mapping[str, int | str] = field(default_factory=lambda: MappingProxyType({}))
    #: every tensor of the graph, in execution order
    steps: tuple[Step, ...] = ()
    #: the likeliest tokens behind the prompt, decoded one after another; None: not recorded
    greedy: tuple[int, ...] | None = None
    #: the same as requests are served: batched, in fused and captured graphs, with drafts if the model makes them
    generated: tuple[int, ...] | None = None
    n_predict: int = 0

    def __post_init__(self) -> None:
        assert NAME.fullmatch(self.name), self.name
        assert self.tolerance.keys() <= self.tensors.keys(), self.tolerance

    def tolerance_of(self, tensor: str) -> float:
        """NMSE up to which another device agrees."""
        return self.tolerance.get(tensor, TOLERANCE)


def require_room(folders: Iterable[Path], *, overwrite: bool) -> None:
    """Raise ``BadInputError`` for the first directory that is there, unless it is a case that may be replaced."""
    for folder in folders:
        if folder.exists() and not overwrite:
            raise BadInputError(f"{folder} is there already; give another directory, or --overwrite")
        if folder.exists() and not (folder / CASE).is_file():
            raise BadInputError(f"{folder} is no recording; give another directory")


def write(recording: Recording, folder: Path, *, overwrite: bool = False) -> None:
    """Write a case. What is at ``folder`` is replaced as a whole, or with ``overwrite`` False refused.

    Raises ``BadInputError``, also when it cannot be written; what was there is there then.
    """
    require_room([folder], overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()  # a link stays one
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir()
        write_arrays(made / ARRAYS, recording.tensors)
        (made / CASE).write_text(_as_json(recording), encoding="utf-8")
        _exchange(made, folder)
    except OSError as error:
        raise BadInputError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _exchange(made: Path, folder: Path) -> None:
    """Put ``made`` where ``folder`` is: the one that was there goes when the other has come, and else it stays."""
    if not folder.exists():
        made.rename(folder)
        return
    former = made.with_name(f"{made.name}.former")
    folder.rename(former)
    try:
        made.rename(folder)
    except BaseException:
        former.rename(folder)
        raise
    shutil.rmtree(former, ignore_errors=True)


def _as_json(recording: Recording) -> str:
    """One value on a line where people look, lists of numbers on one line."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "name": recording.name,
        "engine": recording.engine,
        "device": asdict(recording.device) if recording.device else None,
        "model": asdict(recording.model) if recording.model else None,
        "prompt": recording.prompt,
        "tokens": recording.tokens,
        "settings": dict(recording.settings),
        "n_predict": recording.n_predict,
        "greedy": recording.greedy,
        "generated": recording.generated,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in content.items()]
    tensors = [
        {"name": name, "shape": array.shape, "tolerance": recording.tolerance_of(name)}
        for name, array in recording.tensors.items()
    ]
    for key, rows in (("tensors", tensors), ("steps", [asdict(step) for step in recording.steps])):
        last = "," if key == "tensors" else ""
        inner = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        lines.append(f'  "{key}": [\n{inner}\n  ]{last}' if rows else f'  "{key}": []{last}')
    return "\n".join(["{", *lines, "}", ""])


def read(folder: Path) -> Recording:
    """Read a case. Raises ``GoldenFileError`` for whatever is wrong with its files."""
    fields = Fields.read(folder / CASE)
    schema = fields.integer("schema", low=1)
    if schema > SCHEMA:
        raise GoldenFileError(
            f"{fields.path}: schema is {schema}; this version reads up to {SCHEMA}: use a newer refengine"
        )
    arrays = read_arrays(folder / ARRAYS)
    tensors: dict[str, Array] = {}
    tolerance: dict[str, float] = {}
    for row in fields.objects("tensors", MAX_ARRAYS):
        name, shape = row.name("name"), row.integers("shape", MAX_DIMS)
        array = arrays.pop(name, None)
        if array is None or array.shape != shape:
            seen = "is missing" if array is None else f"has shape {array.shape}"
            raise GoldenFileError(f"{folder / ARRAYS}: array {name} {seen}; want {shape}, as {CASE} says")
        tensors[name], tolerance[name] = array, row.number("tolerance")
    if arrays:
        raise GoldenFileError(f"{folder / ARRAYS}: array {next(iter(arrays))} is not named in {CASE}")
    return Recording(
        name=fields.name("name"),
        engine=fields.text("engine", 200),
        tensors=tensors,
        tolerance=tolerance,
        device=_device(fields.inner("device")) if fields.optional("device") else None,
        model=_model(fields.inner("model")) if fields.optional("model") else None,
        prompt=fields.text("prompt") if fields.optional("prompt") else None,
        tokens=fields.integers("tokens", MAX_TOKENS),
        settings=_settings(fields.inner("settings")),
        steps=tuple(_step(row) for row in fields.objects("steps", MAX_ARRAYS)),
        greedy=fields.integers("greedy", MAX_TOKENS) if fields.optional("greedy") else None,
        generated=fields.integers("generated", MAX_TOKENS) if fields.optional("generated") else None,
        n_predict=fields.integer("n_predict", high=MAX_TOKENS),
    )


def _device(fields: Fields) -> DeviceId:
    return DeviceId(fields.name("kind"), fields.name("arch"))


def _model(fields: Fields) -> ModelId:
    sha256 = fields.text("sha256", 64)
    if not _SHA256.fullmatch(sha256):
        raise fields.fail("sha256", "64 hexadecimal digits")
    return ModelId(fields.text("name", 4096), sha256)


def _settings(fields: Fields) -> dict[str, int | str]:
    unknown = sorted(fields.values.keys() - set(SETTINGS))
    if unknown:
        raise GoldenFileError(
            f"{fields.path}: settings.{shown(unknown[0])} is unknown; want {', '.join(SETTINGS)}"
        )
    return {
        name: fields.integer(name) if name.startswith(("n_", "draft_n")) else fields.name(name)
        for name in SETTINGS
        if name in fields.values
    }


def _step(fields: Fields) -> Step:
    sources = []
    for i, pair in enumerate(fields.items("sources", _MAX_SOURCES)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.fail("sources", "pairs of a name and a shape")
        inner = Fields(fields.path, f"{fields.where}.sources[{i}]", {"name": pair[0], "shape": pair[1]})
        sources.append((inner.name("name"), inner.integers("shape", MAX_DIMS)))
    return Step(fields.name("name"), fields.name("op"), fields.integers("shape", MAX_DIMS), tuple(sources))


def folders(given: Path) -> list[Path]:
    """The case at a path, or the cases in it by name. Raises ``GoldenFileError`` when there is none."""
    if (given / CASE).is_file():
        return [given]
    try:
        found = sorted(
            entry for entry in given.iterdir() if (entry / CASE).is_file() and entry.name[0] != "."
        )
    except OSError as error:
        raise GoldenFileError(f"{given}: cannot be read: {error.strerror}") from None
    if not found:
        raise GoldenFileError(
            f"{given}: has no {CASE}, nor has a directory in it; give what golden record wrote"
        )
    return found


def nmse(found: Array, wanted: Array) -> float:
    """Squared error over squared signal of arrays of one shape, in float64; the error itself where there is no signal.

    Infinite when one has a value that is not finite where the other has another one.
    """
    a, b = found.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    error = float(((a[finite] - b[finite]) ** 2).sum())
    signal = float((b[finite] ** 2).sum())
    return error / signal if signal else error
