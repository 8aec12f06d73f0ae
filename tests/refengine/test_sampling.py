from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refengine.errors import ComputeError, RequestError
from refengine.sampling import Sampler, SamplingParams, logprobs

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": 7}

# A coarse grid makes ties common.
logit_rows = hnp.arrays(np.float32, st.integers(1, 40), elements=st.integers(-40, 40).map(lambda n: n / 4))
fractions = st.floats(0.01, 0.99)


def params(**changes) -> SamplingParams:
    return SamplingParams(**{**OFF, **changes})


def kept(logits, history=(), **changes) -> set[int]:
    ids, _ = Sampler(params(**changes)).candidates(logits, history)
    return set(ids.tolist())


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def by_probability(logits) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


def naive_top_p(ids: list[int], logits, p: float) -> list[int]:
    total, out = 0.0, []
    for i, prob in zip(ids, softmax([float(logits[i]) for i in ids]), strict=True):
        out.append(i)
        total += prob
        if total >= p:
            break
    return out


def naive_typical(ids: list[int], logits, p: float) -> list[int]:
    probs = dict(zip(ids, softmax([float(logits[i]) for i in ids]), strict=True))
    entropy = -math.fsum(prob * math.log(prob) for prob in probs.values())
    total, out = 0.0, []
    for i in sorted(ids, key=lambda i: abs(-math.log(probs[i]) - entropy)):
        out.append(i)
        total += probs[i]
        if total > p:
            break
    return out


@settings(deadline=None)
@given(logit_rows, st.integers(-1, 50))
def test_top_k_keeps_the_highest_and_among_equals_the_lowest_ids(logits, k):
    expected = by_probability(logits)[: k if k > 0 else None]
    ids, _ = Sampler(params(top_k=k)).candidates(logits)
    assert ids.tolist() == expected


@settings(deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 40, 511, 512, 513]), st.sampled_from([2, 30, 1 << 20])
)
def test_top_k_of_a_large_vocabulary_is_exact(seed, k, n_levels):
    # The block-wise preselection is used from 2,049 tokens on; few levels mean thousands of ties.
    logits = np.random.default_rng(seed).integers(0, n_levels, 5003).astype(np.float32)
    ids, _ = Sampler(params(top_k=k)).candidates(logits)
    assert ids.tolist() == by_probability(logits)[:k]


@settings(deadline=None)
@given(logit_rows, fractions)
def test_top_p_matches_its_definition(logits, p):
    ids = by_probability(logits)
    # Where a partial sum meets p, rounding decides; both answers are right there.
    assert kept(logits, top_p=p) in [set(naive_top_p(ids, logits, p + slack)) for slack in (-1e-9, 1e-9)]


@settings(deadline=None)
@given(logit_rows, fractions)
def test_min_p_matches_its_definition(logits, p):
    probs = softmax([float(logit) for logit in logits])
    expected = [
        {i for i, prob in enumerate(probs) if prob >= max(probs) * p * slack}
        for slack in (1 - 1e-9, 1 + 1e-9)
    ]
    assert kept(logits, min_p=p) in expected


@settings(deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=30, unique=True), fractions)
def test_typical_p_matches_its_definition(values, p):
    logits = np.array(values, np.float32)
    ids = by_probability(logits)
    got = kept(logits, typical_p=p)
    expected = [set(naive_typical(ids, logits, p + slack)) for slack in (-1e-9, 1e-9)]
    probs = dict(zip(ids, softmax([float(logits[i]) for i in ids]), strict=True))
    entropy = -math.fsum(prob * math.log(prob) for prob in probs.values())
    distances = sorted(abs(-math.log(prob) - entropy) for prob in probs.values())
    if all(b - a > 1e-9 for a, b in itertools.pairwise(distances)):
        assert got in expected
    else:  # equally typical tokens: either may be the last to stay
        assert len(got) in [len(one) for one in expected]


def test_typical_p_may_drop_the_most_likely_token():
    logits = np.log(np.array([0.4] + [0.1] * 6, np.float32))
    # Entropy 1.75 nats: the surprise of the likely token (0.92) is further from it than the others' (2.30).
    assert kept(logits, typical_p=0.25) == {1, 2, 3}


@settings(deadline=None)
@given(logit_rows, fractions, fractions, fractions, st.integers(1, 20))
def test_the_steps_run_in_llama_cpps_order(logits, top_p, min_p, temperature, k):
    ids = naive_top_p(by_probability(logits)[:k], logits, top_p)
    highest = float(logits[ids[0]])
    ids = [i for i in ids if float(logits[i]) >= highest + math.log(min_p)]
    got, probs = Sampler(params(top_k=k, top_p=top_p, min_p=min_p, temperature=temperature)).candidates(
        logits
    )
    if got.tolist() == ids:  # else a partial sum met top_p and rounding decided
        np.testing.assert_allclose(probs, softmax([float(logits[i]) / temperature for i in ids]), rtol=1e-9)
    else:
        assert abs(len(got) - len(ids)) == 1


def test_truncation_comes_before_temperature():
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    # A hot temperature flattens the distribution; min_p must not see that.
    assert kept(logits, min_p=0.4, temperature=100.0) == {0, 1}
    assert kept(logits, top_p=0.85, temperature=100.0) == {0, 1}


@settings(deadline=None)
@given(
    logit_rows,
    st.lists(st.integers(0, 39), max_size=30),
    st.integers(-1, 12),
    st.tuples(st.floats(0.5, 2.0), st.floats(-1, 1), st.floats(-1, 1)),
)
def test_penalties_match_their_definition(logits, history, last_n, penalties):
    repeat, frequency, presence = penalties
    history = [token % len(logits) for token in history]
    window = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
    expected = [float(logit) for logit in logits]
    for token in set(window):
        value = expected[token]
        value = value / repeat if value > 0 else value * repeat
        expected[token] = value - window.count(token) * frequency - presence
    before = logits.copy()
    ids, probs = Sampler(
        params(
            repeat_last_n=last_n,
            repeat_penalty=repeat,
            frequency_penalty=frequency,
            presence_penalty=presence,
        )
    ).candidates(logits, history)
    got = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    np.testing.assert_allclose([got[i] for i in range(len(logits))], softmax(expected), rtol=1e-4)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_takes_the_lowest_id_among_equals(temperature):
    logits = np.array([1, 3, 3, 2], np.float32)
    assert Sampler(params(temperature=temperature)).sample(logits, 0) == 1


def test_greedy_looks_after_the_penalties():
    logits = np.array([1, 3, 2.9, 2], np.float32)
    sampler = Sampler(params(temperature=0.0, repeat_penalty=1.5))
    assert sampler.sample(logits, 3, [1]) == 2
    assert sampler.sample(logits, 3, [0]) == 1


@settings(deadline=None)
@given(logit_rows)
def test_greedy_ignores_truncation_and_seed(logits):
    sampler = Sampler(SamplingParams(temperature=0.0, top_k=1, top_p=0.1, typical_p=0.1))
    assert sampler.sample(logits, 5) == int(np.argmax(logits))
    ids, probs = sampler.candidates(logits)
    assert ids.tolist() == [int(np.argmax(logits))]
    assert probs.tolist() == [1.0]


def test_what_is_drawn_follows_the_probabilities():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.07, 0.03], np.float32))
    n = 4000
    counts = np.bincount([Sampler(params(seed=3)).sample(logits, i) for i in range(n)], minlength=5)
    expected = np.exp(logits.astype(np.float64)) * n
    # 18.47 is the 99.9 % point of chi-square with 4 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 18.47


def test_random_numbers_of_different_seeds_and_positions_are_unlike():
    seen = {Sampler(params(seed=seed)).uniform(position) for seed in range(30) for position in range(30)}
    assert len(seen) == 900
    assert 0 <= min(seen) < 0.02
    assert 0.98 < max(seen) < 1


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_a_draw_depends_on_seed_and_position_only(seed, positions):
    logits = np.zeros(1000, np.float32)
    one = Sampler(params(seed=seed))
    drawn = {position: one.sample(logits, position) for position in positions}
    for position in reversed(positions):
        assert Sampler(params(seed=seed)).sample(logits, position) == drawn[position]


def test_a_drawn_seed_reproduces_the_run():
    logits = np.zeros(50_000, np.float32)
    first = Sampler(params(seed=-1))
    again = Sampler(params(seed=first.seed))
    assert [first.sample(logits, i) for i in range(5)] == [again.sample(logits, i) for i in range(5)]
    assert first.seed != Sampler(params(seed=-1)).seed or first.seed != Sampler(params(seed=-1)).seed


def test_extreme_values_do_not_overflow():
    logits = np.array([3.4e38, -3.4e38, 3.4e38, 0], np.float32)
    assert kept(logits, temperature=1e-300, min_p=0.1) == {0, 2}
    ids, probs = Sampler(params(frequency_penalty=1e6, temperature=1e-9, typical_p=0.5)).candidates(
        logits, [1, 1]
    )
    assert np.isfinite(probs).all()
    assert set(ids.tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_an_error_that_names_it(bad, temperature):
    logits = np.zeros(3000, np.float32)
    logits[2999] = bad
    with pytest.raises(ComputeError, match=rf"token 2999 at position 12 is {bad} \(1 of 3000"):
        Sampler(params(temperature=temperature)).sample(logits, 12)
    with pytest.raises(ComputeError, match=r"token 2999 is"):
        logprobs(logits)


@pytest.mark.parametrize("shape", [(0,), (2, 3), ()])
def test_logits_that_are_not_one_row_are_refused(shape):
    with pytest.raises(ComputeError, match=r"logits have shape .* wanted one row"):
        Sampler(params()).sample(np.zeros(shape, np.float32), 0)


@pytest.mark.parametrize("token", [-1, 4])
def test_a_history_outside_the_vocabulary_is_refused(token):
    sampler = Sampler(params(repeat_penalty=1.1))
    with pytest.raises(RequestError, match=rf"history has token {token}, outside the vocabulary \(0 to 3\)"):
        sampler.sample(np.zeros(4, np.float32), 0, [0, token])


def test_a_negative_position_is_refused():
    with pytest.raises(RequestError, match="position is -1"):
        Sampler(params()).sample(np.zeros(4, np.float32), -1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", "hot"),
        pytest.param("temperature", 10**5000, id="temperature-huge"),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("min_p", -0.5),
        ("typical_p", -1.0),
        ("typical_p", math.inf),
        ("repeat_last_n", -2),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("frequency_penalty", math.inf),
        ("frequency_penalty", 1e300),
        ("presence_penalty", math.nan),
        ("presence_penalty", None),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_a_bad_parameter_is_refused_by_name(name, value):
    with pytest.raises(RequestError, match=rf"^{name} is .*; wanted "):
        SamplingParams(**{name: value})


def test_defaults_are_llama_cpps():
    assert SamplingParams() == SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        typical_p=1.0,
        repeat_last_n=64,
        repeat_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=-1,
    )


@settings(deadline=None)
@given(hnp.arrays(np.float32, (3, 17), elements=st.floats(-30, 30, width=32)))
def test_logprobs_are_a_distribution_and_keep_differences(logits):
    result = logprobs(logits)
    assert result.dtype == np.float64
    np.testing.assert_allclose(np.exp(result).sum(axis=-1), 1, rtol=1e-12)
    differences = logits.astype(np.float64) - logits[:, :1]
    np.testing.assert_allclose(result - result[:, :1], differences, atol=1e-9)
