"""Engines against the same model in float64 NumPy, made of the kernels' twins: with exact caches and with others.

A cache in half precision rounds each key and value to 11 bits, which moves the logits of these models by an NMSE of
3e-8 to 1.5e-7 however exactly everything else is computed. So its results are held against the twin that rounds too,
and so are those of caches with fewer bits.
"""

import functools

import numpy as np
import pytest
from engines import DATA, PAIRS, Array, nmse
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from kv_cells import held
from qwen35_f64 import Qwen35

import refengine
from refengine.config import ModelConfig, expected_tensors
from refengine.gguf_file import GGUFFile, TensorInfo
from refengine.kernels.attention import attention_f64
from refengine.kernels.elementwise import swiglu_f64
from refengine.kernels.kv_types import CacheType
from refengine.kernels.norm import rms_norm_f64
from refengine.kernels.rope import rope_f64, rope_tables

#: the twin is of the llama family; the hybrid models' is ``qwen35_f64``
DENSE = [name for name in PAIRS if name.split("-")[0] in ("llama", "qwen3")]
Pair = tuple[CacheType, CacheType]
F32: Pair = ("f32", "f32")
F16: Pair = ("f16", "f16")


def dequantised(raw: Array, info: TensorInfo) -> Array:
    """A tensor of a file in float64."""
    if info.type == GGMLQuantizationType.F32:
        return raw.view(np.float32).astype(np.float64).reshape(info.shape)
    return dequantize(raw.reshape(info.shape[0], -1), info.type).astype(np.float64).reshape(info.shape)


class Twin:
    """The model in float64 NumPy, whole sequences at a time; keys and values rounded as the cache rounds them."""

    def __init__(self, name: str, cache_types: Pair) -> None:
        self.cache_types = cache_types
        with GGUFFile.open(DATA / f"{name}.gguf") as gguf:
            self.config = ModelConfig.from_gguf(gguf)
            self.weights = {
                key: dequantised(gguf.raw(key), gguf.tensor(key)) for key in expected_tensors(self.config)
            }

    def norm(self, x: Array, weight: str) -> Array:
        return rms_norm_f64(x, self.weights[weight], self.config.rms_eps)

    def heads(self, x: Array, weight: str, n_head: int) -> Array:
        return (x @ self.weights[weight].T).reshape(len(x), n_head, self.config.head_dim)

    def attention(self, x: Array, block: str) -> Array:
        config = self.config
        q = self.heads(x, f"{block}.attn_q.weight", config.n_head)
        k = self.heads(x, f"{block}.attn_k.weight", config.n_head_kv)
        v = self.heads(x, f"{block}.attn_v.weight", config.n_head_kv)
        if config.qk_norm:
            q, k = self.norm(q, f"{block}.attn_q_norm.weight"), self.norm(k, f"{block}.attn_k_norm.weight")
        position = np.arange(len(x))
        tables = rope_tables(len(x), config.n_rot, config.rope_base, config.rope_freq_scale)
        q, k = (rope_f64(a, position, *tables, config.rope_pairing) for a in (q, k))
        k, v = held(self.cache_types[0], k), held(self.cache_types[1], v)
        out = attention_f64(q, k, v, position, config.attention_scale)
        return out.reshape(len(x), -1) @ self.weights[f"{block}.attn_output.weight"].T

    def logits(self, tokens: Array) -> Array:
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.config.n_layer):
            block = f"blk.{layer}"
            x = x + self.attention(self.norm(x, f"{block}.attn_norm.weight"), block)
            h = self.norm(x, f"{block}.ffn_norm.weight")
            both = swiglu_f64(*(h @ self.weights[f"{block}.ffn_{part}.weight"].T for part in ("gate", "up")))
            x = x + both @ self.weights[f"{block}.ffn_down.weight"].T
        head = "token_embd.weight" if self.config.tied_embeddings else "output.weight"
        return self.norm(x, "output_norm.weight") @ self.weights[head].T


@functools.cache
def recorded(name: str) -> tuple[Array, Array]:
    with np.load(DATA / f"{name}.npz") as data:
        return data["tokens"], data["logits"]


def engine_logits(name: str, cache_types: Pair) -> Array:
    options = {
        "cache_type_k": cache_types[0],
        "cache_type_v": cache_types[1],
        "n_ctx": 64,
        "check": "guard",
        "threads": 1,
    }
    with refengine.load(DATA / f"{name}.gguf", **options) as engine:
        return engine.logits(recorded(name)[0].tolist())


@pytest.mark.parametrize("name", DENSE)
def test_an_exact_cache_gives_the_logits_of_the_twin(name: str):
    tokens, logits = recorded(name)
    twin = Twin(name, F32).logits(tokens)
    assert nmse(engine_logits(name, F32), twin) < 1e-11
    assert nmse(twin, logits) < 1e-11


@pytest.mark.parametrize("name", DENSE)
def test_a_half_cache_gives_the_logits_of_the_twin_that_rounds(name: str):
    tokens, logits = recorded(name)
    twin = Twin(name, F16).logits(tokens)
    found = engine_logits(name, F16)
    # A key on the border between two halves may round to the other one, so this is not as close as the exact cache.
    assert nmse(found, twin) < 1e-8
    # What remains against the logits of an exact cache is that rounding, and no more.
    assert 1e-9 < nmse(found, logits) < 1.5 * nmse(twin, logits)


MIXED: list[tuple[str, Pair]] = [
    ("llama", ("bf16", "bf16")),
    ("llama", ("f16", "f32")),
    ("llama-Q4_K_M", ("q8_0", "q8_0")),
    ("llama-Q4_K_M", ("q8_0", "f16")),
    ("llama-Q4_K_M", ("bf16", "q8_0")),
    ("qwen35", F16),
    ("qwen35", ("bf16", "f16")),
    ("qwen35-Q4_K_M", ("q8_0", "q8_0")),
    ("qwen35-Q4_K_M", ("f16", "q8_0")),
]


@pytest.mark.parametrize(("name", "cache_types"), MIXED)
def test_keys_and_values_are_rounded_each_to_their_type(name: str, cache_types: Pair):
    tokens, logits = recorded(name)
    if name.startswith("qwen35"):
        model = Qwen35(DATA / f"{name}.gguf", cache_types)
        twin = model.logits(model.hidden(tokens))
    else:
        twin = Twin(name, cache_types).logits(tokens)
    found = engine_logits(name, cache_types)
    # One key in thousands that lies between two codes and goes to the other one than the twin's makes 5e-9.
    assert nmse(found, twin) < 1e-8
    # Exact caches, or the two types exchanged, would be as far from the twin as these logits are from exact ones.
    assert nmse(found, twin) < nmse(found, logits) / 100
