"""Files of recordings: what is written is read, and whatever else is there is refused in one line."""

from __future__ import annotations

import errno
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from golden_runs import of, same_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumentation.errors import BadInputError
from refengine.golden import case
from refengine.golden.case import DeviceId, ModelId, Step
from refengine.golden.files import GoldenFileError, read_arrays, write_arrays

FULL = of(
    {"inp_embd": np.arange(6, dtype=np.float32).reshape(2, 3), "ffn_moe_topk-0": np.int32([[1], [2]])},
    tolerance={"inp_embd": 1e-9},
    device=DeviceId("host", "x86_64"),
    model=ModelId("llama.gguf", "ab" * 32),
    prompt='a "prompt"\n\u2028',
    tokens=(1, 2),
    settings={"n_ctx": 64, "cache_type_k": "f32"},
    steps=(Step("inp_embd", "get_rows", (2, 3), (("token_embd.weight", (9, 3)), ("tokens", (2,)))),),
    greedy=(3,),
    generated=(3,),
    n_predict=1,
)


@pytest.fixture
def folder(tmp_path):
    case.write(FULL, tmp_path / "one")
    return tmp_path / "one"


def refused(folder):
    with pytest.raises(GoldenFileError) as raised:
        case.read(folder)
    text = str(raised.value)
    assert text.startswith(str(folder))
    assert text.isprintable()
    return text.removeprefix(str(folder))


def edited(folder, **changes):
    content = json.loads((folder / case.CASE).read_text())
    (folder / case.CASE).write_text(json.dumps(content | changes))


def test_what_is_written_is_read(folder):
    back = case.read(folder)
    assert same_tensors(back, FULL)
    assert back.tolerance == {"inp_embd": 1e-9, "ffn_moe_topk-0": case.TOLERANCE}
    for field in (
        "name",
        "device",
        "model",
        "prompt",
        "tokens",
        "settings",
        "steps",
        "greedy",
        "generated",
        "n_predict",
    ):
        assert getattr(back, field) == getattr(FULL, field)
    assert sorted(file.name for file in folder.iterdir()) == [case.CASE, case.ARRAYS]


def test_the_same_recording_gives_the_same_bytes_that_numpy_reads(folder, tmp_path):
    case.write(FULL, tmp_path / "two")
    assert (folder / case.ARRAYS).read_bytes() == (tmp_path / "two" / case.ARRAYS).read_bytes()
    with np.load(folder / case.ARRAYS, allow_pickle=False) as loaded:
        assert loaded["inp_embd"].tolist() == FULL.tensors["inp_embd"].tolist()


def test_arrays_that_numpy_wrote_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", **FULL.tensors)
    assert set(read_arrays(tmp_path / "a.npz")) == set(FULL.tensors)


def test_a_directory_is_replaced_as_a_whole_or_not_at_all(folder):
    with pytest.raises(BadInputError, match="is there already"):
        case.write(FULL, folder)
    (folder / "more").touch()
    case.write(of({"x": np.float32([1])}), folder, overwrite=True)
    assert list(case.read(folder).tensors) == ["x"]
    assert not (folder / "more").exists()
    other = folder.parent / "other"
    other.mkdir()
    with pytest.raises(BadInputError, match="is no recording"):
        case.write(FULL, other, overwrite=True)
    assert [entry.name for entry in folder.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_link_to_a_case_stays_one(folder):
    link = folder.parent / "link"
    link.symlink_to(folder.name)
    case.write(of({"x": np.float32([1])}), link, overwrite=True)
    assert link.is_symlink()
    assert list(case.read(folder).tensors) == ["x"]


def test_a_case_that_cannot_be_replaced_stays(folder, monkeypatch):
    usual = Path.rename

    def full(self, target):
        if target == folder and not self.name.endswith(".former"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(BadInputError, match=f"{folder}: cannot be written: No space left on device"):
        case.write(of({"x": np.float32([1])}), folder, overwrite=True)
    assert case.read(folder).tensors.keys() == FULL.tensors.keys()
    assert [entry.name for entry in folder.parent.iterdir() if entry.name.startswith(".")] == []


def test_a_newer_schema_is_named(folder):
    edited(folder, schema=2)
    assert refused(folder) == "/case.json: schema is 2; this version reads up to 1: use a newer refengine"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"schema": "1"}, "schema is '1'; want a whole number from 1"),
        ({"schema": True}, "schema is true"),
        ({"name": "../up"}, "name is '../up'; want letters"),
        ({"tokens": [1, -1]}, "tokens is [1, -1]; want whole numbers from 0"),
        ({"tokens": [1.0]}, "tokens is [1.0]"),
        ({"tokens": None}, "tokens is null; want a list"),
        ({"device": {"kind": "host"}}, "device.arch is missing"),
        ({"device": "host"}, "device is 'host'; want an object"),
        ({"model": {"name": "m", "sha256": "zz"}}, "model.sha256 is 'zz'; want 64 hexadecimal digits"),
        ({"settings": {"allow": 1}}, "settings.'allow' is unknown"),
        ({"settings": {"n_ctx": "big"}}, "settings.n_ctx is 'big'"),
        (
            {"steps": [{"name": "a", "op": "b", "shape": [1], "sources": [["x"]]}]},
            "want pairs of a name and a shape",
        ),
        ({"tensors": [{"name": "a", "shape": [1], "tolerance": 0}]}, "array a is missing"),
        (
            {"tensors": [{"name": "inp_embd", "shape": [3, 2], "tolerance": 0}]},
            "array inp_embd has shape (2, 3)",
        ),
        ({"tensors": [{"name": "inp_embd", "shape": [2, 3], "tolerance": -1}]}, "tensors[0].tolerance is -1"),
        ({"tensors": [{"name": "inp_embd", "shape": [2, 3], "tolerance": 0}]}, "ffn_moe_topk-0 is not named"),
        ({"n_predict": 1 << 40}, "n_predict is 1099511627776"),
    ],
)
def test_wrong_values_are_named(folder, changes, wanted):
    edited(folder, **changes)
    assert wanted in refused(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"nothing", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}"],
)
def test_what_is_no_json_object(folder, content):
    (folder / case.CASE).write_bytes(content)
    assert refused(folder).startswith("/case.json: ")


def test_files_that_are_missing(folder, tmp_path):
    (folder / case.ARRAYS).unlink()
    assert refused(folder) == "/tensors.npz: cannot be read: No such file or directory"
    (folder / case.CASE).unlink()
    assert refused(folder) == "/case.json: cannot be read: No such file or directory"
    with pytest.raises(GoldenFileError, match=r"has no case\.json, nor has a directory in it"):
        case.folders(tmp_path)
    with pytest.raises(GoldenFileError, match="cannot be read"):
        case.folders(tmp_path / "none")


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def archive(path, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in entries.items():
            made.writestr(name, data)


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"x.npy": npy(np.array([None, 1], object), allow_pickle=True)}, "elements of |O"),
        ({"x.npy": npy(np.float64([1]))}, "elements of <f8; want one of <f4, <i4"),
        ({"x.npy": npy(np.asfortranarray(np.ones((2, 2), np.float32)))}, "in C order"),
        ({"x.npy": npy(np.array(1, np.float32))}, "want 1 to 8 axes"),
        ({"x.npy": npy(np.float32([1, 2]))[:-4]}, "has 4 bytes; want 8"),
        ({"x.npy": npy(np.float32([1])).replace(b"(1,)", b"(9" + b"9" * 30 + b",)")}, "want"),
        ({"../x.npy": npy(np.float32([1]))}, "want names of tensors"),
        ({"x.txt": b""}, "want names of tensors"),
        ({"x.npy": b"nothing"}, "is damaged"),
        ({"x.npy": b""}, "is damaged"),
        ({"x.npy": npy(np.float32([1]), version=(3, 0))}, "another version"),
    ],
)
def test_arrays_that_are_refused(tmp_path, entries, wanted):
    file = tmp_path / "a.npz"
    archive(file, entries)
    with pytest.raises(GoldenFileError) as raised:
        read_arrays(file)
    assert wanted in str(raised.value)
    assert str(raised.value).isprintable()


def test_archives_that_would_grow_in_memory_are_refused(tmp_path):
    file = tmp_path / "a.npz"
    archive(file, {"x.npy": npy(np.zeros(1000, np.float32))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(GoldenFileError, match="larger than the file"):
        read_arrays(file)
    archive(file, {"x.npy": npy(np.random.default_rng(1).random(1000, np.float32))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(GoldenFileError, match=r"compressed|larger"):
        read_arrays(file)


@settings(max_examples=200)
@given(st.data())
def test_damaged_files_are_refused_or_read_and_nothing_else(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    case.write(FULL, folder / "one")
    file = folder / "one" / data.draw(st.sampled_from([case.CASE, case.ARRAYS]))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        back = case.read(folder / "one")
    except GoldenFileError as error:
        assert str(error).isprintable()  # noqa: PT017 - either is well
    else:
        assert back.tensors.keys() == FULL.tensors.keys()


def test_empty_arrays_and_many_axes_survive(tmp_path):
    arrays = {"a": np.zeros((0, 3), np.float32), "b": np.zeros((1,) * 8, np.int32)}
    write_arrays(tmp_path / "a.npz", arrays)
    back = read_arrays(tmp_path / "a.npz")
    assert {name: array.shape for name, array in back.items()} == {"a": (0, 3), "b": (1,) * 8}
