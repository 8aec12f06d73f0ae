"""Files of llama.cpp's tools as the other side of a comparison."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from engine_runs import tokens_of
from engines import DATA
from golden_runs import OPTIONS, made

from instrumentation.errors import BadInputError
from refengine.golden.files import GoldenFileError
from refengine.golden.llama_files import read_llama_debug, read_llama_results
from refengine.golden.session import Session, diff, read_any

LOGITS = np.arange(6, dtype=np.float32).reshape(2, 3)


def write_debug(folder, logits, tokens, base="llamacpp-model"):
    (folder / f"{base}.bin").write_bytes(logits.astype("<f4").tobytes())
    (folder / f"{base}-tokens.bin").write_bytes(np.array(tokens, "<i4").tobytes())
    return folder / f"{base}.bin"


def write_results(path, logits, tokens, *, declared=None, logits_type=np.float32):
    """As llama-results does: ne {n_tok, n_vocab}, data [n_tok][n_vocab]."""
    writer = gguf.GGUFWriter(path, "")
    writer.kv_data[0].clear()
    writer.add_string("path_model", "model.gguf")
    writer.add_tensor("tokens", np.array(tokens, np.int32))
    shape = declared or (logits.shape[1], logits.shape[0])  # C order of ne
    writer.add_tensor("logits", logits.astype(logits_type).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_llama_debug(tmp_path):
    found = read_llama_debug(write_debug(tmp_path, LOGITS[1], [4, 5]))
    assert found.tensors["result_output"].tolist() == [[3, 4, 5]]
    assert (found.name, found.tokens, found.engine) == ("llamacpp-model", (4, 5), "llama-debug")


@pytest.mark.parametrize("declared", [None, (2, 3)])
def test_llama_results_lie_row_by_row_whatever_they_declare(tmp_path, declared):
    found = read_llama_results(write_results(tmp_path / "r.gguf", LOGITS, [4, 5], declared=declared))
    assert found.tensors["result_output"].tolist() == LOGITS.tolist()
    assert found.tokens == (4, 5)


def test_what_is_not_such_a_file_is_refused(tmp_path):
    path = write_debug(tmp_path, LOGITS[1], [])
    with pytest.raises(GoldenFileError, match=r"tokens\.bin: has 0 bytes; want int32 tokens"):
        read_llama_debug(path)
    path.write_bytes(b"12345")
    with pytest.raises(GoldenFileError, match="has 5 bytes; want float32 logits"):
        read_llama_debug(path)
    with pytest.raises(GoldenFileError, match="holds tokens; give the logits"):
        read_any(tmp_path / "llamacpp-model-tokens.bin")
    (tmp_path / "llamacpp-model-tokens.bin").unlink()
    path.write_bytes(bytes(4))
    with pytest.raises(GoldenFileError, match=r"tokens\.bin: cannot be read"):
        read_any(path)
    write_debug(tmp_path, LOGITS[1], [1, -1])
    with pytest.raises(GoldenFileError, match="want none that is negative"):
        read_any(path)


def test_gguf_files_that_are_no_results_are_refused(tmp_path):
    with pytest.raises(GoldenFileError, match=r"llama\.gguf: tensor tokens is missing; want I32"):
        read_any(DATA / "llama.gguf")
    wrong = write_results(tmp_path / "f16.gguf", LOGITS, [1, 2], logits_type=np.float16)
    with pytest.raises(GoldenFileError, match="tensor logits is F16; want F32"):
        read_any(wrong)
    with pytest.raises(GoldenFileError, match="has 6 logits for 4 tokens"):
        read_any(write_results(tmp_path / "r.gguf", LOGITS, [1, 2, 3, 4], declared=(2, 3)))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(BadInputError):
        read_any(tmp_path / "bad.gguf")


@pytest.fixture(scope="module")
def recording():
    return made("llama", n_tokens=9, n_predict=0, cache_type_k="f32", cache_type_v="f32")


def test_either_side_of_a_diff(recording, tmp_path):
    logits = recording.tensors["result_output"]
    near = logits + np.float32(1e-3) * np.abs(logits)
    for other in (
        write_debug(tmp_path, near[-1], recording.tokens),
        write_results(tmp_path / "r.gguf", near, recording.tokens),
    ):
        foreign = read_any(other)
        for pair in (([recording], foreign), (foreign, [recording])):
            (result,) = diff(*pair)
            assert (result.same, result.exact, result.n_compared) == (True, False, 1)
            (result,) = diff(*pair, tolerance=1e-9)
            assert result.differences[0].tensor == "result_output"
            assert result.differences[0].nmse == pytest.approx(1e-6, rel=0.1)
    (result,) = diff([recording], read_any(write_debug(tmp_path, near[-1], [1, 2])))
    assert result.others[0].startswith("prompt token 0 is 1, want")


def test_an_engine_is_checked_against_them(recording, tmp_path):
    logits = recording.tensors["result_output"]
    with Session(**OPTIONS) as session:
        for file in (
            write_debug(tmp_path, logits[-1], recording.tokens),
            write_results(tmp_path / "r.gguf", logits, recording.tokens),
        ):
            (wanted,) = read_any(file)
            result = session.check(wanted, DATA / "llama.gguf")
            assert result.same
            assert not result.exact
        wrong = logits.copy()
        wrong[4, 7] += 100
        (wanted,) = read_any(write_results(tmp_path / "w.gguf", wrong, recording.tokens))
        (difference,) = session.check(wanted, DATA / "llama.gguf").differences
        assert (difference.row, difference.worst.index) == (4, (4, 7))
    assert tuple(tokens_of("llama")[:9]) == recording.tokens
