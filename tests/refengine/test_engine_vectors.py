"""Recorded logits and greedy continuations of small models in every kind of file."""

import numpy as np
import pytest
from engines import DATA, PAIRS, nmse, same_bits

import refengine


def loaded(name: str, check: str) -> refengine.Engine:
    options = {"cache_type_k": "f32", "cache_type_v": "f32", "n_ctx": 128, "device": "host", "threads": 1}
    return refengine.load(DATA / f"{name}.gguf", check=check, **options)


def test_there_are_pairs():
    assert {"llama", "qwen3", "llama-Q4_K_M", "llama-IQ4_NL", "qwen35", "qwen35-tied", "qwen35moe"} <= set(
        PAIRS
    )


@pytest.mark.parametrize("name", PAIRS)
def test_logits_and_greedy_tokens_are_those_recorded(name: str):
    with np.load(DATA / f"{name}.npz") as recorded:
        tokens, wanted, greedy = recorded["tokens"].tolist(), recorded["logits"], recorded["greedy"].tolist()
    with loaded(name, "guard") as engine:
        logits = engine.logits(tokens)
        assert logits.shape == wanted.shape == (48, engine.config.n_vocab)
        assert logits.dtype == np.float32
        assert nmse(logits, wanted) < 1e-10
        generation = engine.generate(tokens, n_predict=32, temperature=0, return_logits=True)
        assert generation.tokens == greedy
        assert same_bits(generation.logits[0], logits[-1])
        assert engine.check_integrity() == []
        assert engine.findings == []
    with loaded(name, "off") as engine:
        assert same_bits(engine.logits(tokens), logits)
        unchecked = engine.generate(tokens, n_predict=32, temperature=0, return_logits=True)
        assert unchecked.tokens == generation.tokens
        assert same_bits(unchecked.logits, generation.logits)
