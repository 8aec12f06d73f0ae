"""Text to tokens and back, from the vocabulary that a GGUF file carries.

Byte-level BPE only (``tokenizer.ggml.model = gpt2``). The merging is done by the ``tokenizers`` library; how
a text is cut beforehand, which tokens are looked for in it and which of them end a generation follow
llama.cpp, so that the same file gives the same ids.
"""

from __future__ import annotations

import codecs
import operator
import re
from enum import IntEnum
from typing import TYPE_CHECKING, Final, SupportsIndex

import numpy as np
import tokenizers
from tokenizers import models

from refengine.errors import ModelFileError, RequestError, UnsupportedModelError
from refengine.pre_tokenizer import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Control tokens that end a generation whatever eos_token_id says. Separators of files and repositories are
# among them because what a code model writes next is another file.
_END_OF_GENERATION: Final = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's own spelling
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<reponame>",
        "<|file_sep|>",
    }
)
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("([\udc80-\udcff])")


def _byte_alphabet() -> tuple[str, ...]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(rest)) for byte in range(256))


_BYTE_TO_CHAR: Final = _byte_alphabet()
# Characters below U+0100 that stand for no byte go to U+FFFF, so that encoding to Latin-1 refuses them.
_CHAR_TO_LATIN1: Final = dict.fromkeys(range(256), 0xFFFF) | {
    ord(char): byte for byte, char in enumerate(_BYTE_TO_CHAR)
}


class Tokenizer:
    """A byte-level BPE vocabulary. Immutable after construction; safe to share between threads."""

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int],
        bpe: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        self.bos_id: Final = bos_id
        self.eos_id: Final = eos_id
        self.eos_ids: Final = eos_ids
        self.add_bos: Final = add_bos
        self.add_eos: Final = add_eos
        self._tokens: Final = tokens
        self._types: Final = types
        self._bpe: Final = bpe
        ids = {char: bpe.token_to_id(char) for char in _BYTE_TO_CHAR}
        self._byte_ids: Final[tuple[int | None, ...]] = tuple(ids[char] for char in _BYTE_TO_CHAR)
        # Longest first: of two tokens that start alike, the longer one is meant.
        marked = sorted(
            (i for i, kind in enumerate(types) if kind in _MATCHED_IN_TEXT and tokens[i]),
            key=lambda i: (-len(tokens[i].encode()), i),
        )
        self._matched_always: Final = [(tokens[i], i) for i in marked if types[i] == TokenType.USER_DEFINED]
        self._matched_as_special: Final = [(tokens[i], i) for i in marked]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes under ``tokenizer.ggml.*``.

        Raises ``UnsupportedModelError`` for a tokenizer model or pre-tokenizer that is not built, and
        ``ModelFileError`` for a vocabulary that contradicts itself.
        """
        model = _string(metadata, "model")
        if model != "gpt2":
            raise UnsupportedModelError(
                f"tokenizer.ggml.model is {_shown(model)}; only byte-level BPE is built: 'gpt2'"
            )
        pre_name = _string(metadata, "pre", "default")
        pre = PRE_TOKENIZERS.get(pre_name)
        if pre is None:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise UnsupportedModelError(
                f"tokenizer.ggml.pre is {_shown(pre_name)}; pre-tokenizers that are built: {known}"
            )
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_strings(metadata, "tokens"))]
        if not tokens:
            raise ModelFileError("tokenizer.ggml.tokens is empty; a vocabulary needs at least one token")
        types = _token_types(metadata, len(tokens))
        bpe = _build_bpe(tokens, _strings(metadata, "merges"), pre)

        bos_id = _token_id(metadata, "bos_token_id", len(tokens))
        eos_id = _token_id(metadata, "eos_token_id", len(tokens))
        ends = {_token_id(metadata, key, len(tokens)) for key in _END_KEYS} - {None}
        ends |= {
            i for i, kind in enumerate(types) if kind == TokenType.CONTROL and tokens[i] in _END_OF_GENERATION
        }
        return cls(
            tokens,
            types,
            bpe,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=frozenset(i for i in ends if i is not None),
            add_bos=_flag(metadata, "add_bos_token", bos_id, default=pre.add_bos),
            add_eos=_flag(metadata, "add_eos_token", eos_id, default=False),
        )

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def unencodable_bytes(self) -> frozenset[int]:
        """Bytes that no token stands for. Most vocabularies have none; SmolLM2 lacks 21."""
        return frozenset(byte for byte, token in enumerate(self._byte_ids) if token is None)

    def encode(
        self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the tokens of ``text``.

        ``add_special`` puts BOS before and EOS behind where the file asks for it. ``parse_special`` turns the
        names of control tokens inside the text into those tokens: leave it off for text from outside.
        User-defined tokens are always recognised.

        A byte that is not part of valid UTF-8 (in ``bytes``, or escaped in a ``str`` as PEP 383 does for
        command lines and file names) becomes its byte token, or U+FFFD where the vocabulary has none. A valid
        character whose bytes the vocabulary lacks (``unencodable_bytes``) loses those bytes, as in llama.cpp.
        """
        ids: list[int] = []
        if add_special and self.add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        matched = self._matched_as_special if parse_special else self._matched_always
        for fragment in _partition(_normalised(text), matched):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids.extend(self._encode_fragment(fragment))
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _encode_fragment(self, text: str) -> Iterator[int]:
        for piece in _ESCAPED_BYTE.split(text):
            if _ESCAPED_BYTE.match(piece):
                token = self._byte_ids[ord(piece) - 0xDC00]
                yield from self._bpe_ids("\ufffd") if token is None else (token,)
            elif piece:
                yield from self._bpe_ids(piece)

    def _bpe_ids(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = False) -> str:
        """Return the text of ``ids``; bytes that are not valid UTF-8 become U+FFFD.

        ``skip_special`` leaves control and unknown tokens out.
        """
        return b"".join(self._piece(token, skip_special=skip_special) for token in ids).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token: SupportsIndex) -> bytes:
        """Return the bytes that a token stands for: its name if it is special, nothing if it is unused."""
        index = operator.index(token)
        if not 0 <= index < len(self._tokens):
            raise RequestError(f"token {index} is outside the vocabulary (0 to {len(self._tokens) - 1})")
        text, kind = self._tokens[index], self._types[index]
        if kind in _NO_TEXT:
            return b""
        if kind == TokenType.BYTE and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        if kind == TokenType.NORMAL:
            try:
                return text.translate(_CHAR_TO_LATIN1).encode("latin-1")
            except UnicodeEncodeError:
                pass  # not byte-level text: the token is taken literally, as the library's decoder does
        return text.encode()

    def is_special(self, token: SupportsIndex) -> bool:
        """Say whether a token is a control or the unknown token: one that is no part of the answer's text."""
        index = operator.index(token)
        return 0 <= index < len(self._types) and self._types[index] in _SPECIAL

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """Return a decoder for tokens that come one at a time."""
        return StreamDecoder(self, skip_special=skip_special)

    def _piece(self, token: SupportsIndex, *, skip_special: bool) -> bytes:
        return b"" if skip_special and self.is_special(token) else self.token_bytes(token)


class StreamDecoder:
    """Text of tokens as they come: all pieces together are what ``Tokenizer.decode`` returns for all tokens.

    A piece never ends inside a UTF-8 character, and nothing that is complete is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: SupportsIndex) -> str:
        """Return the text that ``token`` completes; empty while a character is unfinished."""
        text = self._decoder.decode(self._tokenizer._piece(token, skip_special=self._skip_special))  # noqa: SLF001
        held, _ = self._decoder.getstate()
        # Python's decoder waits for the third byte of a surrogate, which UTF-8 has none of: nothing can finish it.
        if held[:1] == b"\xed" and held[1:2] >= b"\xa0":
            text += self.flush()
        return text

    def flush(self) -> str:
        """Return U+FFFD for a character left unfinished, and start over."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


_SPECIAL: Final = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})
_MATCHED_IN_TEXT: Final = _SPECIAL | {TokenType.USER_DEFINED}
_NO_TEXT: Final = frozenset({TokenType.UNUSED, TokenType.UNDEFINED})


def _normalised(text: str | bytes) -> str:
    """Return ``text`` with each byte that is not valid UTF-8 as a PEP 383 escape (U+DC80 to U+DCFF)."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            try:
                # Escapes that together are valid UTF-8 become the character that they spell.
                text = text.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the text has a lone surrogate at character {error.start}; give well-formed Unicode"
                ) from None
        else:
            return text
    return text.decode("utf-8", "surrogateescape")


def _partition(text: str, matched: Sequence[tuple[str, int]]) -> list[str | int]:
    """Cut ``text`` at the tokens ``matched``, tried one after the other over what is still text."""
    fragments: list[str | int] = [text] if text else []
    for name, token in matched:
        if name not in text:
            continue
        cut: list[str | int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                cut.append(fragment)
                continue
            for i, part in enumerate(fragment.split(name)):
                cut += [token] * (i > 0)
                cut += [part] * bool(part)
        fragments = cut
    return fragments


def _build_bpe(tokens: Sequence[str], merges: Sequence[str], pre: PreTokenizer) -> tokenizers.Tokenizer:
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) != len(tokens):
        first: dict[str, int] = {}
        text, i, j = next((t, first[t], i) for i, t in enumerate(tokens) if first.setdefault(t, i) != i)
        raise ModelFileError(
            f"tokenizer.ggml.tokens has {_shown(text)} twice, as token {i} and token {j}; "
            "names of tokens must differ"
        )
    # A pair that comes again keeps its first, higher rank.
    pairs = [(a, b) for a, _, b in (merge.partition(" ") for merge in dict.fromkeys(merges))]
    for i, (left, right) in enumerate(pairs):
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(
                f"tokenizer.ggml.merges has {_shown(f'{left} {right}')} (merge {i}); wanted: two tokens "
                "with a space between them, each of them and both joined in tokenizer.ggml.tokens"
            )
    model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.ignore_merges)
    bpe = tokenizers.Tokenizer(model)
    bpe.pre_tokenizer = pre.build()
    return bpe


def _shown(text: str) -> str:
    """Return ``text`` quoted for a message; a damaged file must not fill the screen."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _string(metadata: Mapping[str, object], name: str, default: str | None = None) -> str:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if not isinstance(value, str):
        raise ModelFileError(f"{key} is {_what(value)}; wanted a string")
    return value or default or ""


def _strings(metadata: Mapping[str, object], name: str) -> list[str]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if not isinstance(value, (list, tuple)):
        raise ModelFileError(f"{key} is {_what(value)}; wanted an array of strings")
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise ModelFileError(f"{key}[{i}] is {_what(item)}; wanted a string")
        if not item.isascii() and not item.isprintable():
            _refuse_surrogates(key, i, item)
    return list(value)


def _refuse_surrogates(key: str, i: int, item: str) -> None:
    try:
        item.encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{key}[{i}] is {_shown(item)}: not valid UTF-8") from None


def _integer(key: str, value: object) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ModelFileError(f"{key} is {_what(value)}; wanted an integer")
    return int(value)


def _token_id(metadata: Mapping[str, object], name: str, n_vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return None
    token = _integer(key, value)
    if not 0 <= token < n_vocab:
        raise ModelFileError(f"{key} is {token}; wanted a token of this vocabulary (0 to {n_vocab - 1})")
    return token


def _flag(metadata: Mapping[str, object], name: str, token: int | None, *, default: bool) -> bool:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return default and token is not None
    if not isinstance(value, (bool, np.bool_)):
        raise ModelFileError(f"{key} is {_what(value)}; wanted a boolean")
    if value and token is None:
        raise ModelFileError(f"{key} is true, but {key.replace('add_', '')}_id is not set")
    return bool(value)


def _token_types(metadata: Mapping[str, object], n_vocab: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        return [TokenType.NORMAL.value] * n_vocab
    if not isinstance(value, (np.ndarray, list, tuple)):
        raise ModelFileError(f"{key} is {_what(value)}; wanted an array of integers")
    try:
        types = np.asarray(value)
    except ValueError:
        raise ModelFileError(f"{key} is a nested array; wanted a flat array of integers") from None
    if types.ndim != 1 or len(types) != n_vocab:
        raise ModelFileError(f"{key} has {types.size} entries; wanted one for each of {n_vocab} tokens")
    if not np.issubdtype(types.dtype, np.integer):
        raise ModelFileError(f"{key} holds {types.dtype}; wanted integers")
    wrong = np.flatnonzero((types < TokenType.UNDEFINED) | (types > TokenType.BYTE))
    if wrong.size:
        raise ModelFileError(f"{key}[{wrong[0]}] is {types[wrong[0]]}; wanted 1 (normal) to 6 (byte)")
    return [int(kind) for kind in types]


def _what(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
