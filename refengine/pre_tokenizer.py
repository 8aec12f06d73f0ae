"""Regular expressions that cut a text into words before byte-level BPE, under llama.cpp's names for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tokenizers import Regex, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is cut into words: each expression splits what the ones before it left.

    ``ignore_merges`` takes a word that is a token as it stands. ``add_bos`` is what the format means when
    ``tokenizer.ggml.add_bos_token`` is absent.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def __post_init__(self) -> None:
        assert self.patterns, "without a pattern BPE would merge across words"

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the library's form of it, which also turns bytes into the characters of the vocabulary."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


# Spelled out, because (?i:'s) also takes U+017F, the long s, and llama.cpp does not.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(*, digits: str, letters: str = r"\p{L}") -> str:
    """Return the expression of the cl100k family; ``letters`` is the inside of a character class."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_PRE = PreTokenizer((_GPT2,))
_LLAMA3_PRE = PreTokenizer((_cl100k(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    # What llama.cpp falls back to when a file names none. It is not GPT-2's.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_PRE,
    "gpt2": _GPT2_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "qwen2": PreTokenizer((_cl100k(digits=r"\p{N}"),)),
    "qwen35": PreTokenizer((_cl100k(digits=r"\p{N}", letters=r"\p{L}\p{M}"),)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
}
