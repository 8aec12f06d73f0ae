from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import given
from hypothesis import strategies as st
from malformed_gguf import (
    BOOL,
    CASES,
    F32,
    GGUF,
    I8,
    I64,
    STR,
    U8,
    U16,
    U32,
    U64,
    Tensor,
    tiny_llama,
)

from instrumentation.errors import BadInputError
from refengine.errors import ModelFileError
from refengine.gguf_file import GGUFFile, inner_pages
from refengine.gguf_lookup import parse_override_kv

DATA = Path(__file__).parents[1] / "data"
VECTORS = sorted(DATA.glob("*.gguf"))
OPEN_CASES = [name for name, case in CASES.items() if not case.needs_config]


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | GGUF) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content if isinstance(content, bytes) else content.build())
        return path

    return write


def assert_one_line(error: BaseException, *culprits: str) -> None:
    message = str(error)
    assert message.isprintable(), message
    problem = message.rpartition("model.gguf: ")[2]  # a directory is named after the test: it would match
    for culprit in culprits:
        assert culprit in problem


def test_vectors_are_there():
    assert len(VECTORS) >= 9


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_same_as_the_gguf_package(path):
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        theirs = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(theirs)
        for key, field in theirs.items():
            value = file.metadata[key]
            plain = value.tolist() if isinstance(value, np.ndarray) else value
            assert plain == field.contents()
            assert type(plain) is type(field.contents())
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.type == tensor.tensor_type
            assert info.shape == tuple(int(extent) for extent in reversed(tensor.shape))
            assert (info.n_elements, info.nbytes, info.offset) == (
                tensor.n_elements,
                tensor.n_bytes,
                tensor.data_offset,
            )
            raw = file.raw(tensor.name)
            assert raw.dtype == np.uint8
            assert not raw.flags.writeable
            assert raw.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_raw_bytes_dequantize_to_the_shape(path):
    with GGUFFile.open(path) as file:
        for name, info in file.tensors.items():
            weights = quants.dequantize(file.raw(name).reshape(*info.shape[:-1], -1), info.type)
            assert weights.shape == info.shape
            assert np.isfinite(weights).all()


def test_version_2_is_read(write):
    model = tiny_llama()
    model.version = 2
    with GGUFFile.open(write(model)) as file:
        assert file.version == 2
        assert file.metadata["tokenizer.ggml.tokens"][-2:] == ["Ġ", "日本"]


def test_file_without_keys_and_tensors_is_read(write):
    with GGUFFile.open(write(GGUF())) as file:
        assert len(file.metadata) == len(file.tensors) == 0
        with pytest.raises(ModelFileError, match=r"general\.architecture.*missing"):
            _ = file.architecture


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_custom_alignment(write, alignment):
    model = GGUF(alignment=alignment).add("general.alignment", U32, alignment)
    model.tensors = [Tensor("a", [3], data=b"a" * 12), Tensor("b", [2, 1, 2], data=b"b" * 16)]
    with GGUFFile.open(write(model)) as file:
        assert file.alignment == alignment
        assert file.raw("a").tobytes() == b"a" * 12
        assert file.raw("b").tobytes() == b"b" * 16
        assert file.tensors["b"].shape == (2, 1, 2)


def test_last_tensor_needs_no_padding(write):
    content = GGUF(tensors=[Tensor("t", [3], data=b"abcdefghijkl")]).build()
    with GGUFFile.open(write(content[:-20])) as file:
        assert file.raw("t").tobytes() == b"abcdefghijkl"


def test_every_value_type(write):
    model = GGUF()
    numbers = {
        U8: 255,
        I8: -128,
        U16: 65535,
        3: -32768,
        U32: 2**32 - 1,
        5: -(2**31),
        U64: 2**64 - 1,
        I64: -(2**63),
    }
    for kind, number in numbers.items():
        model.add(f"scalar.{kind}", kind, number).add_array(f"array.{kind}", kind, [number, 1])
    model.add("f32", F32, 0.5).add("f64", 12, 0.1).add("yes", BOOL, 1)
    model.add_array("bools", BOOL, [1, 0]).add_array("empty", F32, []).add_array("no_strings", STR, [])
    with GGUFFile.open(write(model)) as file:
        for kind, number in numbers.items():
            assert file.metadata[f"scalar.{kind}"] == number
            assert file.metadata[f"array.{kind}"].tolist() == [number, 1]
        assert (file.metadata["f32"], file.metadata["f64"], file.metadata["yes"]) == (0.5, 0.1, True)
        assert file.metadata["yes"] is True
        assert file.metadata["bools"].tolist() == [True, False]
        assert file.metadata["empty"].size == 0
        assert file.metadata["no_strings"] == []
        assert file.metadata.type_name("array.10") == "u64[2]"


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=20),
    st.text("ab\u20ac", max_size=99),
)
def test_strings_round_trip(tmp_path_factory, texts, long_text):
    long_text *= 3000  # crosses the chunks in which long strings are checked, in the middle of a character
    path = tmp_path_factory.getbasetemp() / "strings.gguf"
    path.write_bytes(GGUF().add_array("texts", STR, [*texts, long_text]).add("long", STR, long_text).build())
    with GGUFFile.open(path) as file:
        assert file.metadata.array_length("texts") == len(texts) + 1
        assert file.get_strings("texts") == [*texts, long_text]
        assert file.get_str("long") == long_text


@pytest.mark.parametrize("name", OPEN_CASES)
def test_malformed_is_refused(write, name):
    content = CASES[name]()
    path = write(content)
    with pytest.raises(ModelFileError):  # first time: what is imported or cached now is not measured below
        GGUFFile.open(path)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as refused:
            GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert_one_line(refused.value, CASES[name].culprit)
    assert peak <= 2 * len(content) + 65536


@pytest.mark.parametrize("n_strings", [100_000])
def test_short_strings_do_not_multiply(write, n_strings):
    path = write(GGUF().add_array("texts", STR, ["xy"] * n_strings))
    tracemalloc.start()
    try:
        GGUFFile.open(path).close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * path.stat().st_size


def test_wide_character_does_not_multiply(write):
    path = write(GGUF().add("text", STR, "x" * 1_000_000 + "\U0001f600"))
    tracemalloc.start()
    try:
        GGUFFile.open(path).close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * path.stat().st_size


def test_every_truncation_is_refused(write):
    content = tiny_llama().build()
    data = content.rstrip(b"\0")  # the weights are zeros: the header ends before them
    for length in [*range(0, len(data), 7), *range(len(data), len(content) - 32, 997)]:
        with pytest.raises(ModelFileError) as refused:
            GGUFFile.open(write(content[:length]))
        assert_one_line(refused.value)


def test_missing_file(tmp_path):
    with pytest.raises(ModelFileError, match=r"absent\.gguf.*cannot be read"):
        GGUFFile.open(tmp_path / "absent.gguf")


def test_directory(tmp_path):
    with pytest.raises(ModelFileError, match="is a directory"):
        GGUFFile.open(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GGUFFile.open(tmp_path / "pipe")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="permissions do not bind this user"
)
def test_unreadable(write):
    path = write(tiny_llama())
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        GGUFFile.open(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_impossible_path(tmp_path, name):
    with pytest.raises(ModelFileError) as refused:
        GGUFFile.open(tmp_path / name)
    assert_one_line(refused.value, "cannot be")


def test_strange_path_stays_one_line(tmp_path):
    with pytest.raises(ModelFileError) as refused:
        GGUFFile.open(tmp_path / "two\nlines.gguf")
    assert_one_line(refused.value, "two\\nlines")


def test_arrays_and_metadata_outlive_close(write):
    file = GGUFFile.open(
        write(GGUF(tensors=[Tensor("t", [2], data=b"weights!")]).add("general.name", STR, "x"))
    )
    raw = file.raw("t")
    file.close()
    file.close()
    assert raw.tobytes() == b"weights!"
    assert file.get_str("general.name") == "x"
    with pytest.raises(ModelFileError, match=r"'t'.*after close"):
        file.raw("t")
    file.release_pages("t")


def test_unknown_tensor(write):
    with GGUFFile.open(write(tiny_llama())) as file, pytest.raises(ModelFileError, match="'absent'"):
        file.raw("absent")


def test_views_cannot_change_the_file(write):
    with GGUFFile.open(write(tiny_llama())) as file:
        with pytest.raises(ValueError, match="read-only"):
            file.raw("output_norm.weight")[0] = 1
        with pytest.raises(TypeError):
            file.tensors["x"] = file.tensors["output_norm.weight"]
        with pytest.raises(TypeError):
            file.metadata["x"] = 1


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.sampled_from([4096, 16384, 65536]))
def test_inner_pages_stay_inside(offset, nbytes, page):
    start, length = inner_pages(offset, nbytes, page)
    assert start % page == length % page == 0
    assert length == 0 or (offset <= start and start + length <= offset + nbytes)
    assert nbytes - length < 2 * page


def test_released_pages_are_read_again(write):
    weights = np.arange(50_000, dtype=np.float32)
    model = GGUF(tensors=[Tensor("a", [3], data=b"a" * 12), Tensor("b", [50_000], data=weights.tobytes())])
    with GGUFFile.open(write(model)) as file:
        raw = file.raw("b")
        assert raw[-1] == weights.view(np.uint8)[-1]
        file.release_pages("b")
        file.release_pages("a")
        assert np.array_equal(raw.view(np.float32), weights)
        assert file.raw("a").tobytes() == b"a" * 12


@pytest.fixture
def values(write):
    model = (
        GGUF()
        .add("int", U32, 7)
        .add("float", F32, 0.5)
        .add("flag", BOOL, 1)
        .add("text", STR, "x")
        .add("inf", F32, np.inf)
    )
    model.add_array("ints", U16, [3, 5]).add_array("texts", STR, ["a"]).add_array("floats", F32, [1.0])
    with GGUFFile.open(write(model)) as file:
        yield file


def test_getters_return_python_values(values):
    assert (values.get_int("int"), values.get_float("float"), values.get_bool("flag")) == (7, 0.5, True)
    assert (values.get_str("text"), values.get_strings("texts"), values.get_ints("ints")) == (
        "x",
        ["a"],
        [3, 5],
    )
    assert values.get_int("int", minimum=7, maximum=7) == 7
    assert values.get_layer_ints("int", 3) == [7, 7, 7]
    assert values.get_layer_ints("ints", 2) == [3, 5]


def test_getters_default(values):
    assert (values.get_int("no", 1), values.get_float("no", 2.0), values.get_bool("no", default=False)) == (
        1,
        2.0,
        False,
    )
    assert (values.get_str("no", ""), values.get_strings("no", []), values.get_ints("no", [1])) == (
        "",
        [],
        [1],
    )
    assert values.get_layer_ints("no", 2, 4) == [4, 4]


@pytest.mark.parametrize(
    ("getter", "key", "options", "wanted"),
    [
        ("get_int", "no", {}, "missing"),
        ("get_int", "flag", {}, "has type bool; want an integer"),
        ("get_int", "text", {"default": 1}, "has type str"),
        ("get_int", "int", {"minimum": 8}, "is 7; want at least 8"),
        ("get_int", "int", {"maximum": 6}, "is 7; want at most 6"),
        ("get_int", "ints", {}, r"has type u16\[2\]"),
        ("get_float", "int", {}, "has type u32; want f32"),
        ("get_float", "inf", {}, "finite"),
        ("get_float", "float", {"minimum": 0.6}, "at least 0.6"),
        ("get_bool", "int", {}, "has type u32; want bool"),
        ("get_bool", "no", {}, "missing"),
        ("get_str", "int", {}, "want str"),
        ("get_str", "texts", {}, r"has type str\[1\]"),
        ("get_strings", "text", {}, "want an array of strings"),
        ("get_strings", "ints", {}, "want an array of strings"),
        ("get_ints", "int", {}, "want an array of integers"),
        ("get_ints", "floats", {}, "want an array of integers"),
        ("get_ints", "ints", {"length": 3}, "has 2 elements; want 3"),
        ("get_ints", "ints", {"minimum": 4}, "is 3; want at least 4"),
        ("get_ints", "ints", {"maximum": 4}, "is 5; want at most 4"),
        ("get_layer_ints", "ints", {"n_layer": 3}, "has 2 elements; want 3"),
        ("get_layer_ints", "floats", {"n_layer": 1}, "want an array of integers"),
    ],
)
def test_getters_name_what_is_wrong(values, getter, key, options, wanted):
    with pytest.raises(ModelFileError, match=rf"model\.gguf: key '{key}': .*{wanted}"):
        getattr(values, getter)(key, **options)


def test_override_replaces_and_adds(write):
    overrides = parse_override_kv(
        ["llama.context_length=int:32", "new.flag=bool:true", "general.name=str:a=b:c"]
    )
    with GGUFFile.open(write(tiny_llama()), override_kv=overrides) as file:
        assert file.get_int("llama.context_length") == 32
        assert file.get_bool("new.flag") is True
        assert file.get_str("general.name") == "a=b:c"
        assert file.metadata.type_name("llama.context_length") == "i64"


def test_override_does_not_change_how_the_file_is_read(write):
    with GGUFFile.open(write(tiny_llama()), override_kv={"general.alignment": 13}) as file:
        assert file.alignment == 32


def test_override_of_another_type_is_refused_by_key(write):
    path = write(tiny_llama())
    with pytest.raises(BadInputError, match=r"'x'.*type list"):
        GGUFFile.open(path, override_kv={"x": [1]})
    with (
        GGUFFile.open(path, override_kv={"llama.block_count": "1"}) as file,
        pytest.raises(ModelFileError, match=r"block_count.*type str"),
    ):
        file.get_int("llama.block_count")


def test_parse_override_kv():
    parsed = parse_override_kv(["a=int:-5", "b=float:1e-6", "c=bool:false", "d=str:", "a=int:6"])
    assert parsed == {"a": 6, "b": 1e-6, "c": False, "d": ""}
    assert type(parsed["b"]) is float


@pytest.mark.parametrize(
    "argument",
    [
        "",
        "a",
        "a=int",
        "=int:1",
        "a=u32:1",
        "a=int:",
        "a=int:1.0",
        "a=int:1_0",
        "a=int:9223372036854775808",
        "a=int:" + "9" * 5000,
        "a=float:nan",
        "a=float:x",
        "a=float:1_0",
        "a=bool:1",
        "a=bool:True",
        "a=str:" + "x" * 128,
        "a=str:\udc80",
        "k" * 128 + "=int:1",
    ],
)
def test_parse_override_kv_names_the_argument(argument):
    with pytest.raises(BadInputError) as refused:
        parse_override_kv(["ok=int:1", argument])
    assert_one_line(refused.value, "--override-kv", "want", argument[:5].replace("\udc80", ""))
