"""Hyperparameters of llama-family models, and the tensors that a file of them must hold.

Keys and defaults are those of llama.cpp. A value outside its range, or a tensor that this engine would not
use, is refused by name: a model that runs with part of it ignored gives text that looks right.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from refengine.config_qwen35 import (
    ExpertConfig,
    HybridConfig,
    check_hybrid_tensors,
    hybrid_tensors,
    mtp_tensors,
)
from refengine.gguf_values import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.errors import ModelFileError, UnsupportedModelError
    from refengine.gguf_file import GGUFFile

RopePairing: TypeAlias = Literal["norm", "neox"]
Shape: TypeAlias = tuple[int, ...]

MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS
MAX_CONTEXT = 2**24
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20  # n_embd
MAX_FF = 2**22
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12


@dataclass(frozen=True)
class Architecture:
    """What a name of ``general.architecture`` stands for, where the file itself does not say it."""

    rope_pairing: RopePairing
    qk_norm: bool
    rope_freqs: bool  # may the file divide each RoPE frequency by a factor (Llama 3)
    hybrid: bool = False  # gated delta nets between the attention layers
    experts: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(rope_pairing="norm", qk_norm=False, rope_freqs=True),
    "qwen3": Architecture(rope_pairing="neox", qk_norm=True, rope_freqs=False),
    "qwen35": Architecture(rope_pairing="neox", qk_norm=True, rope_freqs=False, hybrid=True),
    "qwen35moe": Architecture(rope_pairing="neox", qk_norm=True, rope_freqs=False, hybrid=True, experts=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters of a model of grouped-query attention, RMS norm and SwiGLU.

    ``rope_pairing``: ``norm`` rotates elements 2i and 2i+1 of a head together, ``neox`` i and i + n_rot/2.
    ``rope_scaling``: ``linear`` multiplies positions by ``rope_freq_scale``; ``none`` has 1.0.
    ``n_layer`` does not count the MTP block of a hybrid model. ``n_ff`` of a model with experts is what the file
    says, or the width of its shared expert; layers have ``experts.n_ff`` and ``experts.n_ff_shared``.
    """

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    rope_base: float
    rope_pairing: RopePairing
    rms_eps: float
    n_ctx_train: int
    n_vocab: int
    attention_scale: float
    qk_norm: bool
    rope_scaling: Literal["none", "linear"] = "none"
    rope_freq_scale: float = 1.0
    rope_freqs: bool = False  # the file has rope_freqs.weight, a divisor per frequency
    tied_embeddings: bool = False  # the file has no output.weight: token_embd.weight serves
    hybrid: HybridConfig | None = None  # None: every layer attends
    experts: ExpertConfig | None = None  # None: every feed-forward is dense

    def __post_init__(self) -> None:
        sizes = (
            self.n_layer,
            self.n_embd,
            self.n_ff,
            self.n_head,
            self.n_head_kv,
            self.head_dim,
            self.n_vocab,
        )
        if min(sizes) < 1 or self.n_head % self.n_head_kv:
            raise ValueError(f"{self}: want sizes of at least 1, n_head a multiple of n_head_kv")
        if self.n_rot < 2 or self.n_rot % 2 or self.n_rot > self.head_dim:
            raise ValueError(f"{self}: want n_rot even, from 2 to head_dim")
        positive = (self.rope_base, self.rms_eps, self.attention_scale, self.rope_freq_scale)
        if not all(math.isfinite(value) and value > 0 for value in positive):
            raise ValueError(f"{self}: want rope_base, rms_eps and the scales finite and above 0")
        if self.hybrid is not None and len(self.hybrid.recurrent) != self.n_layer:
            raise ValueError(f"{self}: want as many kinds of layers as layers")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend, which are those that have a KV cache."""
        hybrid = self.hybrid
        return tuple(i for i in range(self.n_layer) if hybrid is None or not hybrid.recurrent[i])

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a recurrent state."""
        return () if self.hybrid is None else tuple(i for i, r in enumerate(self.hybrid.recurrent) if r)

    @property
    def n_embd_q(self) -> int:
        """Width of all query heads together."""
        return self.n_head * self.head_dim

    @property
    def n_embd_kv(self) -> int:
        """Width of all key heads, or of all value heads, together."""
        return self.n_head_kv * self.head_dim

    @classmethod
    def from_gguf(cls, gguf: GGUFFile) -> ModelConfig:
        """Read the hyperparameters of a file.

        Raises ModelFileError for a value that no sound model has, UnsupportedModelError for a model that this
        engine does not run. Tensors are checked by ``check_tensors``.
        """
        arch = gguf.architecture
        entry = ARCHITECTURES.get(arch)
        if entry is None:
            raise gguf.unsupported(
                f"architecture '{printable(arch)}'", f"want one of {', '.join(ARCHITECTURES)}"
            )
        _refuse_unsupported_keys(gguf, arch, experts=entry.experts)
        n_layer = gguf.get_int(f"{arch}.block_count", minimum=1, maximum=MAX_LAYERS)
        n_embd = gguf.get_int(f"{arch}.embedding_length", minimum=1, maximum=MAX_WIDTH)
        n_head = _uniform(gguf, f"{arch}.attention.head_count", n_layer, None, MAX_HEADS)
        n_head_kv = _uniform(gguf, f"{arch}.attention.head_count_kv", n_layer, n_head, MAX_HEADS)
        if n_head % n_head_kv:
            raise gguf.error(
                f"key '{arch}.attention.head_count_kv'",
                f"is {n_head_kv}; want a divisor of head_count {n_head}",
            )
        head_dim = _head_dim(gguf, arch, n_embd, n_head)
        rope_scaling, rope_freq_scale = _rope_scaling(gguf, arch)
        n_rot = _n_rot(gguf, arch, head_dim)
        hybrid = HybridConfig.from_gguf(gguf, n_layer, n_rot) if entry.hybrid else None
        n_ff_key = f"{arch}.feed_forward_length"
        n_ff = None
        if not entry.experts or n_ff_key in gguf.metadata:
            n_ff = _uniform(gguf, n_ff_key, n_layer, None, MAX_FF)
        experts = ExpertConfig.from_gguf(gguf, n_ff, MAX_FF) if entry.experts else None
        return cls(
            architecture=arch,
            name=gguf.get_str("general.name", ""),
            n_layer=n_layer if hybrid is None else len(hybrid.recurrent),
            n_embd=n_embd,
            n_ff=n_ff or (experts.n_ff_shared if experts is not None else 0),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            n_rot=n_rot,
            rope_base=_positive(gguf, f"{arch}.rope.freq_base", 10000.0, 1e15),
            rope_pairing=entry.rope_pairing,
            rms_eps=_positive(gguf, f"{arch}.attention.layer_norm_rms_epsilon", None, 1.0),
            n_ctx_train=gguf.get_int(f"{arch}.context_length", minimum=1, maximum=MAX_CONTEXT),
            n_vocab=_n_vocab(gguf, arch),
            attention_scale=1.0 / math.sqrt(head_dim),
            qk_norm=entry.qk_norm,
            rope_scaling=rope_scaling,
            rope_freq_scale=rope_freq_scale,
            rope_freqs=entry.rope_freqs and "rope_freqs.weight" in gguf.tensors,
            tied_embeddings="output.weight" not in gguf.tensors,
            hybrid=hybrid,
            experts=experts,
        )


def _refuse_unsupported_keys(gguf: GGUFFile, arch: str, *, experts: bool) -> None:
    n_split = gguf.get_int("split.count", 1)
    if n_split > 1:
        raise gguf.unsupported("key 'split.count'", f"one of {n_split} parts; merge them into one file")
    for key in (f"{arch}.expert_count", f"{arch}.expert_used_count"):
        n_expert = 0 if experts else gguf.get_int(key, 0)
        if n_expert:
            raise gguf.unsupported(f"key '{key}'", f"is {n_expert}: mixture of experts; want 0")
    if not gguf.get_bool(f"{arch}.attention.causal", default=True):
        raise gguf.unsupported(f"key '{arch}.attention.causal'", "is false: an encoder; want a causal model")


def _uniform(gguf: GGUFFile, key: str, n_layer: int, default: int | None, maximum: int) -> int:
    values = set(gguf.get_layer_ints(key, n_layer, default, minimum=1, maximum=maximum))
    if len(values) > 1:
        seen = f"differs between layers, {min(values)} to {max(values)}"
        raise gguf.unsupported(f"key '{key}'", f"{seen}; want one value for all layers")
    return values.pop()


def _positive(gguf: GGUFFile, key: str, default: float | None, maximum: float) -> float:
    value = gguf.get_float(key, default, maximum=maximum)
    if value <= 0:
        raise gguf.error(f"key '{key}'", f"is {value}; want above 0, at most {maximum}")
    return value


def _head_dim(gguf: GGUFFile, arch: str, n_embd: int, n_head: int) -> int:
    key = f"{arch}.attention.key_length"
    if key not in gguf.metadata and n_embd % n_head:
        raise gguf.error(
            f"key '{arch}.attention.head_count'",
            f"is {n_head}; want a divisor of embedding_length {n_embd}, or a key_length",
        )
    head_dim = gguf.get_int(key, n_embd // n_head, minimum=1, maximum=MAX_HEAD_DIM)
    value_key = f"{arch}.attention.value_length"
    value_dim = gguf.get_int(value_key, head_dim, minimum=1, maximum=MAX_HEAD_DIM)
    if value_dim != head_dim:
        raise gguf.unsupported(f"key '{value_key}'", f"is {value_dim}; want key_length {head_dim}")
    return head_dim


def _n_rot(gguf: GGUFFile, arch: str, head_dim: int) -> int:
    key = f"{arch}.rope.dimension_count"
    n_rot = gguf.get_int(key, head_dim, minimum=1, maximum=head_dim)
    if n_rot % 2:
        raise gguf.error(f"key '{key}'", f"is {n_rot} (default: key_length); want an even number")
    return n_rot


def _rope_scaling(gguf: GGUFFile, arch: str) -> tuple[Literal["none", "linear"], float]:
    # llama.cpp takes a missing type for linear, and a factor of 0 for none.
    key = f"{arch}.rope.scaling.type"
    kind = gguf.get_str(key, "linear")
    if kind not in {"none", "linear"}:
        raise gguf.unsupported(f"key '{key}'", f"is '{printable(kind)}'; want none or linear")
    attn_key = f"{arch}.rope.scaling.attn_factor"
    attn_factor = gguf.get_float(attn_key, 1.0)
    if attn_factor != 1.0:
        raise gguf.unsupported(f"key '{attn_key}'", f"is {attn_factor}; want 1.0")
    factor = 0.0
    for factor_key in (f"{arch}.rope.scale_linear", f"{arch}.rope.scaling.factor"):  # the later name wins
        factor = gguf.get_float(factor_key, factor, minimum=0.0, maximum=1e6)
        if 0.0 < factor < 1e-6:
            raise gguf.error(f"key '{factor_key}'", f"is {factor}; want 0 for none, or 1e-6 to 1e6")
    if kind == "none" or factor in {0.0, 1.0}:
        return "none", 1.0
    return "linear", 1.0 / factor


def _n_vocab(gguf: GGUFFile, arch: str) -> int:
    tokens_key, size_key = "tokenizer.ggml.tokens", f"{arch}.vocab_size"
    if tokens_key not in gguf.metadata and size_key not in gguf.metadata:
        raise gguf.error(f"key '{tokens_key}'", f"is missing; want it, or at least '{size_key}'")
    if tokens_key not in gguf.metadata:
        return gguf.get_int(size_key, minimum=1, maximum=MAX_VOCAB)
    n_tokens = gguf.metadata.array_length(tokens_key)
    if n_tokens is None or not gguf.metadata.type_name(tokens_key).startswith("str["):
        seen = gguf.metadata.type_name(tokens_key)
        raise gguf.error(f"key '{tokens_key}'", f"has type {seen}; want an array of strings")
    if not 1 <= n_tokens <= MAX_VOCAB:
        raise gguf.error(f"key '{tokens_key}'", f"has {n_tokens} tokens; want 1 to {MAX_VOCAB}")
    n_vocab = gguf.get_int(size_key, n_tokens)
    if n_vocab != n_tokens:
        raise gguf.error(f"key '{size_key}'", f"is {n_vocab}; want {n_tokens}, the length of {tokens_key}")
    return n_tokens


def _trunk_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    n_embd, n_ff = config.n_embd, config.n_ff
    yield "token_embd.weight", (config.n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    if not config.tied_embeddings:
        yield "output.weight", (config.n_vocab, n_embd)
    if config.rope_freqs:
        yield "rope_freqs.weight", (config.n_rot // 2,)
    if config.hybrid is not None:
        yield from hybrid_tensors(config, config.hybrid)
        return
    for layer in range(config.n_layer):
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", (n_embd,)
        yield f"{block}.attn_q.weight", (config.n_embd_q, n_embd)
        yield f"{block}.attn_k.weight", (config.n_embd_kv, n_embd)
        yield f"{block}.attn_v.weight", (config.n_embd_kv, n_embd)
        if config.qk_norm:
            yield f"{block}.attn_q_norm.weight", (config.head_dim,)
            yield f"{block}.attn_k_norm.weight", (config.head_dim,)
        yield f"{block}.attn_output.weight", (n_embd, config.n_embd_q)
        yield f"{block}.ffn_norm.weight", (n_embd,)
        yield f"{block}.ffn_gate.weight", (n_ff, n_embd)
        yield f"{block}.ffn_up.weight", (n_ff, n_embd)
        yield f"{block}.ffn_down.weight", (n_embd, n_ff)


def _tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield from _trunk_tensors(config)
    if config.hybrid is not None:
        yield from mtp_tensors(config, config.hybrid)


def loaded_tensors(config: ModelConfig, *, draft: bool) -> dict[str, Shape]:
    """Those of ``expected_tensors`` that the engine computes with: the MTP block's only if it is to ``draft``."""
    return dict(_tensors(config) if draft else _trunk_tensors(config))


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape, in C order, of the tensors that a file of this configuration has: these and no more."""
    return dict(_tensors(config))


def check_tensors(gguf: GGUFFile, config: ModelConfig) -> None:
    """Check that a file holds exactly the tensors of its configuration, each of its shape.

    Raises ModelFileError for a tensor that is missing, misshapen or of a layer that the model does not have,
    UnsupportedModelError for one that this engine would have to ignore: biases, experts, adapters.
    """
    if config.hybrid is not None:
        check_hybrid_tensors(gguf, config, config.hybrid)
    used = set()
    for name, wanted in _tensors(config):  # one by one: a wrong block_count ends at the first missing layer
        info = gguf.tensors.get(name)
        if info is None:
            raise gguf.error(f"tensor '{name}'", f"is missing; want shape {list(wanted)}")
        if _squeezed(info.shape) != _squeezed(wanted):
            raise gguf.error(f"tensor '{name}'", f"has shape {list(info.shape)}; want {list(wanted)}")
        used.add(name)
    for name in gguf.tensors:
        if name not in used:
            raise _unused_tensor(gguf, name, config)


def _squeezed(shape: Shape) -> Shape:
    # ggml does not tell [n] from [1, n]: dimensions of 1 in front carry nothing.
    first = next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))
    return shape[first:]


def _unused_tensor(gguf: GGUFFile, name: str, config: ModelConfig) -> ModelFileError | UnsupportedModelError:
    field = f"tensor '{printable(name)}'"
    block = re.match(r"blk\.([0-9]+)\.", name)
    n_layer = config.n_layer + (config.hybrid.n_nextn if config.hybrid is not None else 0)
    if block and int(block[1]) >= n_layer:
        wanted = f"want layers 0 to {n_layer - 1}, as {config.architecture}.block_count says"
        return gguf.error(field, f"is of layer {block[1]}; {wanted}")
    if re.search(r"_exps|_shexp|ffn_gate_inp|\.ffn_(gate|up|down)\.[0-9]+\.", name):
        problem = "a tensor of a mixture of experts"
    elif name.endswith(".bias"):
        problem = "a bias"
    else:
        problem = "an unknown tensor"
    return gguf.unsupported(field, f"{problem}, which architecture '{config.architecture}' would ignore here")
