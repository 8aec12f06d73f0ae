"""Kernels that do what two of other families do, one behind the other or side by side: the bits of both."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned, same_bits
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import packed, random_blocks

from refengine.kernels.elementwise import SPAN, add, select_rows, swiglu
from refengine.kernels.experts import combine_experts, combine_experts_add, experts_swiglu, mul_mat_experts
from refengine.kernels.gates import delta_gates
from refengine.kernels.hidden import concat_rows
from refengine.kernels.norm import rms_norm, rms_norm_concat, rms_norm_rows
from refengine.kernels.short_conv import segment_columns, short_conv, short_conv_gates

EPS = 1e-5
SEEDS = st.integers(0, 2**32 - 1)


class Draw:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype(np.float32)


def normed(x: Array, weight: Array) -> Array:
    return Bench().run(rms_norm(), len(x), x=x, weight=weight, y=poisoned(x.shape), eps=EPS)["y"]


@given(n_rows=st.integers(1, 5), n_wanted=st.integers(1, 6), n=st.integers(1, 100), seed=SEEDS)
def test_the_norm_of_chosen_rows(n_rows: int, n_wanted: int, n: int, seed: int):
    draw = Draw(seed)
    x, weight = draw(n_rows, n), draw(n)
    rows = draw.rng.integers(0, n_rows, n_wanted).astype(np.int32)
    y = poisoned((n_wanted, n))
    chosen = Bench().run(select_rows, n_wanted, x=x, rows=rows, y=y)["y"]
    found = Bench().run(rms_norm_rows(), n_wanted, x=x, rows=rows, weight=weight, y=y, eps=EPS)["y"]
    assert same_bits(found, normed(chosen, weight))


@given(n_rows=st.integers(1, 5), n=st.integers(1, 100), m=st.integers(1, 100), seed=SEEDS)
def test_norms_side_by_side(n_rows: int, n: int, m: int, seed: int):
    draw = Draw(seed)
    a, b, weight_a, weight_b = draw(n_rows, n), draw(n_rows, m), draw(n), draw(m)
    y = poisoned((n_rows, n + m))
    wanted = Bench().run(concat_rows, n_rows, a=normed(a, weight_a), b=normed(b, weight_b), y=y)["y"]
    weights = {"weight_a": weight_a, "weight_b": weight_b}
    assert same_bits(
        Bench().run(rms_norm_concat(), (2, n_rows), a=a, b=b, **weights, y=y, eps=EPS)["y"], wanted
    )


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=3).filter(any),
    n_channels=st.integers(1, 70),
    n_head=st.integers(1, 40),
    seed=SEEDS,
)
def test_the_gates_beside_the_convolution(lengths: list[int], n_channels: int, n_head: int, seed: int):
    draw = Draw(seed)
    n_rows, n_segments = sum(lengths), len(lengths)
    segments = np.full((n_segments, segment_columns(1)), -1, np.int32)
    segments[:, 0] = np.cumsum([0, *lengths[:-1]])
    segments[:, 1] = lengths
    segments[:, 2] = draw.rng.permutation(n_segments)
    segments[:, 3] = draw.rng.integers(-1, 2, n_segments)
    segments[:, 4] = 0
    conv = {
        "x": draw(n_rows, n_channels), "weight": draw(n_channels, 4), "segments": segments,
        "history": draw(n_segments, 2, 3, n_channels), "y": poisoned((n_rows, n_channels)),
    }  # fmt: skip
    gates = {
        "alpha": draw(n_rows, n_head), "beta": draw(n_rows, n_head), "dt_bias": draw(n_head), "a": -abs(draw(n_head)),
        "gates": poisoned((n_rows, 2, n_head)),
    }  # fmt: skip
    blocks, more = -(-n_channels // 32), -(-n_head // 32)
    wanted = Bench().run(short_conv(4), (blocks, n_segments, 1), **conv)
    wanted |= Bench().run(delta_gates, (more, n_rows), **gates)
    found = Bench().run(short_conv_gates(4), (blocks + more, n_segments, 1), **conv, **gates)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert same_bits(found[name], array), name


@pytest.mark.parametrize("names", [("F32", "F32"), ("Q4_1", "Q8_0")], ids="-".join)
@settings(max_examples=15)
@given(
    n_rows=st.integers(1, 4),
    n_used=st.integers(1, 3),
    n_ff=st.integers(1, 9),
    blocks=st.integers(1, 5),
    seed=SEEDS,
)
def test_gate_and_up_of_experts(names, n_rows: int, n_used: int, n_ff: int, blocks: int, seed: int):
    draw = Draw(seed)
    n_expert, n_in = 4, 32 * blocks
    x = draw(n_rows, n_in)
    index = draw.rng.integers(0, n_expert, (n_rows, n_used)).astype(np.int32)
    types = tuple(GGMLQuantizationType[name] for name in names)
    n_out = n_expert * n_ff
    parts = [packed(kind, random_blocks(draw.rng, kind, n_out, n_in), n_out, n_in) for kind in types]
    grid, y = (n_ff, n_used, n_rows), poisoned((n_rows, n_used, n_ff))
    gate, up = (
        Bench().run(mul_mat_experts(kind), grid, **part, index=index, x=x, y=y)["y"].reshape(-1)
        for kind, part in zip(types, parts, strict=True)
    )
    wanted = Bench().run(swiglu, -(-gate.size // SPAN), gate=gate, up=up, y=poisoned(gate.shape))["y"]
    arrays = {
        f"{role}_{name}": a
        for role, part in zip(("gate", "up"), parts, strict=True)
        for name, a in part.items()
    }
    found = Bench().run(experts_swiglu(types), grid, **arrays, index=index, x=x, y=y)["y"]
    assert same_bits(found.reshape(-1), wanted)


@settings(max_examples=30)
@given(n_rows=st.integers(1, 4), n_used=st.integers(1, 4), n=st.integers(1, 600), seed=SEEDS)
def test_experts_and_the_residual(n_rows: int, n_used: int, n: int, seed: int):
    draw = Draw(seed)
    y, r = poisoned((n_rows, n)), draw(n_rows, n)
    arguments = {
        "x": draw(n_rows, n_used, n), "weight": draw(n_rows, n_used), "shared": draw(n_rows, n), "gate": draw(n_rows, 1)
    }  # fmt: skip
    grid = (-(-n // SPAN), n_rows)
    combined = Bench().run(combine_experts, grid, **arguments, y=y)["y"].reshape(-1)
    wanted = Bench().run(add, -(-r.size // SPAN), a=r.reshape(-1), b=combined, y=poisoned((r.size,)))["y"]
    found = Bench().run(combine_experts_add, grid, **arguments, r=r, y=y)["y"]
    assert same_bits(found.reshape(-1), wanted)
