"""Both forms of products, for the host and for a GPU, give the same bits: every format, ragged extents, all tiles."""

from typing import Any

import numpy as np
import pytest
from engines import Array, Bench, decode, poisoned, same_bits, world
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import packed, random_blocks, wide_matrix

from refengine.kernels.experts import experts_swiglu, mul_mat_experts
from refengine.kernels.mul_mat import TILE, WIDE_TILE, mul_mat
from refengine.kernels.norm import rms_norm
from refengine.kernels.products import mul_mat_add, mul_mat_swiglu, mul_mats
from refengine.kernels.quants import FORMATS

QUANTS = {quant.name: quant for quant in FORMATS}
#: rows of x and outputs of one warp
SHAPES = ((1, 1), (1, 4), (WIDE_TILE, 2), (3, 1))
EPS = 1e-6
SEEDS = st.integers(0, 2**32 - 1)


def times(
    kind: Any, weights: dict[str, Array], n_out: int, x: Array, tile: int, outputs: int | None
) -> Array:
    """x W^T by either form."""
    y = poisoned((len(x), n_out))
    grid = (-(-n_out // (outputs or 1)), -(-len(x) // tile))
    if outputs is not None:
        weights, x = wide_matrix(kind, weights), x.view(np.uint64)
    return Bench().run(mul_mat(kind, tile, outputs), grid, **weights, x=x, y=y)["y"]


def by_definition(x: Array, weights: Array) -> Array:
    """The order of additions as its definition has it, in NumPy; x [n_rows, n_in], weights [n_out, n_in].

    They have 12 bits: products and sums are exact in float64, and rounding to float32 after each is what fma does.
    """
    n_blocks = x.shape[1] // 32
    terms = (x[:, None].astype(np.float64) * weights[None]).reshape(len(x), len(weights), n_blocks, 32)
    parts = np.zeros((4, len(x), len(weights), 32), np.float32)
    for b in range(n_blocks):
        p = (b // 2) % 4
        parts[p] = (parts[p].astype(np.float64) + terms[:, :, b]).astype(np.float32)
    total = (parts[0] + parts[1]) + (parts[2] + parts[3])
    for half in (16, 8, 4, 2, 1):
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


@pytest.mark.parametrize(("tile", "outputs"), [(1, None), (TILE, None), *SHAPES])
@settings(max_examples=15)
@given(blocks=st.integers(1, 19), n_rows=st.integers(1, 5), n_out=st.integers(1, 5), seed=SEEDS)
def test_the_order_of_additions_is_its_definition(
    tile, outputs, blocks: int, n_rows: int, n_out: int, seed: int
):
    rng = np.random.default_rng(seed)
    x, dense = (
        (
            rng.integers(-(2**11), 2**11, (n, 32 * blocks)) * 2.0 ** rng.integers(-6, 6, (n, 32 * blocks))
        ).astype(np.float32)
        for n in (n_rows, n_out)
    )
    kind = QUANTS["F32"]
    weights = packed(kind, dense.reshape(-1).view(np.uint8), n_out, 32 * blocks)
    assert same_bits(times(kind, weights, n_out, x, tile, outputs), by_definition(x, dense))


@pytest.mark.parametrize(
    ("name", "tile", "outputs"),
    [
        *((name, 1, 4) for name in QUANTS),
        *((name, *shape) for name in ("F16", "Q4_1") for shape in SHAPES if shape != (1, 4)),
    ],
)
def test_every_format_has_the_bits_of_the_host_form(name: str, tile: int, outputs: int):
    kind = QUANTS[name]
    unit = max(32, FORMATS[kind].block_size)
    for blocks, n_rows, n_out in ((1, 1, 1), (2, 3, 5), (3, 9, 4), (9, 2, 3), (11, 1, 2)):
        rng = np.random.default_rng(blocks)
        n_in = unit * blocks if unit == 32 else unit * (1 + blocks // 3)
        weights = packed(kind, random_blocks(rng, kind, n_out, n_in), n_out, n_in)
        x = rng.standard_normal((n_rows, n_in)).astype(np.float32)
        wanted = times(kind, weights, n_out, x, TILE, None)
        assert same_bits(times(kind, weights, n_out, x, 1, None), wanted)
        assert same_bits(times(kind, weights, n_out, x, tile, outputs), wanted), (blocks, n_rows, n_out)


class Both:
    """Matrices of several formats and x, for kernels of products in either form."""

    def __init__(self, roles: dict[str, str], heights: tuple[int, ...], n_in: int, n_rows: int) -> None:
        self.rng = np.random.default_rng(n_in)
        self.x = self.normal(n_rows, n_in)
        self.matrices = {}
        for (pattern, name), n_out in zip(roles.items(), heights, strict=True):
            kind = QUANTS[name]
            self.matrices[pattern] = (
                kind,
                packed(kind, random_blocks(self.rng, kind, n_out, n_in), n_out, n_in),
            )

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)

    def arguments(self, outputs: int | None, norm: Array | None = None) -> dict[str, Any]:
        """``norm``: for kernels that can norm x; NaN where they do not."""
        rows = {"x": self.x} if norm is None else {"x": self.x, "norm": norm}
        found: dict[str, Any] = rows if outputs is None else {k: a.view(np.uint64) for k, a in rows.items()}
        if norm is not None:
            found["eps"] = EPS
        for pattern, (kind, arrays) in self.matrices.items():
            shown = arrays if outputs is None else wide_matrix(kind, arrays)
            found |= {pattern.format(name): array for name, array in shown.items()}
        return found


def check_forms(
    both: Both, make: Any, heights: tuple[int, ...], rest: dict[str, Array], *, can_norm: bool = True
) -> None:
    """Both forms of a kernel, ``make(tile, outputs)``, write the same bits, the wide one in two shapes.

    ``test_products`` and ``test_mul_mat`` hold the host's form for several rows against that for one.
    """
    norm = np.full_like(both.x, np.nan) if can_norm else None
    n_rows = len(both.x)
    wanted: dict[str, Array] = {}
    for tile, outputs in ((1, None), (1, 3), (2, 2)):
        grid = (sum(-(-n // (outputs or 1)) for n in heights), -(-n_rows // tile))
        found = Bench().run(make(tile, outputs), grid, **both.arguments(outputs, norm), **rest)
        wanted = wanted or found
        for name, array in wanted.items():
            assert not np.isnan(array).any()
            assert same_bits(found[name], array), (tile, outputs, name)


def test_a_product_and_its_residual():
    both = Both({"{}": "Q4_1"}, (7,), 32 * 11, 5)
    rest = {"r": both.normal(5, 7), "y": poisoned((5, 7))}
    check_forms(both, lambda *form: mul_mat_add(QUANTS["Q4_1"], *form), (7,), rest, can_norm=False)


def test_gate_and_up():
    both = Both({"gate_{}": "Q4_1", "up_{}": "F16"}, (7, 7), 32 * 9, 5)
    kinds = (QUANTS["Q4_1"], QUANTS["F16"])
    check_forms(both, lambda *form: mul_mat_swiglu(kinds, *form), (7,), {"y": poisoned((5, 7))})


@pytest.mark.parametrize("names", [("Q4_1", "F16"), ("F16", "Q4_1", "F16"), ("Q4_1", "F16", "F16", "F16")])
def test_products_of_one_x(names: tuple[str, ...]):
    heights = (7, 3, 1, 4)[: len(names)]
    both = Both({f"{{}}_{i}": name for i, name in enumerate(names)}, heights, 32 * 9, 5)
    rest = {f"y_{i}": poisoned((5, n)) for i, n in enumerate(heights)}
    kinds = tuple(QUANTS[name] for name in names)
    check_forms(both, lambda *form: mul_mats(kinds, *form), heights, rest)


@pytest.mark.parametrize("blocks", [1, 9])
def test_a_norm_on_the_way_has_the_bits_of_the_norm(blocks: int):
    """In front of two and more products, and of gate and up, in either form."""
    heights = (7, 3)
    both = Both({"{}_0": "Q4_1", "{}_1": "F16"}, heights, 32 * blocks, 1)
    joined = Both({"gate_{}": "Q4_1", "up_{}": "F16"}, (7, 7), 32 * blocks, 1)
    kinds = (QUANTS["Q4_1"], QUANTS["F16"])
    norm = both.normal(1, 32 * blocks)
    outs = {f"y_{i}": poisoned((1, n)) for i, n in enumerate(heights)}
    for matrices, kernel, tall, rest in (
        (both, mul_mats, heights, outs),
        (joined, mul_mat_swiglu, (7,), {"y": poisoned((1, 7))}),
    ):
        plain, matrices.x = matrices.x, normed_row(matrices.x, norm)
        grid = (sum(tall), 1)
        nothing = np.full_like(norm, np.nan)
        wanted = Bench().run(kernel(kinds, 1), grid, **matrices.arguments(None, nothing), **rest)
        matrices.x = plain
        for outputs in (None, 2):
            grid = (sum(-(-n // (outputs or 1)) for n in tall), 1)
            made = kernel(kinds, 1, outputs, normed=True)
            found = Bench().run(made, grid, **matrices.arguments(outputs, norm), **rest)
            for name, array in wanted.items():
                assert not np.isnan(array).any()
                assert same_bits(found[name], array), (outputs, name)


def normed_row(x: Array, norm: Array) -> Array:
    return Bench().run(rms_norm(), 1, x=x, weight=norm[0], y=poisoned(x.shape), eps=EPS)["y"]


@pytest.mark.parametrize("n_parts", [1, 2])
def test_products_of_experts(n_parts: int):
    """The last output of an expert is not taken for the next expert's."""
    n_expert, n_out, index = 3, 5, np.array([[2, 0], [1, 2]], np.int32)
    both = Both({"{}": "Q4_1"}, (n_expert * n_out,), 32 * 9, 2 * n_parts)
    joined = Both({"gate_{}": "Q4_1", "up_{}": "F16"}, (n_expert * n_out,) * 2, 32 * 9, 2 * n_parts)
    kinds = (QUANTS["Q4_1"], QUANTS["F16"])
    y = poisoned((2, 2, n_out))
    for outputs in (1, 2):
        for matrices, make in (
            (both, lambda form: mul_mat_experts(kinds[0], form)),
            (joined, lambda form: experts_swiglu(kinds, form)),
        ):
            wanted, found = (
                Bench().run(
                    make(form), (-(-n_out // (form or 1)), 2, 2), **matrices.arguments(form), index=index, y=y
                )["y"]
                for form in (None, outputs)
            )
            assert same_bits(found, wanted)
            assert not np.isnan(found).any()


@pytest.mark.parametrize("name", ["llama", "qwen35moe"])
def test_a_model_computes_the_same_bits_in_either_form(name: str):
    with world(name) as made:
        tokens = [3, 5, 7, 2, 9, 11]
        wanted = decode(made.context(n_sequences=2), tokens)
        made.device.wide_loads = True
        context = made.context(n_sequences=2)
        assert same_bits(decode(context, tokens), wanted)
        alone = np.concatenate([decode(context, [token], sequence=1) for token in tokens])
        assert same_bits(alone, wanted)
