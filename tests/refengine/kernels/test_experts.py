"""Router, experts' products and their weighted sum against their twins."""

import gguf
import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import packed, random_blocks
from kernel_runner import run, run_all

from refengine.kernels import experts
from refengine.kernels.elementwise import SPAN, swiglu_f64
from refengine.kernels.mul_mat import mul_mat
from refengine.kernels.quants import FORMATS

F32 = GGMLQuantizationType.F32


def routed(logits: Array, n_used: int) -> tuple[Array, Array]:
    n_rows = len(logits)
    out = run_all(
        experts.route, n_rows, logits, poisoned((n_rows, n_used), np.int32), poisoned((n_rows, n_used))
    )
    return out[1], out[2]


@settings(max_examples=40, deadline=None)
@given(
    n_rows=st.integers(1, 4),
    n_expert=st.integers(1, 130),
    n_used=st.integers(1, 8),
    spread=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_route_is_its_twin(n_rows: int, n_expert: int, n_used: int, spread: float, seed: int):
    n_used = min(n_used, n_expert)
    logits = (spread * np.random.default_rng(seed).standard_normal((n_rows, n_expert))).astype(np.float32)
    index, weight = routed(logits, n_used)
    wanted_index, wanted = experts.route_f64(logits, n_used)
    np.testing.assert_array_equal(index, wanted_index)
    assert nmse(weight, wanted) < 1e-11
    alone = routed(logits[-1:].copy(), n_used)
    assert same_bits(alone[0], index[-1:])
    assert same_bits(alone[1], weight[-1:])


def test_equal_logits_go_to_the_lower_experts():
    index, weight = routed(np.full((1, 70), -3, np.float32), 4)
    assert index.tolist() == [[0, 1, 2, 3]]
    np.testing.assert_allclose(weight, 0.25, rtol=1e-6)


def test_a_small_sum_is_not_blown_up():
    # 2**17 equal experts: two of them hold 2**-16 of the softmax, which is less than what it is divided by.
    _, weight = routed(np.zeros((1, 2**17), np.float32), 2)
    np.testing.assert_allclose(weight, 2.0**-17 / experts.SMALLEST_SUM, rtol=1e-4)


def test_nan_shows_in_its_row_and_stays_within_bounds():
    logits = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    logits[1] = np.nan
    logits[2, 5] = np.nan
    index, weight = routed(logits, 2)
    assert ((index >= 0) & (index < 6)).all()
    assert np.isfinite(weight[0]).all()
    assert np.isnan(weight[1:]).all()


@pytest.mark.parametrize("quantisation", FORMATS, ids=lambda q: q.name)
def test_products_are_those_of_each_expert_alone(quantisation: GGMLQuantizationType):
    rng = np.random.default_rng(0)
    n_expert, n_out, n_in, n_rows, n_used = 3, 4, 256, 3, 2
    raw = random_blocks(rng, quantisation, n_expert * n_out, n_in)
    weights = packed(quantisation, raw, n_expert * n_out, n_in)
    dense = gguf.quants.dequantize(raw.view(np.float32) if quantisation == F32 else raw, quantisation)
    dense = dense.reshape(n_expert, n_out, n_in)
    index = np.array([[2, 0], [1, 2], [0, 1]], np.int32)
    for n_parts in (1, n_used):
        x = rng.standard_normal((n_rows, n_parts, n_in)).astype(np.float32)
        y = poisoned((n_rows, n_used, n_out))
        kernel = experts.mul_mat_experts(quantisation)
        flat = x.reshape(-1, n_in)
        y = run_all(kernel, (n_out, n_used, n_rows), *weights.values(), index, flat, y)[-1]
        assert nmse(y, experts.mul_mat_experts_f64(x, dense, index)) < 1e-11
        all_rows = poisoned((n_rows * n_parts, n_expert * n_out))
        run(mul_mat(quantisation, 1), (n_expert * n_out, len(flat)), *weights.values(), flat, all_rows)
        plain = all_rows.reshape(n_rows, n_parts, n_expert, n_out)
        for r in range(n_rows):
            for u in range(n_used):
                assert same_bits(y[r, u], plain[r, min(u, n_parts - 1), index[r, u]])


@pytest.mark.parametrize("n_in", [1, 31, 32, 33, 48, 95])
def test_rows_that_are_filled_up_with_zeros_are_products_of_what_they_have(n_in: int):
    rng = np.random.default_rng(n_in)
    n_expert, n_out, n_rows, n_used = 3, 5, 2, 2
    dense = rng.standard_normal((n_expert, n_out, n_in)).astype(np.float32)
    wide = np.zeros((n_expert, n_out, -(-n_in // 32) * 32), np.float32)
    wide[..., :n_in] = dense
    weights = packed(F32, wide.reshape(-1).view(np.uint8), n_expert * n_out, wide.shape[2])
    index = np.array([[2, 0], [1, 2]], np.int32)
    x = rng.standard_normal((n_rows, n_used, n_in)).astype(np.float32)
    y = poisoned((n_rows, n_used, n_out))
    flat = x.reshape(-1, n_in)
    y = run_all(experts.mul_mat_experts(F32), (n_out, n_used, n_rows), *weights.values(), index, flat, y)[-1]
    assert nmse(y, experts.mul_mat_experts_f64(x, dense, index)) < 1e-11


@settings(max_examples=30, deadline=None)
@given(
    n_rows=st.integers(1, 3),
    n_used=st.integers(1, 9),
    n=st.integers(1, 2 * SPAN),
    seed=st.integers(0, 2**32 - 1),
)
def test_combination_is_its_twin(n_rows: int, n_used: int, n: int, seed: int):
    rng = np.random.default_rng(seed)
    shapes = ((n_rows, n_used, n), (n_rows, n_used), (n_rows, n), (n_rows, 1))
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    grid = (-(-n // SPAN), n_rows)
    y = run_all(experts.combine_experts, grid, *arrays, poisoned((n_rows, n)))[-1]
    assert nmse(y, experts.combine_experts_f64(*arrays)) < 1e-11


def test_the_stages_together_are_a_mixture_of_experts():
    rng = np.random.default_rng(3)
    n_rows, n_expert, n_used, n_embd, n_ff = 5, 6, 2, 64, 32

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    bench, x = Bench(), normal(n_rows, n_embd)
    matrices = {"gate": normal(n_expert, n_ff, n_embd), "up": normal(n_expert, n_ff, n_embd)}
    down, logits = normal(n_expert, n_embd, n_ff), normal(n_rows, n_expert)
    shared, gate = normal(n_rows, n_embd), normal(n_rows, 1)

    def product(weights: Array, rows: Array, index: Array) -> Array:
        n_out, n_in = weights.shape[1:]
        raw = weights.reshape(-1).view(np.uint8)
        return bench.run(
            experts.mul_mat_experts(F32), (n_out, n_used, n_rows), **packed(F32, raw, n_expert * n_out, n_in),
            index=index, x=rows.reshape(-1, n_in), y=poisoned((n_rows, n_used, n_out)),
        )["y"]  # fmt: skip

    index, weight = routed(logits, n_used)
    both = swiglu_f64(*(product(matrices[part], x, index) for part in ("gate", "up")))
    parts = product(down, both.astype(np.float32), index)
    found = run_all(
        experts.combine_experts, (1, n_rows), parts, weight, shared, gate, poisoned((n_rows, n_embd))
    )
    wanted = 1 / (1 + np.exp(-gate.astype(np.float64))) * shared
    for r in range(n_rows):
        p = np.exp(logits[r].astype(np.float64))
        chosen = np.argsort(-p)[:n_used]
        for e in chosen:
            hidden = swiglu_f64(matrices["gate"][e] @ x[r].astype(np.float64), matrices["up"][e] @ x[r])
            wanted[r] += p[e] / p[chosen].sum() * (down[e] @ hidden)
    assert nmse(found[-1], wanted) < 1e-10
