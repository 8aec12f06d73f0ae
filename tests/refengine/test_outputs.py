"""Candidates in place of whole rows: the same token from either, whatever the sampling."""

from __future__ import annotations

import numpy as np
import pytest
from engines import DATA, same_bits, world
from fake_cuda import fake_device
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from slots import TEXTS, loaded

import refengine
from instrumentation.devices.host import HostDevice
from instrumentation.devices.host_memory import bytes_at
from instrumentation.levels import Level
from refengine.batch import Batch
from refengine.errors import ComputeError
from refengine.gguf_file import GGUFFile
from refengine.inspection import memory_plan
from refengine.kernels.select import CANDIDATES, packed_f64
from refengine.options import EngineOptions
from refengine.outputs import Candidates, at_least, candidates_of
from refengine.request import NEVER
from refengine.sampling import Sampler, SamplingParams
from refengine.speculative import Guess

#: many ties, zeros of both signs, and what is as low as the logit of what is never to be said
LOGITS = st.one_of(
    st.sampled_from([-1.0, -0.0, 0.0, 1.0, 2.5, float(NEVER), -3e38]), st.floats(-30, 30, width=32)
)
ROWS = hnp.arrays(np.float32, st.integers(1, 150), elements=LOGITS)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([1, 2, 15, 16, 40, 63, 64]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    typical_p=st.sampled_from([0.2, 1.0]),
    seed=st.integers(0, 100),
)


def best_of(row: np.ndarray, k: int) -> Candidates:
    (found,) = candidates_of(packed_f64(row[None], k), len(row))
    return found


@settings(max_examples=300)
@given(row=ROWS, params=PARAMS, position=st.integers(0, 1000))
def test_candidates_give_the_token_of_the_whole_row(row, params, position):
    sampler = Sampler(params)
    k = at_least(sampler.n_candidates())
    wanted = sampler.sample(row, position)
    assert sampler.choose(best_of(row, k), position) == wanted
    assert sampler.choose(best_of(row, 64), position) == wanted


@settings(max_examples=300)
@given(row=ROWS, params=PARAMS, position=st.integers(0, 1000), data=st.data())
def test_tokens_that_are_never_said(row, params, position, data):
    tokens = data.draw(st.sets(st.integers(0, len(row) - 1), max_size=4))
    sampler = Sampler(params)
    k = at_least(sampler.n_candidates() + len(tokens))
    if not k:
        return
    choices = row.copy()
    choices[sorted(tokens)] = NEVER
    best = best_of(row, k).with_logit(tokens, NEVER)
    wanted = best_of(choices, 64)
    n = len(best.ids)
    assert n >= min(len(row), sampler.n_candidates())
    np.testing.assert_array_equal(best.ids, wanted.ids[:n])
    assert same_bits(best.logits, wanted.logits[:n])
    assert sampler.choose(best, position) == sampler.sample(choices, position)


@pytest.mark.parametrize(
    ("params", "n"),
    [
        ({"temperature": 0}, 1),
        ({"temperature": 0, "repeat_penalty": 1.1}, 0),
        ({"temperature": 0, "repeat_penalty": 1.1, "repeat_last_n": 0}, 1),
        ({"top_k": 40}, 40),
        ({"top_k": 40, "presence_penalty": 0.5}, 0),
        ({"top_k": 0}, 0),
        ({"top_k": -1}, 0),
        ({"top_k": 1000, "typical_p": 0.5}, 1000),
    ],
)
def test_how_many_candidates_sampling_needs(params, n):
    assert Sampler(SamplingParams(**params)).n_candidates() == n


def test_kernels_are_few():
    assert [at_least(n) for n in (1, 2, 16, 17, 64, 65, 1000)] == [1, 16, 16, 64, 64, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", CANDIDATES)
def test_rows_that_are_not_finite_are_refused(bad, k):
    row = np.zeros(100, np.float32)
    row[[3, 70]] = bad
    for params in ({"temperature": 0.0}, {"top_k": k}):
        for best in (best_of(row, k), best_of(row, k).with_logit({1, 2}, NEVER)):
            with pytest.raises(
                ComputeError, match=r"^2 of 100 logits at position 9 are not finite; find .*numerics"
            ):
                Sampler(SamplingParams(**params)).choose(best, 9)
    nothing = best_of(np.full(100, np.nan, np.float32), k).with_logit({1, 2}, NEVER)
    with pytest.raises(ComputeError, match="100 of 100 logits"):
        Sampler(SamplingParams(temperature=0.0)).choose(nothing, 9)


def test_too_few_candidates_are_a_bug():
    with pytest.raises(AssertionError):
        Sampler(SamplingParams(top_k=40)).choose(best_of(np.zeros(100, np.float32), 16), 0)


def test_rows_without_as_many_tokens_end_with_their_last():
    row = np.array([1, 3, 2], np.float32)
    best = best_of(row, 16)
    assert (best.ids.tolist(), best.logits.tolist(), best.n_vocab, best.n_bad) == ([1, 2, 0], [3, 2, 1], 3, 0)


@given(row=ROWS)
def test_a_guess_is_the_same_from_either(row):
    wanted, found = Guess.of(row), Guess.of(best_of(row, 16))
    assert found.token == wanted.token
    assert np.float64(found.probability) == np.float64(wanted.probability)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_guess_from_what_is_not_finite_is_not_sure(bad):
    row = np.arange(30, dtype=np.float32)
    row[4] = bad
    assert np.isnan(Guess.of(row).probability)
    assert np.isnan(Guess.of(best_of(row, 16)).probability)
    assert np.isnan(Guess.of(best_of(np.full(30, np.nan, np.float32), 16)).probability)


# --- engines whose device chooses


SAMPLINGS = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "repeat_penalty": 1.3},
    {"seed": 3},
    {"seed": 4, "temperature": 2.0, "top_k": 64, "min_p": 0.0, "typical_p": 0.6, "ignore_eos": True},
    {"seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.5},
]


def texts(check="off", **options):
    """Everything that is sampled in all ways at once; and the candidates of the shapes that ran."""
    with loaded(n_slots=3, check=check, n_ctx=192, **options) as engine:
        requests = [
            engine.submit(TEXTS[i % 3][: 9 + 5 * i], n_predict=14, background=False, **sampling)
            for i, sampling in enumerate(SAMPLINGS)
        ]
        alone = engine.submit(TEXTS[3][:7], n_predict=9, background=False, temperature=0, return_logits=True)
        while not engine.scheduler.is_idle:
            engine.drive()
        found = [(r.tokens, r.text) for r in requests]
        shapes = {shape.n_best for shape in engine.context.executor._executables}
        drafted = {shape.n_best for shape in engine.draft.executor._executables} if engine.draft else set()
        assert engine.check_integrity() == []
        assert engine.findings == []
        return found, alone.generation().logits.tobytes(), shapes, drafted


@pytest.mark.parametrize("spec_type", ["none", "draft-mtp"])
def test_texts_are_those_of_whole_rows(spec_type, monkeypatch):
    wanted, wanted_logits, shapes, drafted = texts(spec_type=spec_type)
    assert shapes | drafted == {0}
    monkeypatch.setattr(HostDevice, "behind_bus", True)
    for options in ({}, {"check": "guard", "cuda_graphs": False, "worst_case_reserve": False}):
        found, logits, shapes, drafted = texts(spec_type=spec_type, **options)
        assert found == wanted
        assert logits == wanted_logits
        assert 0 in shapes
        assert (16 in drafted) == (spec_type != "none")


@pytest.mark.parametrize(
    ("sampling", "n_best"),
    [
        ({"temperature": 0}, 1),
        ({"temperature": 0, "ignore_eos": True}, 16),
        ({"seed": 3}, 64),
        ({"top_k": 0}, 0),
    ],
)
@pytest.mark.parametrize("device", ["host", "fake"])
def test_the_device_gives_what_a_request_needs(sampling, n_best, device, monkeypatch):
    arguments = {"n_predict": 12, "seed": 7, **sampling}
    with loaded("llama") as engine:
        wanted = engine.generate(TEXTS[0][:20], **arguments)
    monkeypatch.setattr(HostDevice, "behind_bus", True)
    made = {"device": fake_device(), "threads": None} if device == "fake" else {}
    with loaded("llama", **made, check="guard") as engine:
        found = engine.generate(TEXTS[0][:20], **arguments)
        assert (found.tokens, found.text) == (wanted.tokens, wanted.text)
        shapes = list(engine.context.executor._executables)
        assert {(shape.n_outputs, shape.n_best) for shape in shapes} == {(1, n_best)}
        assert engine.findings == []


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}])
def test_logits_that_are_not_finite_end_the_request(sampling, monkeypatch):
    monkeypatch.setattr(HostDevice, "behind_bus", True)
    with loaded("llama") as engine:
        weight = engine.weights.vectors["output_norm.weight"]
        held = bytes_at(weight.address, weight.nbytes).view(np.float32)
        held[5] = np.nan
        with pytest.raises(ComputeError, match="320 of 320 logits at position 20 are not finite"):
            engine.generate(TEXTS[0][:20], n_predict=3, **sampling)
        held[5] = 1
        assert engine.generate(TEXTS[0][:20], n_predict=3, **sampling).tokens
        assert engine.check_integrity() == []


def test_a_batch_of_several_micro_batches():
    with world("llama") as made:
        whole, chosen = made.context(n_ubatch=8), made.context(n_ubatch=8, chooses=True)
        batch = Batch.of(TEXTS[0][:30], 0, 0, "all")
        for context, n_best in ((whole, 64), (chosen, 16)):
            context.require(
                context.decode(
                    Batch(batch.tokens, batch.position, batch.sequence, batch.outputs, n_best=n_best)
                )
            )
        assert whole.best is None
        assert whole.rows is whole.logits
        assert chosen.logits.shape == (0, 320)
        assert len(chosen.rows) == 30
        for row, found in zip(whole.logits, chosen.rows, strict=True):
            wanted = best_of(row, 16)
            np.testing.assert_array_equal(found.ids, wanted.ids)
            assert same_bits(found.logits.copy(), wanted.logits)


def test_parts_of_a_batch_get_what_the_one_that_wants_most_gets():
    def part(n_best: int, outputs: str = "last") -> Batch:
        of = Batch.of([1, 2], 0, 0, outputs)
        return Batch(of.tokens, of.position, of.sequence, of.outputs, n_best=n_best)

    assert Batch.joined([part(1), part(16)]).n_best == 16
    assert Batch.joined([part(1), part(0), part(64)]).n_best == 0
    assert Batch.joined([part(1), part(0, "none")]).n_best == 1
    assert Batch.joined([part(0, "none")]).n_best == 0
    assert Batch.joined([part(16)]).part(0, 1).n_best == 16


@pytest.mark.parametrize("worst_case_reserve", [True, False])
def test_the_memory_plan_has_what_a_device_that_chooses_reserves(worst_case_reserve):
    options = EngineOptions(n_ctx=64, check="guard", worst_case_reserve=worst_case_reserve)
    with GGUFFile.open(DATA / "llama.gguf") as gguf:
        chosen, whole = (
            memory_plan(gguf, options, fewest_launches=True, chooses=chooses).total(Level.GUARD)
            for chooses in (True, False)
        )
    assert (chosen > whole) == worst_case_reserve
    made = {"n_ctx": 64, "check": "guard", "worst_case_reserve": worst_case_reserve}
    with refengine.load(DATA / "llama.gguf", device=fake_device(), **made) as engine:
        assert engine.allocator.snapshot().reserved == chosen
        engine.generate(TEXTS[0][:20], n_predict=3, temperature=0)
        assert (engine.allocator.snapshot().reserved == chosen) == worst_case_reserve
