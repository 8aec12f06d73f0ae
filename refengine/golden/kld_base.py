"""llama.cpp's base file for KL divergence: tokens, and what a model says of them.

``llama-perplexity --kl-divergence-base`` writes it, ``--kl-divergence`` reads it.

A text is cut into chunks of n_ctx tokens, and each chunk's second half is predicted: ``n_row`` distributions, the first
one at position n_ctx // 2. A distribution is 16 bits for each token: steps from the smallest log probability that is
told apart, at most 16 below the largest logit. All numbers are little-endian.

========================  =====================================================
``_logits_``              8 bytes
n_ctx, n_vocab, n_chunk   i32 each
tokens                    i32 [n_chunk, n_ctx], before a first one is replaced by BOS
rows                      u16 [n_chunk, n_row, row_words]: f32 scale, f32 min_log_prob, code [n_vocab], padding
========================  =====================================================
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from instrumentation.errors import BadInputError
from refengine.config import MAX_CONTEXT, MAX_VOCAB
from refengine.errors import ComputeError
from refengine.golden.files import GoldenFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAGIC = b"_logits_"
_HEADER_BYTES = 20
_STEPS = 65535
#: logits that are farther below the largest one than this are not told apart
_RANGE = np.float32(16.0)
#: a smaller scale has no inverse in float32; logits that close are told apart by nobody
_LEAST_SCALE = np.finfo(np.float32).tiny
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Sizes of a base file."""

    n_ctx: int
    n_vocab: int
    n_chunk: int

    def __post_init__(self) -> None:
        assert self.n_row >= 1, self
        assert min(self.n_vocab, self.n_chunk) >= 1, self

    @property
    def first(self) -> int:
        """Position of the first distribution of a chunk."""
        return self.n_ctx // 2

    @property
    def n_row(self) -> int:
        """Distributions of a chunk."""
        return self.n_ctx - 1 - self.n_ctx // 2

    @property
    def row_words(self) -> int:
        """16-bit words of a distribution."""
        return 2 * ((self.n_vocab + 1) // 2) + 4

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a chunk's distributions."""
        return 2 * self.n_row * self.row_words

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return _HEADER_BYTES + 4 * self.n_chunk * self.n_ctx + self.n_chunk * self.chunk_nbytes


def encode(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rows of a file for logits [n, n_vocab]: [n, row_words]. Raises ``ComputeError`` for one that is not finite."""
    if not np.isfinite(logits).all():
        raise ComputeError("logits are not finite; find the first bad tensor with --check-numerics")
    n, n_vocab = logits.shape
    rows = np.zeros((n, 2 * ((n_vocab + 1) // 2) + 4), np.uint16)
    high = logits.max(axis=1)
    low = np.maximum(logits.min(axis=1), high - _RANGE)
    total = np.exp(logits - high[:, None]).sum(axis=1, dtype=np.float64)
    scale = (high - low) / np.float32(_STEPS)
    scale[scale < _LEAST_SCALE] = 0
    rows[:, 0:2] = scale.astype("<f4")[:, None].view(np.uint16)
    rows[:, 2:4] = (low - high - np.log(total).astype(np.float32)).astype("<f4")[:, None].view(np.uint16)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    steps = np.rint((logits - low[:, None]) * inverse[:, None])  # to even, as adding 1.5 * 2**23 does
    rows[:, 4 : 4 + n_vocab] = np.where(logits > low[:, None], steps, 0).astype(np.uint16)
    return rows


def decode(rows: npt.NDArray[np.uint16], n_vocab: int) -> npt.NDArray[np.float32]:
    """Log probabilities [n, n_vocab] of rows of a file."""
    head = np.ascontiguousarray(rows[:, :4]).view("<f4")
    codes = rows[:, 4 : 4 + n_vocab].astype(np.float32)
    found: npt.NDArray[np.float32] = head[:, :1] * codes + head[:, 1:]
    return found


@dataclass(frozen=True)
class KldBase:
    """A base file whose header and size were checked."""

    path: Path
    layout: Layout
    #: int32 [n_chunk, n_ctx]
    tokens: npt.NDArray[np.int32]

    @classmethod
    def open(cls, path: Path) -> KldBase:
        """Read header and tokens. Raises ``GoldenFileError``."""
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER_BYTES)
            if len(header) < _HEADER_BYTES or header[:8] != MAGIC:
                raise GoldenFileError(f"{path}: begins with {header[:8]!r}; want a base file, {MAGIC!r}")
            n_ctx, n_vocab, n_chunk = np.frombuffer(header, "<i4", offset=8).tolist()
            for name, value, low, high in (
                ("n_ctx", n_ctx, 3, MAX_CONTEXT),
                ("n_vocab", n_vocab, 1, MAX_VOCAB),
                ("n_chunk", n_chunk, 1, size),
            ):
                if not low <= value <= high:
                    raise GoldenFileError(f"{path}: {name} is {value}; want {low} to {high}")
            layout = Layout(n_ctx, n_vocab, n_chunk)
            if layout.nbytes != size:
                raise GoldenFileError(
                    f"{path}: has {size} bytes; want {layout.nbytes} for {n_chunk} chunks of {n_ctx} tokens of "
                    f"{n_vocab}: is it complete?"
                )
            data = file.read(4 * n_chunk * n_ctx)
        tokens = np.frombuffer(data, "<i4").astype(np.int32).reshape(n_chunk, n_ctx)
        wrong = tokens[(tokens < 0) | (tokens >= n_vocab)]
        if len(wrong):
            raise GoldenFileError(f"{path}: token {wrong[0]} is out of range; want 0 to {n_vocab - 1}")
        return cls(path, layout, tokens)

    def chunks(self) -> Iterator[npt.NDArray[np.uint16]]:
        """Rows of each chunk: [n_row, row_words]. Raises ``GoldenFileError`` for a scale that is none."""
        layout = self.layout
        with _opened(self.path) as file:
            file.seek(layout.nbytes - layout.n_chunk * layout.chunk_nbytes)
            for chunk in range(layout.n_chunk):
                data = file.read(layout.chunk_nbytes)
                if len(data) != layout.chunk_nbytes:
                    raise GoldenFileError(f"{self.path}: chunk {chunk} ends early; did the file change?")
                rows = np.frombuffer(data, "<u2").reshape(layout.n_row, layout.row_words)
                head = np.ascontiguousarray(rows[:, :4]).view("<f4")
                bad = np.flatnonzero(~(np.isfinite(head).all(axis=1) & (head[:, 0] >= 0)))
                if len(bad):
                    scale, least = head[bad[0]].tolist()
                    raise GoldenFileError(
                        f"{self.path}: chunk {chunk} row {bad[0]} has scale {scale} and least log probability "
                        f"{least}; want finite ones, the scale not negative"
                    )
                yield rows


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise GoldenFileError(f"{path}: cannot be read: {reason}") from None
    with file:
        yield file


def _unwritable(path: Path, error: OSError) -> BadInputError:
    return BadInputError(f"{path}: cannot be written: {error.strerror or error}")


@contextmanager
def writing(path: Path, layout: Layout, tokens: Array) -> Iterator[Callable[[npt.NDArray[np.float32]], None]]:
    """Write a base file: what is yielded takes logits [n, n_vocab], row after row of each chunk in turn.

    The file appears at ``path`` when all of them came; otherwise none does. Raises ``BadInputError`` when none can.
    """
    assert tokens.shape == (layout.n_chunk, layout.n_ctx), (tokens.shape, layout)
    # A device or a pipe would be replaced by the file, and a link is to stay one.
    if path.exists() and not path.is_file():
        raise BadInputError(f"{path} is no regular file; give the name of one")
    path = path.resolve()
    made = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with made.open("wb") as file:
            file.write(MAGIC)
            file.write(np.array([layout.n_ctx, layout.n_vocab, layout.n_chunk], "<i4").tobytes())
            file.write(tokens.astype("<i4").tobytes())

            def write(logits: npt.NDArray[np.float32]) -> None:
                nonlocal count
                assert logits.shape[1] == layout.n_vocab, (logits.shape, layout)
                file.write(encode(logits).astype("<u2").tobytes())
                count += len(logits)

            yield write
        assert count == layout.n_chunk * layout.n_row, f"{count} rows of {layout}"
        made.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        made.unlink(missing_ok=True)
