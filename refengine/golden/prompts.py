"""Files of prompts: a line each, as text or, in ``.jsonl``, as objects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refengine.golden.files import Fields, GoldenFileError, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

MAX_NBYTES = 16 << 20
MAX_PROMPTS = 10_000
_KEYS = {"name", "prompt", "tokens", "n_predict"}


@dataclass(frozen=True)
class Prompt:
    """A case to record: text, or token ids."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    #: None: what is usual
    n_predict: int | None = None

    def __post_init__(self) -> None:
        assert (self.text is None) != (self.tokens is None), self


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file; empty lines are skipped.

    Lines of a ``.jsonl`` file are objects with ``prompt`` or ``tokens``, and if wanted ``name`` and ``n_predict``.
    A case without a name is called by the number of its line. Raises ``GoldenFileError``.
    """
    data = read_bytes(path, MAX_NBYTES)
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise GoldenFileError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(numbered) <= MAX_PROMPTS:
        raise GoldenFileError(f"{path}: has {len(numbered)} prompts; want 1 to {MAX_PROMPTS}, a line each")
    read = _object if path.suffix == ".jsonl" else _text
    prompts = [read(path, number, line) for number, line in numbered]
    names = [prompt.name for prompt in prompts]
    double = (
        next((name for name in names if names.count(name) > 1), None)
        if len(set(names)) < len(names)
        else None
    )
    if double is not None:
        raise GoldenFileError(f"{path}: two prompts are called {double}; give each its own name")
    return prompts


def _text(path: Path, number: int, line: str) -> Prompt:
    del path
    return Prompt(f"case-{number:03}", text=line)


def _object(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise GoldenFileError(
            f"{path}: line {number} is no JSON: {str(error) or 'nested too deeply'}"
        ) from None
    fields = Fields(path, f"line {number}", value)
    unknown = sorted(fields.values.keys() - _KEYS)
    if unknown or fields.optional("prompt") == fields.optional("tokens"):
        raise GoldenFileError(
            f"{path}: line {number} has {', '.join(sorted(fields.values)) or 'nothing'}; want prompt or tokens, and if "
            "wanted name and n_predict"
        )
    return Prompt(
        fields.name("name") if fields.optional("name") else f"case-{number:03}",
        fields.text("prompt") if fields.optional("prompt") else None,
        fields.integers("tokens", MAX_NBYTES) if fields.optional("tokens") else None,
        fields.integer("n_predict", high=MAX_NBYTES) if fields.optional("n_predict") else None,
    )
