"""Training text: Python source of the CPython standard library (PSF licence), and the vocabulary made from it.

    python examples/train_default/corpus.py --out corpus.jsonl.xz        what train.py collects by itself

A packed corpus is for machines whose Python came without the library's own tests, which are more than half of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from refengine.pre_tokenizer import PRE_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: behind each file; of type control, and what ends a generation
END_OF_TEXT = "<|endoftext|>"
PRE = PRE_TOKENIZERS["qwen35"]
#: folders of other people's packages, of tables, and of programs that are wrong or in another Python on purpose
_LEFT_OUT = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
        "lib2to3",
        "tokenizedata",
        "cjkencodings",
        "_vendored_packages",
    }
)
_LONGEST_FILE = 400_000
#: a file of which so large a part of the lines stands in one other file is left out
_NEAR_DUPLICATE = 0.6
_SHORTEST_LINE = 12
#: one file in so many is held out, chosen by a hash of its path
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class SourceFile:
    """One file: path under the library's folder, with slashes; text that ends in a newline."""

    path: str
    text: str

    def __post_init__(self) -> None:
        assert self.text.endswith("\n"), self.path

    @property
    def held_out(self) -> bool:
        """Whether it is kept from training."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Files in order of their paths, and which Python they are from."""

    python: str
    files: tuple[SourceFile, ...]

    def __post_init__(self) -> None:
        assert self.training, "nothing to train on"
        assert self.held_out, "nothing held out"

    @property
    def training(self) -> list[SourceFile]:
        """Files to train on."""
        return [file for file in self.files if not file.held_out]

    @property
    def held_out(self) -> list[SourceFile]:
        """Files to measure on."""
        return [file for file in self.files if file.held_out]

    @property
    def sha256(self) -> str:
        """Of all paths and texts, in their order."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path}\0{file.text}\0".encode())
        return digest.hexdigest()

    def describe(self) -> str:
        """One line: version, counts, digest."""
        n_bytes = sum(len(file.text.encode()) for file in self.files)
        return (
            f"Python {self.python}: {len(self.files)} files, {n_bytes / 1e6:.1f} MB, "
            f"{len(self.held_out)} files held out, sha256 {self.sha256}"
        )

    @classmethod
    def collect(cls, root: Path, python: str) -> Corpus:
        """Read the ``.py`` files under a library's folder; raises ``AssertionError`` where there are too few."""
        files = []
        for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
            relative = path.relative_to(root)
            if _LEFT_OUT.intersection(relative.parts) or relative.name.startswith("bad"):
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            lines = [line.rstrip() for line in text.replace("\f", "").splitlines()]
            text = "\n".join(lines).strip("\n") + "\n"
            if text.strip() and len(text) <= _LONGEST_FILE:
                files.append(SourceFile(relative.as_posix(), text))
        return cls(python, tuple(_without_duplicates(files)))

    def first(self, n_bytes: int) -> Corpus:
        """As many files from the start as make so many bytes, and at least one held out; for dry runs."""
        chosen: list[SourceFile] = []
        held_out = next(file for file in self.files if file.held_out)
        total = 0
        for file in self.files:
            if total >= n_bytes:
                break
            chosen.append(file)
            total += len(file.text.encode())
        return Corpus(self.python, (*(file for file in chosen if file != held_out), held_out))

    def save(self, path: Path) -> None:
        """Pack into one file that ``load`` reads."""
        with lzma.open(path, "wt", encoding="utf-8") as packed:
            packed.write(json.dumps({"python": self.python, "sha256": self.sha256}) + "\n")
            for file in self.files:
                packed.write(json.dumps([file.path, file.text]) + "\n")

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read a packed corpus; raises ``ValueError`` when it is not what was packed."""
        with lzma.open(path, "rt", encoding="utf-8") as packed:
            head = json.loads(packed.readline())
            made = cls(head["python"], tuple(SourceFile(*json.loads(line)) for line in packed))
        if made.sha256 != head["sha256"]:
            raise ValueError(
                f"{path}: sha256 is {made.sha256}, its head says {head['sha256']}; pack it again"
            )
        return made


def _without_duplicates(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Leave out each file that is mostly contained in one that comes before it."""
    kept: list[SourceFile] = []
    holders: dict[str, list[int]] = {}
    for file in files:
        stripped = (line.strip() for line in file.text.splitlines())
        lines = {line for line in stripped if len(line) >= _SHORTEST_LINE}
        shared = Counter(holder for line in lines for holder in holders.get(line, ()))
        if not lines or max(shared.values(), default=0) > _NEAR_DUPLICATE * len(lines):
            continue
        for line in lines:
            holders.setdefault(line, []).append(len(kept))
        kept.append(file)
    return kept


# --- vocabulary


def train_tokenizer(texts: Sequence[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE under qwen35's pre-tokenizer: 256 bytes, merges, ``END_OF_TEXT`` last.

    Gives exactly ``n_vocab`` tokens, or fewer when the text has no more pairs to merge.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = PRE.build()
    bpe.decoder = decoders.ByteLevel()
    alphabet = byte_alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=n_vocab - 1, initial_alphabet=alphabet, min_frequency=2, show_progress=False
        ),
    )
    assert bpe.get_vocab_size() < n_vocab, bpe.get_vocab_size()
    bpe.add_special_tokens([END_OF_TEXT])
    return bpe


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenise(bpe: Tokenizer, files: Sequence[SourceFile]) -> list[npt.NDArray[np.int32]]:
    """Tokens of each file, the last one ``END_OF_TEXT``."""
    end = bpe.token_to_id(END_OF_TEXT)
    # A file may spell the end marker; as text, so that it means nothing.
    bpe.encode_special_tokens = True
    encoded = bpe.encode_batch([file.text for file in files], add_special_tokens=False)
    return [np.array([*one.ids, end], np.int32) for one in encoded]


def main() -> None:
    """Collect and pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="packed corpus to write (.jsonl.xz)")
    parser.add_argument(
        "--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="its folder"
    )
    parser.add_argument("--python", default=platform.python_version(), help="the library's version")
    arguments = parser.parse_args()
    corpus = Corpus.collect(arguments.library, arguments.python)
    print(corpus.describe())
    if arguments.out:
        corpus.save(arguments.out)


if __name__ == "__main__":
    main()
