"""Gates against their twins, and the float32 logarithm against NumPy in float64."""

import numpy as np
import pytest
from engines import Array, nmse, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runner import run, run_all
from numba import cuda

from instrumentation.kernel import Kernel, kernel
from instrumentation.kernel.types import f32_1d
from refengine.kernels import gates
from refengine.kernels.norm import rms_norm

EPS = float(np.float32(1e-6))


@kernel(block=32, strict=True)
def logarithms(x: f32_1d, y: f32_1d) -> None:
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < x.shape[0]:
        y[i] = gates.log1p_f32(x[i])


@kernel(block=32, strict=True)
def softpluses(x: f32_1d, y: f32_1d) -> None:
    i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    if i < x.shape[0]:
        y[i] = gates.softplus_f32(x[i])


def apply(function: Kernel, x: Array) -> Array:
    y = poisoned(x.shape)
    run(function, -(-len(x) // 32), x, y)
    return y


def worst_ulp(found: Array, wanted: Array) -> float:
    spacing = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    return float((np.abs(found.astype(np.float64) - wanted) / spacing).max())


def test_log1p_is_within_2_ulp():
    # Every binade down to the smallest, and densely where softplus uses it.
    dense = np.linspace(0, 8, 1_000_003)
    wide = np.exp2(np.random.default_rng(0).uniform(-126, 100, 1_000_003))
    for u in (dense.astype(np.float32), wide.astype(np.float32)):
        assert worst_ulp(apply(logarithms, u), np.log1p(u.astype(np.float64))) <= 2


def test_softplus_is_as_close_as_exp_allows():
    x = np.linspace(-87.3, 40, 1_000_003).astype(np.float32)
    wide = x.astype(np.float64)
    # Two of exp, two of the logarithm.
    assert worst_ulp(apply(softpluses, x), np.logaddexp(0, wide)) <= 4


@pytest.mark.parametrize(
    ("x", "wanted"),
    [(-np.inf, 0), (-100, 0), (20.5, 20.5), (89, 89), (1e30, 1e30), (np.inf, np.inf), (np.nan, np.nan)],
)
def test_softplus_at_the_edges(x: float, wanted: float):
    np.testing.assert_array_equal(apply(softpluses, np.array([x], np.float32)), [np.float32(wanted)])


def random(seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def delta_gates(alpha: Array, beta: Array, dt_bias: Array, a: Array) -> Array:
    n_rows, n_head = alpha.shape
    grid = (-(-n_head // 32), n_rows)
    return run_all(gates.delta_gates, grid, alpha, beta, dt_bias, a, poisoned((n_rows, 2, n_head)))[-1]


@settings(max_examples=40, deadline=None)
@given(
    n_rows=st.integers(1, 5),
    n_head=st.integers(1, 70),
    scale=st.sampled_from([0.1, 1.0, 10.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_delta_gates_are_their_twin(n_rows: int, n_head: int, scale: float, seed: int):
    alpha, beta, dt_bias, a = random(seed, (n_rows, n_head), (n_rows, n_head), (n_head,), (n_head,))
    alpha, a = alpha * np.float32(scale), -np.exp(a)
    found = delta_gates(alpha, beta, dt_bias, a)
    wanted = gates.delta_gates_f64(alpha, beta, dt_bias, a)
    for part in (0, 1):
        # A decay of e**-50 has the error of its exponent, which is large for it and nothing beside the others.
        error = np.abs(found[:, part] - wanted[:, part])
        assert (error <= 2e-6 * np.maximum(wanted[:, part], 1e-3)).all()
    assert nmse(found, wanted) < 1e-11
    assert ((found >= 0) & (found <= 1)).all()
    assert same_bits(delta_gates(alpha[-1:].copy(), beta[-1:].copy(), dt_bias, a), found[-1:])


ROWS = {"rows": st.integers(1, 9), "n": st.integers(1, 300), "seed": st.integers(0, 2**32 - 1)}


@settings(max_examples=40, deadline=None)
@given(**ROWS, scale=st.sampled_from([1e-12, 1.0, 1e6]))
def test_gated_norm_is_its_twin(rows: int, n: int, seed: int, scale: float):
    x, weight, z = random(seed, (rows, n), (n,), (rows, n))
    x *= np.float32(scale)
    z *= np.float32(3)
    y = run_all(gates.gated_norm, rows, x, weight, z, poisoned(x.shape), EPS)[-1]
    assert nmse(y, gates.gated_norm_f64(x, weight, z, EPS)) < 1e-11
    alone = run_all(gates.gated_norm, 1, x[-1:].copy(), weight, z[-1:].copy(), poisoned((1, n)), EPS)[-1]
    assert same_bits(alone, y[-1:])


@settings(max_examples=40, deadline=None)
@given(**ROWS)
def test_query_norm_has_the_bits_of_the_norm_of_the_query(rows: int, n: int, seed: int):
    q_gate, weight = random(seed, (rows, 2 * n), (n,))
    q = run_all(gates.query_norm, rows, q_gate, weight, poisoned((rows, n)), EPS)[-1]
    assert nmse(q, gates.query_norm_f64(q_gate, weight, EPS)) < 1e-11
    plain = poisoned((rows, n))
    run(rms_norm(), rows, q_gate[:, :n].copy(), weight, plain, EPS)
    assert same_bits(q, plain)


@settings(max_examples=40, deadline=None)
@given(**ROWS)
def test_output_gate_is_its_twin(rows: int, n: int, seed: int):
    x, q_gate = random(seed, (rows, n), (rows, 2 * n), scale=3.0)
    y = run_all(gates.output_gate, rows, x, q_gate, poisoned(x.shape))[-1]
    assert nmse(y, gates.output_gate_f64(x, q_gate)) < 1e-11


def test_query_and_gate_alternate_by_head():
    # As projected: [n_rows, n_head * 2 n]; a row of the kernels is one head's [query | gate].
    n_rows, n_head, n = 2, 3, 4
    projected = np.arange(n_rows * n_head * 2 * n, dtype=np.float32).reshape(n_rows, n_head * 2 * n)
    x = np.ones((n_rows * n_head, n), np.float32)
    y = run_all(gates.output_gate, n_rows * n_head, x, projected.reshape(-1, 2 * n) - 24, poisoned(x.shape))[
        -1
    ]
    gate = projected.reshape(n_rows, n_head, 2, n)[:, :, 1].astype(np.float64) - 24
    np.testing.assert_allclose(y, (1 / (1 + np.exp(-gate))).reshape(-1, n), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_own_row_only(bad: float):
    x, weight, z = random(0, (3, 48), (48,), (3, 48))
    x[1, 7] = bad
    y = run_all(gates.gated_norm, 3, x, weight, z, poisoned(x.shape), EPS)[-1]
    assert np.isnan(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()
