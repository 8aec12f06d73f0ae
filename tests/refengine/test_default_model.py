"""The model that comes with the package: what it writes, at every check level, and what its card says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refengine
from refengine.gguf_file import GGUFFile
from refengine.golden.session import Session, read_any
from refengine.inspection import summarise
from refengine.models import resolve_model
from refengine.tokenizer import Tokenizer

MODEL = resolve_model()
GOLDEN = Path(__file__).resolve().parent.parent / "data" / "golden"
OPTIONS = {"device": "host", "threads": 1, "n_ctx": 256}
RECORDED = {recording.name: recording for recording in read_any(GOLDEN)}
#: what the recorded tokens are as text
TEXTS = {
    "default-class": (
        "        self.stack = []\n\n    def __getstate__(self):\n        return self.items\n\n"
        "    def __setstate__(self, state):\n        self.items"
    ),
    "default-function": '    """Given a n-number of n-numbers, returning a n-number of n-number\n    number',
}
# From py_compile.py of CPython 3.12.1, which was held out of the training.
HELD_OUT = """class PycInvalidationMode(enum.Enum):
    TIMESTAMP = 1
    CHECKED_HASH = 2
    UNCHECKED_HASH = 3


def _get_default_invalidation_mode():
    if os.environ.get('SOURCE_DATE_EPOCH'):
        return PycInvalidationMode.CHECKED_HASH
"""


@pytest.fixture(scope="module")
def report():
    return json.loads((MODEL.parent / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def card():
    return (MODEL.parent / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer():
    with GGUFFile.open(MODEL) as gguf:
        return Tokenizer.from_metadata(gguf.metadata)


# --- what it computes


@pytest.mark.parametrize("check", ["off", "guard", "audit", pytest.param("trap", marks=pytest.mark.slow)])
def test_tensors_and_tokens_are_as_recorded_with_drafts_and_without(check):
    closed = []
    with Session(closed=closed.append, device="host", threads=1, check=check) as session:
        for recording in RECORDED.values():
            result = session.check(recording, MODEL)
            assert result.same, "\n".join(result.lines())
    with refengine.load(check=check, **OPTIONS) as plain:
        for recording in RECORDED.values():
            made = plain.generate(list(recording.tokens), n_predict=recording.n_predict, temperature=0)
            assert tuple(made.tokens) == recording.generated == recording.greedy
            assert made.text == TEXTS[recording.name]
        assert plain.check_integrity() == []
        assert plain.findings == []
    assert [engine.findings for engine in closed] == [[]]


def test_goldens_are_of_this_file_and_small():
    assert set(RECORDED) == set(TEXTS)
    assert {recording.model.name for recording in RECORDED.values()} == {"default"}
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 300_000


def test_drafts_are_accepted_on_held_out_code():
    with refengine.load(spec_type="draft-mtp", draft_n_max=3, check="guard", **OPTIONS) as engine:
        drafts = engine.generate(HELD_OUT, n_predict=48, temperature=0).draft
        assert engine.findings == []
    assert drafts.generated >= 20
    assert drafts.acceptance >= 0.5


def test_held_out_code_is_less_surprising_than_its_bytes_in_another_order():
    """Training is in the file: what it expects of code it does not expect of the same tokens turned round."""
    with refengine.load(**OPTIONS) as engine:
        tokens = engine.tokenizer.encode(HELD_OUT)
        forwards, backwards = (_nats_a_token(engine, each) for each in (tokens, tokens[::-1]))
    assert forwards < 3 < backwards


def _nats_a_token(engine, tokens):
    logits = engine.logits(tokens[:-1]).astype(np.float64)
    top = logits.max(axis=1)
    normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return float((normaliser - logits[np.arange(len(logits)), tokens[1:]]).mean())


# --- the vocabulary


@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer):
    assert tokenizer.n_vocab == 4096
    assert not tokenizer.unencodable_bytes


# --- the file, its report and its card


def test_the_file_is_small_enough_to_ship(report):
    assert MODEL.stat().st_size <= 12_000_000
    with GGUFFile.open(MODEL) as gguf:
        assert {row.type for row in summarise(gguf).types} == {"F32", "Q8_0"}
        assert sum(row.elements for row in summarise(gguf).types) == report["parameters"]
        assert gguf.metadata["general.license"] == report["about"]["license"] == "PSF-2.0"


def test_the_card_says_what_the_report_says(card, report):
    progress, text = report["progress"], report["corpus"]
    for said in (
        f"CPython {text['python']}",
        text["sha256"],
        f"`{report['command']}`",
        f"{report['training_tokens']:,} tokens of",
        f"{report['held_out_tokens']:,} more held out",
        f"{report['tokens_seen']:,} tokens seen",
        f"{progress['step']:,} steps",
        f"Weights of step {progress['best_step']:,}",
        f"{progress['best_loss']:.4f} nats a token",
        f"{report['parameters']:,} parameters",
        f"{MODEL.stat().st_size:,} bytes",
        report["device"],
        report["about"]["license"],
    ):
        assert said in card
    best = min(progress["history"], key=lambda each: each["loss"])
    assert (best["step"], best["loss"]) == (progress["best_step"], progress["best_loss"])


def test_the_card_has_loss_acceptance_and_ten_prompts_twice(card, report):
    model, ngram = (float(bits) for bits in re.findall(r"^\| [^|]+ \| (\d\.\d+) \| \d", card, re.MULTILINE))
    assert model < ngram
    # Other pieces than at training: alike, not the same.
    best = min(each["bits_per_byte"] for each in report["progress"]["history"])
    assert model == pytest.approx(best, rel=0.25)
    [acceptance] = re.findall(r"accepted \((\d\.\d+)\)", card)
    assert float(acceptance) >= 0.5
    assert (card.count("temperature 0\n"), card.count("temperature 0.8\n")) == (10, 10)


def test_its_licence_comes_with_it():
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (MODEL.parent / "LICENSE").read_text(
        encoding="utf-8"
    )
