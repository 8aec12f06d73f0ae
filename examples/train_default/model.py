"""qwen35 with its MTP block in plain PyTorch.

Parameters have the names and layouts that they have in a GGUF file, so that exporting one is writing it down; what
a converter of other checkpoints has to permute (value heads beside their key heads) is in the file's order from the
start: value head v reads key head ``v % n_key_head``. Shapes: B sequences, T tokens, E = n_embd.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from delta import delta_rule
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everyone gives it


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. The defaults make 10.5 M parameters: 11.4 MB in Q8_0 with the vocabulary.

    Width 256 lets each row be cut into blocks of 32 (Q8_0) and of 256 (the K-quants); eight layers of trunk over one
    MTP block make a draft cheap beside the decode that it saves.
    """

    n_vocab: int = 4096
    n_embd: int = 256
    #: layers of the trunk; the MTP block comes on top
    n_layer: int = 8
    n_ff: int = 768
    #: every so many-th layer attends, the others are gated delta nets
    full_attention_interval: int = 4
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_rot: int = 32
    rope_base: float = 10_000.0
    state_size: int = 64
    n_key_head: int = 4
    n_value_head: int = 8
    conv_kernel: int = 4
    rms_eps: float = 1e-6
    #: longest text that it is trained on
    n_ctx: int = 1024
    dropout: float = 0.1

    def __post_init__(self) -> None:
        assert self.n_head % self.n_head_kv == 0, self
        assert self.n_value_head % self.n_key_head == 0, self
        assert self.n_rot % 2 == 0, self
        assert self.n_rot <= self.head_dim, self
        assert self.n_layer % self.full_attention_interval == 0, self

    @property
    def key_dim(self) -> int:
        """Width of all key heads together."""
        return self.n_key_head * self.state_size

    @property
    def value_dim(self) -> int:
        """Width of all value heads together."""
        return self.n_value_head * self.state_size

    @property
    def rope_sections(self) -> tuple[int, int, int, int]:
        """Pairs on the axes t, h, w, e: evenly on the first three, so that text rotates them all alike."""
        pairs = self.n_rot // 2
        return (pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0

    def attends(self, layer: int) -> bool:
        """Whether a layer of the trunk is full attention."""
        return (layer + 1) % self.full_attention_interval == 0


def linear(n_in: int, n_out: int) -> nn.Linear:
    """A matrix without bias: weight (n_out, n_in)."""
    return nn.Linear(n_in, n_out, bias=False)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size) float32 (float64 stays)."""
        x = x if x.dtype == torch.float64 else x.float()
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotary embedding of x (B, T, heads, head_dim): pair i is elements i and i + n_rot / 2; the rest stays."""
    half = config.n_rot // 2
    position = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    frequency = config.rope_base ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = (position[:, None] * frequency)[:, None]  # (T, 1, half)
    first, second, rest = x.split([half, half, config.head_dim - 2 * half], dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)


class Layer(nn.Module):
    """What every layer has: a norm in front of its mixing of tokens, and a feed-forward part behind."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.post_attention_norm = RMSNorm(config.n_embd, config.rms_eps)
        self.ffn_gate, self.ffn_up = linear(config.n_embd, config.n_ff), linear(config.n_embd, config.n_ff)
        self.ffn_down = linear(config.n_ff, config.n_embd)

    def add(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual x (B, T, E) and what the layer mixed of it -> the layer's result (B, T, E)."""
        x = x + F.dropout(mixed, self.config.dropout, self.training)
        u = self.post_attention_norm(x)
        u = self.ffn_down(F.silu(self.ffn_gate(u)) * self.ffn_up(u))
        return x + F.dropout(u, self.config.dropout, self.training)


class Attention(Layer):
    """Parts of a layer with full attention whose output a gate scales."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_embd, dim = config.n_embd, config.head_dim
        self.attn_q = linear(n_embd, 2 * dim * config.n_head)
        self.attn_k = linear(n_embd, dim * config.n_head_kv)
        self.attn_v = linear(n_embd, dim * config.n_head_kv)
        self.attn_q_norm = RMSNorm(dim, config.rms_eps)
        self.attn_k_norm = RMSNorm(dim, config.rms_eps)
        self.attn_output = linear(dim * config.n_head, n_embd)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Normed x (B, T, E) -> keys and values (B, n_head, T, head_dim), shared ones repeated."""
        config = self.config
        k = self.attn_k(x).unflatten(-1, (config.n_head_kv, config.head_dim))
        v = self.attn_v(x).unflatten(-1, (config.n_head_kv, config.head_dim))
        k = rotate(self.attn_k_norm(k), config).to(v.dtype)
        repeat = config.n_head // config.n_head_kv
        return tuple(y.transpose(1, 2).repeat_interleave(repeat, dim=1) for y in (k, v))

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normed x (B, T, E) over keys and values (B, n_head, N, head_dim) -> (B, T, E).

        mask (T, N) says what may be seen; None: what is not later.
        """
        config = self.config
        q_gate = self.attn_q(x).unflatten(-1, (config.n_head, 2 * config.head_dim))
        q, gate = q_gate.chunk(2, dim=-1)  # of each head [query | gate]
        q = rotate(self.attn_q_norm(q), config).to(v.dtype).transpose(1, 2)
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        gated = read.transpose(1, 2) * gate.sigmoid()
        return self.attn_output(gated.flatten(2))


class AttentionLayer(Attention):
    """One of the trunk."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        normed = self.attn_norm(x)
        return self.add(x, self.attend(normed, *self.keys_values(normed)))


class Bias(nn.Module):
    """A vector that a file has under a name of its own."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(value)


class DeltaNet(Layer):
    """A layer of the trunk with a gated delta net."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_embd, heads = config.n_embd, config.n_value_head
        n_channels = 2 * config.key_dim + config.value_dim
        self.attn_qkv = linear(n_embd, n_channels)
        self.attn_gate = linear(n_embd, config.value_dim)
        self.ssm_conv1d = linear(
            config.conv_kernel, n_channels
        )  # weight (n_channels, taps), the last the current token's
        self.ssm_alpha, self.ssm_beta = linear(n_embd, heads), linear(n_embd, heads)
        # Half-lives from under one token to hundreds.
        rate = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))
        self.ssm_dt = Bias(rate + torch.log(-torch.expm1(-rate)))  # softplus of it is the rate
        self.ssm_a_log = nn.Parameter(
            torch.empty(heads).uniform_(1, 16).log()
        )  # a file has ssm_a = -exp of it
        self.ssm_norm = RMSNorm(config.state_size, config.rms_eps)
        self.ssm_out = linear(config.value_dim, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, E)."""
        return self.add(x, self.delta_net(self.attn_norm(x)))

    def delta_net(self, x: Tensor) -> Tensor:
        """Normed x (B, T, E) -> (B, T, E)."""
        config, size = self.config, self.config.state_size
        mixed = short_convolution(self.attn_qkv(x), self.ssm_conv1d.weight)
        q, k, v = mixed.split([config.key_dim, config.key_dim, config.value_dim], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, size)) for y in (q, k, v))  # (B, T, heads, S)
        repeat = config.n_value_head // config.n_key_head
        q, k = (
            unit_length(y, config.rms_eps).repeat(1, 1, repeat, 1) for y in (q, k)
        )  # head v: key head v % n_key_head
        alpha, beta = self.ssm_alpha(x), self.ssm_beta(x)
        # Sums of many small decays: bfloat16 would lose them.
        with torch.autocast(x.device.type, enabled=False):
            wide = self.ssm_a_log.dtype
            g = -self.ssm_a_log.exp() * F.softplus(alpha.to(wide) + self.ssm_dt.bias)
            read = delta_rule(q.to(wide), k.to(wide), v.to(wide), g, beta.to(wide).sigmoid())
        z = self.attn_gate(x).unflatten(-1, (-1, size))
        return self.ssm_out((self.ssm_norm(read) * F.silu(z)).flatten(2))


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Silu of a causal convolution of each channel: x (B, T, C), weight (C, taps) -> (B, T, C)."""
    n_tokens, taps = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    weight = weight.to(x.dtype)
    summed = padded[:, :n_tokens] * weight[:, 0]
    for tap in range(1, taps):
        summed = summed + padded[:, tap : tap + n_tokens] * weight[:, tap]
    return F.silu(summed)


def unit_length(x: Tensor, eps: float) -> Tensor:
    """Give x / sqrt(sum(x^2) + eps) over the last axis, in float32 (float64 stays)."""
    x = x if x.dtype == torch.float64 else x.float()
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def behind(x: Tensor) -> Tensor:
    """Rows (B, T, E) moved one on: each token's is that of the token before, the first one's zeros."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


class NextN(nn.Module):
    """What the MTP block has beyond a layer with attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.shared_head_norm = (
            RMSNorm(config.n_embd, config.rms_eps) for _ in range(3)
        )
        self.eh_proj = linear(2 * config.n_embd, config.n_embd)


class MtpBlock(Attention):
    """Multi-token prediction: from token p and the hidden row of p - 1, the token p + 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.nextn = NextN(config)

    def forward(self, embedded: Tensor, before: Tensor, n_draft: int) -> list[Tensor]:
        """Embedded tokens, and the trunk's row before each (B, T, E) -> rows (B, T, E) of each of ``n_draft`` steps.

        Row p of step s is what an engine's s-th draft is made from that last saw the trunk's row p - s - 1: the steps
        before it went on from the block's own rows, and their keys and values stand in its cache.
        Rows below s mean nothing.
        """
        ahead = torch.arange(embedded.shape[1], device=embedded.device)
        ahead = ahead[:, None] - ahead[None, :]  # how far row p is ahead of column j
        made: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        embedded = self.nextn.enorm(embedded)
        for step in range(n_draft):
            x = self.nextn.eh_proj(torch.cat([embedded, self.nextn.hnorm(before)], dim=-1))
            normed = self.attn_norm(x)
            k, v = self.keys_values(normed)
            keys.append(k)
            values.append(v)
            # The trunk's rows up to where the draft began, then one row of each step.
            mask = torch.cat([ahead >= step, *(ahead == step - s for s in range(1, step + 1))], dim=1)
            read = self.attend(normed, torch.cat(keys, 2), torch.cat(values, 2), mask if step else None)
            made.append(self.nextn.shared_head_norm(self.add(x, read)))
            before = behind(made[-1])
        return made


class Qwen35(nn.Module):
    """Trunk, MTP block and the vocabulary that both share. ``state_dict`` has the names of a GGUF file."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        trunk = [
            AttentionLayer(config) if config.attends(layer) else DeltaNet(config)
            for layer in range(config.n_layer)
        ]
        self.blk = nn.ModuleList([*trunk, MtpBlock(config)])
        self.output_norm = RMSNorm(config.n_embd, config.rms_eps)
        for name, parameter in self.named_parameters():
            if name.endswith("ssm_conv1d.weight"):
                nn.init.uniform_(parameter, -(config.conv_kernel**-0.5), config.conv_kernel**-0.5)
            elif parameter.dim() == 2:
                onto_residual = name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight"))
                std = 0.02 / (2 * config.n_layer) ** 0.5 if onto_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, T, E)."""
        return F.dropout(self.token_embd(tokens), self.config.dropout, self.training)

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T) -> h_nextn (B, T, E): the trunk's rows behind ``output_norm``."""
        x = self.embed(tokens)
        for layer in list(self.blk)[:-1]:
            x = layer(x)
        return self.output_norm(x)

    def drafted(self, tokens: Tensor, hidden: Tensor, n_draft: int) -> list[Tensor]:
        """(B, T) and (B, T, E) -> rows (B, T, E) of each draft step, see ``MtpBlock``."""
        return self.blk[-1](self.embed(tokens), behind(hidden), n_draft)

    def logits(self, rows: Tensor) -> Tensor:
        """(B, T, E) -> (B, T, n_vocab); the head is the embedding."""
        return F.linear(rows, self.token_embd.weight)
