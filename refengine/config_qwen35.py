"""What models with gated delta nets have beyond ``ModelConfig``: kinds of layers, MTP blocks, experts.

Keys and tensors of the architectures ``qwen35`` and ``qwen35moe``. The last ``nextn_predict_layers`` blocks of a file
are multi-token prediction (MTP) and no part of the trunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refengine.config import ModelConfig, Shape
    from refengine.gguf_file import GGUFFile

MAX_STATE_HEADS = 2**12
MAX_STATE_SIZE = 2**12
MAX_TAPS = 64
MAX_EXPERTS = 2**12
DEFAULT_INTERVAL = 4
#: tensors that an MTP block may leave to the trunk
OPTIONAL_NEXTN = ("embed_tokens", "shared_head_head", "shared_head_norm")


@dataclass(frozen=True)
class HybridConfig:
    """The recurrent part of a model; ``recurrent[layer]`` says which layers of the trunk are gated delta nets."""

    recurrent: tuple[bool, ...]
    #: elements of a key head, and of a value head
    state_size: int
    n_key_head: int
    n_value_head: int
    #: taps of the short convolution
    n_taps: int
    n_nextn: int
    #: those of ``OPTIONAL_NEXTN`` that the file has
    nextn_tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if all(self.recurrent) or not any(self.recurrent):
            raise ValueError(f"{self}: want both kinds of layers")
        if min(self.state_size, self.n_key_head) < 1 or self.n_value_head % self.n_key_head:
            raise ValueError(f"{self}: want sizes of at least 1, n_value_head a multiple of n_key_head")
        if self.n_taps < 2 or self.n_nextn < 0:
            raise ValueError(f"{self}: want at least two taps, no less than 0 MTP blocks")

    @property
    def n_embd_value(self) -> int:
        """Width of all value heads together."""
        return self.n_value_head * self.state_size

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.n_key_head * self.state_size + self.n_embd_value

    @classmethod
    def from_gguf(cls, gguf: GGUFFile, n_block: int, n_rot: int) -> HybridConfig:
        """Read what a file of ``n_block`` blocks says; raises as ``ModelConfig.from_gguf``."""
        arch = gguf.architecture
        n_nextn = gguf.get_int(f"{arch}.nextn_predict_layers", 0, minimum=0, maximum=n_block - 1)
        if n_nextn > 1:
            key = f"key '{arch}.nextn_predict_layers'"
            raise gguf.unsupported(key, f"is {n_nextn}; want at most one MTP block")
        n_layer = n_block - n_nextn
        _check_sections(gguf, arch, n_rot)
        state_size = gguf.get_int(f"{arch}.ssm.state_size", minimum=1, maximum=MAX_STATE_SIZE)
        n_key_head = gguf.get_int(f"{arch}.ssm.group_count", minimum=1, maximum=MAX_STATE_HEADS)
        n_value_head = gguf.get_int(f"{arch}.ssm.time_step_rank", minimum=1, maximum=MAX_STATE_HEADS)
        if n_value_head % n_key_head:
            wanted = f"want a multiple of group_count {n_key_head}"
            raise gguf.error(f"key '{arch}.ssm.time_step_rank'", f"is {n_value_head}; {wanted}")
        inner = gguf.get_int(f"{arch}.ssm.inner_size")
        if inner != state_size * n_value_head:
            wanted = f"want state_size * time_step_rank, {state_size * n_value_head}"
            raise gguf.error(f"key '{arch}.ssm.inner_size'", f"is {inner}; {wanted}")
        block = f"blk.{n_layer}.nextn"
        return cls(
            recurrent=_recurrent(gguf, arch, n_layer, n_block),
            state_size=state_size,
            n_key_head=n_key_head,
            n_value_head=n_value_head,
            n_taps=gguf.get_int(f"{arch}.ssm.conv_kernel", minimum=2, maximum=MAX_TAPS),
            n_nextn=n_nextn,
            nextn_tensors=tuple(
                name for name in OPTIONAL_NEXTN if n_nextn and f"{block}.{name}.weight" in gguf.tensors
            ),
        )


@dataclass(frozen=True)
class ExpertConfig:
    """Mixture of experts with one shared expert; ``n_ff`` is the width of each routed one."""

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int

    def __post_init__(self) -> None:
        if not 1 <= self.n_used <= self.n_expert or min(self.n_ff, self.n_ff_shared) < 1:
            raise ValueError(f"{self}: want sizes of at least 1, n_used at most n_expert")

    @classmethod
    def from_gguf(cls, gguf: GGUFFile, n_ff: int | None, max_ff: int) -> ExpertConfig:
        """Read what a file says; absent widths follow from ``n_ff``. Raises as ``ModelConfig.from_gguf``."""
        arch = gguf.architecture
        n_expert = gguf.get_int(f"{arch}.expert_count", minimum=1, maximum=MAX_EXPERTS)
        n_used = gguf.get_int(f"{arch}.expert_used_count", minimum=1, maximum=n_expert)
        routed = max(1, n_ff // n_used) if n_ff else None
        return cls(
            n_expert=n_expert,
            n_used=n_used,
            n_ff=gguf.get_int(f"{arch}.expert_feed_forward_length", routed, minimum=1, maximum=max_ff),
            n_ff_shared=gguf.get_int(
                f"{arch}.expert_shared_feed_forward_length", n_ff, minimum=1, maximum=max_ff
            ),
        )


def _recurrent(gguf: GGUFFile, arch: str, n_layer: int, n_block: int) -> tuple[bool, ...]:
    key = f"{arch}.attention.recurrent_layers"
    if key in gguf.metadata:
        kinds = gguf.get_bools(key, length=n_block)
        if any(kinds[n_layer:]):
            raise gguf.error(f"key '{key}'", f"is true for block {n_layer}; want an MTP block that attends")
    else:
        key = f"{arch}.full_attention_interval"
        interval = gguf.get_int(key, DEFAULT_INTERVAL, minimum=1)
        kinds = [(layer + 1) % interval != 0 for layer in range(n_layer)]
    recurrent = tuple(kinds[:n_layer])
    if all(recurrent) or not any(recurrent):
        kind = "recurrent" if all(recurrent) else "attention"
        raise gguf.unsupported(f"key '{key}'", f"all {n_layer} layers are {kind}; want both kinds")
    return recurrent


def _check_sections(gguf: GGUFFile, arch: str, n_rot: int) -> None:
    """Refuse sections with a pair on the fourth axis, which does not rotate with a text's positions."""
    key = f"{arch}.rope.dimension_sections"
    sections = gguf.get_ints(key, length=4, minimum=0, maximum=2**16)
    total = sum(sections)
    for pair in range(n_rot // 2):
        c = pair % total if total else 0
        if c >= 3 * sections[c % 3]:
            raise gguf.unsupported(
                f"key '{key}'", f"is {sections}, which leaves pair {pair} of {n_rot // 2} without an axis"
            )


# --- tensors


def hybrid_tensors(config: ModelConfig, hybrid: HybridConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the trunk's layers."""
    for layer, recurrent in enumerate(hybrid.recurrent):
        yield from _recurrent_block(config, hybrid, layer) if recurrent else _attention_block(config, layer)
        yield from _feed_forward(config, layer)


def mtp_tensors(config: ModelConfig, hybrid: HybridConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the MTP block."""
    n_embd, layer = config.n_embd, config.n_layer
    if not hybrid.n_nextn:
        return
    yield from _attention_block(config, layer)
    yield from _feed_forward(config, layer)
    block = f"blk.{layer}.nextn"
    yield f"{block}.eh_proj.weight", (n_embd, 2 * n_embd)
    yield f"{block}.enorm.weight", (n_embd,)
    yield f"{block}.hnorm.weight", (n_embd,)
    for name in hybrid.nextn_tensors:
        shape = (n_embd,) if name == "shared_head_norm" else (config.n_vocab, n_embd)
        yield f"{block}.{name}.weight", shape


def _attention_block(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    n_embd, block = config.n_embd, f"blk.{layer}"
    yield f"{block}.attn_norm.weight", (n_embd,)
    yield f"{block}.attn_q.weight", (2 * config.n_embd_q, n_embd)
    yield f"{block}.attn_k.weight", (config.n_embd_kv, n_embd)
    yield f"{block}.attn_v.weight", (config.n_embd_kv, n_embd)
    yield f"{block}.attn_q_norm.weight", (config.head_dim,)
    yield f"{block}.attn_k_norm.weight", (config.head_dim,)
    yield f"{block}.attn_output.weight", (n_embd, config.n_embd_q)


def _recurrent_block(config: ModelConfig, hybrid: HybridConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    n_embd, n_head, block = config.n_embd, hybrid.n_value_head, f"blk.{layer}"
    yield f"{block}.attn_norm.weight", (n_embd,)
    yield f"{block}.attn_qkv.weight", (hybrid.n_channels, n_embd)
    yield f"{block}.attn_gate.weight", (hybrid.n_embd_value, n_embd)
    yield f"{block}.ssm_conv1d.weight", (hybrid.n_channels, hybrid.n_taps)
    yield f"{block}.ssm_dt.bias", (n_head,)
    yield f"{block}.ssm_a", (n_head,)
    yield f"{block}.ssm_beta.weight", (n_head, n_embd)
    yield f"{block}.ssm_alpha.weight", (n_head, n_embd)
    yield f"{block}.ssm_norm.weight", (hybrid.state_size,)
    yield f"{block}.ssm_out.weight", (n_embd, hybrid.n_embd_value)


def _feed_forward(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    n_embd, experts, block = config.n_embd, config.experts, f"blk.{layer}"
    yield f"{block}.post_attention_norm.weight", (n_embd,)
    if experts is None:
        yield f"{block}.ffn_gate.weight", (config.n_ff, n_embd)
        yield f"{block}.ffn_up.weight", (config.n_ff, n_embd)
        yield f"{block}.ffn_down.weight", (n_embd, config.n_ff)
        return
    yield f"{block}.ffn_gate_inp.weight", (experts.n_expert, n_embd)
    yield f"{block}.ffn_gate_exps.weight", (experts.n_expert, experts.n_ff, n_embd)
    yield f"{block}.ffn_up_exps.weight", (experts.n_expert, experts.n_ff, n_embd)
    yield f"{block}.ffn_down_exps.weight", (experts.n_expert, n_embd, experts.n_ff)
    # A matrix of one row, which files hold as a vector.
    yield f"{block}.ffn_gate_inp_shexp.weight", (1, n_embd)
    yield f"{block}.ffn_gate_shexp.weight", (experts.n_ff_shared, n_embd)
    yield f"{block}.ffn_up_shexp.weight", (experts.n_ff_shared, n_embd)
    yield f"{block}.ffn_down_shexp.weight", (n_embd, experts.n_ff_shared)


def check_hybrid_tensors(gguf: GGUFFile, config: ModelConfig, hybrid: HybridConfig) -> None:
    """Refuse sound files of another form by what they are, before a tensor is missed in them."""
    if hybrid.n_nextn and "blk.0.attn_norm.weight" not in gguf.tensors:
        raise gguf.unsupported(
            "tensor 'blk.0.attn_norm.weight'",
            "is missing, as in a file of an MTP block alone; want the trunk",
        )
    # On a recurrent layer attn_qkv is something else, which every file has.
    attends = [*config.attention_layers, *range(config.n_layer, config.n_layer + hybrid.n_nextn)]
    for layer in attends:
        name = f"blk.{layer}.attn_qkv.weight"
        if name in gguf.tensors:
            raise gguf.unsupported(
                f"tensor '{name}'", "queries, keys and values in one; want attn_q, attn_k and attn_v"
            )
    for layer in range(config.n_layer + hybrid.n_nextn):
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        if name in gguf.tensors:
            raise gguf.unsupported(f"tensor '{name}'", "gates and ups in one; want two tensors of them")
