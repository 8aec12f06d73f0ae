"""What a model file holds, and what it will take of a device: known before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from instrumentation.allocator import Allocator
from instrumentation.devices.host_memory import HostMemory
from instrumentation.errors import OutOfMemoryError
from instrumentation.findings import FindingLog
from instrumentation.levels import Level
from instrumentation.ownership import Owner
from refengine.config import ModelConfig, check_tensors, expected_tensors, loaded_tensors
from refengine.gguf_values import printable
from refengine.weights import WeightPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from instrumentation.reservation import BufferRequest
    from refengine.context_plan import ContextSettings
    from refengine.engine import Engine
    from refengine.gguf_file import GGUFFile
    from refengine.gguf_values import Scalar
    from refengine.options import EngineOptions

#: elements of an array that are shown
MAX_SHOWN = 6
MAX_TEXT = 60
#: elements of a tensor that are looked at together
_CHUNK = 1 << 20

_SPECIAL_FLOATS = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
_SPECIAL_FLOATS |= {GGMLQuantizationType.F64: np.float64}


# --- the file


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """A key of the file. ``value``: a scalar as it is, or the first ``MAX_SHOWN`` elements of an array."""

    key: str
    type: str
    value: Scalar | list[Scalar]
    #: elements of an array; None for a scalar
    length: int | None

    @property
    def text(self) -> str:
        """The value on one line, shortened."""
        if not isinstance(self.value, list):
            return _shown(self.value)
        more = ", ..." if self.length is not None and self.length > len(self.value) else ""
        return f"[{', '.join(_shown(element) for element in self.value)}{more}]"


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor of the file; ``shape`` in C order."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TypeRow:
    """All tensors of one type together."""

    type: str
    tensors: int
    elements: int
    nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file that an element takes."""
        return self.nbytes * 8 / self.elements


@dataclass(frozen=True, slots=True)
class FileSummary:
    """What a file holds."""

    path: str
    version: int
    alignment: int
    metadata: tuple[MetadataRow, ...]
    tensors: tuple[TensorRow, ...]
    #: largest share first
    types: tuple[TypeRow, ...]


def summarise(gguf: GGUFFile) -> FileSummary:
    """Metadata, tensors and types of an open file, in the file's order."""
    tensors = tuple(
        TensorRow(info.name, info.type.name, info.shape, info.nbytes) for info in gguf.tensors.values()
    )
    types: dict[str, TypeRow] = {}
    for info in gguf.tensors.values():
        name = info.type.name
        row = types.get(name, TypeRow(name, 0, 0, 0))
        types[name] = TypeRow(name, row.tensors + 1, row.elements + info.n_elements, row.nbytes + info.nbytes)
    return FileSummary(
        path=str(gguf.path),
        version=gguf.version,
        alignment=gguf.alignment,
        metadata=tuple(_metadata_row(gguf, key) for key in gguf.metadata),
        tensors=tensors,
        types=tuple(sorted(types.values(), key=lambda row: (-row.nbytes, row.type))),
    )


def _metadata_row(gguf: GGUFFile, key: str) -> MetadataRow:
    value: Any = gguf.metadata[key]
    length = gguf.metadata.array_length(key)
    if length is not None:
        value = value[:MAX_SHOWN] if isinstance(value, list) else value[:MAX_SHOWN].tolist()
    return MetadataRow(key, gguf.metadata.type_name(key), value, length)


def _shown(value: Scalar) -> str:
    return f"'{printable(value, MAX_TEXT)}'" if isinstance(value, str) else str(value)


# --- the memory


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One arena of an engine: its buffers, their bytes, and what the device gives for them at each level."""

    owner: Owner
    name: str
    buffers: int
    #: bytes that the engine uses
    payload: int
    #: bytes with alignment, at level ``off``
    off: int
    #: bytes with alignment and guard bytes, at level ``guard``
    guard: int

    def __post_init__(self) -> None:
        assert 0 < self.payload <= self.off <= self.guard, self

    def at(self, level: Level) -> int:
        """Bytes that are reserved at a level."""
        return self.off if level == Level.OFF else self.guard


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Everything that an engine reserves when it is loaded."""

    settings: ContextSettings
    arenas: tuple[ArenaPlan, ...]
    #: tensors of the file that are not loaded: those of its MTP block, without ``spec_type``
    not_loaded: tuple[str, ...] = ()

    @property
    def payload(self) -> int:
        """Bytes that the engine uses."""
        return sum(arena.payload for arena in self.arenas)

    def total(self, level: Level) -> int:
        """Bytes that are reserved at a level, without the shadows of level ``trap``.

        Below it the same as an engine's ``snapshot().reserved`` after loading.
        """
        return sum(arena.at(level) for arena in self.arenas)


def memory_plan(
    gguf: GGUFFile, options: EngineOptions, *, fewest_launches: bool = False, chooses: bool = False
) -> MemoryPlan:
    """What ``refengine.load`` of this file reserves with these options. Reads no weight, reserves nothing.

    Raises ``ModelFileError``, ``UnsupportedModelError`` and ``BadInputError`` as loading would.
    """
    config = ModelConfig.from_gguf(gguf)
    check_tensors(gguf, config)
    plans = options.context_plans(config, fewest_launches=fewest_launches, chooses=chooses)
    drafts = len(plans) > 1
    model = Owner("model")
    arenas = [_arena(model, "weights", [WeightPlan(gguf, config, model, draft=drafts).requests])]
    arenas += [_arena(plan.owner, name, layouts) for plan in plans for name, layouts in plan.arenas()]
    loaded = loaded_tensors(config, draft=drafts)
    not_loaded = tuple(name for name in expected_tensors(config) if name not in loaded)
    return MemoryPlan(plans[0].settings, tuple(arenas), not_loaded)


def check_limit(
    gguf: GGUFFile, options: EngineOptions, *, fewest_launches: bool = False, chooses: bool = False
) -> None:
    """Raise ``OutOfMemoryError`` when a memory limit is too small to load the model, before anything is reserved."""
    limit = options.device_memory_limit
    if limit is None:
        return
    level = Level.parse(options.check)
    needed = memory_plan(gguf, options, fewest_launches=fewest_launches, chooses=chooses)
    if needed.total(level) > limit:
        largest = max(needed.arenas, key=lambda arena: arena.at(level))
        raise OutOfMemoryError(
            f"device memory limit {limit} bytes: loading needs {needed.total(level)}, of which {largest.name} of "
            f"{largest.owner} {largest.at(level)}; the smallest limit that works is {needed.total(level)}"
        )


def _arena(owner: Owner, name: str, layouts: Iterable[Iterable[BufferRequest]]) -> ArenaPlan:
    """Plan an arena in which each of ``layouts`` fits, one at a time."""
    lists = [list(requests) for requests in layouts]
    largest = max(lists, key=lambda requests: sum(request.nbytes for request in requests))
    sizes = {
        # An allocator that reserves nothing: what it says about sizes is what the engine's own will say.
        level: max(_sizes(level).arena_size(requests) for requests in lists)
        for level in (Level.OFF, Level.GUARD)
    }
    payload = sum(request.nbytes for request in largest)
    return ArenaPlan(owner, name, len(largest), payload, sizes[Level.OFF], sizes[Level.GUARD])


def _sizes(level: Level) -> Allocator:
    return Allocator(HostMemory(), level=level, findings=FindingLog())


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """What the driver holds for an engine beside its arenas; nothing on the host device."""

    #: captured graphs that are kept, and their bytes of device memory
    graphs: int
    graph_nbytes: int
    #: bytes of device memory of loaded kernels, of the whole process
    kernel_nbytes: int
    #: bytes of the host's memory that are page-locked
    host_nbytes: int
    #: bytes of device memory of libraries' handles, without their workspaces
    handle_nbytes: int = 0

    @classmethod
    def of(cls, engine: Engine) -> DriverMemory:
        """Of an engine now, by its ledger."""
        account = engine.device.account
        rows = [row for each in {account, account.shared} for row in each.rows]
        graphs = [(owner, name, usage.device) for owner, name, usage in rows if name.startswith("graph ")]
        return cls(
            graphs=len({(owner, name) for owner, name, _ in graphs}),
            graph_nbytes=sum(nbytes for *_, nbytes in graphs),
            kernel_nbytes=sum(usage.device for _, name, usage in rows if name == "loaded kernels"),
            host_nbytes=sum(usage.host for *_, usage in rows),
            handle_nbytes=sum(usage.device for _, name, usage in rows if name.startswith("handle ")),
        )

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return any((self.graphs, self.graph_nbytes, self.kernel_nbytes, self.host_nbytes))


# --- the values


def check_tensor_data(gguf: GGUFFile) -> None:
    """Read every tensor and see that its values are finite, as ``--check-tensors`` asks.

    Raises ``ModelFileError`` naming the first tensor with a NaN or an infinity, and where in it.
    """
    for name, info in gguf.tensors.items():
        raw = gguf.raw(name)
        n_in = info.shape[-1]
        row_nbytes = info.nbytes * n_in // info.n_elements
        rows = max(1, _CHUNK // n_in)
        for first in range(0, info.n_elements // n_in, rows):
            part = raw[first * row_nbytes : (first + rows) * row_nbytes].reshape(-1, row_nbytes)
            with np.errstate(invalid="ignore", over="ignore"):
                values = _values(part, info.type)
            if values is None:
                break
            finite = np.isfinite(values)
            if not finite.all():
                at = int(np.argmin(finite))
                row, column = first + at // n_in, at % n_in
                raise gguf.error(
                    f"tensor '{printable(name)}'",
                    f"row {row}, column {column} is {values.reshape(-1)[at]}; want finite numbers, "
                    "the file is damaged or was converted wrongly: fetch or convert it again",
                )
        gguf.release_pages(name)


def _values(part: np.ndarray[Any, np.dtype[np.uint8]], kind: Any) -> Any:
    """Numbers of rows of bytes; None for integers, which are always finite."""
    if kind in _SPECIAL_FLOATS:
        return part.view(_SPECIAL_FLOATS[kind])
    return None if kind.name.startswith("I") and kind.name[1:].isdigit() else dequantize(part, kind)
