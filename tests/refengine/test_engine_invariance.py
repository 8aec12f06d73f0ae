"""Whatever the batch sizes, threads and levels: the same bits, in logits and in text."""

import functools

import numpy as np
import pytest
from engines import DATA, Array, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

import refengine
from refengine.errors import RequestError
from refengine.generation import Generation

TOKENS = np.random.default_rng(11).integers(0, 320, 70).tolist()


def loaded(**options) -> refengine.Engine:
    return refengine.load(DATA / "qwen3.gguf", **({"n_ctx": 128, "device": "host"} | options))


@functools.cache
def reference() -> tuple[Array, Generation]:
    with loaded() as engine:
        generation = engine.generate(TOKENS[:20], n_predict=20, temperature=0.9, seed=5, return_logits=True)
        return engine.logits(TOKENS), generation


@settings(max_examples=10)
@given(
    n_batch=st.integers(1, 80),
    n_ubatch=st.integers(1, 80),
    check=st.sampled_from(["off", "guard"]),
    threads=st.sampled_from([1, 2]),
    cuda_graphs=st.booleans(),
    n=st.integers(1, 70),
)
def test_batches_threads_and_levels_do_not_change_a_bit(n: int, **options):
    logits, generation = reference()
    with loaded(**options) as engine:
        assert same_bits(engine.logits(TOKENS[:n]), logits[:n])
        again = engine.generate(TOKENS[:20], n_predict=20, temperature=0.9, seed=5, return_logits=True)
    assert again.tokens == generation.tokens
    assert again.text == generation.text
    assert same_bits(again.logits, generation.logits)


@settings(max_examples=15)
@given(requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6))
def test_requests_before_do_not_change_a_bit(engine: refengine.Engine, requests: list[tuple[int, int]]):
    logits, _ = reference()
    for start, n in requests:
        engine.generate(TOKENS[start : start + n], n_predict=3, temperature=0)
    assert same_bits(engine.logits(TOKENS[:40]), logits[:40])


@pytest.fixture(scope="module")
def engine():
    with loaded(check="guard") as made:
        yield made
        assert made.findings == []


def test_logits_while_generating_are_those_of_the_whole_text(engine: refengine.Engine):
    generation = engine.generate(
        TOKENS[:20], n_predict=30, temperature=1.5, seed=1, ignore_eos=True, return_logits=True
    )
    whole = engine.logits([*TOKENS[:20], *generation.tokens])
    assert same_bits(generation.logits, whole[19:-1])
    assert generation.finish_reason == "length"
    assert generation.prompt_tokens == TOKENS[:20]


def test_a_seed_reproduces_a_run(engine: refengine.Engine):
    drawn = engine.generate(TOKENS[:9], n_predict=20, temperature=2.0, top_k=0, min_p=0)
    again = engine.generate(TOKENS[:9], n_predict=20, temperature=2.0, top_k=0, min_p=0, seed=drawn.seed)
    assert again.tokens == drawn.tokens
    other = engine.generate(TOKENS[:9], n_predict=20, temperature=2.0, top_k=0, min_p=0, seed=drawn.seed + 1)
    assert other.tokens != drawn.tokens


def test_a_stream_gives_the_text_of_generate(engine: refengine.Engine):
    ends: list[Generation] = []
    pieces = list(engine.stream("ab", n_predict=12, temperature=0, ignore_eos=True, on_end=ends.append))
    whole = engine.generate("ab", n_predict=12, temperature=0, ignore_eos=True)
    assert "".join(pieces) == whole.text == ends[0].text
    assert ends[0].tokens == whole.tokens
    assert ends[0].finish_reason == "length"
    assert ends[0].timings.predicted_tokens == 11


def test_ignore_eos_never_chooses_the_end(engine: refengine.Engine):
    ends = engine.tokenizer.eos_ids
    generation = engine.generate(TOKENS[:9], n_predict=60, temperature=5.0, top_k=0, seed=0, ignore_eos=True)
    assert ends
    assert not ends & set(generation.tokens)
    assert len(generation.tokens) == 60


def test_the_end_of_generation_ends_it(engine: refengine.Engine, monkeypatch: pytest.MonkeyPatch):
    free = engine.generate(TOKENS[:9], n_predict=10, temperature=0, ignore_eos=True)
    monkeypatch.setattr(engine.tokenizer, "eos_ids", frozenset({free.tokens[4]}))
    stopped = engine.generate(TOKENS[:9], n_predict=10, temperature=0)
    at = free.tokens.index(free.tokens[4])
    assert stopped.tokens == free.tokens[: at + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("n_predict", [0, -2, 1.5, None])
def test_lengths_that_make_no_sense_are_refused(engine: refengine.Engine, n_predict):
    with pytest.raises(RequestError, match=rf"n_predict is {n_predict}; give a positive"):
        engine.generate(TOKENS[:3], n_predict=n_predict)
