"""Products with packed matrices of every format against gguf's own dequantisation in float64."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned, same_bits
from gguf import quants as gguf_quants
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine.kernels.mul_mat import TILE, get_rows, get_rows_f64, mul_mat, mul_mat_f64
from refengine.kernels.quants import FORMATS, Packed, QuantFormat

QUANTS = list(FORMATS.values())
NAMES = [quant.name for quant in QUANTS]
BY_NAME = dict(zip(NAMES, QUANTS, strict=True))


def random_raw(quant: QuantFormat, n_out: int, n_in: int, rng: np.random.Generator) -> Array:
    """Bytes of a matrix of finite weights of about one size; every bit of a code is random."""
    if quant.name in ("F32", "F16", "BF16"):
        weights = rng.standard_normal((n_out, n_in)).astype(np.float32)
        return np.ascontiguousarray(gguf_quants.quantize(weights, quant.type)).reshape(-1).view(np.uint8)
    n_blocks = n_out * n_in // quant.block_size
    raw = rng.integers(0, 256, n_blocks * quant.block_bytes, np.uint8)
    blocks = raw.view(quant.block)
    for field in {"d", "m", "dmin"} & set(blocks.dtype.names or ()):
        blocks[field] = rng.uniform(0.01, 0.1, n_blocks).astype(np.float16).view(np.uint16)
    return raw


class Matrix:
    """A random matrix: packed as kernels want it, and dequantised by gguf."""

    def __init__(self, name: str, n_out: int, units: int, seed: int) -> None:
        self.quant = BY_NAME[name]
        self.n_out, self.n_in = n_out, units * max(32, self.quant.block_size)
        self.rng = np.random.default_rng(seed)
        raw = random_raw(self.quant, n_out, self.n_in, self.rng)
        shapes = self.quant.packed_shapes(n_out, self.n_in)
        self.packed = Packed(
            np.empty(shapes.codes, np.uint8),
            np.empty(shapes.halves, np.uint16),
            np.empty(shapes.words, np.uint32),
        )
        self.quant.repack(raw, n_out, self.n_in, self.packed)
        self.weights = gguf_quants.dequantize(raw.reshape(n_out, -1), self.quant.type).reshape(
            n_out, self.n_in
        )

    @property
    def arguments(self) -> dict[str, Array]:
        return {"codes": self.packed.codes, "halves": self.packed.halves, "words": self.packed.words}

    def inputs(self, n_rows: int) -> Array:
        return self.rng.standard_normal((n_rows, self.n_in)).astype(np.float32)

    def relative_error(self, y: Array, x: Array) -> float:
        """Squared error over squared signal; where terms cancel, over what their squares add up to."""
        wanted = mul_mat_f64(x, self.weights)
        power = mul_mat_f64(x.astype(np.float64) ** 2, self.weights.astype(np.float64) ** 2).sum()
        return float(((y - wanted) ** 2).sum() / max((wanted**2).sum(), power))

    def times(self, x: Array, tile: int) -> Array:
        grid = (self.n_out, -(-len(x) // tile))
        y = poisoned((len(x), self.n_out))
        return Bench().run(mul_mat(self.quant.type, tile), grid, **self.arguments, x=x, y=y)["y"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(
    n_rows=st.integers(1, 2 * TILE + 1),
    n_out=st.integers(1, 9),
    units=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_mul_mat_is_its_twin_with_the_same_bits_in_tiles(
    name: str, n_rows: int, n_out: int, units: int, seed: int
):
    matrix = Matrix(name, n_out, units, seed)
    x = matrix.inputs(n_rows)
    tiled = matrix.times(x, TILE)
    assert matrix.relative_error(tiled, x) < 1e-11
    assert same_bits(matrix.times(x, 1), tiled)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(
    n_out=st.integers(1, 9), units=st.integers(1, 9), n_rows=st.integers(1, 5), seed=st.integers(0, 2**32 - 1)
)
def test_get_rows_gives_the_bits_of_gguf(name: str, n_out: int, units: int, n_rows: int, seed: int):
    matrix = Matrix(name, n_out, units, seed)
    rows = matrix.rng.integers(0, n_out, n_rows).astype(np.int32)
    y = poisoned((n_rows, matrix.n_in))
    found = Bench().run(get_rows(matrix.quant.type), n_rows, **matrix.arguments, rows=rows, y=y)["y"]
    assert same_bits(found, get_rows_f64(matrix.weights, rows).astype(np.float32))


@pytest.mark.parametrize("n_rows", range(1, 2 * TILE + 2))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(n_rows: int):
    matrix = Matrix("Q4_1", 5, 7, seed=n_rows)
    x = matrix.inputs(n_rows)
    alone = np.concatenate([matrix.times(x[i : i + 1], 1) for i in range(n_rows)])
    assert same_bits(matrix.times(x, TILE), alone)


def test_a_nan_stays_in_its_row():
    matrix = Matrix("Q8_0", 3, 2, seed=0)
    x = matrix.inputs(TILE)
    x[1, 40] = np.nan
    y = matrix.times(x, TILE)
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, axis=0)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_a_bit(threads: int):
    matrix = Matrix("Q6_K", 37, 2, seed=0)
    x = matrix.inputs(5)
    y = poisoned((5, 37))
    kernel = mul_mat(matrix.quant.type, TILE)
    found = Bench(threads=threads).run(kernel, (37, 2), **matrix.arguments, x=x, y=y)["y"]
    assert same_bits(found, matrix.times(x, 1))
