"""Recordings made and checked one after another: which model, which engine, what with what."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import refengine
from instrumentation.errors import BadInputError, FindingError
from refengine.golden import case
from refengine.golden.compare import compare
from refengine.golden.files import GoldenFileError, shown
from refengine.golden.llama_files import LOGITS, read_llama_debug, read_llama_results
from refengine.golden.record import Request, again, device_id, model_id, record
from refengine.models import KNOWN_MODELS, resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from refengine.engine import Engine
    from refengine.golden.case import ModelId, Recording
    from refengine.golden.compare import Comparison

_READERS = {".bin": read_llama_debug, ".gguf": read_llama_results}


def read_any(path: Path) -> list[Recording]:
    """Recordings at a path: a case, a directory of cases, or a file of another engine's. Raises ``GoldenFileError``."""
    reader = _READERS.get(path.suffix)
    if reader is not None and path.is_file():
        return [reader(path)]
    return [case.read(folder) for folder in case.folders(path)]


def is_foreign(recording: Recording) -> bool:
    """Whether another engine made it, which has no more than some of the tensors."""
    return not recording.steps


class Session:
    """Engines, of which one is open at a time, for recordings of any models and settings. A context manager.

    ``options``: of ``refengine.load``, for all of them; ``closed`` is called with each engine that was closed.
    """

    def __init__(self, closed: Callable[[Engine], None] | None = None, **options: Any) -> None:
        self.options = options
        self._closed = closed
        self._engine: Engine | None = None
        self._key: object = None
        self._models: dict[Path, ModelId] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine that is open. Its findings are for ``closed`` to look at."""
        engine, self._engine, self._key = self._engine, None, None
        if engine is None:
            return
        if self._closed is not None:
            self._closed(engine)
        with suppress(FindingError):
            engine.close()

    def engine(self, model: Path, **settings: Any) -> Engine:
        """An engine of a model with these settings: the one that is open, if it is alike."""
        key = (model, tuple(sorted(settings.items())))
        if self._engine is None or key != self._key:
            self.close()
            self._engine = refengine.load(model, **{**self.options, **settings})
            self._key = key
        return self._engine

    def model_id(self, model: Path) -> ModelId:
        """Name and hash of a model, which is read once."""
        if model not in self._models:
            self._models[model] = model_id(model)
        return self._models[model]

    def check(
        self,
        wanted: Recording,
        model: Path,
        *,
        tolerance: float | None = None,
        any_model: bool = False,
    ) -> Comparison:
        """Compute again what was recorded, and compare: bits on the same kind of device, NMSE elsewhere.

        ``tolerance``: compare NMSE with it in any case. Raises ``GoldenFileError`` for another model, unless
        ``any_model``.
        """
        found_model = self.model_id(model)
        if wanted.model is not None and wanted.model.sha256 != found_model.sha256 and not any_model:
            raise GoldenFileError(
                f"{model}: has SHA-256 {found_model.sha256}; {wanted.name} was recorded with {wanted.model.sha256}: "
                "give that model, or --any-model"
            )
        if is_foreign(wanted):
            settings: dict[str, Any] = {"n_ctx": len(wanted.tokens)}
            rows = len(wanted.tensors[LOGITS]) if LOGITS in wanted.tensors else 0
            request = Request(wanted.name, wanted.tokens, n_rows=rows, tensors=tuple(wanted.tensors))
        else:
            settings, request = dict(wanted.settings), again(wanted)
        try:
            engine = self.engine(model, **settings)
        except BadInputError as error:
            raise type(error)(f"{wanted.name}: {error}") from None
        found = record(engine, request, found_model)
        exact = tolerance is None and wanted.device == device_id(engine)
        return compare(found, wanted, exact=exact, tolerance=tolerance, shared_only=is_foreign(wanted))


def model_of(recording: Recording, beside: Path) -> Path:
    """The model that a recording names: a short name, or a file of that name here or beside the recording."""
    name = recording.model.name if recording.model is not None else ""
    if name in KNOWN_MODELS:
        return resolve_model(name)
    if name and Path(name).name == name:
        for folder in (Path(), beside, beside.parent):
            if (folder / name).is_file():
                return folder / name
    raise GoldenFileError(f"{beside}: model {shown(name)} is not here nor beside it; give it with -m")


def diff(
    wanted: list[Recording],
    found: list[Recording],
    *,
    exact: bool | None = None,
    tolerance: float | None = None,
) -> Iterator[Comparison]:
    """Compare recordings by name, or one with one whatever their names. Raises ``BadInputError`` without pairs.

    ``exact`` None: bits when both are of one kind of device.
    """
    by_name = {recording.name: recording for recording in found}
    pairs = [(a, by_name[a.name]) for a in wanted if a.name in by_name]
    if len(wanted) == len(found) == 1:
        pairs = [(wanted[0], found[0])]
    missing = [a.name for a in wanted if a.name not in by_name]
    if not pairs or (missing and len(pairs) != len(wanted)):
        raise BadInputError(f"the second has no case {missing[0]}; it has {', '.join(by_name)}")
    for a, b in pairs:
        foreign = is_foreign(a) or is_foreign(b)
        bits = a.device is not None and a.device == b.device if exact is None else exact
        limit = tolerance
        if limit is None and is_foreign(b) and not is_foreign(a):
            limit = max((b.tolerance_of(name) for name in b.tensors), default=None)
        yield compare(b, a, exact=bits and tolerance is None, tolerance=limit, shared_only=foreign)
