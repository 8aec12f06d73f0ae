"""Rotary embedding against its twin, and against rotation as complex numbers."""

import numpy as np
import pytest
from engines import Array, Bench, nmse, poisoned, same_bits
from hypothesis import given
from hypothesis import strategies as st

from refengine.kernels.rope import Pairing, rope, rope_f64, rope_tables

PAIRINGS: tuple[Pairing, ...] = ("norm", "neox")


def rotated(x: Array, position: Array, tables: tuple[Array, Array], pairing: Pairing) -> Array:
    cosine, sine = tables
    grid = (x.shape[1], x.shape[0])
    y = poisoned(x.shape)
    return Bench().run(rope(pairing), grid, x=x, position=position, cosine=cosine, sine=sine, y=y)["y"]


@given(
    pairing=st.sampled_from(PAIRINGS),
    n_tokens=st.integers(1, 5),
    n_head=st.integers(1, 4),
    half=st.integers(1, 64),
    rest=st.sampled_from([0, 0, 2, 16, 33]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rope_is_its_twin(pairing: Pairing, n_tokens: int, n_head: int, half: int, rest: int, seed: int):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n_head, 2 * half + rest)).astype(np.float32)
    position = rng.integers(0, 50, n_tokens).astype(np.int32)
    tables = rope_tables(50, 2 * half, 1e4)
    found = rotated(x, position, tables, pairing)
    assert nmse(found, rope_f64(x, position, *tables, pairing)) < 1e-11
    assert same_bits(found[..., 2 * half :], x[..., 2 * half :])
    assert same_bits(rotated(x[-1:], position[-1:], tables, pairing), found[-1:])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_position_0_turns_nothing(pairing: Pairing):
    x = np.arange(48, dtype=np.float32).reshape(1, 3, 16)
    np.testing.assert_array_equal(rotated(x, np.zeros(1, np.int32), rope_tables(4, 16, 1e4), pairing), x)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pair_turns_as_a_complex_number(pairing: Pairing):
    x = np.random.default_rng(0).standard_normal((1, 1, 8)).astype(np.float32)
    first, second = (x[..., 0::2], x[..., 1::2]) if pairing == "norm" else (x[..., :4], x[..., 4:])
    angle = 3 * 100.0 ** (-np.arange(4) / 4)
    turned = (first + 1j * second) * np.exp(1j * angle)
    y = rotated(x, np.array([3], np.int32), rope_tables(4, 8, 100.0), pairing)
    found = y[..., 0::2] + 1j * y[..., 1::2] if pairing == "norm" else y[..., :4] + 1j * y[..., 4:]
    np.testing.assert_allclose(found, turned, rtol=1e-6)


def test_tables_take_scale_and_factors():
    cosine, sine = rope_tables(5, 4, 100.0, 0.5, np.array([1, 4], np.float32))
    position = np.arange(5)[:, None]
    angle = position * np.array([0.5, 0.5 * 0.1 / 4])
    assert cosine.shape == sine.shape == (5, 2)
    np.testing.assert_array_equal(cosine, np.cos(angle).astype(np.float32))
    np.testing.assert_array_equal(sine, np.sin(angle).astype(np.float32))
