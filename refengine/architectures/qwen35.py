"""qwen35 and qwen35moe: gated delta nets, every few layers attention with an output gate; dense or experts.

The trunk; ``qwen35_mtp`` builds the MTP block from the same functions. A graph may write a
layer's recurrent state over the one that it read, so it runs once for each micro-batch; ``RecurrentState.abort`` is the
way back from one that failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from refengine.architectures import common
from refengine.errors import UnsupportedModelError
from refengine.kernels.gated_delta import MAX_STATE_SIZE, STATE_SIZE_UNIT
from refengine.kernels.short_conv import segment_columns

if TYPE_CHECKING:
    from refengine.config import ModelConfig
    from refengine.config_qwen35 import ExpertConfig, HybridConfig
    from refengine.graph import BatchShape, ContextShape, Graph


def build(config: ModelConfig, context: ContextShape, shape: BatchShape) -> Graph:
    """Graph of one batch: llama's inputs, and segments as ``short_conv`` has them -> result_norm, result_output.

    With ``context.n_hidden`` the final-normed rows are also written to the persistent buffer ``hidden``
    [n_hidden, n_embd], each at its row of the input ``hidden_rows`` (T,); negative: nowhere.
    """
    hybrid = config.hybrid
    assert hybrid is not None, config
    graph, x = common.begin(config, context, shape)
    graph.input("segments", (context.n_sequences, segment_columns(context.n_rs_seq)), "fixed")
    if context.n_hidden:
        graph.input("hidden_rows", (shape.n_tokens,), "tokens")
    for layer in range(config.n_layer):
        il = f"-{layer}"
        a = attention_norm(graph, config, layer, x)
        if hybrid.recurrent[layer]:
            a = _gated_delta_net(graph, config, hybrid, layer, a)
        else:
            a = gated_attention(graph, config, layer, a)
        x = common.add(graph, f"attn_residual{il}", x, a)
        x = common.add(graph, f"l_out{il}", x, feed_forward(graph, config, layer, x))
    if not context.n_hidden:
        return common.end(graph, config, x)
    weights = ("output_norm.weight", common.vocabulary_head(config))
    return common.end_handing_over(graph, config, x, weights=weights, buffer="hidden", rows="hidden_rows")


def attention_norm(graph: Graph, config: ModelConfig, layer: int, x: str) -> str:
    """RMS norm in front of a layer's attention or delta net: (T, n_embd) -> (T, n_embd)."""
    weight = f"blk.{layer}.attn_norm.weight"
    return common.norm(graph, f"attn_norm-{layer}", x, weight, config.rms_eps, config.n_embd)


def feed_forward(graph: Graph, config: ModelConfig, layer: int, x: str) -> str:
    """Norm of the residual sum, then SwiGLU feed-forward or experts: (T, n_embd) -> (T, n_embd)."""
    weight = f"blk.{layer}.post_attention_norm.weight"
    f = common.norm(graph, f"attn_post_norm-{layer}", x, weight, config.rms_eps, config.n_embd)
    if config.experts is None:
        return common.feed_forward(graph, config, layer, f)
    return _experts(graph, config, config.experts, layer, f)


def gated_attention(graph: Graph, config: ModelConfig, layer: int, x: str, name: str = "attn_output") -> str:
    """Causal self-attention whose result each head's gate scales: (T, n_embd) -> (T, n_embd)."""
    block, il = f"blk.{layer}", f"-{layer}"
    # Rows of [query | gate], head after head.
    q_gate = common.mul_mat(graph, f"Qcur_full{il}", x, f"{block}.attn_q.weight", 2 * config.n_embd_q)
    k = common.mul_mat(graph, f"Kcur{il}", x, f"{block}.attn_k.weight", config.n_embd_kv)
    v = common.mul_mat(graph, f"Vcur{il}", x, f"{block}.attn_v.weight", config.n_embd_kv)
    n_tokens = graph.shape.n_tokens
    q = graph.add(
        "query_norm", f"Qcur_normed{il}", (n_tokens, config.n_embd_q), {"q_gate": q_gate},
        weights={"weight": f"{block}.attn_q_norm.weight"}, eps=config.rms_eps,
    )  # fmt: skip
    k = common.norm(
        graph, f"Kcur_normed{il}", k, f"{block}.attn_k_norm.weight", config.rms_eps, config.head_dim
    )
    attended = common.attend(graph, config, layer, q, k, v, name="attn_pregate")
    gated = graph.add(
        "output_gate", f"attn_gated{il}", (n_tokens, config.n_embd_q), {"x": attended, "q_gate": q_gate},
        head_dim=config.head_dim,
    )  # fmt: skip
    return common.mul_mat(graph, f"{name}{il}", gated, f"{block}.attn_output.weight", config.n_embd)


def _gated_delta_net(graph: Graph, config: ModelConfig, hybrid: HybridConfig, layer: int, x: str) -> str:
    """Linear attention by the gated delta rule: (T, n_embd) -> (T, n_embd)."""
    if hybrid.state_size % STATE_SIZE_UNIT or hybrid.state_size > MAX_STATE_SIZE:
        raise UnsupportedModelError(
            f"states of {hybrid.state_size} elements are not built; want a multiple of {STATE_SIZE_UNIT}, "
            f"at most {MAX_STATE_SIZE}"
        )
    block, il, n_tokens = f"blk.{layer}", f"-{layer}", graph.shape.n_tokens
    n_head, n_value = hybrid.n_value_head, hybrid.n_embd_value
    qkv = common.mul_mat(
        graph, f"linear_attn_qkv_mixed{il}", x, f"{block}.attn_qkv.weight", hybrid.n_channels
    )
    z = common.mul_mat(graph, f"z{il}", x, f"{block}.attn_gate.weight", n_value)
    beta = common.mul_mat(graph, f"beta{il}", x, f"{block}.ssm_beta.weight", n_head)
    alpha = common.mul_mat(graph, f"alpha{il}", x, f"{block}.ssm_alpha.weight", n_head)
    gates = graph.add(
        "delta_gates", f"delta_gates{il}", (n_tokens, 2, n_head), {"alpha": alpha, "beta": beta},
        weights={"dt_bias": f"{block}.ssm_dt.bias", "a": f"{block}.ssm_a"},
    )  # fmt: skip
    mixed = graph.add(
        "short_conv", f"conv_output_silu{il}", (n_tokens, hybrid.n_channels), {"x": qkv, "segments": "segments"},
        weights={"weight": f"{block}.ssm_conv1d.weight"}, layer=layer,
    )  # fmt: skip
    read = graph.add(
        "gated_delta", f"delta_output{il}", (n_tokens, n_value),
        {"qkv": mixed, "gates": gates, "segments": "segments"},
        layer=layer, state_size=hybrid.state_size, eps=config.rms_eps,
    )  # fmt: skip
    normed = graph.add(
        "gated_norm", f"final_output{il}", (n_tokens, n_value), {"x": read, "z": z},
        weights={"weight": f"{block}.ssm_norm.weight"}, eps=config.rms_eps,
    )  # fmt: skip
    return common.mul_mat(graph, f"linear_attn_out{il}", normed, f"{block}.ssm_out.weight", config.n_embd)


def _experts(graph: Graph, config: ModelConfig, experts: ExpertConfig, layer: int, x: str) -> str:
    """The best experts of each row and the shared one: (T, n_embd) -> (T, n_embd)."""
    block, il, n_tokens = f"blk.{layer}", f"-{layer}", graph.shape.n_tokens
    n_used = experts.n_used
    logits = common.mul_mat(graph, f"ffn_moe_logits{il}", x, f"{block}.ffn_gate_inp.weight", experts.n_expert)
    weights = graph.add(
        "route", f"ffn_moe_weights_norm{il}", (n_tokens, n_used), {"logits": logits},
        others={"index": (f"ffn_moe_topk{il}", (n_tokens, n_used), np.int32)},
    )  # fmt: skip
    index = graph.nodes[-1].others["index"]

    def product(name: str, y: str, part: str, n_out: int) -> str:
        return graph.add(
            "mul_mat_experts", f"{name}{il}", (n_tokens, n_used, n_out), {"x": y, "index": index},
            weights={"weight": f"{block}.ffn_{part}_exps.weight"},
        )  # fmt: skip

    gate = product("ffn_moe_gate", x, "gate", experts.n_ff)
    up = product("ffn_moe_up", x, "up", experts.n_ff)
    both = common.swiglu(graph, f"ffn_moe_swiglu{il}", gate, up)
    routed = product("ffn_moe_down", both, "down", config.n_embd)

    n_shared = experts.n_ff_shared
    gate = common.mul_mat(graph, f"ffn_shexp_gate{il}", x, f"{block}.ffn_gate_shexp.weight", n_shared)
    up = common.mul_mat(graph, f"ffn_shexp_up{il}", x, f"{block}.ffn_up_shexp.weight", n_shared)
    both = common.swiglu(graph, f"ffn_shexp_swiglu{il}", gate, up)
    shared = common.mul_mat(graph, f"ffn_shexp{il}", both, f"{block}.ffn_down_shexp.weight", config.n_embd)
    shared_gate = common.mul_mat(graph, f"shared_expert_gate{il}", x, f"{block}.ffn_gate_inp_shexp.weight", 1)
    return graph.add(
        "combine_experts", f"ffn_out{il}", (n_tokens, config.n_embd),
        {"x": routed, "weight": weights, "shared": shared, "gate": shared_gate},
    )  # fmt: skip
