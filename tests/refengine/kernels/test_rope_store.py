"""Rotation into the cache in one launch: the bits of norms, rotations and the store on their own."""

import numpy as np
import pytest
from engines import Array, Bench, poisoned, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cells import empty_caches

from refengine.kernels import CACHE_PAIRS, ROPE_STORES
from refengine.kernels.attention import store_kv
from refengine.kernels.kv_types import PAGE
from refengine.kernels.norm import rms_norm
from refengine.kernels.rope import rope, rope_tables
from refengine.kernels.rope_store import rope_store

EPS = 1e-6
N_CTX = 50
#: each pairing with norms and without, and each element type
CHOSEN = tuple((*pair, *rest) for pair, rest in zip(CACHE_PAIRS, ROPE_STORES, strict=True))


def normed(x: Array, weight: Array) -> Array:
    rows = np.ascontiguousarray(x[..., : len(weight)]).reshape(-1, len(weight))
    found = Bench().run(rms_norm(), len(rows), x=rows, weight=weight, y=poisoned(rows.shape), eps=EPS)
    return found["y"].reshape(*x.shape[:2], len(weight))


@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: "-".join(map(str, chosen)))
@settings(max_examples=15)
@given(
    n_tokens=st.integers(1, 5),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    half=st.integers(1, 32),
    rest=st.sampled_from([0, 0, 2, 16, 33]),
    gate=st.booleans(),
    nan=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_bits_are_those_of_the_separate_kernels(chosen, n_tokens, heads, half, rest, gate, nan, seed):
    type_k, type_v, pairing, norms = chosen
    rng = np.random.default_rng(seed)
    n_head, n_head_kv = heads
    head_dim = 2 * half + rest
    if "q8_0" in chosen:
        head_dim = -(-head_dim // 32) * 32
    width = 2 * head_dim if gate and norms else head_dim
    q = rng.standard_normal((n_tokens, n_head, width)).astype(np.float32)
    k, v = rng.standard_normal((2, n_tokens, n_head_kv, head_dim)).astype(np.float32)
    if nan:
        k[0, 0, 0] = q[0, 0, 0] = np.nan
    weight_q, weight_k = rng.standard_normal((2, head_dim)).astype(np.float32)
    position = rng.integers(0, N_CTX, n_tokens).astype(np.int32)
    cosine, sine = rope_tables(N_CTX, 2 * half, 1e4)
    cell = rng.permutation(3 * PAGE)[:n_tokens].astype(np.int32)
    k_cache, v_cache = empty_caches((type_k, type_v), 3, n_head_kv, head_dim, rng)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    tables = {"position": position, "cosine": cosine, "sine": sine}

    def rotated(x: Array, weight: Array) -> Array:
        x = normed(x, weight) if norms else x
        grid = (x.shape[1], n_tokens)
        return Bench().run(rope(pairing), grid, x=x, **tables, y=poisoned(x.shape))["y"]

    wanted = Bench().run(
        store_kv(type_k, type_v), (n_head_kv, n_tokens), k=rotated(k, weight_k), v=v, cell=cell, **caches
    )
    found = Bench().run(
        rope_store(pairing, type_k, type_v, norms=norms), (n_head + n_head_kv, n_tokens),
        q=q, k=k, v=v, weight_q=weight_q, weight_k=weight_k, **tables, cell=cell,
        y=poisoned((n_tokens, n_head, head_dim)), **caches, eps=EPS,
    )  # fmt: skip
    assert same_bits(found["y"], rotated(q, weight_q))
    for name in caches:
        assert same_bits(found[name], wanted[name])
