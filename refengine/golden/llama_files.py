"""What llama.cpp's tools leave of a run: logits of ``llama-debug``, the files of ``llama-results``."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType

from refengine.config import MAX_VOCAB
from refengine.gguf_file import GGUFFile
from refengine.golden.case import MAX_TOKENS, Recording
from refengine.golden.files import NAME, GoldenFileError, read_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from refengine.golden.case import Array

#: NMSE up to which the logits of another engine agree, which may compute with quantised activations
TOLERANCE = 5e-4
LOGITS = "result_output"


def read_llama_debug(path: Path) -> Recording:
    """``llamacpp-<model>.bin``, or ``pytorch-<model>.bin``: float32 logits of the last token.

    Tokens are those of ``<base>-tokens.bin`` beside it, int32. Raises ``GoldenFileError``.
    """
    if path.stem.endswith(("-tokens", "-embeddings")):
        raise GoldenFileError(f"{path}: holds {path.stem.rpartition('-')[2]}; give the logits, <base>.bin")
    data = read_bytes(path, 4 * MAX_VOCAB)
    if not data or len(data) % 4:
        raise GoldenFileError(f"{path}: has {len(data)} bytes; want float32 logits, 4 bytes for each token")
    beside = path.with_name(f"{path.stem}-tokens.bin")
    raw = read_bytes(beside, 4 * MAX_TOKENS)
    if not raw or len(raw) % 4:
        raise GoldenFileError(f"{beside}: has {len(raw)} bytes; want int32 tokens, 4 bytes each")
    return _foreign("llama-debug", path, np.frombuffer(data, "<f4")[None, :], np.frombuffer(raw, "<i4"))


def read_llama_results(path: Path) -> Recording:
    """A GGUF file with ``tokens`` and ``logits`` of all of them.

    The dimensions that it declares for ``logits`` are swapped: data lie as [n_tokens, n_vocab]. Raises
    ``GoldenFileError``, ``ModelFileError``.
    """
    with GGUFFile.open(path) as gguf:
        tensors = {}
        for name, kind in (("tokens", GGMLQuantizationType.I32), ("logits", GGMLQuantizationType.F32)):
            info = gguf.tensors.get(name)
            if info is None or info.type != kind:
                seen = "missing" if info is None else info.type.name
                raise GoldenFileError(
                    f"{path}: tensor {name} is {seen}; want {kind.name}, as llama-results writes"
                )
            tensors[name] = np.frombuffer(gguf.raw(name).tobytes(), "<i4" if name == "tokens" else "<f4")
    tokens, logits = tensors["tokens"], tensors["logits"]
    n_vocab, rest = divmod(len(logits), max(1, len(tokens)))
    if not len(tokens) or rest or not n_vocab:
        raise GoldenFileError(
            f"{path}: has {len(logits)} logits for {len(tokens)} tokens; want as many for each"
        )
    return _foreign("llama-results", path, logits.reshape(len(tokens), n_vocab), tokens)


def _foreign(tool: str, path: Path, logits: Array, tokens: Array) -> Recording:
    if int(tokens.min()) < 0 or len(tokens) > MAX_TOKENS:
        raise GoldenFileError(
            f"{path}: {len(tokens)} tokens from {tokens.min()} on; want none that is negative"
        )
    name = path.stem if NAME.fullmatch(path.stem) else tool
    return Recording(
        name, tool, {LOGITS: logits}, MappingProxyType({LOGITS: TOLERANCE}), tokens=tuple(tokens.tolist())
    )
