"""What the example that trains the default model reads and writes; needs no PyTorch."""

import lzma

import numpy as np
import pytest
import tiny_default
from engines import nmse

import refengine
from refengine.gguf_file import GGUFFile
from refengine.tokenizer import Tokenizer

import corpus  # isort: skip - tiny_default says where
import ngram  # isort: skip


def test_recorded_export_computes_what_pytorch_computed():
    record = np.load(tiny_default.RECORD)
    tokens = record["tokens"].tolist()
    with refengine.load(
        tiny_default.GGUF, device="host", threads=1, cache_type_k="f32", cache_type_v="f32", n_ctx=128,
        spec_type="draft-mtp",
    ) as engine:  # fmt: skip
        for name in ("hidden", "logits", "draft_logits"):
            assert nmse(getattr(engine, name)(tokens), record[name]) <= 1e-9, name


def test_recorded_export_has_the_vocabulary_that_was_trained():
    bpe = tiny_default.tokenizer()
    with GGUFFile.open(tiny_default.GGUF) as gguf:
        ours = Tokenizer.from_metadata(gguf.metadata)
    assert ours.n_vocab == bpe.get_vocab_size() or ours.n_vocab == tiny_default.N_VOCAB
    text = f"def f(x):\n\treturn self.données[x]  # {corpus.END_OF_TEXT}\n"
    (ids,) = corpus.tokenise(bpe, [corpus.SourceFile("a.py", text)])
    assert [*ours.encode(text), ours.eos_id] == ids.tolist()
    assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == {bpe.token_to_id(corpus.END_OF_TEXT)}


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def lines(name, n=40):
    return "".join(f"    {name}_{i} = compute_something({i})\n" for i in range(n))


@pytest.fixture
def library(tmp_path):
    for i in range(60):
        write(tmp_path, f"package/m{i}.py", f"def f{i}():\n" + lines(f"v{i}"))
    write(tmp_path, "operator.py", lines("operator"))
    write(tmp_path, "a.py", "import b\n" + lines("shared"))
    write(tmp_path, "a_copy.py", "import b\n" + lines("shared"))
    write(tmp_path, "near_copy.py", "import c\n" + lines("shared") + lines("own", 3))
    write(tmp_path, "site-packages/other.py", lines("other"))
    write(tmp_path, "test/bad_syntax.py", lines("bad"))
    write(tmp_path, "empty.py", "\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" + lines("latin").encode())
    return tmp_path


def test_a_library_is_read_once_without_copies_and_other_packages(library):
    found = corpus.Corpus.collect(library, "3.99")
    paths = [file.path for file in found.files]
    assert [path for path in paths if "package/" not in path] == ["a.py", "operator.py"]
    assert len(paths) == 62
    assert paths == sorted(paths)
    held_out = {file.path for file in found.held_out}
    assert held_out.isdisjoint(file.path for file in found.training)
    assert len(held_out) + len(found.training) == len(paths)


def test_what_is_held_out_depends_on_a_path_alone():
    assert corpus.SourceFile("operator.py", "x\n").held_out
    assert not corpus.SourceFile("os.py", "x\n").held_out


def test_a_packed_corpus_is_what_was_packed_or_refused(library, tmp_path):
    found = corpus.Corpus.collect(library, "3.99")
    path = tmp_path / "corpus.jsonl.xz"
    found.save(path)
    assert corpus.Corpus.load(path) == found
    damaged = lzma.decompress(path.read_bytes()).replace(b"compute_something(7)", b"compute_something(8)", 1)
    path.write_bytes(lzma.compress(damaged))
    with pytest.raises(ValueError, match="pack it again"):
        corpus.Corpus.load(path)


def test_ngram_is_a_distribution_and_learns():
    texts = [b"def f(x):\n    return x\n" * 20, b"class A:\n    pass\n" * 20]
    counted = ngram.ByteNgram.train(texts)
    for context in (b"", b"d", b"retur", b"\xff\xfe", b"zzzzdef f(x"):
        total = sum(2.0 ** -counted.bits(context + bytes([byte]))[-1] for byte in range(256))
        assert total == pytest.approx(1.0)
    assert counted.bits(b"def f(x):\n    return x\n").mean() < 1.5
    assert counted.bits(bytes(range(128, 160))).mean() > 6
    assert counted.bits(b"").shape == (0,)
