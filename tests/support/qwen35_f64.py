"""qwen35 and qwen35moe with their MTP block in float64 NumPy: whole sequences, formulas written out, no kernel's twin.

Shapes in C order; T rows. What the kernels are tested against piece by piece, this is for the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from kv_cells import held

from refengine.gguf_file import GGUFFile

if TYPE_CHECKING:
    from pathlib import Path

    from refengine.kernels.kv_types import CacheType

Array = npt.NDArray[Any]

#: experts' weights are divided by at least this
SMALLEST_WEIGHT_SUM = 2.0**-14


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softmax(x: Array) -> Array:
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def dequantised(gguf: GGUFFile, name: str) -> Array:
    """A tensor of a file: float64 in its own shape."""
    info, raw = gguf.tensor(name), gguf.raw(name)
    if info.type == GGMLQuantizationType.F32:
        return raw.view(np.float32).astype(np.float64).reshape(info.shape)
    rows = raw.reshape(info.n_elements // info.shape[-1], -1)
    return dequantize(rows, info.type).astype(np.float64).reshape(info.shape)


def rotation(position: Array, n_rot: int, base: float, sections: list[int]) -> tuple[Array, Array]:
    """Cosine and sine [T, n_rot / 2] of interleaved multi-axis RoPE for text: axes t, h, w at p, axis e at 0."""
    pair = np.arange(n_rot // 2)
    c = pair % sum(sections)
    on_e = np.ones(len(pair), bool)
    for axis, remainder in ((1, 1), (2, 2), (0, 0)):
        on_e &= ~((c % 3 == remainder) & (c < 3 * sections[axis]))
    angle = np.where(on_e, 0.0, position[:, None]) * base ** (-2.0 * pair / n_rot)
    return np.cos(angle), np.sin(angle)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """x [T, n_head, head_dim]: pair i is elements i and i + n_rot / 2; what lies behind n_rot stays."""
    half = cosine.shape[1]
    c, s = cosine[:, None], sine[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * c - second * s, first * s + second * c, x[..., 2 * half :]], axis=-1)


class Qwen35:
    """A model file in memory; keys and values rounded as caches of some types round them."""

    def __init__(self, path: Path, cache_types: tuple[CacheType, CacheType] = ("f32", "f32")) -> None:
        self.cache_types = cache_types
        with GGUFFile.open(path) as gguf:
            arch = gguf.architecture
            assert arch in ("qwen35", "qwen35moe"), arch
            key = f"{arch}.{{}}".format
            self.n_nextn = gguf.get_int(key("nextn_predict_layers"), 0)
            self.n_layer = gguf.get_int(key("block_count")) - self.n_nextn
            self.n_head = gguf.get_int(key("attention.head_count"))
            self.n_head_kv = gguf.get_int(key("attention.head_count_kv"))
            n_embd = gguf.get_int(key("embedding_length"))
            self.head_dim = gguf.get_int(key("attention.key_length"), n_embd // self.n_head)
            self.eps = gguf.get_float(key("attention.layer_norm_rms_epsilon"))
            self.n_rot = gguf.get_int(key("rope.dimension_count"), self.head_dim)
            self.rope_base = gguf.get_float(key("rope.freq_base"), 10000.0)
            self.sections = gguf.get_ints(key("rope.dimension_sections"), length=4)
            self.state_size = gguf.get_int(key("ssm.state_size"))
            self.n_key_head = gguf.get_int(key("ssm.group_count"))
            self.n_value_head = gguf.get_int(key("ssm.time_step_rank"))
            self.interval = gguf.get_int(key("full_attention_interval"), 4)
            self.n_used = gguf.get_int(key("expert_used_count"), 0)
            self.weights = {name: dequantised(gguf, name) for name in gguf.tensors}

    def is_recurrent(self, layer: int) -> bool:
        return layer < self.n_layer and (layer + 1) % self.interval != 0

    def w(self, layer: int, name: str) -> Array:
        return self.weights[f"blk.{layer}.{name}"]

    def norm(self, x: Array, weight: Array) -> Array:
        return rms(x, weight, self.eps)

    def attention(self, layer: int, u: Array, position: Array) -> Array:
        """Full attention with output gate: u [T, n_embd] -> [T, n_embd]."""
        n_rows, dim = len(u), self.head_dim
        q_gate = (u @ self.w(layer, "attn_q.weight").T).reshape(n_rows, self.n_head, 2 * dim)
        q, gate = q_gate[..., :dim], q_gate[..., dim:]
        k = (u @ self.w(layer, "attn_k.weight").T).reshape(n_rows, self.n_head_kv, dim)
        v = (u @ self.w(layer, "attn_v.weight").T).reshape(n_rows, self.n_head_kv, dim)
        tables = rotation(position, self.n_rot, self.rope_base, self.sections)
        q = rotate(self.norm(q, self.w(layer, "attn_q_norm.weight")), *tables)
        k = rotate(self.norm(k, self.w(layer, "attn_k_norm.weight")), *tables)
        k, v = held(self.cache_types[0], k), held(self.cache_types[1], v)
        group = self.n_head // self.n_head_kv
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)  # head h has key head h // group
        score = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        score = np.where(position[:, None] >= position[None, :], score, -np.inf)
        o = np.einsum("hts,shd->thd", softmax(score), v)
        return (o * sigmoid(gate)).reshape(n_rows, -1) @ self.w(layer, "attn_output.weight").T

    def gated_delta_net(self, layer: int, u: Array) -> Array:
        """Linear attention: u [T, n_embd] -> [T, n_embd], from empty states."""
        n_rows, size = len(u), self.state_size
        m = u @ self.w(layer, "attn_qkv.weight").T
        z = (u @ self.w(layer, "attn_gate.weight").T).reshape(n_rows, self.n_value_head, size)
        step = sigmoid(u @ self.w(layer, "ssm_beta.weight").T)
        x = u @ self.w(layer, "ssm_alpha.weight").T + self.w(layer, "ssm_dt.bias")
        log_decay = self.w(layer, "ssm_a") * np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
        taps = self.w(layer, "ssm_conv1d.weight")  # (channels, taps)
        n_taps = taps.shape[1]
        padded = np.concatenate([np.zeros((n_taps - 1, m.shape[1])), m])
        y = silu(sum(padded[k : k + n_rows] * taps[:, k] for k in range(n_taps)))
        heads = y.reshape(n_rows, -1, size)
        q, k = heads[:, : self.n_key_head], heads[:, self.n_key_head : 2 * self.n_key_head]
        v = heads[:, 2 * self.n_key_head :]
        q = q / np.sqrt((q**2).sum(axis=-1, keepdims=True) + self.eps)
        k = k / np.sqrt((k**2).sum(axis=-1, keepdims=True) + self.eps)
        out = np.empty((n_rows, self.n_value_head, size))
        for head in range(self.n_value_head):
            state = np.zeros((size, size))  # (value index, key index)
            for t in range(n_rows):
                key, query = k[t, head % self.n_key_head], q[t, head % self.n_key_head]
                state = np.exp(log_decay[t, head]) * state
                delta = step[t, head] * (v[t, head] - state @ key)
                state = state + np.outer(delta, key)
                out[t, head] = state @ query / np.sqrt(size)
        gated = self.norm(out, self.w(layer, "ssm_norm.weight")) * silu(z)
        return gated.reshape(n_rows, -1) @ self.w(layer, "ssm_out.weight").T

    def feed_forward(self, layer: int, u: Array) -> Array:
        if f"blk.{layer}.ffn_gate_inp.weight" in self.weights:
            return self.experts(layer, u)
        return swiglu(u, *(self.w(layer, f"ffn_{part}.weight") for part in ("gate", "up", "down")))

    def experts(self, layer: int, u: Array) -> Array:
        p = softmax(u @ self.w(layer, "ffn_gate_inp.weight").T)
        chosen = np.argsort(-p, axis=1, kind="stable")[:, : self.n_used]
        gate, up, down = (self.w(layer, f"ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        shared = swiglu(u, *(self.w(layer, f"ffn_{part}_shexp.weight") for part in ("gate", "up", "down")))
        out = sigmoid(u @ self.w(layer, "ffn_gate_inp_shexp.weight"))[:, None] * shared
        for t, experts in enumerate(chosen):
            weight = p[t, experts] / max(p[t, experts].sum(), SMALLEST_WEIGHT_SUM)
            for w, e in zip(weight, experts, strict=True):
                out[t] += w * swiglu(u[t], gate[e], up[e], down[e])
        return out

    def block(self, layer: int, x: Array, position: Array) -> Array:
        u = self.norm(x, self.w(layer, "attn_norm.weight"))
        mixed = (
            self.gated_delta_net(layer, u) if self.is_recurrent(layer) else self.attention(layer, u, position)
        )
        x = x + mixed
        return x + self.feed_forward(layer, self.norm(x, self.w(layer, "post_attention_norm.weight")))

    @property
    def head(self) -> Array:
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def residual(self, tokens: Array) -> Array:
        """What the last layer of the trunk gives, before the output norm: [T, n_embd]."""
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.n_layer):
            x = self.block(layer, x, np.arange(len(tokens)))
        return x

    def hidden(self, tokens: Array) -> Array:
        """h_nextn, the output norm's result: [T, n_embd]."""
        return self.norm(self.residual(tokens), self.weights["output_norm.weight"])

    def logits(self, hidden: Array) -> Array:
        """[T, n_embd] -> [T, n_vocab]."""
        return hidden @ self.head.T

    def mtp_hidden(self, tokens: Array, hidden: Array, position: Array) -> Array:
        """The MTP block's rows for (token, hidden row before it) at positions, from an empty cache: [T, n_embd]."""
        layer = self.n_layer
        embeddings = self.weights.get(
            f"blk.{layer}.nextn.embed_tokens.weight", self.weights["token_embd.weight"]
        )
        e = self.norm(embeddings[tokens], self.w(layer, "nextn.enorm.weight"))
        h = self.mtp_hnorm(hidden)
        x = np.concatenate([e, h], axis=1) @ self.w(layer, "nextn.eh_proj.weight").T
        x = self.block(layer, x, position)
        last = self.weights.get(
            f"blk.{layer}.nextn.shared_head_norm.weight", self.weights["output_norm.weight"]
        )
        return self.norm(x, last)

    def mtp_hnorm(self, hidden: Array) -> Array:
        return self.norm(hidden, self.w(self.n_layer, "nextn.hnorm.weight"))

    def mtp_logits(self, hidden: Array) -> Array:
        """[T, n_embd] of ``mtp_hidden`` -> [T, n_vocab]."""
        own = f"blk.{self.n_layer}.nextn.shared_head_head.weight"
        return hidden @ self.weights.get(own, self.head).T

    def chain(self, tokens: Array, hidden: Array, n: int) -> tuple[Array, Array]:
        """Greedy drafts after ``tokens`` [T] from trunk rows ``hidden`` [T - 1 or more, n_embd]: [n], [n, n_vocab].

        The MTP block reads every token with the trunk's row before it, the first one with zeros, and then its own
        drafts with its own rows.
        """
        rows = np.concatenate([np.zeros((1, hidden.shape[1])), hidden[: len(tokens) - 1]])
        read, drafted, logits = np.asarray(tokens), [], []
        for _ in range(n):
            own = self.mtp_hidden(read, rows, np.arange(len(read)))[-1:]
            logits.append(self.mtp_logits(own)[0])
            drafted.append(int(logits[-1].argmax()))
            read, rows = np.append(read, drafted[-1]), np.concatenate([rows, own])
        return np.array(drafted, np.int32), np.array(logits)

    def drafts(self, tokens: Array) -> Array:
        """MTP logits for (h[p], tokens[p + 1]) at position p + 1, p from 0: [T - 1, n_vocab]."""
        position = np.arange(1, len(tokens))
        return self.mtp_logits(self.mtp_hidden(tokens[1:], self.hidden(tokens)[:-1], position))
