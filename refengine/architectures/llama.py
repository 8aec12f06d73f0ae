"""The llama family: pre-norm attention and SwiGLU feed-forward, RoPE over adjacent pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refengine.architectures import common

if TYPE_CHECKING:
    from refengine.config import ModelConfig
    from refengine.graph import BatchShape, ContextShape, Graph


def build(config: ModelConfig, context: ContextShape, shape: BatchShape) -> Graph:
    """Graph of one batch: inputs tokens, position, sequence, cell, pages, output_rows -> result_norm, result_output."""
    graph, x = common.begin(config, context, shape)
    for layer in range(config.n_layer):
        block, il = f"blk.{layer}", f"-{layer}"
        a = common.norm(
            graph, f"attn_norm{il}", x, f"{block}.attn_norm.weight", config.rms_eps, config.n_embd
        )
        a = common.attention(graph, config, layer, a, head_norms=config.qk_norm)
        x = common.add(graph, f"ffn_inp{il}", x, a)
        f = common.norm(graph, f"ffn_norm{il}", x, f"{block}.ffn_norm.weight", config.rms_eps, config.n_embd)
        x = common.add(graph, f"l_out{il}", x, common.feed_forward(graph, config, layer, f))
    return common.end(graph, config, x)
