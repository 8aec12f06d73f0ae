"""Joined products: the bits of the kernels that they stand for, whatever formats, heights and rows meet."""

from typing import Any

import numpy as np
import pytest
from engines import Array, Bench, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import packed, random_blocks

from refengine.kernels.elementwise import add, swiglu
from refengine.kernels.mul_mat import TILE, mul_mat
from refengine.kernels.products import MAX_PRODUCTS, mul_mat_add, mul_mat_swiglu, mul_mats
from refengine.kernels.quants import FORMATS

#: few enough for their kernels to be compiled once each
QUANTS = {quant.name: quant for quant in FORMATS}
GROUPS = (("F32", "Q8_0"), ("Q4_1", "Q4_1", "Q6_K"), ("Q4_1", "Q8_0", "F32", "F32"))
TILES = (1, TILE)


class Matrix:
    """A random matrix of a format, as kernels take it."""

    def __init__(self, name: str, n_out: int, n_in: int, rng: np.random.Generator) -> None:
        self.type, self.n_out = QUANTS[name], n_out
        self.arrays = packed(self.type, random_blocks(rng, self.type, n_out, n_in), n_out, n_in)

    def times(self, x: Array, tile: int) -> Array:
        grid = (self.n_out, -(-len(x) // tile))
        y = poisoned((len(x), self.n_out))
        return Bench().run(mul_mat(self.type, tile), grid, **self.arrays, x=x, y=y)["y"]

    def named(self, form: str) -> dict[str, Array]:
        return {form.format(name): array for name, array in self.arrays.items()}


def inputs(rng: np.random.Generator, n_rows: int, n: int) -> Array:
    return rng.standard_normal((n_rows, n)).astype(np.float32)


def plain(x: Array) -> dict[str, Any]:
    """Arguments for x without a norm: what stands for the norm is not read."""
    return {"x": x, "norm": np.full_like(x, np.nan), "eps": np.nan}


def elementwise(kernel, a: Array, b: Array) -> Array:
    names = [name for name in kernel.signature if name != "y"]
    arrays = dict(zip(names, (a.reshape(-1), b.reshape(-1)), strict=True))
    return Bench().run(kernel, -(-a.size // 512), **arrays, y=poisoned((a.size,)))["y"].reshape(a.shape)


each_tile = pytest.mark.parametrize("tile", TILES)
SIZES = {
    "n_rows": st.integers(1, 2 * TILE + 1),
    "units": st.integers(1, 3),
    "seed": st.integers(0, 2**32 - 1),
}


@each_tile
@settings(max_examples=10)
@given(name=st.sampled_from(["F32", "Q4_1", "Q6_K"]), n_out=st.integers(1, 9), **SIZES)
def test_a_product_and_its_residual(tile: int, name: str, n_out: int, n_rows: int, units: int, seed: int):
    rng = np.random.default_rng(seed)
    matrix = Matrix(name, n_out, 256 * units, rng)
    x, r = inputs(rng, n_rows, 256 * units), inputs(rng, n_rows, n_out)
    y = poisoned((n_rows, n_out))
    grid = (n_out, -(-n_rows // tile))
    found = Bench().run(mul_mat_add(matrix.type, tile), grid, **matrix.arrays, x=x, r=r, y=y)["y"]
    assert same_bits(found, elementwise(add, r, matrix.times(x, tile)))


@each_tile
@settings(max_examples=10)
@given(names=st.sampled_from([("F32", "F32"), ("Q4_1", "Q8_0")]), n_out=st.integers(1, 9), **SIZES)
def test_gate_and_up(tile: int, names: tuple[str, str], n_out: int, n_rows: int, units: int, seed: int):
    rng = np.random.default_rng(seed)
    gate, up = (Matrix(name, n_out, 256 * units, rng) for name in names)
    x, y = inputs(rng, n_rows, 256 * units), poisoned((n_rows, n_out))
    grid = (n_out, -(-n_rows // tile))
    kernel = mul_mat_swiglu((gate.type, up.type), tile)
    found = Bench().run(kernel, grid, **gate.named("gate_{}"), **up.named("up_{}"), **plain(x), y=y)["y"]
    assert same_bits(found, elementwise(swiglu, gate.times(x, tile), up.times(x, tile)))


@each_tile
@settings(max_examples=15)
@given(
    names=st.sampled_from(GROUPS),
    heights=st.lists(st.integers(1, 9), min_size=MAX_PRODUCTS, max_size=MAX_PRODUCTS),
    **SIZES,
)
def test_products_of_one_x(
    tile: int, names: tuple[str, ...], heights: list[int], n_rows: int, units: int, seed: int
):
    rng = np.random.default_rng(seed)
    matrices = [Matrix(name, n, 256 * units, rng) for name, n in zip(names, heights, strict=False)]
    x = inputs(rng, n_rows, 256 * units)
    arguments = plain(x)
    for i, matrix in enumerate(matrices):
        arguments |= matrix.named(f"{{}}_{i}") | {f"y_{i}": poisoned((n_rows, matrix.n_out))}
    kernel = mul_mats(tuple(matrix.type for matrix in matrices), tile)
    grid = (sum(matrix.n_out for matrix in matrices), -(-n_rows // tile))
    found = Bench().run(kernel, grid, **arguments)
    for i, matrix in enumerate(matrices):
        assert same_bits(found[f"y_{i}"], matrix.times(x, tile))


def test_a_nan_stays_in_its_row():
    rng = np.random.default_rng(0)
    gate, up = (Matrix("F32", 3, 64, rng) for _ in range(2))
    x = inputs(rng, TILE, 64)
    x[2, 40] = np.nan
    arguments = {**gate.named("gate_{}"), **up.named("up_{}")}
    y = Bench().run(
        mul_mat_swiglu((gate.type, up.type), TILE), (3, 1), **arguments, **plain(x), y=poisoned((TILE, 3))
    )
    assert np.isnan(y["y"][2]).all()
    assert np.isfinite(np.delete(y["y"], 2, axis=0)).all()
