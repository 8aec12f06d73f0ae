"""The base file of KL divergence: its bytes, its numbers, and what an engine is measured to be."""

from __future__ import annotations

import math
import os
import struct

import numpy as np
import pytest
from engines import DATA
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import refengine
from instrumentation.errors import BadInputError
from refengine.errors import ComputeError, ContextSizeError
from refengine.golden.files import GoldenFileError
from refengine.golden.kld import Divergence, chunk_logits, measure, write_base
from refengine.golden.kld_base import KldBase, Layout, decode, encode, writing

RNG = np.random.default_rng(5)
f32 = np.float32


def nearest(value):
    """Round to even, as adding and removing 1.5 * 2**23 does."""
    return int(f32(f32(value) + f32(12582912.0)).view(np.int32) & 0x7FFFFF) - 0x400000


def row_of_formula(logits):
    """One row, number by number: the bytes that follow from the format's description."""
    high = max(logits)
    low = max(f32(min(logits)), f32(high - f32(16)))
    total = sum(float(np.exp(f32(l - high))) for l in logits)
    scale = f32(f32(high - low) / f32(65535))
    scale = scale if scale >= np.finfo(f32).tiny else f32(0)  # its inverse would be infinite
    least = f32(f32(low - high) - f32(math.log(total)))
    inverse = f32(f32(1) / scale) if scale else f32(0)
    codes = [nearest(f32(f32(l - low) * inverse)) if l > low else 0 for l in logits]
    padding = [0] * (len(codes) % 2)
    return struct.pack("<ff", scale, least) + struct.pack(f"<{len(codes) + len(padding)}H", *codes, *padding)


ROWS = arrays.arrays(
    f32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-60, 60, width=32)
)


@example(f32([[0, 1e-38]]))
@example(f32([[0, 1e-33], [5, 5]]))
@given(ROWS)
def test_rows_are_those_of_the_formula(logits):
    assert encode(logits).tobytes() == b"".join(row_of_formula(list(row)) for row in logits)


@given(ROWS)
def test_log_probabilities_are_kept_to_half_a_step(logits):
    n_vocab = logits.shape[1]
    found = decode(encode(logits), n_vocab).astype(np.float64)
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    shown = np.maximum(exact, exact.max(axis=1, keepdims=True) - 16)
    assert np.abs(found - shown).max() <= 16 / 65535 / 2 + 4e-5


def file_of_formula(path, n_ctx, n_vocab, chunks, rows):
    data = b"_logits_" + struct.pack("<iii", n_ctx, n_vocab, len(chunks))
    data += b"".join(struct.pack(f"<{n_ctx}i", *chunk) for chunk in chunks)
    path.write_bytes(data + b"".join(row_of_formula(list(row)) for row in rows))


@pytest.mark.parametrize("n_vocab", [7, 8])
@pytest.mark.parametrize("n_ctx", [3, 8, 9])
def test_a_file_of_the_formula_reads_to_the_same_numbers_and_ours_to_the_bit(tmp_path, n_ctx, n_vocab):
    layout = Layout(n_ctx, n_vocab, 2)
    tokens = RNG.integers(0, n_vocab, (2, n_ctx)).astype(np.int32)
    logits = RNG.normal(0, 5, (2 * layout.n_row, n_vocab)).astype(f32)
    file_of_formula(tmp_path / "theirs", n_ctx, n_vocab, tokens.tolist(), logits)
    with writing(tmp_path / "ours", layout, tokens) as write:
        write(logits[:1])
        write(logits[1:])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    base = KldBase.open(tmp_path / "theirs")
    assert base.layout == layout
    assert base.tokens.tolist() == tokens.tolist()
    assert layout.nbytes == (tmp_path / "ours").stat().st_size
    assert np.array_equal(np.concatenate(list(base.chunks())), encode(logits))


def test_an_unfinished_file_does_not_appear(tmp_path):
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        writing(tmp_path / "base", Layout(4, 5, 1), np.zeros((1, 4), np.int32)),
    ):
        raise RuntimeError("on purpose")
    assert list(tmp_path.iterdir()) == []


def _write(path):
    layout = Layout(4, 5, 1)
    with writing(path, layout, np.zeros((1, 4), np.int32)) as write:
        write(np.zeros((layout.n_row, 5), np.float32))


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(BadInputError, match=f"{path} is no regular file"):
            _write(path)
    assert pipe.is_fifo()
    with pytest.raises(BadInputError, match=f"{tmp_path}/none/base: cannot be written: No such file"):
        _write(tmp_path / "none" / "base")
    link = tmp_path / "link"
    link.symlink_to("base")
    _write(link)
    assert link.is_symlink()
    assert KldBase.open(tmp_path / "base").layout.n_chunk == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "link", "pipe"]


def test_equal_logits_have_no_scale():
    row = encode(np.full((1, 4), 3, f32))
    assert row[0, :2].tolist() == [0, 0]
    assert decode(row, 4) == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(ComputeError, match="not finite"):
        encode(f32([[1, bad]]))


def base_bytes(n_ctx=4, n_vocab=3, n_chunk=1, tokens=(0, 1, 2, 0), scale=0.1, least=-3.0):
    layout = Layout(4, 3, 1)
    row = struct.pack("<ff", scale, least) + bytes(2 * layout.row_words - 8)
    return (
        b"_logits_"
        + struct.pack("<iii", n_ctx, n_vocab, n_chunk)
        + struct.pack("<4i", *tokens)
        + row * layout.n_row
    )


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "want a base file"),
        (b"_logitz_" + bytes(100), "want a base file"),
        (base_bytes(n_ctx=2), "n_ctx is 2; want 3"),
        (base_bytes(n_ctx=-1), "n_ctx is -1"),
        (base_bytes(n_vocab=0), "n_vocab is 0"),
        (base_bytes(n_vocab=2**30), "n_vocab is 1073741824"),
        (base_bytes(n_chunk=2**31 - 1), "n_chunk is 2147483647"),
        (base_bytes(n_chunk=2), "has 52 bytes; want 84 for 2 chunks"),
        (base_bytes() + b"x", "has 53 bytes; want 52"),
        (base_bytes()[:-1], "is it complete"),
        (base_bytes(tokens=(0, 3, 0, 0)), "token 3 is out of range; want 0 to 2"),
        (base_bytes(tokens=(0, -1, 0, 0)), "token -1 is out of range"),
        (base_bytes(scale=-1.0), "chunk 0 row 0 has scale -1.0"),
        (base_bytes(scale=math.nan), "chunk 0 row 0 has scale nan"),
        (base_bytes(least=-math.inf), "least log probability -inf"),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, wanted):
    file = tmp_path / "base"
    file.write_bytes(data)
    with pytest.raises(GoldenFileError) as raised:
        list(KldBase.open(file).chunks())
    assert wanted in str(raised.value)


def test_numbers_are_those_of_their_definitions():
    logits = RNG.normal(0, 3, (5, 6)).astype(f32)
    other = RNG.normal(0, 3, (5, 6)).astype(f32)
    base = decode(encode(other), 6)
    following = np.array([0, 5, 2, 3, 3])
    found = Divergence()
    found.add(logits[:2], base[:2], following[:2])
    found.add(logits[2:], base[2:], following[2:])
    summary = found.summary()
    kld, nll, nll_base, same, delta = [], [], [], [], []
    for row, b, token in zip(logits.astype(float), base.astype(float), following, strict=True):
        log_p = row - math.log(sum(math.exp(v) for v in row))
        kld.append(sum(math.exp(v) * (v - w) for v, w in zip(b, log_p, strict=True) if v > -16))
        nll.append(-log_p[token])
        nll_base.append(-b[token])
        same.append(row.argmax() == b.argmax())
        delta.append(math.exp(log_p[token]) - math.exp(b[token]))
    assert summary.n == 5
    assert summary.kld.value == pytest.approx(np.mean(kld))
    assert summary.kld.error == pytest.approx(np.std(kld) / math.sqrt(4))
    assert summary.kld_max == pytest.approx(max(kld))
    assert summary.same_top.value == pytest.approx(np.mean(same))
    assert summary.ppl == pytest.approx(math.exp(np.mean(nll)))
    assert summary.ppl_base == pytest.approx(math.exp(np.mean(nll_base)))
    assert summary.delta_p.value == pytest.approx(np.mean(delta))
    assert summary.as_json()["kld_error"] == summary.kld.error
    assert len(list(summary.lines())) == 11


@pytest.fixture(scope="module")
def engine():
    with refengine.load(DATA / "llama.gguf", n_ctx=96, n_batch=40, device="host", threads=1) as engine:
        yield engine


def test_rows_are_the_logits_of_each_second_half(engine):
    tokens = RNG.integers(0, engine.config.n_vocab, 91).tolist()
    rows = np.concatenate([part.copy() for part in chunk_logits(engine, tokens)])
    begun = list(tokens)
    if engine.tokenizer.add_bos:
        begun[0] = engine.tokenizer.bos_id
    wanted = engine.logits(begun)[45:90]
    assert rows.tobytes() == wanted.tobytes()
    assert len(rows) == Layout(91, 1, 1).n_row


def test_an_engine_agrees_with_its_own_base_and_not_with_anothers(engine, tmp_path):
    tokens = RNG.integers(0, engine.config.n_vocab, 200).tolist()
    done = []
    layout = write_base(engine, tmp_path / "base", tokens, 32, progress=lambda i, n: done.append((i, n)))
    assert (layout.n_chunk, done[-1]) == (6, (6, 6))
    summary = measure(engine, KldBase.open(tmp_path / "base"))
    assert summary.n == 6 * 15
    assert abs(summary.kld.value) < 1e-5
    assert summary.same_top.value == 1
    assert summary.ppl == pytest.approx(summary.ppl_base, rel=1e-4)
    assert measure(engine, KldBase.open(tmp_path / "base"), 2).n == 30
    with refengine.load(DATA / "llama-Q8_0.gguf", n_ctx=32, device="host", threads=1) as other:
        if other.config.n_vocab == engine.config.n_vocab:
            assert measure(other, KldBase.open(tmp_path / "base")).kld.value > 1
        with pytest.raises(ContextSizeError):
            write_base(other, tmp_path / "longer", tokens, 33)
    assert not (tmp_path / "longer").exists()
    assert engine.check_integrity() == []


def test_what_does_not_fit_is_refused(engine, tmp_path):
    with pytest.raises(BadInputError, match="the text has 5 tokens; want at least one chunk of 8"):
        write_base(engine, tmp_path / "base", [1] * 5, 8)
    with pytest.raises(BadInputError, match="predict nothing"):
        write_base(engine, tmp_path / "base", [1] * 5, 2)
    (tmp_path / "base").write_bytes(base_bytes())
    with pytest.raises(BadInputError, match="n_vocab is 3; this model has"):
        measure(engine, KldBase.open(tmp_path / "base"))
